"""The work of jobs whose hosts have disks of their own, and read each other's after a loss."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np

from tests.waiting import waited_until
from tests.workers.manages import meet
from tests.workers.saves import mesh_of, put
from tests.workers.tiers import Data

# Copies of the state; each is divided over the devices of the hosts that have it.
REPLICAS = 2


def values_at(step):
    return {
        "rows": np.arange(24 * 4096, dtype=np.float32).reshape(24, 4096) + step,
        "whole": np.arange(3000, dtype=np.int16) * step,
        "count": np.int32(step),
    }


def state_at(step, replicas):
    """The state over all devices, with a leaf in rows, and leaves that every device has."""
    import jax

    mesh = mesh_of(copy=replicas, row=jax.device_count() // replicas)
    specs = {"rows": ("row",), "whole": (), "count": ()}
    return {name: put(value, mesh, specs[name]) for name, value in values_at(step).items()}


def init_of(replicas):
    import jax

    shardings = {name: array.sharding for name, array in state_at(0, replicas).items()}
    return jax.jit(lambda: values_at(0), out_shardings=shardings)


def check(state, step):
    for name, value in values_at(step).items():
        for shard in state[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), value[shard.index]), (name, step)


def opened(
    root, host, read, peers=(), fault=lambda verb, path: None, every=2, of_local=None, **options
):
    """A manager of a host; `read` gets the size of what it reads of values in the directory.

    Args:
        fault: Called with each verb and path on the disk of the host; it may raise.
        every: Which steps go to the directory.
        of_local: Further options of the local tier.
    """
    import jaxckpt
    from jaxckpt.storage import LocalStorage, PathIn
    from jaxckpt.testing import WatchedStorage

    def before(verb, path):
        if verb == "read_into":
            read.append(path)

    of_local = {"save": jaxckpt.SavePolicy(every_steps=1), **(of_local or {})}
    return jaxckpt.CheckpointManager(
        PathIn(WatchedStorage(LocalStorage(), before), f"{root}/run"),
        save=jaxckpt.SavePolicy(every_steps=every),
        local=jaxckpt.LocalTier(
            PathIn(WatchedStorage(LocalStorage(), fault), f"{root}/host{host}/local"),
            durable_timeout_s=10,
            peers=peers,
            **of_local,
        ),
        timeout_s=20,
        **options,
    )


def train(me, root, hosts, steps, replicas=REPLICAS, data=True, budget_bytes=1 << 30, peers=()):
    """Restores, and saves so many further steps, every second one in the directory too.

    Returns:
        Where it started, how often it read values in the directory until then, and the problems.
    """
    read, seen = [], Data(me.index)
    items = {"data": seen} if data else {}
    with opened(root, hosts[me.index], read, peers, budget_bytes=budget_bytes) as manager:
        state, start = manager.restore_or(init_of(replicas), items=items)
        check(state, start)
        assert seen.at == start or not data
        before = len(read)
        for step in range(start + 1, start + steps + 1):
            seen.at = step
            manager.save(step, state_at(step, replicas), items=items).result()
            me.reach(f"saved {step}")
        manager.wait_until_finished()
        return {"start": start, "read": before, "problems": manager.problems}


def keep_best(me, root, hosts, losses, replicas, faulty=-1, loses=-1):
    """Restores, and saves a step for each loss, every third one in the directory too.

    Args:
        faulty: The host whose disk cannot be listed, once, when the first step has its name there.
        loses: The host that loses step 2 after step 3.

    Returns:
        For each of these steps, the steps that its disk has afterwards; and the best of all.
    """
    import jaxckpt

    ranks, named = jaxckpt.KeepPolicy(metric="loss"), []
    local, there = {"keep": jaxckpt.KeepPolicy(last=1, best=1, metric="loss")}, []

    def fault(verb, path):
        if verb == "rename" and "share_0/5." in path and hosts[me.index] == faulty:
            named.append(path)
        if verb == "entries" and path.endswith("share_0") and named:
            named.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    options = {"keep": ranks, "every": 3, "of_local": local, "fault": fault}
    with opened(root, hosts[me.index], [], **options) as manager:
        _, start = manager.restore_or(init_of(replicas))
        for step, loss in enumerate(losses, start + 1):
            manager.save(step, state_at(step, replicas), metrics={"loss": loss}).result()
            manager.wait_until_finished()
            share = Path(f"{root}/host{hosts[me.index]}/local/share_0")
            there.append(sorted(int(path.name) for path in share.glob("[0-9]")))
            if step == 3 and hosts[me.index] == loses:
                shutil.rmtree(share / "2")
        return there, manager.best_step()


def fail(me, root, hosts, steps, replicas, since=1):
    """Saves steps, which the disk of host 1 does not commit from `since` on; returns those."""
    import jaxckpt

    failed, saving = [], [0]

    def fault(verb, path):
        if verb == "rename" and saving[0] >= since and hosts[me.index] == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with opened(root, hosts[me.index], [], fault=fault) as manager:
        manager.restore_or(init_of(replicas))
        for step in steps:
            saving[0] = step
            try:
                manager.save(step, state_at(step, replicas)).result()
            except jaxckpt.CheckpointError:
                failed.append(step)
        return failed


def stand_by(me, root, hosts, replicas):
    """Saves a step, and after another job has gone on, the next one; returns the error of that."""
    import jaxckpt

    manager, error = opened(root, hosts[me.index], []), ""
    manager.save(1, state_at(1, replicas)).result()
    me.reach("saved")
    me.wait_for("go")
    try:
        manager.save(2, state_at(2, replicas)).result()
    except jaxckpt.CheckpointError as raised:
        error = str(raised)
    with contextlib.suppress(jaxckpt.CheckpointError):
        manager.close()
    return error


def go_on(me, root, hosts, restored, deleted, steps, replicas):
    """Restores steps, deletes steps and saves others, none of them in the directory.

    Returns:
        The steps on its disk, and all steps.
    """
    import jaxckpt

    local = {"keep": jaxckpt.KeepPolicy(last=9)}
    with opened(root, hosts[me.index], [], every=99, of_local=local) as manager:
        for step in restored:
            check(manager.restore(state_at(0, replicas), step=step), step)
        for step in deleted:
            manager.delete(step)
        for step in steps:
            manager.save(step, state_at(step, replicas)).result()
        manager.wait_until_finished()
        share = Path(f"{root}/host{hosts[me.index]}/local/share_0")
        return sorted(int(path.name) for path in share.glob("[0-9]")), manager.all_steps()


def why_not(manager, step, replicas):
    """Why a step is not saved."""
    from jaxckpt.errors import StepExists

    try:
        assert manager.save(step, state_at(step, replicas)) is None
    except (ValueError, StepExists) as error:
        return str(error)
    return manager.decision.reason


def go_back(me, root, hosts, restored, saved, replicas=1, every=3, last=9):
    """Restores a step by its number, unless that is None, and saves others; see `call`."""
    calls = [] if restored is None else [["restore", restored, restored]]
    calls += [["save", int(step), like] for step, like in saved.items()]
    return call(me, root, hosts, calls, replicas, every, last)


def call(me, root, hosts, calls, replicas=1, every=3, last=9):
    """Makes calls of a manager, then restores.

    Args:
        calls: Each has its name, a step, and the step whose values that has, or a text that says
            why it is not saved.
        every: Which steps go to the directory.
        last: How many stay on a disk.

    Returns:
        The latest step before, the one that is restored last, the step whose values it has, and
        what this process reports.
    """
    import jaxckpt

    local = {"keep": jaxckpt.KeepPolicy(last=last)}
    with opened(root, hosts[me.index], [], every=every, of_local=local) as manager:
        latest = manager.latest_step()
        for name, step, like in calls:
            if name == "delete":
                manager.delete(step)
            elif name == "restore_or":
                state, found = manager.restore_or(lambda: state_at(0, replicas))
                assert found == step
                check(state, like)
            elif name == "restore":
                check(manager.restore(state_at(0, replicas), step=step), like)
            elif isinstance(like, str):
                assert like in why_not(manager, step, replicas)
            else:
                handle = manager.save(step, state_at(like, replicas))
                assert handle is not None, manager.decision
                handle.result()
        manager.wait_until_finished()
        state = manager.restore(state_at(0, replicas))
        like = int(np.asarray(state["count"].addressable_shards[0].data))
        check(state, like)
        return latest, manager.restored_step, like, manager.problems


def restore_beside(me, root, hosts, replicas, slow):
    """Restores while saves are under way, which end late in one process; returns the last one."""
    with opened(root, hosts[me.index], [], every=10) as manager:
        found = manager.restore_or(init_of(replicas))[1]
        for step in range(found + 1, found + 4):
            handle, restores = manager.save(step, state_at(step, replicas)), len(manager.timings)
            if me.index == slow:  # a restore that does not wait has gone on by then
                restored = partial(waited_until, lambda n=restores: len(manager.timings) > n)
                handle.on_end(lambda _, wait=restored: wait(limit_s=0.3))
            while step > 1 and manager.latest_step() != step:  # alike in all
                pass
            state, found = manager.restore_or(init_of(replicas))
            assert found == step
            check(state, step)
        return found


def lose(me, root, hosts, replicas, least, restored):
    """Saves steps, of which others delete some; restores, and saves more; returns all steps."""
    import jaxckpt

    keep = {"keep": jaxckpt.KeepPolicy(last=9)}
    with opened(root, hosts[me.index], [], every=100, of_local=keep) as manager:
        manager.restore_or(init_of(replicas))
        for step in (10, 20, 30):
            manager.save(step, state_at(step, replicas)).result()
        manager.wait_until_finished()
        for step in (10, 20, 30):
            if step >= least:
                shutil.rmtree(f"{root}/host{hosts[me.index]}/local/share_0/{step}")
        meet("deleted")
        _, found = manager.restore_or(init_of(replicas))
        assert found == restored
        for step in (found + 5, found + 15):
            manager.save(step, state_at(step, replicas)).result()
        return manager.all_steps()


def resume(me, root, hosts, replicas, faulty=-1, verb="", part="", code=0, times=9, peers=()):
    """Restores; returns where it started, or the error; without replicas asks for the latest step.

    Args:
        faulty: The host on whose disk the first `times` calls of `verb` with such a path fail with
            `code`.
    """
    left = [times if replicas else 0]

    def fault(called, path):
        if called == verb and part in path and hosts[me.index] == faulty and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code), path)

    try:
        with opened(root, hosts[me.index], [], peers, fault) as manager:
            if not replicas:
                left[0] = times
                return manager.latest_step()
            state, start = manager.restore_or(init_of(replicas))
            check(state, start)
            return start
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def read_flipped(me, root, hosts, seeds, replicas):
    """Restores often, each time from disks of which one is new, and one has a flipped bit.

    Args:
        seeds: The first one, and how many.

    Returns:
        For each, the step that was restored, whose values are right, or what went wrong.
    """
    from tests.workers import manages

    logging.disable(logging.WARNING)
    train(me, root, hosts, 3, replicas, data=False)
    found = []
    for seed in range(seeds[0], sum(seeds)):
        at = f"{root}/{seed}"
        if me.index == 0:
            for name in ("run", *(f"host{host}" for host in hosts)):
                shutil.copytree(f"{root}/{name}", f"{at}/{name}")
            move(root, at)
            break_disks(Path(at), hosts, random.Random(seed))
        manages.meet(f"broken {seed}")
        try:
            with opened(at, hosts[me.index], []) as manager:
                state, start = manager.restore_or(init_of(replicas))
                check(state, start)
                found.append(start)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        manages.meet(f"read {seed}")
        if me.index == 0:
            shutil.rmtree(at)
    return found


def move(root, to):
    """Lets the copied disks be those of the copied run."""
    for file in Path(to).glob("host*/local/_jaxckpt.run"):
        file.write_text(file.read_text().replace(f"{root}/run", f"{to}/run"))


def break_disks(at, hosts, draw):
    """Wipes the disk of one host, and flips a bit of step 3 on another's."""
    new, bad = draw.sample(hosts, 2)
    shutil.rmtree(at / f"host{new}")
    files = sorted(p for p in (at / f"host{bad}/local/share_0/3").rglob("*") if p.is_file())
    file = draw.choices(files, [p.stat().st_size + 1 for p in files])[0]
    data = bytearray(file.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.chmod(0o644)
    file.write_bytes(data)
