"""The plots draw the right data; their appearance was checked by eye."""

from __future__ import annotations

import math
import sys

import jax
import matplotlib as mpl
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.colors import to_hex, to_rgb

mpl.use("agg")

import matplotlib.pyplot as plt

import jaxckpt
from jaxckpt import KeepPolicy
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.pages import _palette, plots
from jaxckpt.types import Timing

LOSSES = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3}


@pytest.fixture(autouse=True)
def _close_figures():
    """Every plot is drawn in full, and no figure is left open."""
    yield
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
    plt.close("all")


def run_of(root, metrics):
    """Makes a run of these metrics by step, and returns its root."""
    with jaxckpt.CheckpointManager(root) as manager:
        for step, found in metrics.items():
            manager.save(step, {"w": 1}, metrics=found)
    return root


def marked(ax):
    """Returns the steps that carry each kind of mark, by the text of the legend."""
    return {
        marks.get_label(): [(int(x), float(y)) for x, y in marks.get_offsets()]
        for marks in ax.collections
    }


@pytest.mark.parametrize("plot", ["metric", "timings", "sharding"])
def test_a_plot_names_the_package_that_is_missing(tmp_path, monkeypatch, plot):
    """With the command that installs it."""
    one = Timing(kind="save", path="run/1", step=1, total_bytes=1, seconds=1.0, phases={})
    of = {"metric": run_of(tmp_path, {1: {"loss": 0.5}}), "timings": [one]}
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ModuleNotFoundError, match=r"a plot needs .* pip install matplotlib"):
        getattr(plots, plot)(of.get(plot, jax.numpy.ones(3)))


# --- a metric ------------------------------------------------------------------------------------


def test_a_metric_is_drawn_with_what_is_kept_best_and_pinned(tmp_path):
    """Over the steps of a manager, as its policy has it."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        for step, loss in LOSSES.items():
            manager.save(step, {"w": 1}, metrics={"lr": 1.0, "loss": loss})
        manager.wait_until_finished()
        manager.pin(1)
    keep = KeepPolicy(last=1, best=1, metric="loss")

    with jaxckpt.CheckpointManager(tmp_path, mode="r", keep=keep) as manager:
        ax = plots.metric(manager)

    assert marked(ax) == {
        "kept": [(1, 0.5), (2, 0.1), (4, 0.3)],
        "deleted after the next save": [(3, 0.4)],
        "pinned": [(1, 0.5)],
        "best": [(2, 0.1)],
    }
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*marked(ax)]
    assert ax.lines[0].get_xydata().tolist() == [[step, loss] for step, loss in LOSSES.items()]


def test_the_best_by_one_metric_is_not_marked_in_another(tmp_path):
    """Nor is there a legend where all marks mean the same."""
    with jaxckpt.CheckpointManager(tmp_path, keep=KeepPolicy(best=1, metric="loss")) as manager:
        manager.save(1, {"w": 1}, metrics={"loss": 1.0, "acc": 0.5})
        manager.wait_until_finished()
        ax = plots.metric(manager, "acc")

    assert marked(ax) == {"kept": [(1, 0.5)]}
    assert ax.get_legend() is None


def test_a_metric_of_a_root_or_reader(tmp_path):
    """By the policy that its last job recorded, if it has one; into axes that are there."""
    for name, keep in {"a": KeepPolicy(), "b": KeepPolicy(best=1, metric="loss")}.items():
        with jaxckpt.CheckpointManager(tmp_path / name, keep=keep) as manager:
            manager.save(1, {"w": 1}, metrics={"acc": 0.5, "loss": 1.5})
    _, ax = plt.subplots()

    assert plots.metric(tmp_path / "a", "loss", ax=ax) is ax
    assert marked(ax) == {"complete": [(1, 1.5)]}
    with jaxckpt.CheckpointManager(tmp_path / "b", mode="r") as reader:
        for run in (tmp_path / "b", reader):
            assert marked(plots.metric(run)) == {"kept": [(1, 1.5)], "best": [(1, 1.5)]}


def test_what_is_no_number_is_not_drawn(tmp_path):
    """Text and the like have no mark; NaN and infinities are lines across the plot."""
    odd = [math.nan, math.inf, "high", True, None, 0.5]

    ax = plots.metric(run_of(tmp_path, {step: {"loss": value} for step, value in enumerate(odd)}))

    assert marked(ax) == {"complete": [(5, 0.5)]}
    assert [line.get_xdata() for line in ax.lines[1:]] == [[0, 0], [1, 1]]
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "NaN, infinite or huge"


def test_a_metric_as_large_as_a_float_is_drawn(tmp_path):
    """As a line across: no scale of an axis reaches from one such value to the other."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        for step, loss in enumerate((1e308, -1e308, 1.0), 1):
            manager.save(step, {"w": 1}, metrics={"loss": loss})

    ax = plots.metric(tmp_path)
    ax.figure.canvas.draw()

    assert [len(line.get_xdata()) for line in ax.lines] == [1, 2, 2]


