"""The work of the members of a job in which one dies, hangs, or arrives late."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.zygote import say
from tests.workers import manages

SAVING = ["writing", "written", "renaming", "committed", "deleting"]
PHASES = [*SAVING, "restoring"]


def who_pauses(phase, victim):
    """Only process 0 does what comes after the writing of all."""
    return victim if phase in ("writing", "restoring") else 0


def phase_of(verb, path, index):
    """The phase that begins for this process with what it is about to do, or None."""
    from jaxckpt.format import names

    if verb == "read" and os.path.basename(path) == names.RECORD:
        return "restoring"
    return manages.phase_of(verb, path, index)


def heard(call):
    """Calls; returns what it raised and whom that named, and how long it took, as JSON."""
    import jaxckpt

    start_s, error = time.monotonic(), None
    try:
        call()
    except (jaxckpt.CheckpointError, OSError) as raised:
        error = raised
    named = getattr(error, "missing", None) or getattr(error, "failures", ())
    return {
        "error": None if error is None else type(error).__name__,
        "named": sorted(int(index) for index in named),
        "text": str(error),
        "s": time.monotonic() - start_s,
    }


def save(manager, me, step):
    """Completes the save of a step, and reports to the test that it was acknowledged."""
    manager.save(step, manages.state_at(step), items={"data": manages.Data(me)})
    manager.wait_until_finished(60)
    me.reach(f"acked-{step}")


def lose_one(me, root, phase, who, timeout_s):
    """Saves step 1 and 2; then saves 3, or restores, in which `who` pauses as a phase begins."""
    import jaxckpt

    armed = []

    def before(verb, path):
        if armed and phase_of(verb, path, me.index) == phase:
            armed.clear()
            if phase == "deleting":
                manages.delete_half(path)
            me.reach("paused")
            me.wait_for("on")

    manager = jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2), timeout_s=timeout_s)
    manages.watch(manager, before)
    for step in (1, 2):
        save(manager, me, step)
    armed += [True] * (me.index == who)
    if phase == "restoring":
        lost = heard(lambda: manager.restore_or(manages.make_init()))
    else:
        lost = heard(lambda: save(manager, me, 3))
    # Who has lost nobody yet, since the save was over, does so now.
    me.wait_for("on")
    then = heard(lambda: save(manager, me, 4))
    return {"lost": lost, "then": then}


def go_on(root, wanted):
    """A job of one process: says which steps there are, all whole, and restores; then saves on.

    Args:
        wanted: The newest step that was acknowledged.
    """
    import jaxckpt
    from jaxckpt.format import names

    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        steps = manager.all_steps()
        for step in steps:
            assert jaxckpt.verify(f"{root}/{step}").ok
            manages.check_state(jaxckpt.restore(f"{root}/{step}"), step)
        state, newest = manager.restore_or(manages.make_init())
        manages.check_state(state, newest)
        assert newest >= wanted
        problems = [problem for problem in manager.problems if "running job" not in problem]
        for step in (newest + 1, newest + 2):
            manager.save(step, manages.state_at(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [newest + 1, newest + 2]
    left = set(os.listdir(root)) - {
        str(newest + 1),
        str(newest + 2),
        names.RUN,
        names.LOCK,
        names.OWNER,
        names.LEDGER,
    }
    say(steps=steps, newest=newest, problems=problems, left=sorted(left))


# --- who comes late, names used twice ----------------------------------------------------------


def come_late(me, root, late, where, deadline_s):
    """All but `late` come to a meeting and wait; then it comes too; then all meet once more."""
    import jaxckpt
    from jaxckpt.multihost import current

    processes, manager = current(), None
    if where == "save":
        manager = jaxckpt.CheckpointManager(root, timeout_s=deadline_s)
        save(manager, me, 1)
    meetings = {
        "barrier": lambda: processes.within(deadline_s).gather("same", None),
        "gather": lambda: processes.within(deadline_s).gather("same", me.index),
        "agree": lambda: processes.within(deadline_s).agree("same", me.index),
        "open": lambda: jaxckpt.CheckpointManager(root, timeout_s=deadline_s).close(),
        "save": lambda: save(manager, me, 2),
    }
    if me.index == late:
        me.wait_for("late")
    first = heard(meetings[where])
    me.reach("first")
    me.wait_for("second")
    if where == "save":
        meetings["save"] = lambda: save(manager, me, 3)
    return {"first": first, "second": heard(meetings[where])}


def meet_often(me, rounds):
    """The same name in each round, for other values; returns what was gathered."""
    from jaxckpt.multihost import current

    found = []
    for n in range(rounds):
        current().within(20).gather("again", None)
        found.append(current().within(20).gather("again", [n, me.index]))
        found.append(current().within(20).agree("again", [n, me.index]))
    return found


def live_on(me, root, victim, deadline_s):
    """Saves; then the victim goes while all are at a save; the others try two more."""
    import jaxckpt

    manager = jaxckpt.CheckpointManager(root, timeout_s=deadline_s)
    save(manager, me, 1)
    if me.index == victim:
        me.reach("paused")
        me.wait_for("on")
    words = [heard(lambda step=step: save(manager, me, step)) for step in (2, 3, 4)]
    return {"words": words, "closed": heard(manager.close)}


# --- being told to stop ------------------------------------------------------------------------


def train_until_told(me, root, handler, most):
    """Saves every fifth step and the step of the preemption, until a signal stops all processes.

    Args:
        handler: Whether the program has its own handler, set "before" jax's or "after" it. Here it
            is too late to set one for SIGTERM before jax's, so "before" sets one for SIGUSR1.
        most: The number of steps if no signal arrives.
    """
    import jax

    import jaxckpt

    heard_of = []
    number = {"before": signal.SIGUSR1, "after": signal.SIGTERM}.get(handler)
    if number is not None:
        signal.signal(number, lambda *_: heard_of.append(True))
    add = jax.jit(lambda state: state["split"].sum())  # all take a step together
    policy = jaxckpt.SavePolicy(every_steps=5)
    keep = jaxckpt.KeepPolicy(last=2)
    step = 0
    with jaxckpt.CheckpointManager(root, save=policy, keep=keep, timeout_s=20) as manager:
        while step < most and not manager.reached_preemption(step):
            step += 1
            state = manages.state_at(step)
            jax.block_until_ready(add(state))
            if step < most:
                manager.save(step, state)
            if step == 3:
                me.reach("training")
    return {"step": step, "heard": len(heard_of)}


def train_deaf(root):
    """A training in one process whose policy does not listen to signals."""
    import jaxckpt
    from tests.faults.children import tree

    policy = jaxckpt.SavePolicy(every_steps=7, on_preemption=False)
    step = 0
    with jaxckpt.CheckpointManager(root, save=policy) as manager:
        while not manager.reached_preemption(step):
            step += 1
            manager.save(step, tree(step))
            manager.wait_until_finished()
            say(step=step)


# --- partitions --------------------------------------------------------------------------------


def save_on(me, root, first, last):
    """Saves steps up to `first`, waits for the test to release it, and saves up to `last`."""
    import jaxckpt

    words = []
    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2), timeout_s=30) as manager:
        for step in range(1, last + 1):
            if step == first + 1:
                me.wait_for("on")
            words.append(heard(lambda step=step: save(manager, me, step))["error"])
    return words
