"""SIGKILL before every file change by a manager loses no acknowledged step."""

from __future__ import annotations

import itertools
import shutil

import pytest

from jaxckpt.format import names, run
from jaxckpt.format.run import Doomed, Lease
from tests.faults import children
from tests.faults.disk import Disk

# A row, and what is done to the n-th of what: writes are torn, changes do not happen.
ENDINGS = [pytest.param("3", "kill", id="kill"), pytest.param("4", "tear", id="tear")]


@pytest.fixture
def make_run(zygote, ram_path):
    """Makes a run with so many saves, of which the last two are kept."""

    def make(saves):
        root = ram_path / "original"
        root.mkdir()
        for step in range(1, saves + 1):
            assert said(zygote, root, "save")[0] == {"saved": step}
        return root

    return make


def said(zygote, root, what, fault=None, log=None):
    """All that a child says which does something with a run, until it ends or is killed."""
    zygote.start(children.manage, root, what, fault, log=log)
    return zygote.answers()[0]


def killed(zygote, original, what, ending="kill"):
    """Kills at every change, or write; yields its number, what was said, and what is found then.

    Of each in turn the run is a copy of the original. The last one is beyond the end.
    """
    for n in itertools.count(1):
        copy = original.with_name(f"run{n}")
        if original.exists():
            shutil.copytree(original, copy)
        words = said(zygote, copy, what, fault=[ending, n])
        yield n, words, zygote.run(children.check_managed, copy)
        shutil.rmtree(copy)
        if words and "events" in words[-1]:
            break
    assert words[-1]["events"] == n - 1
    assert n >= 2


@pytest.mark.parametrize(("row", "ending"), ENDINGS)
@pytest.mark.parametrize("what", ["save", "rich", "shared"])
def test_a_kill_while_a_manager_saves_and_deletes(zygote, make_run, trial, what, row, ending):
    """The steps of before, or with the new one, and the oldest is there or not: all are whole."""
    seen, new = set(), 6 if what == "shared" else 4
    before, with_new, after = (new - 2, new - 1), (new - 2, new - 1, new), (new - 1, new)
    for n, words, found in killed(zygote, make_run(3), what, ending):
        with trial(row, f"a manager's {what}, {ending} at {n}"):
            acknowledged = {"saved": new} in words
            assert tuple(found["steps"]) in (before, with_new, after)
            assert found["seeds"] == found["steps"]
            assert found["newest"] == found["steps"][-1]
            assert found["newest"] == new or not acknowledged
            assert found["after"] == [found["newest"], found["newest"] + 1]
            assert found["left"] == []
            seen.add((tuple(found["steps"]), acknowledged))
        with trial("56", f"the ledger after a manager's {what}, {ending} at {n}"):
            # The killed start has its line, as far as that was written, and the next start too.
            ended = "closed" if "events" in str(words) else ""
            assert found["ends"] == [*["closed"] * 3, ended, ""]
            assert found["saved"][:3] == [1, 2, 3]
            assert found["saved"][3] in (None, new - 2, new - 1, new)
            assert what == "shared" or found["saved"][3] in (None, new)

    assert {(before, False), (after, True)} <= seen
    # Whether it is acknowledged before the oldest goes is up to the threads.
    assert with_new in {steps for steps, _ in seen} or ending == "tear"


@pytest.mark.parametrize(("row", "ending"), ENDINGS)
def test_a_kill_while_a_run_begins(zygote, ram_path, trial, row, ending):
    """Afterwards there is no run, a run without a step, or a run with its first step."""
    seen = set()
    for n, words, found in killed(zygote, ram_path / "nothing", "first", ending):
        with trial(row, f"the first step of a run, {ending} at {n}"):
            acknowledged = {"saved": 1} in words
            assert found["seeds"] == found["steps"]
            assert found["steps"] in ([], [1])
            assert found["steps"] == [1] or not acknowledged
            assert found["after"] == [*found["steps"], len(found["steps"]) + 1]
            assert found["left"] == []
            seen.add((bool(found["before"]), len(found["steps"]), acknowledged))

    assert {(True, 0, False), (True, 1, True)} <= seen
    assert (False, 0, False) in seen or ending == "tear"


