"""A training loop that can be stopped at any time, and resumes where it was.

    python examples/preemptible.py --run DIR
    python examples/preemptible.py --run gs://BUCKET/DIR --local /mnt/nvme/DIR
    python examples/preemptible.py --run DIR --coordinator HOST:PORT --processes 2 --index 0

On SIGTERM or SIGUSR1 it saves its current step and exits with --requeue-code; started again, it
resumes at that step. When it has finished, it exits with 0. `slurm.sh` and `kubernetes.yaml`
restart it in this way. With --local it also saves often on a disk of each host, so that a job that
is killed without notice and restarted there loses a few steps only.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt

Params = dict[str, jax.Array]


class Batches:
    """Random points on a curve, determined by the number of global batches taken so far."""

    def __init__(self, sharding: NamedSharding) -> None:
        self.sharding, self.taken = sharding, 0

    def __next__(self) -> jax.Array:
        points = np.random.default_rng(self.taken).uniform(-1, 1, (64, 1)).astype(np.float32)
        self.taken += 1
        return jax.make_array_from_callback(points.shape, self.sharding, lambda i: points[i])

    def get_state(self) -> dict[str, int]:
        """Returns the state for `save` to store."""
        return {"global_next_index": self.taken}  # this key: alike on any number of processes

    def set_state(self, state: dict[str, int]) -> None:
        """Sets the state; called by `restore_or`."""
        self.taken = state["global_next_index"]


def init() -> Params:
    """Makes the parameters of one hidden layer."""
    keys = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(keys[0], (1, 32)), "down": jax.random.normal(keys[1], (32, 1))}


@jax.jit
def train_step(
    params: dict[str, jax.Array], x: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Makes one step of gradient descent."""

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - jnp.sin(3 * x)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), loss


def main() -> int:
    """Trains, and returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, help="directory for the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--local", help="directory on a disk of each host")
    parser.add_argument("--local-every", type=int, default=10)
    parser.add_argument("--requeue-code", type=int, default=85)
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, for several processes")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--index", type=int)
    args = parser.parse_args()
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.index)

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    batches = Batches(NamedSharding(mesh, PartitionSpec("data")))
    save = jaxckpt.SavePolicy(every_steps=args.save_every)
    keep = jaxckpt.KeepPolicy(last=3)
    local = None
    if args.local:
        often = jaxckpt.SavePolicy(every_steps=args.local_every)
        local = jaxckpt.LocalTier(args.local, save=often)
    with jaxckpt.CheckpointManager(args.run, save=save, keep=keep, local=local) as manager:
        replicated = jax.jit(init, out_shardings=NamedSharding(mesh, PartitionSpec()))
        params, step = manager.restore_or(replicated, items={"batches": batches})
        while step < args.steps and not manager.reached_preemption(step):
            step += 1
            params, loss = train_step(params, next(batches))
            loss = float(loss)  # in every process: CPU collectives fail if one runs ahead
            if jax.process_index() == 0:
                print(f"step {step}: loss {loss}", flush=True)
            manager.save(step, params, items={"batches": batches}, force=step == args.steps)
    return 0 if step >= args.steps else args.requeue_code


if __name__ == "__main__":
    sys.exit(main())
