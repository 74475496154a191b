"""Jobs of a run: one stands still after a commit, another takes the run over meanwhile."""

from __future__ import annotations

import contextlib
import os

from tests.faults.children import found, tree
from tests.faults.zygote import arm, disarm, events, say


def start(root, steps):
    """A run of so many steps."""
    import jaxckpt

    with jaxckpt.CheckpointManager(root) as manager:
        for step in range(1, steps + 1):
            manager.save(step, tree(step))


def save_and_stand_still(root, keep, *, act="save", at=0, reads=False):
    """Saves the next step, or deletes one, and stops itself at the n-th event afterwards.

    Reports when the commit is done, then how many events followed, the problems, and how the next
    save went.

    Args:
        keep: The arguments of the policy.
        act: "save", after which the policy deletes; "delete": the oldest step by hand.
        at: The event after the commit; 0 for none.
        reads: Whether reads count too.
    """
    import jaxckpt
    from jaxckpt._run.deletion import Deletion
    from jaxckpt._run.root import Root

    def from_here(method):
        def call(*args, **options):
            if not armed:
                say(committed=True)
                armed.append(True)
                arm(root, ["stop", at, 0, reads])
            return method(*args, **options)

        return call

    armed = []
    manager = jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(**keep))
    step = manager.latest_step() + 1
    if act == "save":
        Root.committed = from_here(Root.committed)
        manager.save(step, tree(step)).result()
        manager.wait_until_finished()
    else:
        Deletion.delete = from_here(Deletion.delete)
        with contextlib.suppress(ValueError, jaxckpt.SaveFailed):
            manager.delete(manager.all_steps()[0])
    count = events()
    disarm()
    error = None
    try:
        manager.save(step + 100, tree(step + 100)).result()
    except jaxckpt.CheckpointError as raised:
        error = f"{type(raised).__name__}: {raised}"
    with contextlib.suppress(jaxckpt.CheckpointError):
        manager.close()
    say(events=count, problems=manager.problems, error=error)


def take_over(root, keep, saves, back_to=None):
    """Saves steps, each acknowledged; says which the run has then.

    Args:
        back_to: The newest step to go on from, if an earlier one; the later ones are deleted.
    """
    import jaxckpt

    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(**keep)) as manager:
        for step in reversed(manager.all_steps()):
            if back_to is not None and step > back_to:
                manager.delete(step)
        for _ in range(saves):
            step = manager.all_steps()[-1] + 1
            manager.save(step, tree(step)).result()
        manager.wait_until_finished()
        say(steps=manager.all_steps(), problems=manager.problems)


def look(root):
    """Says which steps there are, each the right one; then saves, and says what is left over."""
    from jaxckpt.format import names

    steps = sorted(int(name) for name in os.listdir(root) if name.isdecimal())
    assert [found(f"{root}/{step}") for step in steps] == steps
    say(steps=steps)
    take_over(root, {"last": 20}, 1)
    ours = {
        *map(str, [*steps, steps[-1] + 1]),
        names.RUN,
        names.OWNER,
        names.LOCK,
        names.LEDGER,
        "old",
    }
    say(left=sorted(set(os.listdir(root)) - ours))


# --- jobs of two processes ---------------------------------------------------------------------


def open_run(me, root, hosts, last=None):
    """A manager whose processes have the disks of these hosts, if any."""
    import jaxckpt

    keep, local = jaxckpt.KeepPolicy(last=last), None
    if hosts:
        local = jaxckpt.LocalTier(f"{root}/host{hosts[me.index]}/local", keep=keep)
    return jaxckpt.CheckpointManager(f"{root}/run", keep=keep, timeout_s=20, local=local)


def stand_still(me, root, hosts, process, at):
    """Saves three steps, and one with a policy; a process stops itself at an event after that.

    Returns how the save after it went, and the problems.
    """
    import jaxckpt
    from jaxckpt._run.root import Root
    from tests.workers.manages import state_at

    def from_here(method):
        def call(*args, **options):
            if me.index == process and not armed:
                me.reach("committed")
                armed.append(True)
                arm(f"{root}/host{hosts[process]}" if hosts else root, ["stop", at])
            return method(*args, **options)

        return call

    with open_run(me, root, hosts) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step)).result()
    armed, error = [], ""
    Root.committed, Root.follow = from_here(Root.committed), from_here(Root.follow)
    manager = open_run(me, root, hosts, last=1)
    manager.save(4, state_at(4)).result()
    with contextlib.suppress(jaxckpt.CheckpointError):
        manager.wait_until_finished()
    disarm()
    me.reach("over")
    try:
        manager.save(104, state_at(104)).result()
    except (jaxckpt.CheckpointError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    with contextlib.suppress(jaxckpt.CheckpointError):
        manager.close()
    return {"error": error, "problems": manager.problems}


def go_on(me, root, hosts):
    """Resumes, saves two steps, and says which the run has then, and the disk of this process."""
    from tests.workers.manages import check_state, make_init, state_at

    with open_run(me, root, hosts) as manager:
        state, start = manager.restore_or(make_init())
        check_state(state, start)
        for step in (start + 1, start + 2):
            manager.save(step, state_at(step)).result()
        manager.wait_until_finished()
        return {"start": start, "tiers": manager.tiers}
