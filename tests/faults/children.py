"""The work of a zygote's forked children: saves, restores and whole runs, with a report of each."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path

import numpy as np

from tests.faults.zygote import arm, disarm, events, say


def tree(seed):
    """Small enough to be quick; one array is stored by TensorStore itself, one as a value."""
    rng = np.random.default_rng(seed)
    large = rng.standard_normal(70_000, np.float32)
    return {"large": large, "small": rng.integers(0, 9, 99), "text": f"seed {seed}", "seed": seed}


@cache
def the_same():
    """A `jax.Array` that no step need compare."""
    import jax

    return jax.device_put(np.arange(70_000, dtype=np.int32))


def with_frozen(seed):
    """An array that changes, and two that never do."""
    frozen = {"frozen": np.arange(70_000), "same": the_same()}
    return {"large": tree(seed)["large"], **frozen, "seed": seed}


def found(path):
    """The seed of the tree at `path`; None if there is none. Fails if a bit is wrong."""
    import jaxckpt

    try:
        got = jaxckpt.restore(path)
    except jaxckpt.CheckpointNotFound:
        return None
    wanted = (with_frozen if "frozen" in got else tree)(got["seed"])
    assert got.keys() == wanted.keys()
    assert all(np.asarray(got[k]).tobytes() == np.asarray(wanted[k]).tobytes() for k in wanted)
    return got["seed"]


def save(path, seed, overwrite, fault=None, log=None):
    import jaxckpt

    value = tree(seed)
    arm(os.path.dirname(path), fault, log=log)
    jaxckpt.save(path, value, overwrite=overwrite)
    say(events=events())
    disarm()


def check(path, seed, beside):
    """Says what is there, then saves: that must work by itself and clean up."""
    import jaxckpt

    there = found(path)
    jaxckpt.save(path, tree(seed), overwrite=True)
    assert found(path) == seed
    assert jaxckpt.verify(path).ok
    assert sorted(os.listdir(os.path.dirname(path))) == sorted([os.path.basename(path), *beside])
    say(found=there)


def overwrite_for_ever(path):
    """Says what is there, then replaces it with the next and says so, until it is killed."""
    import jaxckpt

    seed = found(path)
    say(found=seed)
    seed = -1 if seed is None else seed
    while True:
        seed += 1
        jaxckpt.save(path, tree(seed), overwrite=True)
        say(saved=seed)


def keep_training(root, acks_early=False):
    """Resumes from the newest step of a run that keeps two steps; reports each save, until killed.

    Reports first the existing steps, all of which are complete, then the step that it resumes from,
    and the leftovers after its first save.

    Args:
        acks_early: Whether it lies, and reports a step as saved before it is.
    """
    import jax
    import jax.numpy as jnp

    import jaxckpt
    from jaxckpt.format import names

    @jax.jit
    def train(state):
        w, momentum = state["w"], state["momentum"]
        momentum = 0.9 * momentum + jnp.sin(w) + state["n"]
        return {"w": w - 0.01 * momentum, "momentum": momentum, "n": state["n"] + 1}

    @jax.jit
    def init():
        w = jnp.arange(70_000, dtype=jnp.float32)
        return {"w": w, "momentum": jnp.zeros_like(w), "n": 0}

    def check(state, step):
        wanted = init()
        for _ in range(step):
            wanted = train(wanted)
        assert jax.tree.all(jax.tree.map(is_same, state, wanted))

    steps = sorted(int(name) for name in os.listdir(root) if name.isdecimal())
    for step in steps:
        check(jaxckpt.restore(f"{root}/{step}"), step)
    say(steps=steps)
    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        state, step = manager.restore_or(init)
        check(state, step)
        say(restored=step, problems=manager.problems)
        first, under_way = True, None
        while True:
            state, step = train(state), step + 1
            if acks_early:
                say(saved=step)
            saving = manager.save(step, state)
            if under_way is not None:
                under_way.result()
                say(saved=step - 1)
            under_way = saving
            if first:
                manager.wait_until_finished()
                known = {
                    *map(str, manager.all_steps()),
                    names.RUN,
                    names.OWNER,
                    names.LOCK,
                    names.LEDGER,
                }
                say(kept=manager.all_steps(), left=sorted(set(os.listdir(root)) - known))
                first = False


def is_same(array, other):
    return np.asarray(array).tobytes() == np.asarray(other).tobytes()


def train_and_lie(root):
    """A control: says of each step that it is saved when that has just begun."""
    keep_training(root, acks_early=True)


def try_to_save(path, seed):
    """Says what it raised."""
    import jaxckpt

    try:
        jaxckpt.save(path, tree(seed))
    except jaxckpt.CheckpointError as error:
        say(raised=type(error).__name__)
    else:
        say(raised=None)


def save_below(root, relative, log):
    """Saves below a directory that is there; what is between is made."""
    import jaxckpt

    os.mkdir(root)
    arm(root, log=log)
    jaxckpt.save(f"{root}/{relative}", tree(1))
    disarm()
    say(done=True)


def write_plainly(root, log):
    arm(root, log=log)
    Path(root, "plain").write_bytes(b"1")
    Path(root, "plain").rename(Path(root, "moved"))
    with Path(root, "synced").open("wb") as file:
        file.write(b"1")
        file.flush()
        os.fsync(file.fileno())
    disarm()


def train_for_ever(root, *, hears=None, heeds=True):
    """Trains until a signal stops it; reports each action before it begins.

    Args:
        hears: A signal that already has a handler; reports the signals that this handler got.
        heeds: Whether it stops after the signal.
    """
    import jaxckpt
    from jaxckpt.storage import LocalStorage

    def handle(number, frame):
        del frame
        say(handled=number)

    if hears is not None:
        signal.signal(hears, handle)
    save, keep = jaxckpt.SavePolicy(every_steps=7), jaxckpt.KeepPolicy(last=3)
    with jaxckpt.CheckpointManager(root, save=save, keep=keep) as manager:
        manager._index.storage = Telling(LocalStorage())
        _, step = manager.restore_or(lambda: tree(0))
        told = False
        while not (told and heeds):
            step += 1
            say(step=step)
            saving = manager.save(step, tree(step))
            if saving is not None and manager.decision.reason == "preemption":
                if not heeds:
                    saving.result()
                say(saved_for_preemption=step)
            told = manager.reached_preemption(step)
    kept = hears is None or signal.getsignal(hears) is handle
    say(stopped=step, handler_is_back=kept)


class Telling:
    """A storage that says which verb comes next."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, verb):
        found = getattr(self._inner, verb)
        if not callable(found):
            return found

        def call(path, *args, **kwargs):
            say(verb=verb)
            return found(path, *args, **kwargs)

        return call


