"""Checkpoints for a job of many processes on shared storage; `multi_host.gin` has the same options.

Every process reads this config, since the rules must be the same in all of them. `single_host.py`
explains the options that are missing here.
"""

import ml_collections

from jaxckpt.integrations.ml_collections import manager_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.checkpoint = manager_config(
        directory="/shared/runs/multi_host",  # the same directory from every host
        save={
            # A rule by step number, which every process can apply without communication. A
            # time-based rule (every_seconds) works too: each save agrees on the next one.
            "every_steps": 500,
            "on_preemption": True,  # if any process is preempted, all save the same step
        },
        keep={
            "last": 2,  # each step is large
            "every_seconds": 6 * 3600.0,
            "best": 1,
            "metric": "loss",
            "mode": "min",
        },
        budget_bytes=8 << 30,  # for each process, of the host memory beside the data pipeline
        timeout_s=600.0,  # waits for the slowest process; the error names the missing ones
        step_digits=8,  # so that `ls` lists millions of steps in order
        local=None,  # such as "/mnt/nvme/multi_host", on the own disk of each host
    )
    return config