def test_values_that_span_decades_have_a_log_scale(tmp_path):
    """Others, and those that are not all positive, have a linear one."""
    for name, values, scale in (
        ("a", (1e-4, 1.0), "log"),
        ("b", (0.1, 1.0), "linear"),
        ("c", (-1e-4, 1.0), "linear"),
        ("d", (math.nan,), "linear"),
    ):
        metrics = {step: {"loss": value} for step, value in enumerate(values)}
        assert plots.metric(run_of(tmp_path / name, metrics)).get_yscale() == scale


def test_a_metric_that_no_step_has_is_named(tmp_path):
    """The error lists the existing metrics."""
    with pytest.raises(ValueError, match="'los'; found loss, acc"):
        plots.metric(run_of(tmp_path, {1: {"loss": 1.0, "acc": 2.0}}), "los")


def test_a_name_is_no_formula(tmp_path):
    """matplotlib would read it as a formula, and fail on an incomplete one."""
    ax = plots.metric(run_of(tmp_path, {1: {"$\\frac{": 1.0}}))

    assert ax.get_ylabel() == r"\$\frac{"


@pytest.mark.parametrize("background", ["white", "#111111"])
def test_a_new_figure_is_legible_on_any_page(tmp_path, background):
    """It has no background of its own, and its text stands out from light and from dark ones."""
    ax = plots.metric(run_of(tmp_path, {1: {"loss": 1.0}}))

    texts = [*ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label, ax.title]
    assert not ax.patch.get_visible()
    assert not ax.figure.patch.get_visible()
    assert {contrast(text.get_color(), background) > 4 for text in texts} == {True}


def contrast(colour, other):
    """The ratio of two luminances, as WCAG 2 has it; text needs 4.5, large text 3."""

    def luminance(of):
        channels = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(of)]
        return 0.05 + np.dot(channels, (0.2126, 0.7152, 0.0722))

    dark, light = sorted((luminance(colour), luminance(other)))
    return light / dark


# --- timings -------------------------------------------------------------------------------------


def timing(kind="save", step=7, seconds=1.0, **phases):
    return Timing(
        kind=kind, path="run", step=step, total_bytes=10**9, seconds=seconds, phases=phases
    )


def test_times_are_stacked_by_phase():
    """As long as it took, the rest as "other", with the rate at the end."""
    ax = plots.timings([timing(seconds=2.0, write=1.0, snapshot=0.5, commit=0.25)])

    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert bars == [(0.0, 0.5), (0.5, 1.0), (1.5, 0.25), (1.75, 0.25)]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["snapshot", "write", "commit", "other"]
    assert [text.get_text().strip() for text in ax.texts] == ["500 MB/s"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["step 7"]
    assert ax.get_xlabel() == "seconds"


def test_saves_and_restores_have_the_same_colours_for_the_same():
    """The phase that moves data has one colour, and the legend names the phases."""
    ax = plots.timings(
        [timing(snapshot=0.5, write=0.5), timing("restore", None, find=0.5, read=0.5)]
    )

    legend = {
        text.get_text(): to_hex(patch.get_facecolor())
        for text, patch in zip(
            ax.get_legend().get_texts(), ax.get_legend().get_patches(), strict=True
        )
    }
    assert legend == {
        "snapshot": _palette.ORANGE,
        "find": _palette.MAGENTA,
        "read, write": _palette.BLUE,
    }
    assert [label.get_text() for label in ax.get_yticklabels()] == ["save 7", "restore"]


def test_the_last_of_many_timings_are_drawn():
    """Only as many are drawn as can be distinguished."""
    ax = plots.timings([timing(step=step, write=1.0) for step in range(100)])

    assert [label.get_text() for label in ax.get_yticklabels()][::39] == ["step 60", "step 99"]


def test_no_timing_is_no_plot():
    """It says that nothing was saved yet."""
    with pytest.raises(ValueError, match="nothing was saved"):
        plots.timings([])


def test_all_phases_have_colours_apart():
    """The phases of one save, of one restore, and unknown phases."""
    for phases in (
        ("snapshot", "wait", "write", "meet", "commit"),
        ("find", "read", "place", "meet"),
        ("mine", "yours", "theirs"),
    ):
        colours = _palette.phase_colours(phases)
        assert list(colours) == list(phases)
        assert len(set(colours.values())) == len(phases)


# --- shardings -----------------------------------------------------------------------------------


def parts(ax):
    """Returns the text in each part, by its box: x, y, width, height."""
    texts = {text.get_position(): text.get_text() for text in ax.texts}
    return {
        patch.get_bbox().bounds: texts[tuple(patch.get_bbox().get_points().mean(axis=0))]
        for patch in ax.patches
    }


def put(mesh, shape, *spec):
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*spec)))


