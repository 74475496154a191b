"""The demo (`make demo`): a character-level transformer of 1.6 million parameters.

It uses the checkpoint options of `single_host.py`, but saves more often: the demo takes a minute.
"""

import runpy
from pathlib import Path
from typing import Any


def get_config() -> dict[str, Any]:
    single_host = Path(__file__).with_name("single_host.py")
    checkpoint = runpy.run_path(str(single_host))["get_config"]().checkpoint
    checkpoint.save.every_steps = 10
    checkpoint.keep.last = 3
    checkpoint.keep.every_steps = 20
    return {
        "steps": 60,
        "kill_from": 30,  # SIGKILL during the first save from this step on
        "stop_from": 40,  # SIGTERM during the next process's first save from this step on
        "width": 256,  # width of the residual stream; the MLP is four times as wide
        "heads": 4,
        "layers": 2,
        "batch": 16,  # sequences per step
        "length": 32,  # characters per sequence
        "checkpoint": checkpoint,
    }
