"""The benchmarks run and tell everything. How fast anything is, no test says."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("orbax.checkpoint")

from benchmarks.__main__ import main
from benchmarks.timing import FIGURES, paired
from benchmarks.workloads import WORKLOADS


def test_every_workload_has_every_figure(tmp_path, capsys):
    """One command measures all workloads, and leaves nothing but the results."""
    options = "--scale 0.0003 --repeats 1 --name tiny --peers jaxckpt,roofline"

    status = main([*options.split(), "--dir", str(tmp_path), "--out", str(tmp_path / "out")])

    assert status == 0
    printed = capsys.readouterr().out
    for figure in FIGURES:
        assert printed.count(f"\n| {figure} | ") == len(WORKLOADS)
    assert (tmp_path / "out/results/tiny.md").read_text().strip() == printed.strip()
    workloads = json.loads((tmp_path / "out/results/tiny.json").read_text())["workloads"]
    assert list(workloads) == list(WORKLOADS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_every_peer_restores_what_it_saved(tmp_path, capsys):
    """The first round compares the values, and all peers get a column."""
    options = "--scale 0.0003 --repeats 1 --workloads small"

    main([*options.split(), "--dir", str(tmp_path)])

    assert "| | jaxckpt | orbax v1 | orbax v0 | roofline |" in capsys.readouterr().out


def test_a_ratio_pairs_figures_of_one_round():
    """The extremes are those of the rounds, not of all with all."""
    assert paired([1.0, 4.0, 2.0], [2.0, 4.0, 8.0]) == (2.0, 1.0, 4.0)
