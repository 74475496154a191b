"""Data goes on at the very next global batch, on any number of processes."""

from __future__ import annotations

import contextlib
import functools
from itertools import chain

import numpy as np
import pytest

from jaxckpt import CheckpointManager
from jaxckpt.errors import TreeMismatch
from jaxckpt.testing import simulate
from tests.multiprocess import Job
from tests.twins import watched
from tests.workers.positions import (
    BATCH,
    KINDS,
    SAVED,
    STEPS,
    Own,
    Plain,
    elastic,
    iterators,
    joined,
    take,
)

pytest.importorskip("grain")

COUNTS = [1, 2, 4, 8]

pytestmark = pytest.mark.multihost


@functools.cache
def whole():
    """The global batches of an uninterrupted run, by kind."""
    return take(iterators(0, 1), STEPS)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs of real jobs of each size, which read the first batches: where they are."""
    roots = {str(count): tmp_path_factory.mktemp("begun") / "run" for count in COUNTS}
    for name, root in roots.items():
        count = int(name)
        with Job("positions:read", count=count, devices_per_process=8 // count, args=[root]) as job:
            first = joined([done.result for done in job.wait()])
        assert first == {kind: batches[:SAVED] for kind, batches in whole().items()}
    return roots


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_jobs_of_every_size_go_on_with_the_data_of_each_other(run_processes, begun, count):
    """What they read next is what the uninterrupted run reads, and nothing is lost or repeated."""
    done = run_processes(
        "positions:go_on", count=count, devices_per_process=8 // count, args=[begun]
    )

    for name in begun:
        rest = joined([one.result[name] for one in done])
        assert rest == {kind: batches[SAVED:] for kind, batches in whole().items()}
    assert all(sorted(chain(*batches)) == [*range(BATCH * STEPS)] for batches in whole().values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_through_many_sizes(tmp_path, kind):
    """Each job reads two batches with another number of processes than the job before it."""
    got = []

    def run(start, processes):
        data = KINDS[kind](processes.index, processes.count)
        with CheckpointManager(tmp_path) as manager:
            state, step = manager.restore_or(lambda: {"n": 0}, items={"data": data})
            assert (state, step) == ({"n": start}, start)
            mine = take({kind: data}, 2)
            manager.save(step + 2, {"n": step + 2}, items={"data": data})
            return mine

    for start, count in enumerate([4, 1, 8, 2]):
        got += joined(simulate(count, functools.partial(run, 2 * start)))[kind]

    assert got == whole()[kind][:8]


def save_apart(root, make, count, **options):
    """Saves step 1 of a job of simulated processes, whose object `make` returns."""

    def run(processes):
        with CheckpointManager(root, **options) as manager:
            manager.save(1, {"n": 1}, items={"data": make(processes.index, processes.count)})

    simulate(count, run)


def restore_apart(root, make, count, **options):
    """Restores the newest step into what `make` returns; returns the objects of all processes."""

    def run(processes):
        data = make(processes.index, processes.count)
        with CheckpointManager(root, **options) as manager:
            manager.restore(items={"data": data})
        return data

    return simulate(count, run)


class Local(Plain):
    """Has an index of its own process, which looks alike in all."""

    def get_state(self):
        return {"seed": self.seed, "index": self.next // self.count}


def test_an_index_that_is_not_said_to_be_of_the_job_is_refused(tmp_path):
    """That all processes have the same numbers does not show what they count."""
    save_apart(tmp_path, Local, 2)

    with pytest.raises(TreeMismatch, match="Give Local the methods merge_states and split_state"):
        restore_apart(tmp_path, Local, 4)


class Counter(Plain):
    """Has a number as its state."""

    def get_state(self):
        return self.next

    def set_state(self, state):
        self.next = state


def test_a_state_that_is_a_number_is_refused(tmp_path):
    save_apart(tmp_path, Counter, 2)

    with pytest.raises(TreeMismatch, match="Give Counter the methods merge_states and split_state"):
        restore_apart(tmp_path, Counter, 4)


def test_positions_of_the_job_that_differ_are_refused(tmp_path):
    """One process has read further than another, so there is no next batch of the job."""

    def make(index, count):
        data = Plain(index, count)
        data.next = BATCH * index
        return data

    save_apart(tmp_path, make, 2)

    with pytest.raises(TreeMismatch, match=r"states of 2 processes, but there are 4"):
        restore_apart(tmp_path, make, 4)


def test_too_few_states_of_split_state_are_an_error(tmp_path):
    """It names the item and the number that was wanted; no object changes."""

    class Short(Own):
        def split_state(self, state, count):
            return super().split_state(state, count - 1)

    save_apart(tmp_path, Own, 4)
    data = Short(0, 2)
    wanted = "item 'data': the result of split_state must be a list of 1, .*, got 0"
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match=wanted) as no:
        manager.restore(items={"data": data})

    assert data.plain.next == 0
    assert "item 'data'; states wanted: 1" in no.value.__notes__[0]


@pytest.mark.parametrize("made", [{0: 5, 1: 5}, {"read": 10, "seed": 0}, "ab", b"cd", None])
def test_split_state_returns_a_list(tmp_path, made):
    """The keys of a dict with as many are no states."""

    class Odd(Own):
        def split_state(self, state, count):
            return made

    save_apart(tmp_path, Own, 4)

    def run(processes):
        data = Odd(processes.index, processes.count)
        with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError) as no:
            manager.restore(items={"data": data})
        return str(no.value), data.plain.next

    wanted = "item 'data': the result of split_state must be a list of 2, one state per process"
    for text, at in simulate(2, run):
        assert text.startswith(f"{wanted}, got ")
        assert at == 0


def test_restore_items_divides_too(tmp_path):
    save_apart(tmp_path, Own, 4)

    def run(processes):
        data = Own(processes.index, processes.count)
        data.plain.next = 99
        with CheckpointManager(tmp_path) as manager:
            return manager.restore_items(items={"data": data})["data"] is data, data.plain.next

    assert simulate(2, run) == [(True, 0)] * 2


@pytest.mark.parametrize(("count", "wanted"), [(4, 4), (2, 8)])
def test_a_process_reads_the_states_of_others_only_on_another_number(tmp_path, count, wanted):
    save_apart(tmp_path, Own, 4)
    reads = []

    def before(verb, path):
        reads.extend([path] * (verb == "read" and "/data/process_" in path))

    restore_apart(watched(tmp_path, before), Own, count)

    assert len(reads) == wanted


def test_a_local_disk_does_not_stand_in_the_way(tmp_path):
    """The states of all processes are in the directory, if a host lacks some."""
    local = tmp_path / "local"
    save_apart(tmp_path / "run", elastic, 4, local=local)

    data = restore_apart(tmp_path / "run", elastic, 2, local=local)

    assert take({"data": data[0]}, 1) == {"data": [np.asarray(next(elastic(0, 2))).tolist()]}


def count_batches(kind, examples):
    """Returns how many batches each of four processes gets from a data set of this size."""
    counts = []
    for i in range(4):
        data, counts = KINDS[kind](i, 4, examples), [*counts, 0]
        with contextlib.suppress(StopIteration):
            while True:
                next(data)
                counts[-1] += 1
    return counts


def test_what_is_left_of_a_batch_at_the_end_is_up_to_the_iterator():
    """Grain gives it to the processes that have a full part of it, which are not always all."""
    rest = 2 * BATCH - 1

    assert count_batches("grain", BATCH + 3) == count_batches("plain", rest) == [1, 1, 1, 1]
    assert count_batches("grain", rest) == [2, 2, 2, 1]


def test_a_batch_that_the_processes_cannot_divide_is_an_error_of_grain():
    with pytest.raises(ValueError, match="16 is not divisible by shard count 3"):
        next(elastic(0, 3))
