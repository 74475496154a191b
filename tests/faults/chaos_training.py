"""Trains six steps, saves every second step and resumes where it was. A script for ckpt-chaos."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

import jaxckpt


def main(folder):
    def init():
        return {"w": np.zeros((32, 32), np.float32), "text": "six steps"}

    save = jaxckpt.SavePolicy(every_steps=2)
    with jaxckpt.CheckpointManager(folder / "run", save=save) as manager:
        state, step = manager.restore_or(init)
        print("resumed from step", step, flush=True)
        while step < 6 and not manager.reached_preemption(step):
            step += 1
            state = {**state, "w": state["w"] * np.float32(0.5) + np.float32(step)}
            if (saving := manager.save(step, state)) is not None:
                saving.result()
    if step == 6:
        digest = hashlib.sha256(state["w"].tobytes()).hexdigest()
        (folder / "result").write_text(digest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
