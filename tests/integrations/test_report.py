"""The report of a run: its contents, its encoding, and its display in a real browser.

Tests that need a browser have its mark; `make browser` runs them, and fails if there is none.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import KeepPolicy
from jaxckpt.format import names
from jaxckpt.format.ledger import Start, encode_ledger
from jaxckpt.pages import _svg
from jaxckpt.pages import report as report_module
from jaxckpt.pages._svg import Bar, Mark
from jaxckpt.pages.overview import overview
from jaxckpt.pages.report import report
from tests.integrations.test_notebook import EVIL, Outline

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars "
    # No name is found and no host is reached: the network is off.
    "--proxy-server=127.0.0.1:9 --proxy-bypass-list=<-loopback> --enable-logging=stderr"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with all that a report can show: two steps are not whole, one was set aside, ..."""
    root = tmp_path_factory.mktemp("runs") / "vit-b16"
    layer = {"w": np.ones((8, 8), np.float32), "b": np.zeros(8)}
    tree = {f"layer_{i}": {"mlp": layer, EVIL: layer} for i in range(30)}
    with jaxckpt.CheckpointManager(root) as manager:
        for step in range(1, 31):
            metrics = {
                "loss": 1 / step,
                "a_metric_with_a_long_name/of_the_evaluator": step,
                EVIL: 1,
            }
            manager.save(100 * step, tree, metrics=metrics, custom_metadata={"note": EVIL})
        manager.wait_until_finished()
        manager.pin(500)
    (root / "1200" / "commit_success.txt").unlink()
    with next((root / "1500" / "state" / "d").iterdir()).open("ab") as file:
        file.write(b"more")
    (root / "1700").rename(root / "1700.jaxckpt-bad-0123abcd")
    (root / EVIL.replace("/", "")).touch()
    return root


KEEP = KeepPolicy(last=3, best=1, metric="loss", mode="max", every_steps=1000)


def sections(html):
    return dict(re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", html, re.DOTALL))


# --- what is in it -------------------------------------------------------------------------------


def test_a_report_shows_the_run(run, tmp_path):
    """The facts, the steps and why they are kept, metrics, sizes, the newest tree, problems."""
    report(run, tmp_path / "report.html", keep=KEEP)

    html = (tmp_path / "report.html").read_text("utf-8")
    outline = Outline(html)
    for words in ("vit-b16", str(run), "2 incomplete", "newest complete step", "3,000"):
        assert words in outline.text
    found = sections(html)
    assert list(found) == [
        "Steps",
        "Metrics",
        "Time and size of each save" if "by phase" in html else "Size of each step",
        "Training time kept",
        "Contents of the newest step",
        "Problems",
        "Also in this directory",
    ]
    steps = re.findall(r"<tr><td[^>]*><b>([\d,]+)</b>", found["Steps"])
    assert [int(step.replace(",", "")) for step in steps] == [
        100 * step
        for step in [*range(30, 9, -1), 1, *range(9, 1, -1)]  # the best is before what is folded
        if step != 17
    ]
    assert {"pinned", "newest", "last 3", "best 1 by loss", "every 1000 steps"} <= set(
        outline.texts
    )
    assert "min 0.0333 at 3,000 · max 1 at 100 · last 0.0333" in found["Metrics"]
    assert found["Metrics"].count('<svg class="jc-chart"') == 3
    assert "layer_29" in found["Contents of the newest step"]
    assert re.findall(r"<li>step ([\d,]+):", found["Problems"]) == ["1,200", "1,500"]
    assert "1700.jaxckpt-bad-0123abcd" in found["Also in this directory"]


def test_a_report_shows_where_the_time_of_a_save_goes(run):
    """A bar for each step, its parts the phases in their order; with a legend."""
    seen = overview(run)
    phases = {"snapshot": 0.1, "commit": 0.1, "write": 0.8, EVIL: 0.1}
    steps = tuple(replace(step, phases=phases) for step in seen.steps)

    html = report_module._page(replace(seen, steps=steps), str(run), None, now_s=0.0)

    found = sections(html)["Time and size of each save"]
    chart = re.search(r"<svg class=\"jc-chart\".*?</svg>", found)[0]
    assert chart.count("<rect") == 4 * len(steps)
    legend = re.search(r"jc-key\">(.*?)</div>", found)[1]
    words = [text for text in Outline(legend).texts if text.strip()]
    assert words == ["snapshot", "write", "commit", EVIL]


def test_a_report_says_how_fast_and_how_often_was_saved(run):
    """The median interval in steps and time, the rate, and how many more steps fit on the disk."""
    seen = overview(run)
    steps = tuple(
        replace(step, saved_s=90.0 * i, size_bytes=3 * 10**9, phases={"write": 2.0})
        for i, step in enumerate(seen.steps)
    )

    html = report_module._page(replace(seen, steps=steps), str(run), None, now_s=0.0)

    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))
    assert facts["save interval"] == "100 steps, 1.5 min, median of the steps that are here"
    assert facts["rate"] == "1.5 GB/s, median of the saves"
    assert re.fullmatch(r"[\d.]+ [kMGT]?B, room for [\d,]+ steps? like the newest", facts["free"])