SPECS = [(), ("x",), ("x", "y"), (None, "y"), (("x", "y"), None), (("y", "x"),), (None, ("y", "x"))]


def test_each_device_stands_in_its_part(make_mesh):
    """Rows go down, columns to the right; copies stand together."""
    mesh = make_mesh(x=2, y=2)

    assert parts(plots.sharding(put(mesh, (4, 6), "x", "y"))) == {
        (0, 0, 3, 2): "0",
        (3, 0, 3, 2): "1",
        (0, 2, 3, 2): "2",
        (3, 2, 3, 2): "3",
    }
    assert parts(plots.sharding(put(mesh, (4, 6), "y"))) == {
        (0, 0, 6, 2): "0 2",
        (0, 2, 6, 2): "1 3",
    }
    assert parts(plots.sharding(put(mesh, (8,), "y"))) == {
        (0, 0, 4, 1): "0 2",
        (4, 0, 4, 1): "1 3",
    }


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_saved_sharding_is_drawn_like_that_of_the_array(tmp_path, mesh, spec):
    """From a checkpoint alone: before and after resharding look alike."""
    array = put(mesh, (8, 16), *spec)
    jaxckpt.save(tmp_path / "a", {"w": array})
    leaf = jaxckpt.open(tmp_path / "a").leaves["w"]

    before, after = plots.sharding(leaf), plots.sharding(array)
    alone = plots.sharding(array.sharding, array.shape)

    assert parts(before) == parts(after) == parts(alone)
    assert before.get_title() == after.get_title() == "[8, 16] on 8 devices"


def test_a_sharding_has_a_hue_for_each_axis(make_mesh):
    """Darker along the axis, the product where two axes divide; an array on one part is grey."""
    mesh = make_mesh(x=2, y=4)

    def colours(*spec):
        return [np.array(patch.get_facecolor()[:3]) for patch in
                plots.sharding(put(mesh, (8, 8), *spec)).patches]  # fmt: skip

    x, y, both = colours("x"), colours(None, "y"), colours("x", "y")
    assert [to_hex(colour) for colour in x] == [to_hex(_palette.tint(0, at)) for at in (0, 1)]
    assert np.allclose(y, [_palette.tint(1, at / 3) for at in range(4)])
    assert np.allclose(both, [along_x * along_y for along_x in x for along_y in y])
    assert len({to_hex(colour) for colour in both}) == 8
    assert np.allclose(colours(), _palette.NEUTRAL)


def test_a_sharding_has_a_legend_of_the_axes_that_divide(make_mesh):
    """With the numbers of the first and last place; none if no axis divides."""
    mesh = make_mesh(x=2, y=4)

    def legend(*spec):
        found = plots.sharding(put(mesh, (8, 8), *spec)).get_legend()
        return found and [text.get_text() for text in found.get_texts()]

    assert legend("y", "x") == ["x, 0 to 1", "y, 0 to 3"]
    assert legend(None, "y") == ["y, 0 to 3"]
    assert legend() is None


def test_of_more_dimensions_the_two_most_divided_are_drawn(mesh):
    """At the start of the others, and it says so."""
    ax = plots.sharding(put(mesh, (2, 8, 3, 4), None, "x", None, "y"))

    assert (ax.get_ylabel(), ax.get_xlabel().split("\n")) == (
        "dimension 1, of 8",
        [
            "dimension 3, of 4",
            "P(None, 'x', None, 'y') on (x=4, y=2)",
            "first part of dimension 0, 2",
        ],
    )
    assert len(parts(ax)) == 8


@pytest.mark.parametrize("shape", [(), (1,), (0, 4)])
def test_arrays_without_extent_are_drawn(shape):
    """A scalar, one element, none."""
    ax = plots.sharding(jax.numpy.zeros(shape))

    assert ax.get_title() == f"[{', '.join(map(str, shape))}] on 1 device"


def test_what_has_no_sharding_is_refused(tmp_path):
    """It says what to give."""
    jaxckpt.save(tmp_path / "a", {"w": np.ones(3)})
    leaf = jaxckpt.open(tmp_path / "a").leaves["w"]

    with pytest.raises(ValueError, match="the sharding of 'w'"):
        plots.sharding(leaf)
    with pytest.raises(TypeError, match="got ndarray"):
        plots.sharding(np.ones(3))
    with pytest.raises(ValueError, match="no shape"):
        plots.sharding(jax.numpy.zeros(3).sharding)


def test_a_mesh_that_cannot_be_is_refused(tmp_path):
    """A file may claim any; nothing is allocated for it."""
    from dataclasses import replace

    jaxckpt.save(tmp_path / "a", {"w": np.ones(3)})
    lie = SavedSharding(axis_names=("x",), axis_sizes=(10**15,), spec=("x",))
    leaf = replace(jaxckpt.open(tmp_path / "a").leaves["w"], saved_sharding=lie)

    with pytest.raises(ValueError, match="too large"):
        plots.sharding(leaf)
