"""The work of the members of a job that reads each value once, in which something goes wrong."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import Counter

import numpy as np

from tests.faults.dead_children import heard
from tests.faults.zygote import say
from tests.workers.saves import mesh_of, put

# The first is spread, the second is a chunk that one of its replicas reads, the others are packed.
SHAPES = {"a": (24, 1 << 14), "b": (24, 1 << 14), "c": (24, 1 << 12), "d": (24, 1 << 12)}
LEAVES = tuple(SHAPES)
# Each leaf is a group: less than one of them fits.
OPTIONS = {"read_once": True, "budget_bytes": 1 << 16}
POINTS = [
    "before restore 1",
    "after restore 1",
    "before restore group 1",
    "after restore group 1",  # and so before the collective operation, which the others enter
    ADDED := "after restore group 2",  # and before one that adds up replicas
    "after restore group 3",  # and before one that adds up what all have read
    "before restore 2",
]


def values_at(step):
    return {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * step + i
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def tree_of(step, spec, devices):
    mesh = mesh_of(x=devices)
    return {name: put(value, mesh, spec) for name, value in values_at(step).items()}


def check(state, step):
    for name, value in values_at(step).items():
        for shard in state[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), value[shard.index]), name


def save(root, devices=6):
    """Saves two steps, each leaf in rows, but one."""
    import jaxckpt

    with jaxckpt.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, {**tree_of(step, ("x",), devices), "b": values_at(step)["b"]})
        manager.wait_until_finished()


@contextlib.contextmanager
def at_rounds(reach):
    """Calls `reach` before and after each gather of this process, with its number of this name."""
    from jaxckpt.multihost import current

    processes, uses = type(current()), Counter()  # with any limit
    gather = processes.gather

    def gathering(self, name, *args, **kwargs):
        kind = name.rpartition(" ")[0] if name.startswith("restore") else name
        uses[kind] += 1
        where = f"{kind} {uses[kind]}"
        reach(f"before {where}")
        found = gather(self, name, *args, **kwargs)
        reach(f"after {where}")
        return found

    processes.gather = gathering
    try:
        yield
    finally:
        processes.gather = gather


def lose_one(me, root, point, victim, timeout_s):
    """Saves; then restores, in which a process pauses at a point of its rounds."""
    import jaxckpt

    save(root)
    manager = jaxckpt.CheckpointManager(root, mode="r", timeout_s=timeout_s)
    armed = [me.index == victim]

    def reach(where):
        if where == point and armed[0]:
            armed[0] = False
            me.reach("paused")
            me.wait_for("on")

    like = tree_of(0, (), 6)
    with at_rounds(reach):
        return heard(lambda: check(manager.restore(like, **OPTIONS), 2))


def go_on(root):
    """A new job of one process restores the newest step."""
    import jaxckpt

    got = jaxckpt.restore(root, as_numpy=True)
    say(same=all(np.array_equal(got[name], value) for name, value in values_at(2).items()))


def read_bad(me, root, how, leaf, by):
    """Restores while chunks are damaged, or unreadable in process 1; what came of it.

    Args:
        how: "damaged" on the disk, or unreadable "always" or until all read directly.
        leaf: Which leaf is damaged, or after how many reads none succeeds.
        by: "manager" or "path".
    """
    import jaxckpt
    from tests.workers import manages

    warned, reads, reports = [], [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("jaxckpt").addHandler(handler)
    save(root)
    if how == "damaged" and me.index == 0:
        damage(root, LEAVES[leaf])
    manages.meet("damaged")

    def before(verb, path):
        if verb == "read_into" and how != "damaged" and me.index == 1:
            reads.append(path)
            if len(reads) > leaf and (how == "always" or not warned):
                raise OSError(errno.EIO, "read error", path)

    manager = jaxckpt.CheckpointManager(root, mode="r")
    manages.watch(manager, before)
    like, options = tree_of(0, (), 6), {**OPTIONS, "report": reports.append}
    got = []

    def restore():
        found = manager.restore(like, **options) if by == "manager" else None
        got.append(found or jaxckpt.restore(root, like, **options))

    said = heard(restore)
    for step in (1, 2):
        with contextlib.suppress(AssertionError):
            check(got[0] if got else tree_of(0, (), 6), step)
            said["step"] = step
    once = [list(report.read_once) for report in reports]
    return {**said, "warned": warned, "once": once}


def damage(root, leaf):
    """Changes a value of step 2 on the disk, wherever the chunk lies."""
    wanted = values_at(2)[leaf][7].tobytes()
    for folder, _, files in os.walk(f"{root}/2"):
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                data = bytearray(file.read())
            if (at := data.find(wanted)) >= 0:
                data[at + 5] ^= 1
                os.chmod(path, 0o644)
                with open(path, "wb") as file:
                    file.write(data)
                return
    raise AssertionError(f"{leaf} is not there")
