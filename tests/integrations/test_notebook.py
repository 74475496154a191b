"""Notebooks display checkpoints and managers completely, escaped, small, and correctly."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import treescope

import jaxckpt
from jaxckpt import KeepPolicy
from jaxckpt.pages import _palette, _steps
from jaxckpt.pages._html import escape
from jaxckpt.pages.notebook import checkpoint_html, manager_html
from jaxckpt.pages.overview import StepOverview
from jaxckpt.storage import LocalStorage
from jaxckpt.testing import WatchedStorage
from tests.golden.fixture import golden_names

EVIL = "<script>alert('x')</script>"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Reads HTML strictly: what it opens it closes, in order."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def saved(path, tree, **options):
    jaxckpt.save(path, tree, **options)
    return jaxckpt.open(path)


def rows_of(html):
    """Names of the rows of a tree, as they are shown."""
    return re.findall(r'class="jc-name jc-mono">([^<]*)<', html)


@pytest.fixture
def model(tmp_path, mesh):
    """A checkpoint of a small model, on eight devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def put(shape, *spec):
        return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, PartitionSpec(*spec)))

    tree = {
        "params": {"w": put((8, 6), "x", "y"), "b": put((6,)), "row": put((4, 8), None, "x")},
        "step": 7,
    }
    return saved(tmp_path / "a", tree, custom_metadata={"git": "6ba1f79"})


def test_a_checkpoint_is_a_folding_tree(model):
    """Names, types, bytes, shardings and what was saved with it; a branch folds."""
    html = model._repr_html_()

    outline = Outline(html)
    assert rows_of(html) == ["params", "b", "row", "w", "step"]
    assert outline.tags.count("details") == outline.tags.count("summary") == 1
    for words in ("float32", "[8, 6]", "192 B", "P('x', 'y')", " x=4, ", " y=2", "6ba1f79"):
        assert words in outline.text


def test_a_sharding_is_drawn_as_its_parts(model):
    """A line between parts, a second outline where each part is on several devices."""
    drawn = re.findall(r"<svg class=\"jc-layout\".*?</svg>", checkpoint_html(model))

    found = [
        (re.search("<title>(.*)</title>", d)[1], d.count("v12"), d.count("h21")) for d in drawn
    ]
    assert found == [
        ("1 parts, each on 8 devices", 0, 0),
        ("1 × 4 parts, each on 2 devices", 3, 0),
        ("4 × 2 parts, each on 1 device", 1, 3),
    ]
    assert ["M4.5 3V.5H25.5V12.5H22" in d for d in drawn] == [True, True, False]


def test_a_cut_has_the_hue_of_its_axis(tmp_path, mesh):
    """As the legend in the head: also where two axes divide one dimension."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    w = jax.device_put(np.ones(8), NamedSharding(mesh, PartitionSpec(("x", "y"))))

    html = checkpoint_html(saved(tmp_path / "a", {"w": w}))

    x, y = _palette.axis_hue(0), _palette.axis_hue(1)
    assert re.findall(r'v12" stroke="(.*?)"', html) == [y, x, y, x, y, x, y]
    assert re.findall(r'rx="2" fill="(.*?)"/></svg> (\w=\d)', html) == [(x, "x=4"), (y, "y=2")]


def test_leaves_on_several_meshes_say_on_which(tmp_path, make_mesh):
    """The head cannot, then."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    tree = {
        name: jax.device_put(np.ones(8), NamedSharding(make_mesh(**{name: 2}), PartitionSpec(name)))
        for name in ("x", "y")
    }

    text = Outline(checkpoint_html(saved(tmp_path / "a", tree))).text

    assert "2 meshes" in text
    assert "P('x') on (x=2)" in text
    assert "P('y') on (y=2)" in text


def test_a_part_says_where_it_is_of(model):
    """Its path is in the head, and its leaves alone are below."""
    html = model["params"]._repr_html_()

    assert rows_of(html) == ["b", "row", "w"]
    assert "params" in Outline(html).text