def check_run(root):
    """Says which steps there are; each is whole. Reads without a manager, so changes nothing."""
    from jaxckpt.format import names
    from jaxckpt.storage import is_temporary_file

    entries = [
        name
        for name in os.listdir(root)
        # A file of the run that was being written when its process was killed is temporary too.
        if not name.startswith("_jaxckpt") and not is_temporary_file(name)
    ]
    steps = sorted(int(name) for name in entries if not names.is_temporary(name))
    assert [found(f"{root}/{step}") for step in steps] == steps
    say(steps=steps, temporary=[name for name in entries if names.is_temporary(name)])


def manage(root, what, fault=None, log=None):
    """Does one thing with a run that keeps its two newest steps, and says when it is done.

    what: "save": the next step; "rich": the same with further items and metrics; "shared": the
    second step after it, which shares files with it; "first": the first step of a run that is not
    there; "open": nothing but to open the run; "restore": the newest step, whose damaged ones are
    set aside; "pin", "delete": the oldest step.
    """
    import jaxckpt

    def open_run():
        return jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2))

    opens = what in ("open", "first")
    if opens:
        arm(os.path.dirname(root) if what == "first" else root, fault, log=log)
    manager = open_run()
    step = (manager.latest_step() or 0) + 1
    value = tree(step)
    shared = set()
    if what == "shared":
        for new in (step, step + 1):
            manager.save(new, with_frozen(new)).result()
            manager.wait_until_finished()
        shared = {entry.inode() for entry in os.scandir(f"{root}/{step}/state/d")}
        step, value = step + 2, with_frozen(step + 2)
    rich = {"items": {"notes": {"a": 1}, "more": tree(9)}, "metrics": {"loss": 1.5}}
    if not opens:
        arm(root, fault, log=log)
    if what in ("save", "rich", "shared", "first"):
        manager.save(step, value, **(rich if what == "rich" else {})).result()
        say(saved=step)
        manager.wait_until_finished()
        files = {entry.inode() for entry in os.scandir(f"{root}/{step}/state/d")}
        assert (what == "shared") == bool(files & shared)
    elif what == "restore":
        say(restored=manager.restore()["seed"])
    elif what == "pin":
        manager.pin(manager.all_steps()[0])
        say(pinned=manager.all_steps()[0])
    elif what == "delete":
        manager.delete(manager.all_steps()[0])
        say(left=manager.all_steps())
    say(events=events())
    disarm()
    manager.close()


