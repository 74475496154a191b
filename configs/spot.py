"""Checkpoints of a job on spot instances, which end without asking; `spot.gin` says the same.

As often as loses the least time, and one more when the notice comes. `examples/preemptible.py`,
`slurm.sh` and `kubernetes.yaml` start the job again. What is not said is as `single_host.py`
explains it.
"""

import ml_collections

from jaxckpt.integrations.ml_collections import manager_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.checkpoint = manager_config(
        directory="/shared/runs/spot",  # not on the instance, whose disk ends with it
        save={
            # From what a save and a restore take in this run, and from how long instances live.
            # `continuous` instead of it loses the least work of all, and writes the most.
            "auto": {"mtbf_hours": 4.0, "processes": 8},
            "first": True,  # the step that a restart begins with: another may come at once
            "on_preemption": True,  # the notice is SIGTERM; a save must take less than its grace
        },
        keep={
            "last": 2,  # one more than the newest, which may be damaged by the way it ended
            "newer_than_s": 1800.0,  # and all of the last half hour
        },
        budget_bytes=1 << 30,
        timeout_s=120.0,  # a process that was taken away does not come back
    )
    return config
