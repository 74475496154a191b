"""Trains in several processes with local directories: one that all see, or one for each host."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from typing import Any

import numpy as np

from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt._core.threads import daemons
from jaxckpt.storage import LocalStorage
from jaxckpt.testing._storage import MUTATING_VERBS, _Relay
from tests.workers.manages import check_state, make_init, specs, state_at
from tests.workers.saves import mesh_of, put

EVEN, LAST = SavePolicy(every_steps=2), KeepPolicy(last=2)


def train(me, root, steps):
    """Saves every step locally, and every second one in the directory too."""
    with _open(root) as manager:
        _, start = manager.restore_or(make_init())
        for step in range(start + 1, start + steps + 1):
            handle = manager.save(step, state_at(step))
            if step % 2 == 0:
                handle.durable()
        manager.wait_until_finished()
        return {"start": start, "tiers": manager.tiers}


def resume(me, root):
    """Restores the newest step."""
    with _open(root) as manager:
        state, step = manager.restore_or(make_init())
        check_state(state, step)
        return {"step": step, "problems": manager.problems, "tiers": manager.tiers}


def resume_away(me, root):
    """Restores the newest step and saves one while the directory answers no process."""
    from jaxckpt._run import root as _root

    real, silent = _root.locate, Silent()

    def locate(path):
        storage, found = real(path)
        return (silent if found.endswith("/run") else storage), found

    _root.locate, _root.AWAY_S = locate, 0.2
    with _open(root) as manager:
        manager._directory.reach.away_s = 60.0  # from now on nothing waits for it
        state, step = manager.restore_or(make_init())
        check_state(state, step)
        asked = silent.asked
        told = {"step": step, "asked": asked, "away": manager.tiers, "steps": manager.all_steps()}
        handle = manager.save(step + 1, state_at(step + 1))
        handle.result()
        me.reach("saved")
        me.wait_for("answers")
        silent.answers.set()
        handle.durable()
        manager.wait_until_finished()
        wait(daemons("jaxckpt-ask").under_way())
        return {**told, "tiers": manager.tiers}


# --- hosts with disks of their own -----------------------------------------------------------


def train_apart(
    me,
    root,
    steps,
    hosts,
    kinds=("split", "whole", "count"),
    data=True,
    wait=True,
    url=None,
    env=None,
    budgets=None,
):
    """As `train`; `hosts` has the disk of each process."""
    os.environ.update(env or {})
    seen = Data(me.index)
    more = {"budget_bytes": budgets[me.index]} if budgets else {}
    with _open(root, host=hosts[me.index], url=url, **more) as manager:
        items = {"data": seen} if data else {}
        state, start = manager.restore_or(_init(kinds), items=items)
        _check(state, start, kinds)
        assert seen.at == start or not data
        places = [str(timing.path) for timing in manager.timings]
        for step in range(start + 1, start + steps + 1):
            seen.at = step
            handle = manager.save(step, _state(step, kinds), items=items, metrics={"n": step})
            handle.result()
            me.reach(f"saved {step}")
            if wait and step % 2 == 0:
                handle.durable()
        if wait:
            manager.wait_until_finished()
        tiers = manager.tiers if wait else None
        return {
            "start": start,
            "tiers": tiers,
            "problems": manager.problems,
            "places": places,
        }


def begin_apart(me, root):
    """Calls restore_or while the first save is committed on the disk of process 0 alone."""
    real, here, listed = LocalStorage.rename, threading.Event(), threading.Event()

    def rename(self, src, dst, *args, **options):
        is_share = dst.endswith("/share_0/1")
        if is_share and me.index == 1:
            listed.wait(2)  # until restore_or has returned, unless it waits for this save
        found = real(self, src, dst, *args, **options)
        if is_share:
            here.set()
        return found

    LocalStorage.rename = rename
    with _open(root, host=me.index) as manager:
        handle = manager.save(1, _state(1, ("split",)))
        assert me.index == 1 or here.wait(10)
        _, start = manager.restore_or(_init(("split",)))
        listed.set()
        handle.result()
        return start


def time_training(me, place, locals_, steps, save_every, leaf_bytes, leaves, env):
    """Trains on a mesh of all processes; returns seconds of the loop, and of a call of `save`.

    Args:
        locals_: The disk of each process; empty to save in `place` itself.
    """
    import time

    import jax
    import jax.numpy as jnp

    os.environ.update(env)
    mesh = mesh_of(x=me.count)
    rng = np.random.default_rng(0)
    shape = (me.count, leaf_bytes // 4)
    values = {f"w{n}": rng.integers(0, 1 << 30, shape, np.int32) for n in range(leaves)}
    state = {name: put(value, mesh, ("x",)) for name, value in values.items()}
    work = jax.jit(lambda x: x @ x / 1000)
    x = jax.block_until_ready(work(jnp.ones((700, 700))))
    calls = []
    options = {"local": locals_[me.index]} if locals_ else {}
    with CheckpointManager(place, keep=KeepPolicy(last=2), **options) as manager:
        manager.save(0, state)  # the first one makes connections and plans
        manager.wait_until_finished()
        start_s = time.perf_counter()
        for step in range(1, steps + 1):
            for _ in range(5):
                x = jax.block_until_ready(work(x))
            if step % save_every == 0:
                called_s = time.perf_counter()
                manager.save(step, state)
                calls.append(time.perf_counter() - called_s)
        loop_s = time.perf_counter() - start_s
        manager.wait_until_finished()
    return {"loop_s": loop_s, "blocked_s": max(calls)}


def train_and_die(me, root, steps, hosts, process, change):
    """As `train_apart`, but a process is killed at its n-th change of a file on its disk."""
    from jaxckpt._run import root as _root

    if me.index == process:
        real, dying = _root.locate, Dying(me, change)

        def locate(path):
            storage, found = real(path)
            return (dying if "/local" in found else storage), found

        _root.locate = locate
    return train_apart(me, root, steps, hosts)


def train_and_die_uploading(me, root, hosts, process):
    """A process is killed when it has sent its arrays, but not where they are."""
    from jaxckpt._run.shares import Part

    def die(*_: Any, **__: Any) -> Any:
        me.die()

    if me.index == process:
        Part.take = Part.leave = die
    return train_apart(me, root, 2, hosts)


def train_and_count(me, root, hosts):
    """As `train_apart`; also the bytes sent, and those that were there."""
    from jaxckpt._run.upload import Sending

    def send_all(self, sizes, **options):
        real(self, sizes, **options)
        counted.append((self.sent_bytes, self.found_bytes))

    counted, real, Sending.send_all = [], Sending.send_all, send_all
    return {**train_apart(me, root, 0, hosts), "counted": counted}


def wait_for_none(me, root, hosts):
    """Opens the run and lets it upload by itself; nothing is saved, and no process waits."""
    with _open(root, host=hosts[me.index]) as manager:
        assert manager._tiers is not None
        worker = manager._tiers.uploader.worker
        worker.wait(worker.under_way(), 30)
        return manager._directory.known_steps()


def train_unchanged(me, root, hosts, steps):
    """Saves the same values in every step, and uploads each."""
    save, keep = SavePolicy(every_steps=1), KeepPolicy()
    with _open(root, host=hosts[me.index], save=save, local_keep=keep) as manager:
        for step in range(1, steps + 1):
            manager.save(step, _state(0, ["split", "whole"]), items={"data": Data(me.index)})
            manager.wait_until_finished()
        return manager.problems


def scrub_apart(me, root, hosts):
    """Scrubs both places, and waits for what is uploaded then."""
    with _open(root, host=hosts[me.index]) as manager:
        reports = manager.scrub()
        manager.wait_until_finished()
        found = {str(step): report.ok for step, report in sorted(reports.items())}
        return {"ok": found, "durable": manager.tiers["durable"]}


def leave_open(me, root, hosts):
    """The program ends without closing its manager."""
    manager = _open(root, host=hosts[me.index])
    manager.save(2, state_at(2))


def choose(me, root, hosts, kinds):
    """Asks which steps there are, and restores the newest by its number, and the best."""
    with _open(root, host=hosts[me.index], keep=KeepPolicy(metric="n", mode="max")) as manager:
        latest = manager.latest_step()
        _check(manager.restore(_state(0, kinds), step=latest), latest, kinds)
        said = {"latest": latest, "best": manager.best_step(), "all": manager.all_steps()}
        manager.restore(_state(0, kinds), step="best")
        return {**said, "restored": manager.restored_step}


def ask(me, root, hosts):
    """Does by hand what managers can do."""
    with _open(root, host=hosts[me.index]) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step), metrics={"n": -step})
        manager.wait_until_finished()
        manager.pin(3)
        manager.unpin(3)
        manager.delete(3)
        reports = manager.scrub()
        after = manager.restore(state_at(0), step=2)
        check_state(after, 2)
        return {
            "tiers": manager.tiers,
            "scrubbed": {str(n): report.ok for n, report in reports.items()},
        }


class Dying(_Relay):
    """A disk whose process is killed at its n-th change."""

    def __init__(self, me, change):
        super().__init__(LocalStorage())
        self.me, self.left = me, change
        self.lock = threading.Lock()

    def _before(self, verb, path, data=b""):
        if verb in MUTATING_VERBS:
            with self.lock:
                self.left -= 1
                if self.left == 0:
                    self.me.die()


class Silent(_Relay):
    """A directory that does not answer until `answers` is set."""

    def __init__(self):
        super().__init__(LocalStorage())
        self.answers, self.asked = threading.Event(), 0

    def _before(self, verb, path, data=b""):
        self.asked += 1
        self.answers.wait()


class Data:
    """A data iterator with a position of its own in each process."""

    def __init__(self, process):
        self.process, self.at = process, 0

    def get_state(self):
        return {"process": self.process, "at": self.at}

    def set_state(self, state):
        assert state["process"] == self.process
        self.at = state["at"]


def _values(step, kinds):
    """Chunks of their own files; each process writes a half of what both hold."""
    values = {
        "split": np.arange(480_000, dtype=np.float32) + step,
        "whole": np.arange(600_000, dtype=np.float32) * step,
        "count": np.int32(step),
        "small": np.arange(64, dtype=np.float32) + step,
    }
    return {name: value for name, value in values.items() if name in kinds}


def _state(step, kinds):
    import jax

    mesh, spec_of = mesh_of(x=jax.device_count()), {**specs(), "small": ("x",)}
    return {name: put(value, mesh, spec_of[name]) for name, value in _values(step, kinds).items()}


def _init(kinds):
    import jax

    shardings = {name: array.sharding for name, array in _state(0, kinds).items()}
    return jax.jit(lambda: _values(0, kinds), out_shardings=shardings)


def _check(state, step, kinds):
    wanted = _values(step, kinds)
    assert state.keys() == set(kinds)
    for name in kinds:
        for shard in state[name].addressable_shards:
            assert (shard.data == wanted[name][shard.index]).all()


def _open(root, host=None, url=None, save=EVEN, local_keep=LAST, **options):
    where = f"{root}/local" if host is None else f"{root}/host{host}/local"
    local = LocalTier(where, save=SavePolicy(every_steps=1), keep=local_keep, durable_timeout_s=10)
    return CheckpointManager(url or f"{root}/run", save=save, local=local, timeout_s=10, **options)
