"""Checkpoints for a job on spot instances, which may end at any time; `spot.gin` has the same.

Saves at the interval that loses the least time, and once more when the notice arrives.
`examples/preemptible.py`, `slurm.sh` and `kubernetes.yaml` restart the job. `single_host.py`
explains the options that are missing here.
"""

import ml_collections

from jaxckpt.integrations.ml_collections import manager_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.checkpoint = manager_config(
        directory="/shared/runs/spot",  # not on the instance's disk, which is lost with it
        save={
            # Computed from how long a save and a restore take in this run, and how long instances
            # live. `continuous` instead would lose the least work, and write the most.
            "auto": {"mtbf_hours": 4.0, "processes": 8},
            "first": True,  # the first step of a new run, too
            "on_preemption": True,  # the notice is SIGTERM; a save must fit into its grace period
        },
        keep={
            "last": 2,  # one more than the newest, which may be damaged when the instance ends
            "newer_than_s": 1800.0,  # and all steps of the last half hour
        },
        budget_bytes=1 << 30,
        timeout_s=120.0,  # an instance that was reclaimed does not come back
    )
    return config
