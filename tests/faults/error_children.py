"""Runs in forked children while system calls fail: one child tries every point in turn.

A child keeps its state from one trial to the next, like a training job that continues after a
failed save: open files, caches of TensorStore, the memory of a manager.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import itertools
import os
import shutil
import traceback
from pathlib import Path

import numpy as np

from tests.faults.children import found, tree
from tests.faults.zygote import arm, disarm, events, say

KEPT = 2
# A trial takes milliseconds. One that hangs must end the child, or nobody learns where it hangs.
HANGS_AFTER_S = 30


def sweep(folder, subject, kind, number, reads=False, stride=1, first=1):
    """Has the first event fail, then the second, and so on, until none is left that could.

    Says of each trial what was raised, and what was wrong with what came of it: None, if nothing.

    Args:
        subject: The name of a class of this module.
        kind, number, reads: As `zygote.arm` takes them.
        stride, first: Tries every so-manieth event only, from this one on.
    """
    trials = globals()[subject](Path(folder))
    for n in itertools.count(first, stride):
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        trials.prepare(n)
        raised = None
        arm(folder, [kind, n, number, reads])
        try:
            trials.act()
        except Exception as error:  # judged below
            raised = error
        reached = events() >= n
        disarm()
        problem = None
        try:
            if raised is not None:
                check_error(raised, folder)
            assert reached or raised is None
            trials.check(raised, os.strerror(number))
        except Exception as error:  # told to the test, which counts it
            problem = "".join(traceback.format_exception(error))
            if raised is not None:
                problem += "\nraised was:\n" + "".join(traceback.format_exception(raised))
        open_files = len(os.listdir("/proc/self/fd"))
        say(n=n, raised=type(raised).__name__, problem=problem, open_files=open_files)
        if not reached:
            return


def check_error(error, folder):
    """It is of a type that a caller of this library expects, and says where."""
    import jaxckpt

    assert isinstance(error, (jaxckpt.CheckpointError, OSError))
    assert str(folder) in str(error)


class Save:
    """The first save at a path."""

    there = (None, 1)

    def __init__(self, folder):
        self.folder = folder

    def prepare(self, n):
        self.n = n
        self.path = self.folder / "live" / str(n) / "a"
        (self.path.parent / "beside").mkdir(parents=True)

    def act(self):
        import jaxckpt

        jaxckpt.save(self.path, tree(self.there[1]), overwrite=self.there[0] is not None)

    def check(self, raised, why):
        del why
        assert found(self.path) in (self.there if raised is not None else self.there[1:])
        shutil.copytree(self.path.parent, self.folder / "left" / str(self.n))
        save_next(self.path)
        shutil.rmtree(self.path.parent)


class Replace(Save):
    """A save with `overwrite=True`."""

    there = (1, 2)

    def __init__(self, folder):
        import jaxckpt

        super().__init__(folder)
        jaxckpt.save(folder / "old", tree(1))

    def prepare(self, n):
        super().prepare(n)
        shutil.copytree(self.folder / "old", self.path)


def save_next(path):
    """Makes the next save of a job: it needs no help, and leaves nothing behind."""
    import jaxckpt

    jaxckpt.save(path, tree(3), overwrite=True)
    assert found(path) == 3
    assert jaxckpt.verify(path).ok
    assert sorted(os.listdir(path.parent)) == ["a", "beside"]


def check_left(folder):
    """Checks from another process the state after each failed save."""
    for left in sorted(Path(folder, "left").iterdir(), key=lambda left: int(left.name)):
        problem = None
        try:
            if (left / "beside").exists():
                found(left / "a")
                save_next(left / "a")
            else:
                check_run(left)
        except Exception as error:
            problem = "".join(traceback.format_exception(error))
        shutil.rmtree(left)
        say(n=int(left.name), problem=problem)


class ManagerSave:
    """A save in a run that keeps two steps, so that one step is deleted."""

    def __init__(self, folder):
        self.folder = folder
        with open_run(folder / "run") as manager:
            for step in (1, 2, 3):
                manager.save(step, tree(step))

    def prepare(self, n):
        self.n = n
        self.root = self.folder / "live" / str(n)
        shutil.copytree(self.folder / "run", self.root)
        self.manager = open_run(self.root)

    def act(self):
        self.manager.save(4, tree(4), metrics={"loss": 1.0}).result()
        self.manager.wait_until_finished()

    def check(self, raised, why):
        del why
        steps = committed(self.root)
        assert steps in ([2, 3], [2, 3, 4], [3, 4])
        assert steps[-1] == 4 or raised is not None
        shutil.copytree(self.root, self.folder / "left" / str(self.n))
        try:
            save_next_step(self.manager)
        finally:
            self.manager.close()
        check_run(self.root)
        shutil.rmtree(self.root)


def open_run(root, **options):
    import jaxckpt

    return jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=KEPT), **options)


def committed(root):
    """The steps that are there by their names; each has its right values."""
    steps = sorted(int(name) for name in os.listdir(root) if name.isdecimal())
    assert [found(f"{root}/{step}") for step in steps] == steps
    return steps


def save_next_step(manager):
    """The next save works, and then exactly what the policy keeps is there."""
    from jaxckpt.format import names

    steps = committed(manager.directory)
    new = max(steps, default=0) + 1
    manager.save(new, tree(new)).result()
    manager.wait_until_finished()
    entries = set(os.listdir(manager.directory))
    leases = {name for name in entries if names.is_lease(name)}
    held = leased(manager.directory, leases)  # by what could not be deleted, until it expires
    kept = sorted({*[*steps, new][-KEPT:], *(step for step in steps if str(step) in held)})
    assert manager.all_steps() == committed(manager.directory) == kept
    left = (
        entries - leases - set(map(str, kept)) - {names.RUN, names.OWNER, names.LOCK, names.LEDGER}
    )
    assert not left, f"left over: {left}"


def leased(root, leases):
    from jaxckpt.format import run

    files = [Path(root, name) for name in leases]
    return {run.decode(run.Lease, file.read_bytes(), file=str(file)).step for file in files}


def check_run(root):
    """A start in the same place: all steps are there, the next save works and clears up.

    A deletion that the job before had begun may be finished.
    """
    steps = committed(root)
    with open_run(root) as manager:
        assert manager.all_steps() in (steps, steps[-KEPT:])
        assert manager.restore()["seed"] == steps[-1]
        save_next_step(manager)


# --- reading ---------------------------------------------------------------------------------


class Restore:
    """A restore of one checkpoint."""

    def __init__(self, folder):
        import jaxckpt

        self.path = folder / "a"
        jaxckpt.save(self.path, tree(1))
        self.names = names_below(folder)

    def prepare(self, n):
        self.seed = None

    def act(self):
        self.seed = found_by_itself(self.path)

    def check(self, raised, why):
        import jaxckpt

        assert self.seed == 1 or raised is not None
        if raised is not None:
            assert not isinstance(raised, jaxckpt.CheckpointNotFound)
            check_says(why, str(raised))
        assert names_below(self.path.parent) == self.names
        assert found(self.path) == 1


def found_by_itself(path):
    """As `found`, but of what is there for certain."""
    import jaxckpt

    return seed_of(jaxckpt.restore(path))


def seed_of(got):
    wanted = tree(got["seed"])
    assert got.keys() == wanted.keys()
    same = (np.asarray(got[key]).tobytes() == np.asarray(wanted[key]).tobytes() for key in wanted)
    assert all(same), "a wrong value"
    return got["seed"]


def check_says(why, said):
    """Checks that the system's error is reported, and that good data is not called damaged."""
    assert why in said
    assert "damaged" not in said


