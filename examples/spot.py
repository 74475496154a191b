"""Training on spot instances, which resumes from the disks that are left.

    python examples/spot.py --run gs://BUCKET/DIR --local /mnt/nvme/DIR \\
        --peer http://10.0.0.11:8080 --peer http://10.0.0.12:8080 --cloud gcp

It saves often on the local disk, and sometimes in the bucket. At the notice of the cloud, or at
SIGTERM, it saves once more, uploads that step and exits with 85. If an instance ends without
notice, the next one reads the newest step from disks that are served: see docs/tiers.md, also for
JAXCKPT_PEER_USER and JAXCKPT_PEER_PASSWORD.
"""

from __future__ import annotations

import argparse
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec
from preemptible import Batches, init, train_step

import jaxckpt
from jaxckpt.integrations import notices

CLOUDS = {"aws": notices.aws, "azure": notices.azure, "gcp": notices.gcp}


def main() -> int:
    """Trains, and returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, help="directory for the checkpoints")
    parser.add_argument("--local", required=True, help="directory on a disk of this host")
    parser.add_argument("--peer", action="append", default=[], help="URL of another host's disk")
    parser.add_argument("--cloud", choices=CLOUDS, help="whose notices to ask for")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    batches = Batches(NamedSharding(mesh, PartitionSpec("data")))
    manager = jaxckpt.CheckpointManager(
        args.run,
        save=jaxckpt.SavePolicy(every_steps=100),
        keep=jaxckpt.KeepPolicy(last=3),
        local=jaxckpt.LocalTier(
            args.local, save=jaxckpt.SavePolicy(every_steps=10), peers=args.peer
        ),
        notice=CLOUDS[args.cloud]() if args.cloud else None,
    )
    with manager:
        replicated = jax.jit(init, out_shardings=NamedSharding(mesh, PartitionSpec()))
        params, step = manager.restore_or(replicated, items={"batches": batches})
        while step < args.steps and not manager.reached_preemption(step):
            step += 1
            params, loss = train_step(params, next(batches))
            print(f"step {step}: loss {float(loss)}", flush=True)
            manager.save(step, params, items={"batches": batches}, force=step == args.steps)
    return 0 if step >= args.steps else 85


if __name__ == "__main__":
    sys.exit(main())