def test_a_report_leaves_out_how_long_a_save_waited(run):
    """Neither the rate nor the chart counts the time behind earlier saves."""
    seen = overview(run)
    phases = {"snapshot": 0.5, "wait": 98.0, "write": 1.5}
    steps = tuple(replace(step, size_bytes=3 * 10**9, phases=phases) for step in seen.steps)

    html = report_module._page(replace(seen, steps=steps), str(run), None, now_s=0.0)

    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))
    assert facts["rate"] == "1.5 GB/s, median of the saves"
    legend = re.search(r"jc-key\">(.*?)</div>", sections(html)["Time and size of each save"])[1]
    assert [text for text in Outline(legend).texts if text.strip()] == ["snapshot", "write"]


def test_a_report_that_cannot_be_written_names_its_file(run, tmp_path):
    """A full disk reports no file by itself; here it is the limit of a file's size."""
    code = """
import resource, sys
from jaxckpt.pages.report import report
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
report(sys.argv[1], sys.argv[2])
"""
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "report.html")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.stderr.strip().endswith(f"File too large: '{tmp_path / 'report.html'}'")
    assert not [path for path in tmp_path.iterdir() if "report.html" in path.name]


def test_a_report_reads_no_numbers_of_other_programs(tmp_path):
    """Their chunks may be of any size."""
    ocp.PyTreeCheckpointer().save(tmp_path / "run" / "1", {"lr": np.full(1, 777.25)})

    report(tmp_path / "run", tmp_path / "report.html")

    html = (tmp_path / "report.html").read_text("utf-8")
    assert "lr" in html
    assert "777" not in html


def test_a_report_shows_values_and_json_items(tmp_path):
    """Leaves of one number, and the content of the items that are JSON; no other array is read."""
    items = {"config": {"lr": 0.1, EVIL: 1}, "ema": {"w": np.ones(3)}}
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"lr": np.float32(0.5), "s[0]": 7, "w": np.ones(9)}, items=items)

    report(tmp_path / "run", tmp_path / "report.html")

    outline = Outline((tmp_path / "report.html").read_text("utf-8"))
    assert {"0.5", "7"} <= set(outline.texts)
    assert '"lr": 0.1' in outline.text
    assert "script" not in outline.tags
    assert "mean" not in outline.text


