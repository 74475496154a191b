"""The power fails after every change of a file, and every possible remaining state is restored.

The changes of a child are logged with their bytes, and replayed on a model of a disk. After each of
them the model gives the possible states after a power cut, under three rules; see `disk`. A new
process checks each state: the newest acknowledged step is there bit for bit, every listed step is
complete, and the next save works and cleans up.
"""

from __future__ import annotations

import random
import shutil

import pytest

from tests.faults import left_children as children
from tests.faults.disk import Disk

# What is left of names, and of the bytes of a file.
RULES = {
    "strict POSIX": (lambda node: node.synced_names, lambda node: node.synced_data),
    "names in order, bytes lost": (lambda node: node.names, lambda node: node.synced_data),
    "names in order, zeros": (
        lambda node: node.names,
        lambda node: node.data if node.data == node.synced_data else b"\0" * len(node.data),
    ),
}
BATCH = 40


class Replay:
    """The states that a log leads to, each different one once; a child looks at them in batches."""

    def __init__(self, zygote, folder, log, saves):
        self.zygote, self.folder = zygote, folder
        self.top = folder / "top"
        self.top.mkdir()
        self.log, self.data = folder / "log", folder / "data"
        self.disk = Disk(self.top)
        zygote.start(log, self.top, saves, self.log, self.data)
        zygote.answers()

    def new_disk(self):
        """The disk as it was at first."""
        disk = Disk(self.folder / "nothing")
        disk.root = self.disk.root
        return disk

    def states(self):
        """Yields the rule, the number of lines and the newest acknowledged step of each state."""
        seen = set()
        for n, _ in enumerate(self.disk.steps(self.log, self.data), start=1):
            acked = int(self.disk.marks[-1].split()[1]) if self.disk.marks else 0
            for rule, (names, data) in RULES.items():
                key = (acked, *_key(self.disk.top, names, data))
                if key not in seen:
                    seen.add(key)
                    yield rule, n, acked

    def problems(self, check):
        """Has a child check every state; yields the rule, the number of lines and the problem."""
        batch = []
        for rule, n, acked in self.states():
            names, data = RULES[rule]
            left = self.folder / f"left{n}-{len(batch)}"
            self.disk.leave(left, names=names, data=data)
            batch.append((rule, n, left, acked))
            if len(batch) == BATCH:
                yield from self._checked(batch, check)
                batch.clear()
        yield from self._checked(batch, check)

    def _checked(self, batch, check):
        self.zygote.start(check, [(left, acked) for *_, left, acked in batch])
        said = [word for word in self.zygote.answers()[0] if "problem" in word]
        for (rule, n, left, _), word in zip(batch, said, strict=True):
            yield rule, n, word["problem"]
            shutil.rmtree(left)


def _key(node, names, data, path=""):
    """Tells states apart, without a copy of their bytes."""
    yield path, None if node.is_dir else data(node)
    for name, inner in sorted(names(node).items() if node.is_dir else ()):
        yield from _key(inner, names, data, f"{path}/{name}")


@pytest.mark.parametrize(
    ("log", "saves"),
    [
        (children.log_run, 4),
        (children.log_rich_run, 3),
        (children.log_shared_run, 4),
        (children.log_copied_run, 3),
    ],
)
def test_no_power_cut_loses_a_step_of_a_run(zygote, ram_path, trial, log, saves):
    """A run that keeps two: also while the oldest is deleted, and before there is any."""
    replay = Replay(zygote, ram_path, log, saves)

    for rule, n, problem in replay.problems(children.check_runs):
        with trial("7", f"a run, {rule}, after {n} lines"):
            assert problem is None, problem

    assert replay.disk.marks == [f"acked {step}" for step in range(1, saves + 1)]


@pytest.mark.parametrize("saves", [5])
def test_no_power_cut_loses_a_path_that_is_replaced(zygote, ram_path, trial, saves):
    """The last one that was acknowledged is there, or the one after it."""
    replay = Replay(zygote, ram_path, children.log_replacements, saves)

    for rule, n, problem in replay.problems(children.check_replaced):
        with trial("7", f"a replacement, {rule}, after {n} lines"):
            assert problem is None, problem

    assert len(replay.disk.marks) == saves


@pytest.mark.parametrize("control", [children.log_run_unsynced, children.log_run_that_lies])
def test_the_replay_sees_a_step_that_is_lost(zygote, ram_path, control):
    """A control: without syncs of directories, or with an early acknowledgement, steps are lost."""
    replay = Replay(zygote, ram_path, control, 1)

    problems = [problem for *_, problem in replay.problems(children.check_runs)]

    assert any("1 is lost" in problem for problem in problems if problem)


def test_a_disk_that_lies_about_syncs(zygote, ram_path, trial):
    """It keeps some bytes and names and loses others: nothing restores to a wrong value."""
    replay = Replay(zygote, ram_path, children.log_run, 4)
    lines = len(replay.log.read_text().splitlines())
    restored = []
    for seed in range(100):
        dice = random.Random(seed)
        disk, stop = replay.new_disk(), dice.randrange(lines)
        for n, _ in enumerate(disk.steps(replay.log, replay.data)):
            if n == stop:
                break
        left = ram_path / f"lie{seed}"
        disk.leave(left, **kept_by_chance(dice))
        zygote.start(children.check_no_lie, [(left, 4)])
        *said, last = zygote.answers()[0]
        with trial("9", f"seed {seed}, after {stop} lines"):
            assert last["problem"] is None, last["problem"]
            restored += said[0]["restored"]
        shutil.rmtree(left)

    # Much is lost, and much is not.
    assert None in restored
    assert len(set(restored)) > 3


def kept_by_chance(dice):
    """The arguments of `Disk.leave`: which names there are, and what files hold."""
    kept, loss = {}, dice.choice([0.02, 0.1, 0.3])

    def names(node):
        if node not in kept:
            known = {**node.synced_names, **node.names}
            kept[node] = {k: v for k, v in known.items() if dice.random() > loss}
        return kept[node]

    def data(node):
        if node not in kept:
            whole, size = node.data, len(node.data)
            some = dice.randrange(size + 1)
            worse = [b"", whole[:some], b"\0" * size, whole[:some].ljust(size, b"\0")]
            kept[node] = whole if dice.random() > loss else dice.choice(worse)
        return kept[node]

    return {"names": names, "data": data}


def test_the_check_of_a_lying_disk_sees_a_wrong_value(zygote, ram_path):
    """A control: a step under the name of another one is a wrong value."""
    replay = Replay(zygote, ram_path, children.log_run, 2)
    (replay.top / "run/1").rename(replay.top / "run/7")

    zygote.start(children.check_no_lie, [(replay.top, 4)])

    assert zygote.answers()[0][-1]["problem"] is not None
