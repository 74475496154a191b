"""The demo: every claim that it prints holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo.py"
CONFIG = ROOT / "configs" / "demo_quick.py"


@pytest.mark.slow
@pytest.mark.faults
def test_the_demo_proves_what_it_claims(tmp_path):
    """A run killed in the middle of a save goes on with the same bits, and on another mesh."""
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    done = subprocess.run(
        [sys.executable, DEMO, "--config", CONFIG, "--run", tmp_path / "demo"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    output = done.stdout + done.stderr
    verdict = done.stdout.partition("8. Verdict")[2]
    assert done.returncode == 0, output
    assert "ALL CLAIMS HOLD" in verdict, output
    assert verdict.count("   ok   ") == 9, output
    assert "FAIL" not in done.stdout, output
    assert "Traceback" not in done.stderr, output