def mend(root, fault=None, log=None):
    """Saves a step for which a damaged file is written again, and mended in two older steps."""
    import jaxckpt
    from jaxckpt._save import unchanged

    unchanged.TRUSTED = 1  # a file is read before each reference but the second
    with jaxckpt.CheckpointManager(root) as manager:
        for step in range(1, 5):
            if step == 4:  # after it, what 3 and 1 share is read
                damage_frozen(root)
            manager.save(step, with_frozen(step))
            manager.wait_until_finished()
        arm(root, fault, log=log)
        manager.save(5, with_frozen(5)).result()
        say(saved=5)
        manager.wait_until_finished()
        say(events=events(), problems=manager.problems)
        disarm()


def damage_frozen(root):
    """Flips a bit of what 3 and 1 share."""
    [file] = [one for one in os.scandir(f"{root}/3/state/d") if one.stat().st_nlink == 2]
    with open(file, "r+b") as data:
        data.seek(400_000)
        data.write(bytes([data.read(1)[0] ^ 1]))


def check_mended(root):
    """Says which steps there are and which are bad; saves another one, which must be whole."""
    import jaxckpt

    with jaxckpt.CheckpointManager(root) as manager:
        steps = manager.all_steps()
        bad = [step for step in steps if not jaxckpt.verify(f"{root}/{step}").ok]
        assert all(found(f"{root}/{step}") == step for step in steps if step not in bad)
        manager.save(9, with_frozen(9)).result()
        assert found(f"{root}/9") == 9
    say(steps=steps, bad=bad, left=[n for n in os.listdir(root) if "tmp" in n])


def check_managed(root):
    """Says what a run holds, each step whole; then saves, which must work and clean up."""
    import jaxckpt
    from jaxckpt.format import names

    before = sorted(os.listdir(root)) if os.path.isdir(root) else []
    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        starts = manager._directory.ledger.starts
        steps = manager.all_steps()
        pinned = [step for step in steps if names.PINNED in os.listdir(f"{root}/{step}")]
        seeds = [found(f"{root}/{step}") for step in steps if step != damaged_step(root, steps)]
        newest = None if not steps else manager.restore()["seed"]
        new = steps[-1] + 1 if steps else 1
        manager.save(new, tree(new)).result()
        manager.wait_until_finished()
        assert found(f"{root}/{new}") == new
        assert all(jaxckpt.verify(f"{root}/{step}").ok for step in manager.all_steps())
        after = manager.all_steps()
    left = sorted(
        set(os.listdir(root)) - {*map(str, after), names.RUN, names.OWNER, names.LOCK, names.LEDGER}
    )
    say(
        before=before,
        steps=steps,
        seeds=seeds,
        newest=newest,
        pinned=pinned,
        after=after,
        left=left,
        ends=[start.end for start in starts],
        saved=[start.saved for start in starts],
    )


def damaged_step(root, steps):
    """The step that a test has damaged, if it is still there: its manifest is gone."""
    for step in steps:
        if not os.path.exists(f"{root}/{step}/state/manifest.ocdbt"):
            return step
    return None


def save_unsynced(path, log):
    """A control: what the same save leaves in the caches if directories are not synced."""
    from jaxckpt.storage import _local

    sync = _local._sync
    _local._sync = lambda path, flags: None if flags == os.O_DIRECTORY else sync(path, flags)
    save(path, 1, False, log=log)


def fork(source, root, fault=None, log=None):
    """Starts a run from a step."""
    import jaxckpt

    arm(os.path.dirname(root), fault, log=log)
    jaxckpt.fork(source, root)
    say(events=events())
    disarm()


def check_fork(source, root):
    """Says whether a fork is there, whole; the source is. If it is not, forking works now."""
    import jaxckpt

    assert found(source) == 3
    there = os.path.exists(f"{root}/3")
    if not there:
        jaxckpt.fork(source, root)
    assert found(f"{root}/3") == 3
    assert jaxckpt.verify(f"{root}/3").ok
    check_managed(root)
    say(there=there, left=sorted(os.listdir(root)))