def test_a_report_without_values_still_shows_the_tree(tmp_path):
    """Values that cannot be read are left out, and the problem is shown."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"lr": np.float32(0.5)})
    for file in (tmp_path / "run" / "1" / "state" / "d").iterdir():
        file.write_bytes(bytes(file.stat().st_size))

    report(tmp_path / "run", tmp_path / "report.html")

    html = (tmp_path / "report.html").read_text("utf-8")
    assert "float32" in html
    assert " = <b>" not in html
    assert "step 1: " in sections(html)["Problems"]


def test_a_chart_marks_values_that_are_not_finite(run):
    """A line at each, and a word in the caption; also where no value is finite."""
    seen = overview(run)
    lost = {1: {"loss": 1.0, "acc": math.nan}, 2: {"loss": math.nan}, 3: {"loss": -math.inf}}
    steps = tuple(replace(seen.steps[0], step=n, metrics=found) for n, found in lost.items())

    html = report_module._page(replace(seen, steps=steps), str(run), None, now_s=0.0)

    found = sections(html)["Metrics"]
    assert re.findall(r'text-anchor="middle">(nan|-?inf)</text>', found) == ["nan", "-inf"]
    assert "2 NaN or infinite, first at 2" in found
    assert "1 NaN or infinite, first at 1" in found


def test_a_chart_of_values_over_decades_has_a_log_scale():
    """Its ticks are powers of ten, and its marks at even distances."""
    marks = [Mark(step=n, value=10.0**-n) for n in range(5)]

    drawn = _svg.line_chart(marks, label="x")

    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    gaps = np.diff(heights)
    assert np.allclose(gaps, gaps[0], atol=0.2)
    assert [t for t in ("1", "0.1", "0.01", "0.001", "0.0001") if f">{t}</text>" in drawn]


def test_a_report_loads_and_runs_nothing(run, tmp_path):
    """It has no script, and no address but its empty icon; and it forbids the browser both."""
    report(run, tmp_path / "report.html")

    outline = Outline((tmp_path / "report.html").read_text("utf-8"))
    addresses = [value for name, value in outline.attributes if name in ("src", "href", "srcset")]
    assert addresses == ["data:,"]
    assert not {"script", "img", "iframe", "object", "base", "form"} & set(outline.tags)
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    policy = [value for _, value in outline.attributes if "default-src" in str(value)]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_a_run_without_a_whole_step_has_a_report(tmp_path):
    """Also one without any step."""
    (tmp_path / "run").mkdir()
    report(tmp_path / "run", tmp_path / "none.html")
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": 1})
    (tmp_path / "run" / "1" / "commit_success.txt").unlink()
    report(tmp_path / "run", tmp_path / "torn.html")

    none, torn = ((tmp_path / name).read_text("utf-8") for name in ("none.html", "torn.html"))
    assert "none yet" in Outline(none).text
    assert "1 incomplete" in Outline(torn).text


def test_a_step_whose_tree_is_damaged_gives_way_to_the_one_before(tmp_path):
    """And the report says so."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"first": 1})
        manager.save(2, {"second": 1})
    metadata = tmp_path / "run" / "2" / "state" / "_METADATA"
    metadata.write_bytes(b"x" * metadata.stat().st_size)

    report(tmp_path / "run", tmp_path / "report.html")

    found = sections((tmp_path / "report.html").read_text("utf-8"))
    assert "first" in found["Contents of the newest step"]
    assert "step 2:" in found["Problems"]


def test_a_report_of_a_large_run_stays_small(run):
    """50,000 steps with 30 metrics each."""
    seen = overview(run)
    metrics = {f"metric_{i}": 0.1 * i for i in range(30)}
    many = tuple(replace(seen.steps[0], step=n, metrics=metrics) for n in range(50_000))

    html = report_module._page(replace(seen, steps=many), str(run), None, now_s=0.0)

    assert "… 18 more metrics" in html
    assert len(html) < 1_500_000


numbers = st.floats() | st.integers(-(10**18), 10**18) | st.floats(-1, 1)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 10**18), numbers), max_size=8, unique_by=lambda p: p[0]))
def test_whatever_the_numbers_are_a_chart_can_be_drawn(points):
    """Huge, tiny, all alike or none: no coordinate is NaN or infinite, and ticks are in order."""
    marks = [Mark(step=step, value=value) for step, value in sorted(points)]
    bars = [Bar(label="x", parts={"a": abs(mark.value), "b": 1.0}) for mark in marks]

    for drawn in (
        _svg.line_chart(marks, label="x"),
        _svg.timeline(marks),
        _svg.bar_chart(bars, label="x"),
    ):
        outline = Outline(drawn)
        placed = [
            v for n, v in outline.attributes if n in ("x", "y", "cx", "cy", "x1", "width", "height")
        ]
        assert all(math.isfinite(float(value.rstrip("%"))) for value in placed)
        assert "nan" not in str(dict(outline.attributes).get("points"))


# --- how it is written ---------------------------------------------------------------------------


