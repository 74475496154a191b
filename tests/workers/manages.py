"""Runs with one manager in each of several processes: train, lose a process, get a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import numpy as np

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, SavePolicy
from jaxckpt.format import names
from jaxckpt.multihost import current
from jaxckpt.storage import LocalStorage
from jaxckpt.testing import FailingStorage
from tests.waiting import wait_until
from tests.workers.saves import mesh_of, put, said

SIZE = 48
BEST_AT = 20
KEEP = KeepPolicy(last=2, best=1, metric="score", mode="max")


def values_at(step):
    """Returns the state at a step, as numpy."""
    split = np.arange(SIZE, dtype=np.float32) + step
    return {"split": split, "whole": split[:16] * 2, "count": np.int32(step)}


def specs():
    return {"split": ("x",), "whole": (), "count": ()}


def state_at(step):
    """The state, over all devices of the job."""
    import jax

    mesh, values = mesh_of(x=jax.device_count()), values_at(step)
    return {name: put(values[name], mesh, spec) for name, spec in specs().items()}


def make_init():
    """Returns a function that makes the state at step 0, with shardings known beforehand."""
    import jax

    shardings = {name: array.sharding for name, array in state_at(0).items()}
    return jax.jit(lambda: values_at(0), out_shardings=shardings)


def check_state(state, step):
    """Whether it is, bit for bit, what `state_at` makes; of arrays this process's part."""
    values = values_at(step)
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert state[name].dtype == value.dtype
        for shard in state[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), value[shard.index])


class Data:
    """Numbers of its own for each process; its state is how many it has given."""

    def __init__(self, me):
        self.index, self.count, self.given = me.index, me.count, 0

    def __next__(self):
        self.given += 1
        return self.given * self.count + self.index

    def get_state(self):
        return {"given": self.given, "process": self.index}

    def set_state(self, state):
        assert state["process"] == self.index
        self.given = state["given"]


class Watched:
    """A storage that says which verb comes next, and with which path."""

    def __init__(self, inner, before):
        self._inner, self._before = inner, before

    def __getattr__(self, verb):
        found = getattr(self._inner, verb)
        if not callable(found):
            return found

        def call(path, *args, **kwargs):
            self._before(verb, path)
            return found(path, *args, **kwargs)

        return call

    def delete_files(self, paths, **options):
        for path in paths:
            self._before("delete", path)
            self._inner.delete_files([path], **options)


def watch(manager, before):
    manager._index.storage = Watched(LocalStorage(), before)


