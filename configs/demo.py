"""The demo (`make demo`): a character-level transformer of 1.6 million parameters.

Its checkpoints are those of `single_host.py`, more often: the demo takes a minute.
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
        "kill_from": 30,  # SIGKILL inside the first save from this step on
        "stop_from": 40,  # SIGTERM inside the first save from this step on, of the next process
        "width": 256,  # of the residual stream; the MLP is four times as wide
        "heads": 4,
        "layers": 2,
        "batch": 16,  # sequences in a step
        "length": 32,  # characters in a sequence
        "checkpoint": checkpoint,
    }
