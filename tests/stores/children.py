"""What a zygote's forked children do with a store; their parent kills some of them."""

from __future__ import annotations

import contextlib
import math
import os

import numpy as np

import jaxckpt
from jaxckpt import StoreSettings, use_store
from jaxckpt.storage import _requests as requests
from tests.faults.zygote import say

LEASE_S = 2.0
_ENDPOINTS = ("AWS_ENDPOINT_URL", "TENSORSTORE_GCS_HTTP_URL", "AZURE_STORAGE_ENDPOINT")


def reach(url, env, timeout_s=8.0):
    """Reaches the store of a URL, with short leases and waits."""
    os.environ.update(env)
    settings = StoreSettings(
        endpoint=next(env[name] for name in _ENDPOINTS if name in env),
        region="us-east-1",
        lease_s=LEASE_S,
        stall_s=1.0,
        timeout_s=timeout_s,
        tries=4,
    )
    scheme, _, path = url.partition("://")
    use_store(f"{scheme}://{path.partition('/')[0]}", settings)


def _begin(url, env):
    """Reaches the store without second reads: with one, a child whose read hangs would go on."""
    requests._LEAST_PEERS = math.inf
    reach(url, env)


def state(step):
    """Two leaves whose every value tells the step: a small one, and one with a chunk of its own."""
    return {"small": np.full(8, step), "large": np.full(1 << 17, step, np.float32)}


def is_state(found, step):
    return all(
        found[name].dtype == leaf.dtype and np.array_equal(found[name], leaf)
        for name, leaf in state(step).items()
    )


def save_alone(url, env, step):
    """Saves one checkpoint."""
    _begin(url, env)
    jaxckpt.save(url, state(step))
    say(done=True)


def replace_alone(url, env, step):
    """Replaces a checkpoint by one of this step, in the way that a store allows."""
    _begin(url, env)
    jaxckpt.save(url, state(step), overwrite="delete_first")
    say(done=True)


def try_to_replace(url, env, step):
    """As `replace_alone`, and says the error."""
    _begin(url, env)
    try:
        jaxckpt.save(url, state(step), overwrite="delete_first")
    except jaxckpt.errors.CheckpointError as error:
        say(error=f"{type(error).__name__}: {error}")
    else:
        say(error="")


def try_to_save_steps(url, env, steps):
    """Saves steps of a run; says which are acknowledged, and the error."""
    _begin(url, env)
    saved, error = [], ""
    manager = jaxckpt.CheckpointManager(url)
    try:
        for step in steps:
            manager.save(step, state(step)).result()
            saved.append(step)
        manager.close()
    except jaxckpt.errors.CheckpointError as raised:
        error = f"{type(raised).__name__}: {raised}"
    say(saved=saved, error=error)


def race_to_save(url, env, count):
    """Saves to one path from so many processes at one moment; each says how that went."""
    read, write = os.pipe()
    children = [_race_one(url, env, writer, read, write) for writer in range(count)]
    os.close(read)
    os.close(write)  # which starts them
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def _race_one(url, env, writer, read, write):
    if child := os.fork():
        return child
    os.close(write)
    _begin(url, env)
    os.read(read, 1)
    try:
        jaxckpt.save(url, state(writer))
    except jaxckpt.errors.CheckpointError as error:
        say(writer=writer, error=f"{type(error).__name__}: {error}")
    else:
        say(writer=writer, error="")
    os._exit(0)


def save_steps(url, env, steps, last):
    """Saves steps of a run with a manager that keeps the last ones."""
    _begin(url, env)
    with jaxckpt.CheckpointManager(url, keep=jaxckpt.KeepPolicy(last=last)) as manager:
        for step in steps:
            manager.save(step, state(step))
    say(done=True)


def delete_step(url, env, step):
    """Deletes a step of a run."""
    _begin(url, env)
    with jaxckpt.CheckpointManager(url) as manager:
        manager.delete(step)
    say(done=True)


def save_in_tiers(url, env, local, steps):
    """Saves steps on a local disk first, and says which are acknowledged, here and in the store."""
    _begin(url, env)
    last = jaxckpt.KeepPolicy(last=1)
    local = jaxckpt.LocalTier(local, keep=last)
    with jaxckpt.CheckpointManager(url, keep=last, local=local) as manager:
        for step in steps:
            handle = manager.save(step, state(step))
            handle.result()
            say(saved=step)
            handle.durable()
            say(durable=step)
    say(done=True)


def retain_and_save(url, env, steps, keep):
    """Says what `retained` returns."""
    say(**retained(url, env, steps, keep))


def retain_together(me, url, env, steps, keep):
    """As `retain_and_save`, in each process of a job."""
    return retained(url, env, steps, keep, leads=me.index == 0)


def retained(url, env, steps, keep, *, leads=True):
    """Saves steps; one more with a policy; and another one.

    The process that leads reads "the-commit" and "the-end" before and after what follows that
    commit. Returns how the last save went, and the problems.
    """
    from jaxckpt._run.root import Root
    from jaxckpt.storage import locate

    def note(mark):
        storage, root = locate(url)
        with contextlib.suppress(FileNotFoundError):
            storage.read(f"{root}/{mark}", max_bytes=1)

    _begin(url, env)
    with jaxckpt.CheckpointManager(url) as manager:
        for step in steps:
            manager.save(step, state(step))
    committed = Root.committed

    def from_here(root, *about):
        note("the-commit")
        return committed(root, *about)

    Root.committed = from_here
    error = ""
    manager = jaxckpt.CheckpointManager(url, keep=jaxckpt.KeepPolicy(**keep))
    manager.save(steps[-1] + 1, state(steps[-1] + 1)).result()
    with contextlib.suppress(jaxckpt.errors.CheckpointError):
        manager.wait_until_finished()
    if leads:
        note("the-end")
    try:
        manager.save(steps[-1] + 100, state(0)).result()
    except jaxckpt.errors.CheckpointError as raised:
        error = f"{type(raised).__name__}: {raised}"
    with contextlib.suppress(jaxckpt.errors.CheckpointError):
        manager.close()
    return {"error": error, "problems": manager.problems}
