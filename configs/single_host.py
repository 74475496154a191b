"""Checkpoints for a run on one host, with all options; `single_host.gin` has the same for gin.

Flags can set any field: --config.checkpoint.keep.last=5. Leave out what you do not need: None here
is the default.
"""

import ml_collections

from jaxckpt.integrations.ml_collections import manager_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.checkpoint = manager_config(  # for CheckpointManager.from_config
        directory="runs/single_host",
        # Rules add up: a step is saved if any rule says so.
        save={
            "every_steps": 1000,
            "every_seconds": 900.0,  # limits the loss if steps are slow
            "at_steps": (1,),  # also the first step, so that a full disk is noticed immediately
            "first": None,  # if True, also saves the first step of a new run
            "on_preemption": True,  # on SIGTERM, or on SIGUSR1 from a scheduler
            "check_replicas": 20,  # compares the replicas of each shard at every 20th save
            "may_differ": None,  # globs over leaves whose replicas differ on purpose
            "max_write_bytes_per_s": None,  # such as "100MB", to leave training some network
            "continuous": None,  # starts each save when the previous one has ended
        },
        # Rules add up here too; the newest step and pinned steps always stay.
        keep={
            "last": 3,  # to go back if the loss blows up
            "every_steps": 10_000,  # for later analysis
            "every_seconds": None,
            "best": 2,  # for evaluation: manager.restore(step="best")
            "metric": "loss",  # as passed to manager.save(..., metrics={"loss": ...})
            "mode": "min",
            "newer_than_s": None,
            "move_to": None,  # with "deleted", steps move to this directory of the run instead
            "verified": False,  # True reads each step back before older ones are deleted
        },
        mode="w",  # "r" for a program that only reads and deletes nothing
        budget_bytes=2 << 30,  # limits the values waiting to be written during training
        timeout_s=1200.0,  # waits for an earlier save, for example on a hanging disk
        step_prefix=None,  # a directory is called `1000`; with "ckpt", `ckpt_1000`
        step_digits=None,  # with 8, a directory is called `00001000`
        run_metadata=None,  # JSON to store with the run
        item="state",  # "default" is the name that a manager of Orbax gives it
        compression=None,  # "zstd" for slow or costly storage; "zstd:3" for level 3
        incremental="auto",  # steps refer to arrays that have not changed; False writes them anew
        # With a `directory` in a bucket: a directory on this host's own disk, saved to first.
        local={
            "directory": None,  # such as "/mnt/nvme/single_host"
            "save": {"every_steps": None},  # steps that are saved only there, besides
            "keep": {"last": 2},  # and how many stay there
            "durable_timeout_s": 600.0,  # how long the bucket may be away
            "peers": [],  # URLs where servers of files have the disks of other hosts
        },
    )
    return config
