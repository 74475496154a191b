"""Runs in children that share a run with other writers, or whose clock jumps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np

from tests.faults.zygote import say

DAY_S = 86_400.0


def tree_of(writer, step):
    """Says who saved it: one part from each of two writers would not fit together."""
    large = np.random.default_rng([writer, step]).standard_normal(70_000, np.float32)
    return {"large": large, "writer": writer, "step": step}


def found_writer(path):
    """Returns the writer of a step; fails unless every bit is from that writer."""
    import jaxckpt

    got = jaxckpt.restore(path)
    wanted = tree_of(got["writer"], got["step"])
    assert got["large"].tobytes() == wanted["large"].tobytes()
    assert got["step"] == int(os.path.basename(path))
    return got["writer"]


def write_steps(root, writer, steps, *, last=None, starts=1):
    """Saves one step after the other, whatever went wrong with the one before; says how each went.

    Args:
        last: How many the policy keeps.
        starts: How often it tries a step that another job has kept it from; each time it opens the
            run anew, as a job that is restarted.
    """
    import jaxckpt

    def open_run(tries=starts):
        try:
            return jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=last))
        except jaxckpt.SaveFailed:  # another job took the run while this one opened it
            if tries == 1:
                raise
        return open_run(tries - 1)

    manager = open_run()
    for step in range(1, steps + 1):
        for start in range(1, starts + 1):
            error = error_of(manager, step, tree_of(writer, step))
            if start == starts or not isinstance(error, jaxckpt.SaveFailed):
                break
            with contextlib.suppress(jaxckpt.CheckpointError):
                manager.close()
            manager = open_run()
        say(step=step, error=kinds_of(error), text=str(error))
    with contextlib.suppress(jaxckpt.CheckpointError):
        manager.close()


def error_of(manager, step, value):
    """Saves a step to its end; returns what it raised."""
    import jaxckpt

    raised = None
    try:
        manager.save(step, value, force=True).result()  # an error if another job has saved it
    except (jaxckpt.CheckpointError, ValueError) as error:
        raised = error
    with contextlib.suppress(jaxckpt.CheckpointError):  # the same once more, and of deletions
        manager.wait_until_finished()
    return raised


def kinds_of(error):
    return None if error is None else [kind.__name__ for kind in type(error).__mro__]


def write_and_sleep(root, writer, steps, at):
    """Saves steps like `write_steps`; stops itself before verb number `at` of the first step.

    If the first step takes fewer verbs, it does not sleep.
    """
    import jaxckpt
    from jaxckpt.storage import LocalStorage
    from tests.workers.manages import Watched

    count = 0

    def before(verb, path):
        nonlocal count
        count += 1
        if count == at:
            say(sleeps=verb, path=path)
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    manager = jaxckpt.CheckpointManager(root)
    manager._index.storage = Watched(LocalStorage(), before)
    for step in steps:
        error = error_of(manager, step, tree_of(writer, step))
        say(step=step, error=kinds_of(error), text=str(error))
        count = at  # the first has ended
    manager.close()


def check_writers(root):
    """Says who saved each step of a run; then saves one more, and says what else is there."""
    import jaxckpt
    from jaxckpt.format import names

    with jaxckpt.CheckpointManager(root) as manager:
        steps = manager.all_steps()
        writers = {step: found_writer(f"{root}/{step}") for step in steps}
        assert all(jaxckpt.verify(f"{root}/{step}").ok for step in steps)
        newest = manager.restore()["step"] if steps else None
        step = steps[-1] + 1 if steps else 1
        manager.save(step, tree_of(0, step)).result()
        assert found_writer(f"{root}/{step}") == 0
    known = {*map(str, [*steps, step]), names.RUN, names.OWNER, names.LOCK, names.LEDGER}
    say(writers=writers, newest=newest, left=sorted(set(os.listdir(root)) - known))


# --- clocks ----------------------------------------------------------------------------------


class Clock:
    """The time of day for this process, once set; the monotonic clock continues."""

    def __init__(self, start_s):
        self.now_s = start_s
        time.time = lambda: self.now_s
        time.time_ns = lambda: int(self.now_s * 1e9)


def save_with_clock(root, days, keep, save=None):
    """Saves one step at each of these times, in days from today; says what stays.

    Args:
        keep, save: The arguments of the policies.
    """
    import jaxckpt

    start_s = time.time()
    clock = Clock(start_s)
    keep = jaxckpt.KeepPolicy(**keep)
    save = jaxckpt.SavePolicy(**(save or {}))
    stays = []
    with jaxckpt.CheckpointManager(root, keep=keep, save=save) as manager:
        for step, day in enumerate(days, 1):
            clock.now_s = start_s + day * DAY_S
            manager.save(step, tree_of(1, step))
            manager.wait_until_finished()
            stays.append(manager.all_steps())
    with jaxckpt.CheckpointManager(root, keep=keep) as manager:
        newest = manager.restore()["step"]
        latest = manager.latest_step()
        problems = manager.problems
    say(stays=stays, newest=newest, latest=latest, problems=problems)


def read_with_clock(root, ahead_days, behind_days):
    """A reader's clock is days ahead; it holds a step while a writer's deletes what it may.

    The two are one process, whose clock is moved as it plays the one or the other.
    """
    import jaxckpt

    start_s = time.time()
    clock = Clock(start_s)
    writer = jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=1))
    writer.save(1, tree_of(1, 1))
    writer.wait_until_finished()
    clock.now_s = start_s + ahead_days * DAY_S
    held, read = [], None
    with jaxckpt.CheckpointManager(root, mode="r") as reader:
        for step in reader.watch(timeout_s=0.01):
            held.append(step)
            clock.now_s = start_s + behind_days * DAY_S
            writer.save(2, tree_of(1, 2))
            writer.wait_until_finished()
            steps = writer.all_steps()
            try:
                read = reader.restore(step=step)["step"]
            except jaxckpt.CheckpointNotFound:
                read = "not found"
            break
    writer.save(3, tree_of(1, 3))
    writer.wait_until_finished()
    say(held=held, steps=steps, read=read, after=writer.all_steps())
    writer.close()
