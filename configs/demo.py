"""The demo (`make demo`): a character-level transformer of 1.6 million parameters."""

from typing import Any


def get_config() -> dict[str, Any]:
    return {
        "steps": 60,
        "kill_from": 30,  # SIGKILL inside the first save from this step on
        "stop_from": 40,  # SIGTERM inside the first save from this step on, of the next process
        "width": 256,  # of the residual stream; the MLP is four times as wide
        "heads": 4,
        "layers": 2,
        "batch": 16,  # sequences in a step
        "length": 32,  # characters in a sequence
        "checkpoint": {  # for CheckpointManager.from_config
            "save": {"every_steps": 10},
            "keep": {"last": 3, "every_steps": 20},
        },
    }
