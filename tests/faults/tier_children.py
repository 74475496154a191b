"""Runs with a local disk in front of their directory, in a zygote's forked children."""

from __future__ import annotations

from tests.faults.children import tree
from tests.faults.zygote import arm, disarm, events, say


def train(folder, steps, fault=None):
    """Saves steps, of which each place keeps the newest; says what is saved and what is durable."""
    import jaxckpt

    last = jaxckpt.KeepPolicy(last=1)
    arm(folder, fault)
    local = jaxckpt.LocalTier(f"{folder}/local", keep=last)
    with jaxckpt.CheckpointManager(f"{folder}/run", keep=last, local=local) as manager:
        for step in range(1, steps + 1):
            handle = manager.save(step, tree(step))
            handle.result()
            say(saved=step)
            handle.durable()
            say(durable=step)
    say(events=events())
    disarm()


def resume(folder, local):
    """Says which step is restored, here or on another host, and goes on from it."""
    import jaxckpt

    here = {"local": f"{folder}/local"} if local else {}
    with jaxckpt.CheckpointManager(f"{folder}/run", **here) as manager:
        steps = manager.all_steps()
        found = manager.restore() if steps else {"seed": 0}
        wanted = tree(found["seed"])
        assert not steps or all(found[name].tobytes() == wanted[name].tobytes() for name in _ARRAYS)
        manager.save(found["seed"] + 1, tree(found["seed"] + 1)).durable()
        problems = [one for one in manager.problems if "damaged" in one]
    say(found=found["seed"], problems=problems)


_ARRAYS = ("large", "small")


def train_beside(folder, run, fault=None):
    """As `train`, one step of a run whose local directory may have the steps of another run."""
    import jaxckpt

    arm(folder, fault)
    with jaxckpt.CheckpointManager(f"{folder}/{run}", local=f"{folder}/local") as manager:
        step = 1 + max(manager.all_steps(), default=0)
        handle = manager.save(step, tree(SEEDS[run] + step))
        handle.result()
        say(saved=step)
        handle.durable()
        say(durable=step)
    disarm()


def resume_beside(folder, run):
    """Says which step of a run is restored, and goes on from it; its values are of this run."""
    import jaxckpt

    with jaxckpt.CheckpointManager(f"{folder}/{run}", local=f"{folder}/local") as manager:
        steps = manager.all_steps()
        found = manager.restore() if steps else {"seed": SEEDS[run]}
        wanted = tree(found["seed"])
        assert not steps or all(found[name].tobytes() == wanted[name].tobytes() for name in _ARRAYS)
        step = found["seed"] - SEEDS[run]
        manager.save(step + 1, tree(found["seed"] + 1)).durable()
        problems = [one for one in manager.problems if "another run" not in one]
    say(found=step, problems=problems)


SEEDS = {"A": 0, "B": 500}
