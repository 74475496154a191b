"""Every claim that the demo prints holds, and its options work as documented."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.py"
CONFIG = ROOT / "configs" / "demo_quick.py"
GIN_FILE = ROOT / "configs" / "demo.gin"


def run_demo(*options):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, DEMO, *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def check_verdict(done):
    output = done.stdout + done.stderr
    verdict = done.stdout.partition("9. Verdict")[2]
    assert done.returncode == 0, output
    assert "ALL CLAIMS HOLD" in verdict, output
    assert verdict.count("   ok   ") == 15, output
    assert "FAIL" not in done.stdout, output
    assert "Traceback" not in done.stderr, output


@pytest.mark.slow
def test_the_demo_proves_what_it_claims(tmp_path):
    """A run killed in one save and stopped in another resumes with the same bits; its fork too."""
    check_verdict(run_demo("--config", CONFIG, "--run", tmp_path / "demo"))


@pytest.mark.slow
def test_the_demo_takes_gin_files(tmp_path):
    """The same claims hold; the later of two bindings is in force."""
    pytest.importorskip("gin")
    quick = "steps=15 kill_from=6 stop_from=9 layers=1 batch=8 length=16".split()
    lines = [f"include '{GIN_FILE}'", *(f"Config.{field}" for field in quick)]
    lines += ["SavePolicy.every_steps=3", "KeepPolicy.last=2", "KeepPolicy.every_steps=6"]
    file = tmp_path / "quick.gin"
    file.write_text("\n".join(lines))

    check_verdict(run_demo("--gin_file", file, "--run", tmp_path / "demo"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "misspelt", "hint"),
    [
        ('"steps"', '"stpes"', "Did you mean 'steps'?"),
        ('"checkpoint"', '"checkpoints"', "Did you mean 'checkpoint'?"),
        ('"last"', '"lats"', "Did you mean 'last'?"),
        ("Config.steps", "Config.stpes", "Did you mean 'steps'?"),
        ("KeepPolicy.last", "KeepPolicy.lats", "Did you mean 'last'?"),
    ],
)
def test_a_misspelt_field_is_an_error(tmp_path, written, misspelt, hint):
    """Before anything is trained, with the likely one."""
    is_gin = "." in written
    file = tmp_path / ("a.gin" if is_gin else "a.py")
    text = (GIN_FILE if is_gin else CONFIG).read_text()
    file.write_text(text.replace(written, misspelt))

    done = run_demo("--gin_file" if is_gin else "--config", file, "--run", tmp_path / "demo")

    assert done.returncode != 0
    assert hint in done.stderr
    assert "Train" not in done.stdout
    assert not list(tmp_path.glob("demo/*"))
