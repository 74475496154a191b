"""The benchmarks run and report every figure; no test checks the speed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jaxckpt

pytest.importorskip("orbax.checkpoint")

from benchmarks import gpu, scale, studies, timing
from benchmarks.__main__ import STUDIES, main
from benchmarks.timing import FIGURES, paired
from benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.bench

TINY = "--quick --scale 0.0003 --repeats 1".split()


@pytest.fixture(autouse=True)
def no_garbage(monkeypatch):
    """No figure here has to be right, and collecting the garbage of all tests takes seconds."""
    monkeypatch.setattr(timing, "_settle", lambda: None)


def test_every_workload_has_every_figure(tmp_path, capsys):
    """One command measures workloads, and leaves nothing but the results."""
    pytest.importorskip("matplotlib")
    options = [*WORKLOADS, *TINY, "--peers", "jaxckpt,roofline", "--name", "tiny"]

    status = main([*options, "--dir", str(tmp_path), "--out", str(tmp_path / "out")])

    assert status == 0
    printed = capsys.readouterr().out
    for figure in FIGURES:
        assert printed.count(f"\n| {figure} | ") == len(WORKLOADS)
    assert (tmp_path / "out/tiny.md").read_text().strip() == printed.strip()
    found = json.loads((tmp_path / "out/tiny.json").read_text())
    assert list(found["studies"]) == list(WORKLOADS)
    assert found["facts"]["command"].startswith("python -m benchmarks large gpt2 small --quick")
    assert (tmp_path / "out/tiny.svg").read_text().count("roofline") >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_every_peer_restores_what_it_saved(tmp_path, capsys):
    """The first round compares the values, and all peers get a column."""
    names = "jaxckpt,v1,v0,jax,safetensors,roofline"

    main(["small", *TINY, "--peers", names, "--dir", str(tmp_path)])

    columns = "jaxckpt | orbax v1 | orbax v0 | jax serialization | safetensors | roofline |"
    assert f"|  | {columns}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_the_benchmark_of_gpus_runs_on_any_device(tmp_path, capsys):
    """Every peer restores what it saved, and every figure is in the table."""
    gpu.main(["--gib", "0.001", "--repeats", "1", "--width", "64", "--dir", str(tmp_path)])

    printed = capsys.readouterr().out
    assert "|  | bare | jaxckpt | orbax v1 | orbax v0 |" in printed
    assert printed.count("\n| ") == 9
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")  # Orbax's own
@pytest.mark.parametrize("study", sorted({*STUDIES} - {*WORKLOADS, "processes", "scale"}))
def test_every_study_makes_a_table(tmp_path, capsys, study):
    """And leaves nothing behind."""
    main([study, *TINY, "--peers", "jaxckpt,v1", "--dir", str(tmp_path)])

    printed = capsys.readouterr().out
    assert printed.count("\n### ") == 1
    assert printed.count("\n| ") >= 3
    assert not list(tmp_path.iterdir())


def test_the_scale_of_a_job(tmp_path):
    """Plans of many processes, and the merge of their databases."""
    plans = scale.measure_plans([16], leaves=8)
    merges = scale.measure_merges([2], keys=3, root=tmp_path)
    meetings = scale.measure_meetings([2])

    assert plans[16]["chunks"] > 0
    assert plans[16]["metadata bytes"] > 0
    assert set(merges) == {2}
    assert meetings[2]["bytes"] > 0
    assert not list(tmp_path.iterdir())


def test_data_without_checksums_is_data_without_checksums(tmp_path):
    """The study of checksums compares with the same values, in four bytes less per chunk."""
    tree = {"direct": np.zeros((64, 64)), "large": np.zeros((512, 512))}

    jaxckpt.save(tmp_path / "with", tree)
    with studies._unchecked():
        jaxckpt.save(tmp_path / "without", tree)
        got = jaxckpt.restore(tmp_path / "without", as_numpy=True)
        runs = [*studies._chunks.adjacent(np.array([0, 8]), np.array([8, 8]))]

    assert len(runs) == 1  # chunks that lie together are read together, as with checksums
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name / "state/d").iterdir())
        for name in ("with", "without")
    ]
    assert sizes[0] > sizes[1]
    assert all(np.array_equal(got[name], tree[name]) for name in tree)


def test_checksums_are_back_after_any_error(monkeypatch):
    """Also if a cache that the study empties is no longer there."""

    def patched():
        return studies._chunks.checksum, studies._chunks.CRC_BYTES, studies._writer.encode_chunk

    before = patched()
    monkeypatch.setattr(studies, "_forget_plans", lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError), studies._unchecked():
        pass

    assert patched() == before


def test_a_ratio_pairs_figures_of_one_round():
    """The extremes are taken over pairs within a round, not over all pairs."""
    assert paired([1.0, 4.0, 2.0], [2.0, 4.0, 8.0]) == (2.0, 1.0, 4.0)