def test_nothing_in_a_checkpoint_can_be_markup(tmp_path):
    """Names, values of metadata, the path and axis names are text, in attributes too."""
    tree = {EVIL: {EVIL: np.ones(2)}, '" onload="x': np.ones(2), "a\u202eb": 1}
    ckpt = saved(tmp_path / "<b>x'\"", tree, custom_metadata={EVIL: EVIL})

    html = checkpoint_html(ckpt)

    outline = Outline(html)
    assert set(outline.tags) <= {"div", "style", "span", "b", "code", "details", "summary"}
    assert not {name for name, _ in outline.attributes} & {"onload", "href", "src"}
    assert "alert('x')" in outline.text
    assert "\u202e" not in html


def test_rendering_reads_no_array_data(tmp_path):
    """With every data file gone it is the same."""
    ckpt = saved(tmp_path / "a", {"w": np.ones((64, 64))})
    expected = checkpoint_html(ckpt)
    for file in (tmp_path / "a" / "state" / "d").iterdir():
        file.write_bytes(bytes(file.stat().st_size))

    assert checkpoint_html(jaxckpt.open(tmp_path / "a")) == expected


def test_statistics_are_shown_where_they_were_asked_for(tmp_path):
    """Below each leaf; NaN and infinities stand out."""
    values = {"w": np.array([-3.0, 1.0, 0.0]), "bad": np.array([np.nan, np.inf]), "n": np.int32(7)}
    ckpt = saved(tmp_path / "a", values)

    html = checkpoint_html(ckpt, statistics=ckpt.statistics())

    outline = Outline(html)
    assert "mean" not in Outline(checkpoint_html(ckpt)).text
    assert "-3 to 1" in outline.text
    assert "33% zero" in outline.text
    assert re.findall(r'<b class="jc-bad">(.*?)</b>', html) == ["1 NaN", "1 inf"]


def test_a_large_tree_is_folded_and_cut(tmp_path):
    """10,000 leaves are 200 rows at most, 100 of them open; it says what is not shown."""
    layer = {f"w{i}": np.int8(0) for i in range(20)}
    ckpt = saved(
        tmp_path / "a", {f"l{i:02}": {f"m{j}": layer for j in range(10)} for i in range(50)}
    )

    html = checkpoint_html(ckpt)

    assert len(ckpt.leaves) == 10_000
    assert len(rows_of(html)) == 200
    assert "<details open" not in html
    assert "… 10 more; open a part" in Outline(html).text
    assert len(html) < 150_000


@pytest.mark.parametrize("names", [["x" * 100_000], ["d"] * 2000])
def test_one_leaf_with_an_absurd_name_stays_small(tmp_path, names):
    """A name is cut, and so is what lies too deep."""
    ckpt = saved(tmp_path / "a", {"w": 1})
    info = ckpt.leaves["w"]
    ckpt.leaves = {"/".join(names): info}  # no file system holds such a name for long

    html = checkpoint_html(ckpt)

    Outline(html)
    assert len(html) < 25_000


def test_what_is_open_at_first_is_alike(tmp_path):
    """Branches at the same level are either all open or all closed."""
    layers = {f"layer_{i}": {"w": {"x": 1}, "b": 2} for i in range(12)}
    html = checkpoint_html(saved(tmp_path / "a", {"params": layers}))

    opened = re.findall(r"<details( open)?>.*?jc-mono\">(\w+)<", html)

    assert [name for is_open, name in opened if is_open and name == "params"]
    assert len({is_open for is_open, name in opened if name.startswith("layer_")}) == 1