def test_an_earlier_report_is_replaced(run, tmp_path):
    """By one that may be read by whom it could before; nothing else is left beside it."""
    out = tmp_path / "report.html"
    report(run, out)
    first = out.read_text("utf-8")
    report(run, out, keep=KEEP)

    assert out.read_text("utf-8") != first
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert out.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_another_file_is_not_replaced(run, tmp_path):
    """Nor a directory, nor what a dangling link stands for."""
    (tmp_path / "train.py").write_text("print('mine')")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")

    with pytest.raises(FileExistsError, match=r"train\.py exists and is not a jaxckpt report"):
        report(run, tmp_path / "train.py")
    with pytest.raises(FileExistsError, match="link exists"):
        report(run, tmp_path / "link")
    with pytest.raises(IsADirectoryError, match=r"folder/report\.html"):
        report(run, tmp_path / "folder")

    assert (tmp_path / "train.py").read_text() == "print('mine')"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_report_that_cannot_be_made_leaves_nothing(run, tmp_path):
    """No run, or no directory to write to."""
    with pytest.raises(jaxckpt.CheckpointNotFound):
        report(tmp_path / "nowhere", tmp_path / "report.html")
    with pytest.raises(ValueError, match="is a checkpoint, not a run"):
        report(run / "3000", tmp_path / "report.html")
    with pytest.raises(FileNotFoundError, match="no such directory"):
        report(run, tmp_path / "missing" / "report.html")

    assert list(tmp_path.iterdir()) == []


def test_what_fails_half_way_is_removed(run, tmp_path):
    """As when somebody puts a directory there in the meantime."""
    out = tmp_path / "report.html"
    stop = threading.Event()

    def make_directory(info):
        if not stop.is_set():
            out.mkdir()
            stop.set()

    with pytest.raises(IsADirectoryError):
        report(run, out, keep=KeepPolicy(when=make_directory))

    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# --- in a browser --------------------------------------------------------------------------------

PROBE = """<script>
let loaded = 0, failed = 0;
document.addEventListener("load", e => { if (e.target.src) loaded++ }, true);
addEventListener("error", () => failed++, true);
addEventListener("load", () => {
const dim = e => e ? getComputedStyle(e).opacity * dim(e.parentElement) : 1;
const found = {
  width: innerWidth, reached: document.documentElement.scrollWidth,
  failed, loaded,
  background: getComputedStyle(document.body).backgroundColor,
  wide: [...document.querySelectorAll("body *")].filter(
    e => !e.closest("svg") && e.getBoundingClientRect().right > innerWidth + 1).length,
  faint: [...document.querySelectorAll("body *")].filter(
    e => e.textContent.trim() && dim(e) * getComputedStyle(e, "::before").opacity < 0.59).length,
  broken: [...document.querySelectorAll(".jc-type")].filter(e => e.offsetHeight > 30).length,
  folds: [...document.querySelectorAll("details:not([open])")].filter(
    e => !e.parentElement.closest("details:not([open])")).slice(0, 3).map(e => {
      const before = e.offsetHeight; e.querySelector("summary").click();
      const opened = e.offsetHeight; e.querySelector("summary").click();
      return [before < opened, e.offsetHeight == before]; })};
parent.postMessage(JSON.stringify(found), "*"); });</script>"""
FRAME = """<!doctype html><title>waiting</title><body style="margin:0">
<iframe style="width:%dpx;height:900px;border:0" src="probed.html"></iframe>
<script>addEventListener("message", e => document.title = e.data)</script>"""


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    """Returns the report, and a copy that reports how it is rendered."""
    folder = tmp_path_factory.mktemp("page")
    report(run, folder / "report.html", keep=KEEP)
    return folder / "report.html"


def browse(page, tmp_path, *flags, query=""):
    """Returns a page's DOM in the browser, and its output to the console."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert browser is not None, f"none of {', '.join(BROWSERS)} is installed"
    profile = f"--user-data-dir={tmp_path}/profile"
    done = subprocess.run(
        [browser, *QUIET, profile, *flags, "--dump-dom", page.as_uri() + query],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return SimpleNamespace(dom=done.stdout, console=console)


def probe(page, tmp_path, *flags, width=1280):
    """Returns the page's own measurements, in a frame of the given size in pixels."""
    # Without the policy that forbids the probe, too.
    html = re.sub(r"<meta http-equiv=[^>]*>", "", Path(page).read_text("utf-8"))
    (tmp_path / "probed.html").write_text(html.replace("</head>", f"{PROBE}</head>"), "utf-8")
    (tmp_path / "frame.html").write_text(FRAME % width)
    seen = browse(tmp_path / "frame.html", tmp_path, "--window-size=1400,1000", *flags)
    title = re.search("<title>(.*?)</title>", seen.dom)[1]
    return SimpleNamespace(**json.loads(title), console=seen.console)


