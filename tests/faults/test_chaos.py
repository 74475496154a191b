"""ckpt-chaos, an independent test program, kills a training script and checks how it resumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

POINTS = 13
CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("chaos_training.py")
# "#34 os.mkdir:state [before]     2  resumed from step 2     0.00e+00  PASS  [PLAN DRIFT]"
VERDICT = re.compile(r"^(#\d+ .*?)  .*  ([A-Z]+(?:_[A-Z]+)*)\b", re.MULTILINE)


def chaos(place, mode, *command):
    """Runs it; returns where it killed the command, and what it says of each place."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_chaos", "run", "--modes", mode, "--work", place / "work"),
            *("--max-points", str(POINTS), "--timeout", "120", "--result-file", "{out}/result"),
            *("--step-regex", r"resumed from step (\d+)", "--checkpoint-glob", "{out}/run/[0-9]"),
            *("--ckpt-ignore-size", "--", sys.executable, *command, "{out}"),
        ],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = VERDICT.findall(done.stdout)
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("mode", ["before", "torn", "term"])
def test_every_point_passes(ram_path, trial, mode):
    """Killed before a change, in the middle of a write, or after a signal to stop."""
    for point, verdict in chaos(ram_path, mode, SCRIPT):
        with trial("32", point):
            assert verdict == "PASS"


CARELESS = """
import os, sys
folder = sys.argv[1]
os.makedirs(folder + "/run", exist_ok=True)
steps = [name for name in os.listdir(folder + "/run")]
print("resumed from step", max(steps, default=0))
for step in steps:
    assert open(f"{folder}/run/{step}/w").read() == "weights"
os.makedirs(folder + "/run/1", exist_ok=True)
with open(folder + "/run/1/w", "w") as file:
    file.write("weights")
with open(folder + "/result", "w") as file:
    file.write("done")
"""


def test_it_notices_a_careless_script(ram_path):
    """A control: a checkpoint that is written in place does not pass."""
    script = ram_path / "careless.py"
    script.write_text(CARELESS)

    found = chaos(ram_path, "before", script)

    assert {verdict for _, verdict in found} > {"PASS"} or "PASS" not in dict(found).values()
