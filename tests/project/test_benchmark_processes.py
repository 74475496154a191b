"""The benchmarks of several processes run, report every figure, and name a process that failed."""

from __future__ import annotations

import jax
import pytest

pytest.importorskip("orbax.checkpoint")

from benchmarks import meetings
from benchmarks.peers import Jaxckpt
from benchmarks.processes import Study, measure_processes, samples, slowest, started
from benchmarks.worker import FIGURES, RESTORES, check
from benchmarks.workloads import abstract, build, make_mesh

pytestmark = pytest.mark.bench

TIMEOUT_S = 60.0


@pytest.mark.multihost
def test_a_job_counts_what_its_processes_tell_each_other():
    first, other = meetings.measure(2)

    assert first["save rounds"] == other["save rounds"] == 3
    assert 0 < other["bytes"] < first["bytes"]


@pytest.mark.multihost
def test_every_figure_of_every_peer_has_its_samples(tmp_path):
    """One job gives a sample of each figure for each counted round, and leaves no file."""
    got = measure_processes(
        [2], workload="large", scale=0.002, peers=["jaxckpt", "v1"], root=tmp_path, repeats=1
    )

    assert list(got) == [2]
    assert tuple(got[2]) == FIGURES
    for by_peer in got[2].values():
        assert list(by_peer) == ["jaxckpt", "orbax v1"]
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in by_peer.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multihost
def test_a_process_that_dies_is_named(tmp_path):
    """The study fails with the index of the process that died, and all others are ended."""
    with started(tiny(tmp_path), count=2) as job:
        job.processes[1].kill()
        with pytest.raises(RuntimeError, match="process 1 of 2 ended with -9"):
            samples(job, timeout_s=TIMEOUT_S)

        assert all(process.poll() is not None for process in job.processes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multihost
def test_processes_that_take_too_long_are_named(tmp_path):
    """At the time limit all are killed, and the study says which had not ended."""
    with started(tiny(tmp_path), count=2) as job:
        with pytest.raises(TimeoutError, match=r"(?s)process 0 of 2 did not.*process 1 of 2 did"):
            samples(job, timeout_s=0.0)

        assert all(process.poll() is not None for process in job.processes)


def test_a_sample_is_that_of_the_slowest_process():
    """Round by round: another process may be the slowest in each."""
    each = [{"save": {"a": [1.0, 4.0]}}, {"save": {"a": [2.0, 3.0]}}]

    assert slowest(each) == {"save": {"a": [2.0, 4.0]}}


@pytest.mark.parametrize("shape", RESTORES.values())
def test_other_values_are_found(shape):
    """A peer that restores one other value, on any of the meshes, is not measured."""
    tree = build("large", scale=0.002, mesh=make_mesh(4, 2))
    like = abstract(tree, make_mesh(*shape))
    good = jax.tree.map(lambda array, to: jax.device_put(array, to.sharding), tree, like)
    wrong = {**good, "head": good["head"].at[7, 1023].add(1)}

    check(Jaxckpt(), tree, good, like)

    with pytest.raises(AssertionError, match="jaxckpt restored other values"):
        check(Jaxckpt(), tree, wrong, like)


@pytest.mark.parametrize(
    "wrong", [{"counts": [3]}, {"peers": ["jaxckpt", "roofline"]}, {"workload": "huge"}]
)
def test_what_cannot_be_measured_is_refused(tmp_path, wrong):
    """Before anything is started, and by name."""
    options = {"counts": [2], "peers": ["jaxckpt"], "workload": "large"} | wrong

    with pytest.raises(ValueError, match=r"3|roofline|huge"):
        measure_processes(**options, scale=0.002, root=tmp_path, repeats=1)


def tiny(root):
    return Study(workload="large", scale=0.002, peers=["jaxckpt"], root=root, repeats=1)