def names_below(folder):
    return sorted(str(path) for path in folder.rglob("*") if not is_passing(path.name))


def is_passing(name):
    """Whether it is a lease, or a file in the making: what fails once may be there for a while."""
    from jaxckpt.format import names
    from jaxckpt.storage import is_temporary_file

    return names.is_lease(name) or is_temporary_file(name)


class Verify(Restore):
    """`verify` of one checkpoint."""

    def act(self):
        import jaxckpt

        self.report = None
        self.report = jaxckpt.verify(self.path)

    def check(self, raised, why):
        import jaxckpt

        if self.report is not None and not self.report.ok:
            for problem in self.report.problems:
                check_says(why, problem.message)
        if raised is not None:
            assert not isinstance(raised, jaxckpt.CheckpointNotFound)
            check_says(why, str(raised))
        assert names_below(self.path.parent) == self.names
        assert jaxckpt.verify(self.path).ok


class ManagerRestore(ManagerSave):
    """A restore of the newest step of a run, by the manager that may set damaged ones aside."""

    mode = "w"

    def prepare(self, n):
        self.n, self.step = n, None
        for entry in (self.folder / "run").iterdir():  # or there would be ever more to look at
            if is_passing(entry.name):
                entry.unlink()
        self.manager = open_run(self.folder / "run", mode=self.mode)
        self.names = names_below(self.folder)

    def act(self):
        self.step = seed_of(self.manager.restore())

    def check(self, raised, why):
        self.check_nothing_changed()
        self.check_told(raised, why)
        assert self.manager.all_steps() == [2, 3]
        assert seed_of(self.manager.restore()) == 3
        self.manager.close()
        if self.n % 9 == 1:
            self.check_goes_on()

    def check_nothing_changed(self):
        assert names_below(self.folder) == self.names
        assert committed(self.folder / "run") == [2, 3]

    def check_told(self, raised, why):
        """The newest step, or what went wrong with it."""
        import jaxckpt

        if raised is not None:
            assert not isinstance(raised, jaxckpt.CheckpointNotFound) or why in str(raised)
            check_says(why, str(raised))
        elif self.step != 3:
            assert self.step == 2
            check_says(why, "\n".join(self.manager.problems))

    def check_goes_on(self):
        copy = self.folder / f"copy{self.n}"
        shutil.copytree(self.folder / "run", copy)
        check_run(copy)
        shutil.rmtree(copy)


