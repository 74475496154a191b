"""For `examples/flags.py`; flags can set any field: --config.checkpoint.keep.last=2."""

import ml_collections

from jaxckpt.integrations.ml_collections import manager_config


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.steps = 20
    config.learning_rate = 0.1
    config.checkpoint = manager_config(
        directory="runs/flags",
        save={"every_steps": 5},
        keep={"last": 3},
    )
    return config