def test_a_json_item_is_shown(tmp_path):
    """It has no leaves; its content is shown."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1}, items={"config": {"lr": 0.1}})
        manager.wait_until_finished()
    ckpt = jaxckpt.open(tmp_path / "1", item="config")

    assert '"lr": 0.1' in Outline(ckpt._repr_html_()).text


def test_a_long_json_item_is_folded_and_cut(tmp_path):
    """Its escaped text stays small."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1}, items={"config": {EVIL: list(range(10_000))}})
        manager.wait_until_finished()

    html = jaxckpt.open(tmp_path / "1", item="config")._repr_html_()

    assert "script" not in Outline(html).tags
    assert "<details><summary>JSON, 10,004 lines" in html
    assert len(html) < 20_000


def test_the_leaves_of_a_small_model_are_visible(tmp_path):
    """Nothing is folded as long as 100 rows are enough."""
    layer = {"attn": {"q": 1, "k": 1}, "mlp": {"up": 1, "b": 1}}
    params = {f"layer_{i}": layer for i in range(4)}

    html = checkpoint_html(saved(tmp_path / "a", {"params": params, "mu": params, "step": 1}))

    assert len(rows_of(html)) == 2 * (1 + 4 * 7) + 1
    assert html.count("<details") == html.count("<details open")


def test_text_is_shown_from_the_metadata(tmp_path):
    """Cut and escaped; other leaves of one value only where they were read."""
    ckpt = saved(tmp_path / "a", {"name": EVIL, "long": "x" * 1000, "step": 12345, "lr": 3e-4})

    html = checkpoint_html(ckpt)

    assert f"= <b>{escape(f'{chr(34)}{EVIL}{chr(34)}')}</b>" in html
    assert "x" * 61 not in html


def values_in(html):
    return re.findall(r"= <b>(.*?)</b>", html)


def test_single_numbers_are_shown(tmp_path):
    """32 of at most 8 bytes, those nearest to the root first; none if there is an error."""
    tree = {"step": 12345, "lr": np.float32(3e-4), "c": np.complex128(5), "w": np.full(9, 777.0)}
    ckpt = saved(tmp_path / "a", {"a": [np.int8(1)] * 40, **tree})

    html = checkpoint_html(ckpt)

    assert values_in(html) == [*["1"] * 30, "0.0003", "12,345"]
    assert values_in(checkpoint_html(ckpt["a"])) == ["1"] * 32
    assert "777" not in html
    for file in (tmp_path / "a" / "state" / "d").iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    assert values_in(checkpoint_html(jaxckpt.open(tmp_path / "a"))) == []
    ckpt = saved(tmp_path / "b", {"step": 1})
    jaxckpt.save(tmp_path / "b", {"step": 2}, overwrite=True)
    assert values_in(checkpoint_html(ckpt)) == []


@pytest.mark.parametrize("name", golden_names("0.11.25-standard"))
def test_single_numbers_of_other_programs_are_not_read(golden, name):
    """Their chunks may be of any size."""
    assert values_in(checkpoint_html(jaxckpt.open(golden(name).path))) == []


# Of numpy's, which treescope goes through when it is first used.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_treescope_shows_the_same(model):
    """Where it renders a checkpoint, alone or inside something, our tree is in it."""
    for shown in (model, {"ckpt": model}):
        assert "jc-tree" in treescope.render_to_html(shown, compressed=False)


# --- managers ----------------------------------------------------------------------------------


def trained(path, keep, steps, **options):
    manager = jaxckpt.CheckpointManager(path, keep=keep, **options)
    for step, metrics in steps.items():
        manager.save(step, {"w": np.ones(4)}, metrics=metrics)
    manager.wait_until_finished()
    return manager