@contextlib.contextmanager
def heard(before):
    """Calls `before` with the name of each round that this process comes to."""
    kind = type(current())  # of these processes with any limit
    methods = {name: getattr(kind, name) for name in ("gather", "agree")}  # a barrier is a gather

    def hearing(method):
        def call(self, name, *args, **kwargs):
            before(name)
            return method(self, name, *args, **kwargs)

        return call

    for name, method in methods.items():
        setattr(kind, name, hearing(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(kind, name, method)


def meet(point):
    current().within(60).gather(f"test {point}", None)


# --- training ---------------------------------------------------------------------------------


def train(me, root, steps):
    """Trains, and saves by step and by the clock, in the background."""
    import jax

    @jax.jit
    def train_step(state):
        state = {
            "split": state["split"] + 1,
            "whole": state["whole"] + 2,
            "count": 1 + state["count"],
        }
        return state, state["split"].sum()  # over all processes

    rounds, here, asked, saved, data = [], [], [], [], Data(me)

    def hear(name):
        rounds.append(name)
        if threading.current_thread() is threading.main_thread():
            here.append(name)

    policy = SavePolicy(every_steps=25, every_seconds=0.05)
    with heard(hear), CheckpointManager(root, save=policy, keep=KEEP) as manager:
        state, step = manager.restore_or(make_init(), items={"data": data})
        assert (step, data.given) == (0, 0)
        for step in range(1, steps + 1):
            next(data)
            np.linalg.svd(np.ones((20 + 40 * me.index, 20)))  # some are slower than others
            state, total = train_step(state)
            before = len(here)
            due = manager.should_save(step)
            asked += here[before:]
            metrics = {"score": -abs(step - BEST_AT), "total": total}
            handle = manager.save(step, state, items={"data": data}, metrics=metrics)
            assert due == (handle is not None)
            saved += [step] * due
        manager.wait_until_finished()
        meet("trained")
        kept = manager.all_steps()
        said_of = {"best": manager.best_step(), "latest": manager.latest_step()}
        session = f"manager {manager._saver.session}/"
        return {
            **said_of,
            "saved": saved,
            "kept": kept,
            "total": manager.metrics(kept[-1])["total"],
            "in saves": [name.removeprefix(session) for name in rounds if session in name],
            "others": [name.rpartition("/")[2] for name in rounds if session not in name],
            "asked": [name.removeprefix(session) for name in asked],
        }


def go_on(me, root):
    """Restores what another number of processes trained, and saves on."""
    with CheckpointManager(root, keep=KEEP) as manager:
        data = Data(me)
        refused = said(lambda: manager.restore_or(make_init(), items={"data": data}))
        assert data.given == 0
        state, step = manager.restore_or(make_init())
        check_state(state, step)
        assert state["split"].sharding == state_at(0)["split"].sharding
        states = manager.restore_items()["data"]
        manager.save(step + 1, state_at(step + 1), metrics={"score": -1000})
        manager.wait_until_finished()
        state, newest = manager.restore_or(make_init())
        check_state(state, newest)
        return {"refused": refused, "step": step, "states": states, "newest": newest}


def go_on_alike(me, root):
    """Restores with as many processes as saved: each its own data."""
    with CheckpointManager(root, mode="r") as manager:
        data = Data(me)
        state, step = manager.restore_or(make_init(), items={"data": data})
        check_state(state, step)
        return {"step": step, "given": data.given}


def begin_late(me, root):
    """Process 0 begins when the others have written all of their share."""

    def before(verb, path):
        if me.index == 0 and verb == "read" and path.endswith(names.OWNER):
            me.wait_for("begin")

    def hear(name):
        if name.endswith("/written"):
            me.reach("written")

    with CheckpointManager(root) as manager, heard(hear):
        watch(manager, before)
        manager.save(1, state_at(1), items={"data": Data(me)})
        manager.wait_until_finished()


# --- losing one -------------------------------------------------------------------------------


def phase_of(verb, path, index):
    """The phase of a save that begins for this process with what it is about to do, or None."""
    name = os.path.basename(path)
    if verb == "read" and name == names.OWNER:
        return "begin"
    if verb == "make_dir" and index and names.TEMPORARY in path:
        return "begin"
    if verb == "write" and (
        name.startswith(names.part(0)[:-1]) or names.process_count(name) is not None
    ):
        return "writing"  # the arrays are written by then
    if verb == "write" and name == names.RECORD:
        return "written"
    if verb == "rename" and names.is_temporary(name):
        return "renaming"
    if verb == "create" and name == names.DOOMED:
        return "committed"
    if verb == "delete" and names.is_deleting(name):
        return "deleting"
    return None


def delete_half(path):
    files = sorted(f"{at}/{file}" for at, _, found in os.walk(path) for file in found)
    for file in files[::2]:
        os.remove(file)


def lose(me, root, rounds, timeout_s):
    """In each round saves twice; in the second save one process pauses as a phase begins.

    Args:
        rounds: Name, phase, and who pauses.
    """
    armed: list[tuple[str, str]] = []

    def before(verb, path):
        if armed and phase_of(verb, path, me.index) == armed[0][1]:
            name, phase = armed.pop()
            if phase == "deleting":
                delete_half(path)
            me.reach(name)
            me.wait_for(f"{name} on")

    manager = CheckpointManager(root, keep=KeepPolicy(last=1), timeout_s=timeout_s)
    watch(manager, before)
    _, step = manager.restore_or(make_init())
    data, words = Data(me), []

    def save():
        manager.save(step, state_at(step), items={"data": data})
        manager.wait_until_finished(60)

    for name, phase, where in rounds:
        me.wait_for(f"{name} go")
        step += 1
        good = said(save)
        if me.index == where:
            armed.append((name, phase))
        step += 1
        words.append({"good": good, "lost": said(save)})
        me.reach(f"{name} over")
    me.wait_for("last save")
    step += 1
    return {"words": words, "after": said(save), "closed": said(manager.close), "last": step}


def fail_alone(me, root):
    """Process 1, or 0, cannot save some of the steps that are due; the next one is all theirs."""
    full = OSError(28, "No space left on device")
    words, left, known = {}, {}, set()

    def go_on_to(last, storage=None, leaf=None):
        manager._index.storage = storage or LocalStorage()
        while manager_at[0] < last:
            manager_at[0] += 1
            step = manager_at[0]
            extra = {} if leaf is None else {"extra": leaf}
            manager.save(step, {**state_at(step), **extra})
        manager.wait_until_finished()

    manager_at = [0]
    policy = SavePolicy(every_steps=3)
    with CheckpointManager(root, save=policy, timeout_s=20) as manager:
        for round_, (index, what) in enumerate(
            [(1, "leaf"), (0, "leaf"), (1, "full"), (0, "full")]
        ):
            step, odd = 6 * round_ + 3, me.index == index
            leaf = object() if odd and what == "leaf" else None
            # The first thing that is written.
            storage = FailingStorage(LocalStorage(), 0, full) if odd and what == "full" else None
            case = f"{what} {index}"
            words[case] = said(lambda: go_on_to(step, storage, leaf))  # noqa: B023  # called here
            said(manager.wait_until_finished)
            meet(f"{case} failed")
            known |= {
                names.RUN,
                names.LOCK,
                names.OWNER,
                names.LEDGER,
                *map(str, manager.all_steps()),
            }
            left[case] = sorted(set(os.listdir(root)) - known)
            known |= set(left[case])  # told once
            meet(f"{case} seen")
            words[f"after {case}"] = said(lambda: go_on_to(step + 3))  # noqa: B023
        return {"words": words, "left": left, "steps": manager.all_steps()}


def fail_by_the_clock(me, root):
    """Process 1 cannot take part in the third save; which steps does each save after that?"""
    manager = CheckpointManager(root, save=SavePolicy(every_seconds=0.05), timeout_s=5)
    due, failed = [], None
    for step in range(1, 200):
        state, third = state_at(step), len(due) == 2
        if third and me.index == 1:
            state["extra"] = object()
        if manager.should_save(step):
            due.append(step)
            failed = failed or said(lambda: (manager.save(step, state), settle(manager)))  # noqa: B023
    return {"due": due, "failed": failed["type"], "closed": said(manager.close)}


def settle(manager):
    manager.wait_until_finished(60)


def fail_when_told(me, root, max_steps):
    """Process 1 cannot save the step that preemption asks for; which are saved after that?"""
    import jax

    sum_up = jax.jit(lambda state: state["split"].sum())  # all processes take a step together
    manager = CheckpointManager(root, save=SavePolicy(at_steps=[1]), timeout_s=5)
    saved, told_at = [], None
    for step in range(1, max_steps):
        state = state_at(step)
        jax.block_until_ready(sum_up(state))
        if manager.should_save(step) and step > 1 and told_at is None:
            told_at = step
            state |= {"extra": object()} if me.index == 1 else {}
        with contextlib.suppress(jaxckpt.UnsupportedLeaf):
            saved += [step] * (manager.save(step, state) is not None)
        if step == 5:
            me.reach("training")
        if told_at is not None:
            said(lambda: settle(manager))
            if step > told_at + 2:
                break
    return {"told at": told_at, "saved after": [step for step in saved if step > told_at]}


# --- another job ------------------------------------------------------------------------------


def be_replaced(me, root, phase):
    """Job A: its process 0 pauses in the save of step 2."""
    armed = []

    def before(verb, path):
        if armed and phase_of(verb, path, me.index) == phase:
            armed.clear()
            me.reach("paused")
            me.wait_for("on")

    manager = CheckpointManager(root, timeout_s=60)

    def save(step):
        manager.save(step, state_at(step), items={"data": Data(me)})
        settle(manager)

    save(1)
    watch(manager, before)
    armed += [True] * (me.index == 0)
    return {step: said(lambda: save(step)) for step in (2, 3)} | {  # noqa: B023
        "closed": said(manager.close)
    }


# --- being told to stop -----------------------------------------------------------------------


def train_until_told(me, root, max_steps):
    """Trains until a signal stops it, and saves the step of the preemption."""
    import jax

    heard_before = []
    signal.signal(signal.SIGUSR1, lambda *_: heard_before.append(True))
    sum_up = jax.jit(lambda state: state["split"].sum())  # all processes take a step together
    with CheckpointManager(root, save=SavePolicy(at_steps=[1])) as manager:
        saved, reached = [], False
        step = 0
        while not reached and step < max_steps:
            step += 1
            state = state_at(step)
            jax.block_until_ready(sum_up(state))
            saved += [step] * (manager.save(step, state) is not None)
            if step == 5:
                me.reach("training")
            reached = manager.reached_preemption(step)
        reasons = manager.decision.reason
        again = [manager.save(step + n, state) is not None for n in (1, 2)]
        later = manager.reached_preemption(step + 2)
    return {
        "saved": saved,
        "step": step,
        "why": reasons,
        "again": again,
        "later": later,
        "handled": len(heard_before),
    }


def be_told(me, root, asks, before):
    """Saves these steps; before one of them a process gets a signal, of which all learn."""
    from jax._src.distributed import global_state  # no public name tells that jax has heard it

    heard = "PREEMPTION_CURRENT_COUNTER/"
    reached = []
    with CheckpointManager(root, save=SavePolicy(every_steps=10**12)) as manager:
        for index, step in enumerate(asks):
            if index == before:
                if me.index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: len(global_state.client.key_value_dir_get(heard)) == me.count)
            manager.save(step, state_at(index))
            reached.append(manager.reached_preemption(step))
        manager.wait_until_finished()
        return {"reached": reached, "all": manager.all_steps()}


def leave_open(me, root, steps, timeout_s):
    """Saves as many steps as it is told, in each process, and closes nothing."""
    manager = CheckpointManager(root, timeout_s=timeout_s)
    for step in range(steps[me.index]):
        manager.save(step, state_at(step))
    return {}