@pytest.mark.browser
def test_a_browser_shows_the_report(page, tmp_path):
    """Every step is in its DOM; the console stays empty, with the network off."""
    seen = browse(page, tmp_path)

    assert re.findall(r"<td class=\"jc-num\"><b>([\d,]+)</b>", seen.dom)[:2] == ["3,000", "2,900"]
    assert seen.dom.count("<tr>") == 29 + 4
    assert "<title>vit-b16 · checkpoints</title>" in seen.dom
    assert seen.console == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_report_fits_into_its_window(page, tmp_path, width):
    """Nothing is wider, nothing is loaded; what is folded opens and closes."""
    found = probe(page, tmp_path, width=width)

    assert (found.width, found.reached, found.wide) == (width, width, 0)
    assert (found.loaded, found.failed, found.faint) == (0, 0, 0)
    assert found.folds == [[True, True]] * 3
    assert found.console == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_what_a_notebook_shows_fits_too(run, make_mesh, tmp_path, width):
    """Checkpoints and a manager, as the output of cells; types stay in one piece."""
    sharding = NamedSharding(make_mesh(data=4, model=2), PartitionSpec("data", "model"))
    w = jax.device_put(np.ones((64, 64)), sharding)
    jaxckpt.save(
        tmp_path / "deep", {"params": {"layers": {"0": {"attention": {"query": {"w": w}}}}}}
    )
    with jaxckpt.CheckpointManager(run, mode="r", keep=KEEP) as manager:
        cells = [jaxckpt.open(run / "3000")._repr_html_(), manager._repr_html_()]
    cells.append(jaxckpt.open(tmp_path / "deep")._repr_html_())
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<html><head></head><body>{''.join(cells)}</body></html>", "utf-8")

    found = probe(notebook, tmp_path, width=width)

    assert (found.width, found.reached, found.wide, found.failed) == (width, width, 0, 0)
    assert (found.faint, found.broken) == (0, 0)
    assert found.folds == [[True, True]] * 3
    assert found.console == []


@pytest.mark.browser
def test_a_report_is_light_or_dark_as_the_browser_is(page, tmp_path):
    """By its own colours."""
    light = probe(page, tmp_path)
    dark = probe(page, tmp_path, "--blink-settings=preferredColorScheme=0")

    assert (light.background, dark.background) == ("rgb(255, 255, 255)", "rgb(20, 23, 26)")


@pytest.mark.browser
def test_the_report_forbids_what_it_does_not_have(page, tmp_path):
    """A script or an image that got in would not run, nor load: the browser says so."""
    evil = "<script>document.title = 'taken'</script><img src='https://example.invalid/x.png'>"
    planted = tmp_path / "planted.html"
    planted.write_text(page.read_text("utf-8").replace("<footer>", f"{evil}<footer>"), "utf-8")

    seen = browse(planted, tmp_path)

    assert "<title>vit-b16 · checkpoints</title>" in seen.dom
    assert len([line for line in seen.console if "Content Security Policy" in line]) == 2


@pytest.mark.browser
def test_the_probe_sees_what_is_wrong(page, tmp_path):
    """It detects content that is too wide, loaded resources, and an error."""
    bad = (
        "<div style='width:900px'>x</div><img src='missing.png'><img src='there.svg'>"
        "<script>addEventListener('load', () => { throw Error('planted') })</script><footer>"
    )
    planted = tmp_path / "planted.html"
    planted.write_text(page.read_text("utf-8").replace("<footer>", bad), "utf-8")

    (tmp_path / "there.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')

    found = probe(planted, tmp_path, width=420)

    assert found.reached > 420
    assert found.wide >= 1
    assert (found.loaded, found.failed) == (1, 1)
    assert any("planted" in line for line in found.console)


def test_a_report_shows_the_starts_of_a_run(tmp_path):
    """Those that the ledger has; the text in it is not trusted."""
    root = tmp_path / "run"
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, {"w": 1.0})
    bad = Start(
        start="a", end="<script>", opened_s=1e9, seen_s=1e9 + 60, first=1, reached=9, saved=5
    )
    bad = replace(bad, trained_s=40.0, saves=2, blocked_s=1.0, saving_s=2.0)
    (root / names.LEDGER).write_bytes(encode_ledger([bad] * 30))

    report(root, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()

    assert "goodput 33.3% of 1 min" in page
    assert "… 10 earlier starts" in page
    assert "<script>" not in page