class ReaderRestore(ManagerRestore):
    """The same by a reader."""

    mode = "r"


class Resume(ManagerRestore):
    """Runs `restore_or`, which starts anew only if there is no step."""

    def act(self):
        got, step = self.manager.restore_or(lambda: tree(0))
        self.step = seed_of(got)
        assert self.step == step


class Open(ManagerRestore):
    """A run is opened, and its steps are listed."""

    def prepare(self, n):
        self.n, self.steps, self.manager = n, None, None
        self.names = names_below(self.folder)

    def act(self):
        self.manager = open_run(self.folder / "run")
        self.steps = self.manager.all_steps()

    def check(self, raised, why):
        self.check_nothing_changed()
        if raised is not None:
            check_says(why, str(raised))
        elif self.steps != [2, 3]:
            check_says(why, "\n".join(self.manager.problems))
        if self.manager is not None:
            assert self.manager.all_steps() == [2, 3]
            self.manager.close()
        with open_run(self.folder / "run") as manager:
            assert manager.all_steps() == [2, 3]
        if self.n % 9 == 1:
            self.check_goes_on()


# --- controls --------------------------------------------------------------------------------


class LyingSave(Save):
    """A save that says nothing of what went wrong."""

    def act(self):
        with contextlib.suppress(Exception):
            super().act()


class WrongRestore(Restore):
    """A restore that takes what it cannot read for zeros."""

    def act(self):
        got = tree(1)
        try:
            super().act()
        except OSError:
            got["large"] = np.zeros_like(got["large"])
        self.seed = seed_of(got)


class MovingRestore(ManagerRestore):
    """A manager that takes what it cannot read for damaged."""

    def act(self):
        try:
            super().act()
        except OSError as error:  # once: from here on nothing fails
            self.manager._deletion.set_aside(3, str(error))
            raise


READERS = ("Restore", "Verify", "ManagerRestore", "ReaderRestore", "Resume", "Open")
WRITERS = ("Save", "Replace", "ManagerSave")
WRITE_ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES)
READ_ERRORS = (*WRITE_ERRORS, errno.EMFILE)