def test_a_manager_is_its_steps_and_why_they_are_kept(tmp_path):
    """Each with its size, metrics and rules; the best, the pinned and what goes are marked."""
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3}
    with trained(tmp_path, KeepPolicy(), {n: {"loss": x} for n, x in losses.items()}) as manager:
        manager.pin(1)
    keep = KeepPolicy(last=1, best=1, metric="loss")

    with jaxckpt.CheckpointManager(tmp_path, keep=keep) as manager:
        html = manager._repr_html_()

    outline = Outline(html)
    rows = {int(n): row for n, row in re.findall(r"<tr><td[^>]*><b>(\d+)</b>(.*?)</tr>", html)}
    assert list(rows) == [4, 3, 2, 1]
    tags = {n: re.findall(r"jc-tag[^>]*>(.*?)<", row) for n, row in rows.items()}
    assert tags == {4: ["newest", "last 1"], 3: [], 2: ["best 1 by loss"], 1: ["pinned"]}
    assert "deleted after the next save" in rows[3]
    assert ">0.1<" in rows[2]
    assert {"kept", "deleted after the next save", "best", "pinned"} <= set(outline.texts)
    assert html.count('<svg class="jc-timeline"') == 1


def test_a_reader_shows_what_the_policy_of_the_job_keeps(tmp_path):
    """As the report does; a policy of the reader's own comes first."""
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3}
    keep = KeepPolicy(last=2, best=1, metric="loss")
    with trained(tmp_path, keep, {n: {"loss": x} for n, x in losses.items()}):
        pass

    def tags(**options):
        with jaxckpt.CheckpointManager(tmp_path, mode="r", **options) as manager:
            return re.findall(r"jc-tag( jc-best)?\">(.*?)<", manager._repr_html_())

    last, best = ("", "last 2"), (" jc-best", "best 1 by loss")
    assert tags() == [("", "newest"), last, last, best]
    assert ("", "last 1") in tags(keep=KeepPolicy(last=1))


def test_a_manager_shows_what_is_under_way(tmp_path):
    """A save that has not ended is a mark of its own, and no row."""
    gate, here = threading.Event(), threading.current_thread()

    def wait(verb, path):
        if threading.current_thread() is not here:  # showing lists the run
            gate.wait(60)

    with trained(tmp_path, KeepPolicy(), {1: {}}) as manager:
        manager._index.storage = WatchedStorage(LocalStorage(), wait)
        manager.save(2, {"w": 1})
        html = manager_html(manager)
        gate.set()

    assert "<title>step 2, being saved</title>" in html
    assert "being saved" in Outline(html).texts
    assert re.findall(r"<tr><td[^>]*><b>(\d+)</b>", html) == ["1"]


def test_a_manager_shows_what_is_wrong(tmp_path):
    """A step that is not whole, one set aside, and what else is there; all escaped."""
    with trained(tmp_path, KeepPolicy(), {n: {EVIL: 1.0} for n in (1, 2, 3)}):
        pass
    (tmp_path / "2" / "commit_success.txt").unlink()
    (tmp_path / "1").rename(tmp_path / "1.jaxckpt-bad-0123abcd")
    (tmp_path / EVIL.replace("/", "")).touch()

    with jaxckpt.CheckpointManager(tmp_path, mode="r") as manager:
        html = manager_html(manager)

    outline = Outline(html)
    assert "script" not in outline.tags
    assert "incomplete" in outline.texts
    assert "1.jaxckpt-bad-0123abcd" in outline.text


def test_a_policy_counts_a_damaged_step_as_the_manager_does(tmp_path):
    """It is committed, so it is among the last two; the best is a whole one."""
    losses = {1: 0.3, 2: 0.2, 3: 0.1}
    with trained(tmp_path, KeepPolicy(), {n: {"loss": x} for n, x in losses.items()}):
        pass
    with next((tmp_path / "3" / "state" / "d").iterdir()).open("ab") as file:
        file.write(b"more")

    keep = KeepPolicy(last=2, best=2, metric="loss")
    with jaxckpt.CheckpointManager(tmp_path, mode="r", keep=keep) as manager:
        html = manager_html(manager)

    rows = {int(n): row for n, row in re.findall(r"<tr><td[^>]*><b>(\d+)</b>(.*?)</tr>", html)}
    tags = {n: re.findall(r"jc-tag( jc-\w+)?\">(.*?)<", row) for n, row in rows.items()}
    assert tags == {
        3: [(" jc-bad", "incomplete"), ("", "newest"), ("", "last 2"), ("", "best 2 by loss")],
        2: [("", "last 2"), (" jc-best", "best 2 by loss")],
        1: [],
    }


