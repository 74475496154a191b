"""System calls fail at every point of a save or restore, and nothing is lost."""

from __future__ import annotations

import errno

import pytest

from tests.faults import error_children as children

KINDS = ("fail_once", "fail_from")
# In a part, each event fails with every second error, and any two neighbours with all of them.
PARTS = pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
# TensorStore may close a file a little later than it says that it has read it.
FEW = 3


def swept(zygote, folder, trial, subject, kind, number, *, reads=False, stride=1, first=1):
    """Tries every event of a subject, or every n-th; returns what each trial raised."""
    zygote.start(children.sweep, folder, subject, kind, number, reads, stride, first)
    said, _ = zygote.answers()
    for word in said:
        with trial("5", f"{subject}, {errno.errorcode[number]} {kind} at event {word['n']}"):
            assert word["problem"] is None, word["problem"]
    assert [word["n"] for word in said] == list(range(first, first + stride * len(said), stride))
    return said


@PARTS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", children.WRITE_ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("subject", children.WRITERS)
def test_an_error_of_a_save_loses_nothing(zygote, ram_path, trial, subject, number, kind, part):
    """It is raised, with a path; what was there stays, and the next save clears up by itself."""
    first = 1 + (part + children.WRITE_ERRORS.index(number)) % 2
    stride = 4 if (subject, kind) == ("ManagerSave", "fail_from") else 2
    said = swept(zygote, ram_path, trial, subject, kind, number, stride=stride, first=first)

    zygote.start(children.check_left, ram_path)
    for word in zygote.answers()[0]:
        with trial("5", f"{subject}, {errno.errorcode[number]} at {word['n']}, then a new start"):
            assert word["problem"] is None, word["problem"]
    assert said[-1]["n"] > 25
    assert {"SaveFailed", "NoneType"} <= {word["raised"] for word in said}
    assert said[-1]["open_files"] <= said[1]["open_files"] + FEW


@PARTS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", children.READ_ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("subject", children.READERS)
def test_an_error_of_a_read_is_no_damage(zygote, ram_path, trial, subject, number, kind, part):
    """The original error is raised; no good step is moved or replaced, and no value is wrong."""
    first = 1 + (part + children.READ_ERRORS.index(number)) % 2
    where = {"reads": True, "stride": {"fail_once": 2, "fail_from": 4}[kind], "first": first}
    said = swept(zygote, ram_path, trial, subject, kind, number, **where)

    assert said[-1]["n"] > 10
    assert said[-1]["open_files"] <= said[1]["open_files"] + FEW


@pytest.mark.parametrize("lie", ["LyingSave", "WrongRestore", "MovingRestore"])
def test_the_trials_see_what_is_wrong(zygote, ram_path, lie):
    """A control: errors that are kept quiet, wrong values and moved steps do not pass."""
    zygote.start(children.sweep, ram_path, lie, "fail_once", errno.EIO, lie != "LyingSave", 9)

    said, _ = zygote.answers()

    wanted = {
        "LyingSave": "assert found",
        "WrongRestore": "a wrong value",
        "MovingRestore": "names",
    }
    assert any(wanted[lie] in str(word["problem"]) for word in said)