@pytest.mark.parametrize(("row", "ending"), ENDINGS)
def test_a_kill_while_leftovers_are_cleared_up(zygote, make_run, trial, row, ending):
    """All steps stay, and the next start ends what this one began."""
    original = make_run(3)
    leave_much(zygote, original)

    for n, words, found in killed(zygote, original, "open", ending):
        with trial(row, f"clearing up, {ending} at {n}"):
            assert (found["steps"], found["seeds"], found["newest"]) == ([2, 3], [2, 3], 3)
            assert found["after"] == [3, 4]
            assert found["left"] == []
            assert not words or not any(map(names.is_temporary, found["before"]))


def leave_much(zygote, original):
    """Leaves one leftover of each kind in a run, and checks the reports of readers and writers."""
    events = said(zygote, shutil.copytree(original, original.with_name("c")), "save")[-1]["events"]
    left = set()
    for n in range(events // 3, events, 3):
        copy = shutil.copytree(original, original.with_name(f"left{n}"))
        said(zygote, copy, "save", fault=["kill", n])
        for entry in copy.iterdir():
            kind = "deleting" if names.is_deleting(entry.name) else "writing"
            if names.is_temporary(entry.name) and kind not in left:
                left.add(kind)
                shutil.copytree(entry, original / entry.name)
    assert left == {"deleting", "writing"}
    (original / names.DOOMED).write_bytes(run.encode(Doomed(steps=["2"])))
    lease = run.encode(Lease(step="2", expires_ns=1))
    (original / names.lease("expired")).write_bytes(lease)


@pytest.mark.parametrize(("row", "ending"), ENDINGS)
def test_a_kill_while_a_step_is_deleted(zygote, make_run, trial, row, ending):
    """It is there, whole, or gone, and gone if that was acknowledged."""
    seen = set()
    for n, words, found in killed(zygote, make_run(3), "delete", ending):
        with trial(row, f"a deletion, {ending} at {n}"):
            acknowledged = {"left": [3]} in words
            assert found["steps"] in ([2, 3], [3])
            assert found["seeds"] == found["steps"]
            assert found["steps"] == [3] or not acknowledged
            assert (found["newest"], found["after"], found["left"]) == (3, [3, 4], [])
            seen.add((len(found["steps"]), acknowledged))

    assert {(2, False), (1, True)} <= seen


def test_a_kill_while_a_damaged_step_is_set_aside(zygote, make_run, trial):
    """It is a step that is skipped, or it is set aside; the one before it is restored."""
    original = make_run(3)
    (original / "3/state/manifest.ocdbt").unlink()
    seen = set()

    for n, words, found in killed(zygote, original, "restore"):
        with trial("3", f"setting aside, kill at {n}"):
            assert {"restored": 2} in words or "events" not in str(words)
            assert found["steps"] in ([2, 3], [2])
            assert (found["seeds"], found["newest"]) == ([2], 2)
            # Its number is free once it is set aside, by this start or the one that was killed.
            assert found["after"] in ([2, 3], [2, 4])
            assert len(found["left"]) == 1
            assert names.is_set_aside(found["left"][0])
            seen.add(tuple(found["steps"]))

    assert seen == {(2, 3), (2,)}


def test_a_kill_while_a_step_is_pinned(zygote, make_run, trial):
    """It is pinned or not, and pinned if that was acknowledged; then it outlives the next save."""
    seen = set()
    for n, words, found in killed(zygote, make_run(3), "pin"):
        with trial("3", f"pinning, kill at {n}"):
            acknowledged = {"pinned": 2} in words
            assert (found["steps"], found["seeds"]) == ([2, 3], [2, 3])
            assert found["pinned"] in ([2], [])
            assert found["pinned"] == [2] or not acknowledged
            assert found["after"] == [*found["pinned"], 3, 4]
            assert found["left"] == []
            seen.add((len(found["pinned"]), acknowledged))

    assert {(0, False), (1, True)} <= seen


@pytest.mark.parametrize(("row", "ending"), ENDINGS)
def test_a_kill_while_a_step_is_forked(zygote, make_run, trial, row, ending):
    """The fork is there, whole, or it is not and can be made; what it comes from is as it was."""
    source, seen = make_run(3) / "3", []
    for n in itertools.count(1):
        root = source.parent.with_name(f"fork{n}")
        zygote.start(children.fork, source, root, [ending, n])
        words, _ = zygote.answers()
        with trial(row, f"a fork, {ending} at {n}"):
            found = zygote.run(children.check_fork, source, root)
            assert found["there"] or not words
            assert not any(map(names.is_temporary, found["left"]))
            seen.append(found["there"])
        shutil.rmtree(root)
        if words:
            break

    assert seen == sorted(seen)
    assert set(seen) == {True, False}


def test_the_check_after_a_kill_sees_a_step_with_a_hole(zygote, make_run):
    """A control: a listed step that lacks a file, or has a wrong bit, does not pass."""
    for change in (lambda file: file.unlink(), lambda file: file.write_bytes(b"{}")):
        root = make_run(3)
        change(root / "3/state/_strings.json")

        zygote.start(children.check_managed, root)
        with pytest.raises(AssertionError, match="Corrupt"):
            zygote.answers()
        shutil.rmtree(root)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("what", ["save", "rich"])
def test_a_step_is_durable_when_it_is_acknowledged(zygote, make_run, trial, tmp_path, what, steps):
    """So are its names and the run's, and steps that the policy does not keep are gone."""
    root = make_run(steps)
    log = tmp_path / "log"

    disk = Disk(root)
    said(zygote, root, what, log=log)

    with trial("6", f"a manager's {what} after {steps}"):
        assert disk.play(log).unsynced() == (set(), set())
    assert (
        f"new\t{root}/{steps + 1}" in log.read_text()
        or f"\t{root}/{steps + 1}\n" in log.read_text()
    )
    assert ("deleting" in log.read_text()) == (steps > 2)


@pytest.mark.parametrize("what", ["open", "pin", "restore", "delete"])
def test_what_a_manager_does_by_hand_is_durable(zygote, make_run, trial, tmp_path, what):
    """A pin, a step that was set aside or deleted, and a run that was taken over."""
    root, log = make_run(2), tmp_path / "log"
    if what == "restore":
        (root / "2/state/manifest.ocdbt").unlink()

    disk = Disk(root)
    said(zygote, root, what, log=log)

    assert log.read_text()
    with trial("6", what):
        assert disk.play(log).unsynced() == (set(), set())


def test_a_run_is_durable_when_its_first_step_is_acknowledged(zygote, ram_path, trial, tmp_path):
    """The directory of the run too, and that above it."""
    log, root = tmp_path / "log", ram_path / "new" / "run"
    (ram_path / "new").mkdir()
    disk = Disk(ram_path / "new")
    said(zygote, root, "first", log=log)

    with trial("6", "the first step of a run"):
        assert disk.play(log).unsynced() == (set(), set())
    assert f"new\t{root}\tdir" in log.read_text()


def test_a_fork_is_durable_when_it_returns(zygote, make_run, trial, tmp_path):
    """Its root too, which was not there."""
    source, log = make_run(2) / "2", tmp_path / "log"
    root = source.parent.with_name("fork")
    disk = Disk(root.parent, shared=True)  # its files are links of those of the source
    zygote.start(children.fork, source, root, log=log)
    zygote.answers()

    with trial("6", "a fork"):
        assert disk.play(log).unsynced() == (set(), set())
    assert "link\t" in log.read_text()
