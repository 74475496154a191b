"""SIGKILL before every change of a file by a manager: no step that was acknowledged is lost."""

from __future__ import annotations

import shutil

import pytest

from jaxckpt.format import names, run
from jaxckpt.format.run import Lease
from tests.faults import children
from tests.faults.disk import Disk

TEMPORARY_FILE = ".jaxckpt-tmp-"


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


def killed(zygote, original, what, *, stride):
    """Kills before every change, or every n-th; yields what was said and what is found then.

    Of each change in turn the run is a copy of the original.
    """
    copy = original.with_name("counted")
    shutil.copytree(original, copy)
    events = said(zygote, copy, what)[-1]["events"]
    for n in [*range(1, events + 1, stride), events, events + 1]:
        copy = original.with_name(f"run{n}")
        shutil.copytree(original, copy, dirs_exist_ok=True)
        words = said(zygote, copy, what, fault=["kill", n])
        assert ("events" in (words[-1] if words else {})) == (n > events)
        yield words, zygote.run(children.check_managed, copy)
        shutil.rmtree(copy)
    assert events >= 2


def without_torn_files(entries):
    """A file whose writing was cut off has a temporary name, and is nobody's."""
    return [entry for entry in entries if not entry.startswith(TEMPORARY_FILE)]


STRIDES = [pytest.param(3, id="some"), pytest.param(1, marks=pytest.mark.slow, id="all")]


@pytest.mark.parametrize("stride", STRIDES)
def test_a_kill_while_a_manager_saves_and_deletes(zygote, make_run, stride):
    """The steps of before, or with the new one, and the oldest is there or not: all are whole."""
    original = make_run(3)
    seen = set()

    for words, found in killed(zygote, original, "save", stride=stride):
        acknowledged = {"saved": 4} in words
        assert found["steps"] in ([2, 3], [2, 3, 4], [3, 4])
        assert found["seeds"] == found["steps"]
        assert found["newest"] == found["steps"][-1]
        assert found["newest"] == 4 or not acknowledged
        assert found["after"] == [found["newest"], found["newest"] + 1]
        assert without_torn_files(found["left"]) == []
        seen.add((tuple(found["steps"]), acknowledged))

    assert {((2, 3), False), ((2, 3, 4), True), ((3, 4), True)} <= seen


@pytest.mark.parametrize("stride", STRIDES)
def test_a_kill_while_leftovers_are_cleared_up(zygote, make_run, stride):
    """All steps stay, and the next start ends what this one began."""
    original = make_run(3)
    events = said(zygote, shutil.copytree(original, original.with_name("c")), "save")[-1]["events"]
    left = set()
    for n in range(events // 3, events, 3):  # kills until there is one of each kind
        copy = shutil.copytree(original, original.with_name(f"left{n}"))
        said(zygote, copy, "save", fault=["kill", n])
        for entry in copy.iterdir():
            kind = "deleting" if names.is_deleting(entry.name) else "writing"
            if names.is_temporary(entry.name) and kind not in left:
                left.add(kind)
                shutil.copytree(entry, original / entry.name)
    assert left == {"deleting", "writing"}
    (original / names.DOOMED).write_bytes(run.encode_doomed(["2"]))
    lease = run.encode_lease(Lease(step="2", expires_ns=1))
    (original / names.lease("expired")).write_bytes(lease)

    for words, found in killed(zygote, original, "open", stride=stride):
        assert (found["steps"], found["seeds"], found["newest"]) == ([2, 3], [2, 3], 3)
        assert found["after"] == [3, 4]
        assert without_torn_files(found["left"]) == []
        if words:
            assert not any(map(names.is_temporary, found["before"]))


@pytest.mark.parametrize("stride", [1])
def test_a_kill_while_a_damaged_step_is_set_aside(zygote, make_run, stride):
    """It is a step that is skipped, or it is set aside; the one before it is restored."""
    original = make_run(3)
    (original / "3/state/manifest.ocdbt").unlink()
    seen = set()

    for words, found in killed(zygote, original, "restore", stride=stride):
        assert {"restored": 2} in words or "events" not in str(words)
        assert found["steps"] in ([2, 3], [2])
        assert (found["seeds"], found["newest"]) == ([2], 2)
        # Its number is free once it is set aside, by this start or the one that was killed.
        assert found["after"] in ([2, 3], [2, 4])
        aside = without_torn_files(found["left"])
        assert len(aside) == 1
        assert names.is_set_aside(aside[0])
        seen.add(tuple(found["steps"]))

    assert seen == {(2, 3), (2,)}


@pytest.mark.parametrize("stride", [1])
def test_a_kill_while_a_step_is_pinned(zygote, make_run, stride):
    """It is pinned or not, and pinned if that was acknowledged; then it outlives the next save."""
    original = make_run(3)
    seen = set()

    for words, found in killed(zygote, original, "pin", stride=stride):
        acknowledged = {"pinned": 2} in words
        assert (found["steps"], found["seeds"]) == ([2, 3], [2, 3])
        assert found["pinned"] in ([2], [])
        assert found["pinned"] == [2] or not acknowledged
        assert found["after"] == [*found["pinned"], 3, 4]
        assert without_torn_files(found["left"]) == []
        seen.add((len(found["pinned"]), acknowledged))

    assert {(0, False), (1, True)} <= seen


@pytest.mark.xfail(reason="what a kill left of a small file in the root stays for ever")
def test_a_kill_leaves_no_file_of_a_temporary_name(zygote, make_run):
    """After the next start and save there is nothing but steps and the files of the run."""
    original = make_run(3)

    for _, found in killed(zygote, original, "open", stride=1):
        assert found["left"] == []


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_step_is_durable_when_it_is_acknowledged(zygote, make_run, tmp_path, steps):
    """Its bytes and names, those of the run, and that what the policy does not keep is gone."""
    root = make_run(steps)
    log = tmp_path / "log"

    disk = Disk(root)
    said(zygote, root, "save", log=log)

    assert disk.play(log).unsynced() == (set(), set())
    assert (
        f"new\t{root}/{steps + 1}" in log.read_text()
        or f"\t{root}/{steps + 1}\n" in log.read_text()
    )
    assert ("deleting" in log.read_text()) == (steps > 2)


@pytest.mark.parametrize("what", ["open", "pin", "restore"])
def test_what_a_manager_does_by_hand_is_durable(zygote, make_run, tmp_path, what):
    """A pin, a step that was set aside, and a run that was taken over."""
    root, log = make_run(2), tmp_path / "log"
    if what == "restore":
        (root / "2/state/manifest.ocdbt").unlink()

    disk = Disk(root)
    said(zygote, root, what, log=log)

    assert log.read_text()
    assert disk.play(log).unsynced() == (set(), set())
