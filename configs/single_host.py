"""Checkpoints of a run on one host, all options said; `single_host.gin` says the same to gin.

A flag sets any field of it: --config.checkpoint.keep.last=5. Leave out what you do not need: what
is None here is what it would be anyway.
"""

import ml_collections

from jaxckpt.integrations.ml_collections import manager_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.checkpoint = manager_config(  # for CheckpointManager.from_config
        directory="runs/single_host",
        # Rules add up: a step is saved if one of them says so.
        save={
            "every_steps": 1000,
            "every_seconds": 900.0,  # at the latest; a slow step is not lost either
            "at_steps": (1,),  # also the first, so that a disk that is full is found at once
            "first": None,  # the same for the first step of each start of the program
            "on_preemption": True,  # on SIGTERM, or SIGUSR1 of a scheduler
            "continuous": None,  # one save after the other, as fast as the disk takes them
        },
        # Rules add up here too; the newest step always stays, and what is pinned.
        keep={
            "last": 3,  # to go back from a loss that blows up
            "every_steps": 10_000,  # to look at later
            "every_seconds": None,
            "best": 2,  # for evaluation: manager.restore(step="best")
            "metric": "loss",  # of manager.save(..., metrics={"loss": ...})
            "mode": "min",
            "newer_than_s": None,
        },
        mode="w",  # "r" for a program that only reads: it deletes nothing
        budget_bytes=2 << 30,  # of values that wait to be written while the next step trains
        timeout_s=1200.0,  # for an earlier save on a disk that hangs
        step_prefix=None,  # directories are called `1000`; with "ckpt" they are `ckpt_1000`
        step_digits=None,  # with 8 they are `00001000`
    )
    return config