def test_a_manager_says_how_fast_it_saved(tmp_path):
    """The seconds and the rate of its last save; a reader has none."""
    with trained(tmp_path, KeepPolicy(), {1: {}, 2: {}}) as manager:
        writer = Outline(manager._repr_html_()).text
    with jaxckpt.CheckpointManager(tmp_path, mode="r") as manager:
        reader = Outline(manager._repr_html_()).text

    assert re.search(r"last save [\d.e-]+ s, [\d.]+ [kMG]?B/s", writer)
    assert "last save" not in reader


def test_a_manager_of_no_run_yet(tmp_path):
    """A reader may be there before the first step, or the directory."""
    with jaxckpt.CheckpointManager(tmp_path / "later", mode="r") as manager:
        assert "0 steps" in Outline(manager._repr_html_()).text


def test_a_run_of_many_steps_stays_small(tmp_path):
    """The newest 20 steps are shown, 480 are folded, of the others there is the number."""
    steps = [StepOverview(step=n, path=str(n), name=str(n)) for n in range(20_000)]
    told = _steps.story(steps, keep=KeepPolicy(every_steps=10), now_s=0.0)

    html = _steps.table(told) + _steps.line(told)

    outline = Outline(html)
    assert outline.tags.count("tr") == 500 + 2
    assert "19,980 earlier steps" in outline.text
    assert "19,500 more steps" in outline.text
    assert len(html) < 600_000


def test_the_best_step_is_never_folded_away(tmp_path):
    """It stays in sight, in the table and on the timeline, however many newer steps there are."""
    steps = [
        StepOverview(step=n, path=str(n), name=str(n), metrics={"loss": abs(n - 7)})
        for n in range(5_000)
    ]
    told = _steps.story(steps, keep=KeepPolicy(best=1, metric="loss", last=9), now_s=0.0)

    visible, folded = _steps.table(told).split("<details>")

    assert re.findall(r"<tr><td[^>]*><b>([\d,]+)</b>", visible)[-2:] == ["4,980", "7"]
    assert "best 1 by loss" in visible
    assert "<b>7</b>" not in folded
    assert "4,979 earlier steps" in folded
    assert [mark.step for mark in _steps.marks(told) if mark.best] == [7]


def test_each_step_says_what_was_checked(tmp_path):
    """The sizes of its files, or for Orbax's steps its markers; nothing for an incomplete one."""
    step = StepOverview(step=1, path="1", name="1", writer="jaxckpt 0.1.0")
    steps = [step, replace(step, step=2, writer="orbax"), replace(step, step=3, problem="torn")]

    html = _steps.table(_steps.story(steps, keep=None, now_s=0.0))

    assert re.findall(r'data-label="checked">(.*?)<', html) == [
        "", "markers; data not read", "sizes; data not read",
    ]  # fmt: skip


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf")])
def test_a_value_that_is_not_finite_stands_out(value, shown):
    """In the table of the steps."""
    step = StepOverview(step=1, path="1", name="1", metrics={"loss": value, "acc": 0.5})

    html = _steps.table(_steps.story([step], keep=None, now_s=0.0))

    assert re.findall(r'<b class="jc-bad">(.*?)</b>', html) == [shown]


def test_looking_at_a_checkpoint_needs_no_jax(tmp_path):
    """Nor matplotlib, nor TensorStore if no number is shown."""
    jaxckpt.save(tmp_path / "a", {"w": np.ones(2)})
    code = (
        "import sys, jaxckpt; jaxckpt.open(sys.argv[1])._repr_html_();"
        "print([m for m in ('jax', 'tensorstore', 'matplotlib') if m in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert done.stdout.strip() == "[]"
