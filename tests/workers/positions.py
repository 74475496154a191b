"""Jobs whose processes read one data set: each its part of every global batch."""

from __future__ import annotations

import numpy as np

from jaxckpt import CheckpointManager
from tests.workers.saves import mesh_of, put

BATCH = 16  # examples of a global batch
STEPS = 9  # global batches in the data set
SAVED = 4  # the step that the others resume from


class Plain:
    """One shuffle, and the next example of the job: alike in all processes."""

    def __init__(self, index, count, examples=BATCH * STEPS):
        self.index, self.count, self.examples = index, count, examples
        self.seed, self.next = 11, 0

    def __next__(self):
        order = np.random.default_rng(self.seed).permutation(self.examples)
        batch = order[self.next : self.next + BATCH]
        if len(batch) < BATCH:
            raise StopIteration
        self.next += BATCH
        return batch[self.index :: self.count]

    def get_state(self):
        return {"seed": self.seed, "global_next_index": self.next}

    def set_state(self, state):
        self.seed, self.next = state["seed"], state["global_next_index"]


class Own:
    """Counts what its own process has read, and can add such counts up and divide them."""

    def __init__(self, index, count, examples=BATCH * STEPS):
        self.plain = Plain(index, count, examples)

    def __next__(self):
        return next(self.plain)

    def get_state(self):
        return {"read": self.plain.next // self.plain.count, "process": self.plain.index}

    def set_state(self, state):
        assert state["process"] == self.plain.index
        self.plain.next = state["read"] * self.plain.count

    def merge_states(self, states):
        return sum(state["read"] for state in states)

    def split_state(self, state, count):
        return [{"read": state // count, "process": i} for i in range(count)]


def elastic(index, count, examples=BATCH * STEPS):
    """Grain's iterator for jobs whose number of processes changes."""
    import grain

    data = grain.MapDataset.range(examples).seed(3).shuffle()
    shard = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    return iter(grain.experimental.ElasticIterator(data, BATCH, shard))


KINDS = {"grain": elastic, "plain": Plain, "own": Own}


def iterators(index, count):
    """Returns one iterator of each kind."""
    return {kind: make(index, count) for kind, make in KINDS.items()}


def take(data, count):
    """Returns the next batches of each iterator: the examples of this process."""
    return {
        name: [np.asarray(next(iterator)).tolist() for _ in range(count)]
        for name, iterator in data.items()
    }


def joined(parts):
    """Returns the global batches, in their order, from the parts of all processes."""
    return {
        kind: [np.stack(batch, axis=1).ravel().tolist() for batch in zip(*of_kind, strict=True)]
        for kind in parts[0]
        if (of_kind := [part[kind] for part in parts])
    }


def read(me, root):
    """Reads the first global batches and saves a step."""
    import jax

    data = iterators(me.index, jax.process_count())
    w = put(np.arange(8.0), mesh_of(x=8), ("x",))
    with CheckpointManager(root) as manager:
        first = take(data, SAVED)
        manager.save(SAVED, {"w": w}, items=data)
        return first


def go_on(me, roots):
    """Resumes each run, and reads the rest."""
    import jax

    mesh, rest = mesh_of(x=8), {}
    for name, root in roots.items():
        data = iterators(me.index, jax.process_count())
        with CheckpointManager(root, mode="r") as manager:
            like = {"w": put(np.zeros(8), mesh, ("x",))}
            state, step = manager.restore(like, items=data), manager.latest_step()
        assert all(
            (shard.data == shard.index[0].start).all() for shard in state["w"].addressable_shards
        )
        assert step == SAVED
        rest[name] = take(data, STEPS - SAVED)
    return rest
