"""Children that write the changes to replay, and children that check the state after a cut."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

from tests.faults.children import found, tree, with_frozen
from tests.faults.error_children import check_run, committed, open_run, save_next, seed_of
from tests.faults.zygote import arm, disarm, mark, say


def log_run(top, saves, log, data, state=tree):
    """A run that keeps two steps, with a mark when each is acknowledged."""
    arm(top, log=log, data=data)
    with open_run(f"{top}/run") as manager:
        for step in range(1, saves + 1):
            manager.save(step, state(step), metrics={"loss": step}).result()
            mark(f"acked {step}")
            manager.wait_until_finished()
    disarm()


def log_shared_run(top, saves, log, data):
    """The same; each step shares a file with the last but one."""
    log_run(top, saves, log, data, with_frozen)
    with open(log) as lines:
        assert any(line.startswith("link") and "/state/d/" in line for line in lines)


def log_copied_run(top, saves, log, data):
    """The same on a file system without hard links: the file is copied once, then written."""
    copied = []

    def refuse(*args, **options):
        copied.append(args)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    link, os.link = os.link, refuse
    try:
        log_run(top, saves, log, data, with_frozen)
    finally:
        os.link = link
    assert copied


def log_rich_run(top, saves, log, data):
    """The same with further items, each step by a manager of its own, the first by a fork."""
    import jaxckpt

    arm(top, log=log, data=data)
    jaxckpt.save(f"{top}/source/1", tree(1))
    jaxckpt.fork(f"{top}/source/1", f"{top}/run")
    mark("acked 1")
    for step in range(2, saves + 1):
        with open_run(f"{top}/run") as manager:
            items = {"notes": {"step": step}, "more": {"a": tree(9)["small"]}}
            manager.save(step, tree(step), items=items, metrics={"loss": step}).result()
            mark(f"acked {step}")
            manager.wait_until_finished()
    disarm()


def log_replacements(top, saves, log, data):
    """One path that is replaced, with a mark when each save has returned."""
    import jaxckpt

    os.mkdir(f"{top}/beside")
    arm(top, log=log, data=data)
    for seed in range(1, saves + 1):
        jaxckpt.save(f"{top}/a", tree(seed), overwrite=True)
        mark(f"acked {seed}")
    disarm()


def log_run_unsynced(top, saves, log, data):
    """A control: directories are not synced, so that no name is ever durable."""
    from jaxckpt.storage import _local

    sync = _local._sync
    _local._sync = lambda path, flags: None if flags == os.O_DIRECTORY else sync(path, flags)
    log_run(top, saves, log, data)


def log_run_that_lies(top, saves, log, data):
    """A control: a step is acknowledged when its save has begun."""
    arm(top, log=log, data=data)
    with open_run(f"{top}/run") as manager:
        for step in range(1, saves + 1):
            mark(f"acked {step}")
            manager.save(step, tree(step)).result()
    disarm()


def check_runs(states):
    """Checks the runs after another start, given the newest acknowledged step of each."""
    _each(states, _check_run)


def _check_run(folder, acked):
    root = folder / "run"
    steps = committed(root) if root.exists() else []
    assert max(steps, default=0) >= acked, f"{acked} is lost: {steps}"
    if not steps:
        assert not root.exists() or open_and_list(root) == []
        return
    check_run(root)


def open_and_list(root):
    with open_run(root) as manager:
        return manager.all_steps()


def check_replaced(states):
    """The same of a path that was being replaced."""
    _each(states, _check_replaced)


def _check_replaced(folder, acked):
    there = found(folder / "a")
    assert (there or 0) in (acked, acked + 1), f"{acked} is lost: {there}"
    (folder / "beside").mkdir(exist_ok=True)
    save_next(folder / "a")


def check_no_lie(states):
    """After a disk lied: whatever a restore returns is some step, whole; else it raises."""
    _each(states, _check_no_lie)


def _check_no_lie(folder, last):
    import jaxckpt

    root, restored = folder / "run", []

    def read(restore):
        try:
            return seed_of(restore())
        except (jaxckpt.CheckpointError, OSError):
            return None

    for name in os.listdir(root) if root.is_dir() else ():
        seed = read(lambda name=name: jaxckpt.restore(root / name))
        assert seed is None or str(seed) == name.partition(".")[0]
        restored.append(seed)
    restored.append(read(lambda: jaxckpt.restore(root)))
    with open_run(root, mode="r") as manager:
        restored.append(read(manager.restore))
    with open_run(root) as manager:
        restored.append(read(manager.restore))
        assert restored[-1] is None or restored[-1] == manager.restored_step
    assert set(restored) <= {None, *range(1, last + 1)}
    say(restored=restored)


def _each(states, check):
    for folder, acked in states:
        problem = None
        try:
            check(Path(folder), acked)
        except Exception as error:  # told to the test, which counts it
            problem = "".join(traceback.format_exception(error))
        say(folder=folder, problem=problem)
