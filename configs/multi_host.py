"""Checkpoints of a job of many processes on shared storage; `multi_host.gin` says the same.

Every process reads this config: the rules must be the same in all of them. What is not said is as
`single_host.py` explains it.
"""

import ml_collections

from jaxckpt.integrations.ml_collections import manager_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.checkpoint = manager_config(
        directory="/shared/runs/multi_host",  # the same directory from every host
        save={
            # By the step alone, which all know without talking to each other. A rule by the clock
            # (every_seconds) works too: the processes agree on its next step at each save.
            "every_steps": 500,
            "on_preemption": True,  # of any one of them: all save the same step
        },
        keep={
            "last": 2,  # each is large
            "every_seconds": 6 * 3600.0,
            "best": 1,
            "metric": "loss",
            "mode": "min",
        },
        budget_bytes=8 << 30,  # for each process; of the host's memory beside the data pipeline
        timeout_s=600.0,  # for the slowest process; its error names those that did not come
        step_digits=8,  # so that `ls` has millions of steps in order
    )
    return config
