"""One run exposed to faults of all kinds, for any time: `make soak SOAK_MINUTES=480`."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults import soak_children as children

MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENOMEM)


def train(zygote, dice, root, how):
    """Trains until something ends it; returns all that was said."""
    fault = None
    if how == "fail":
        kind = dice.choice(["fail_once", "fail_from"])
        fault = [kind, dice.randrange(1, 1500), dice.choice(ERRORS), dice.random() < 0.5]
    elif how == "tear":
        fault = ["tear", dice.randrange(1, 150)]
    child = zygote.start(children.train, root, fault)
    said = []
    if how in ("kill", "stop"):
        for _ in range(dice.randrange(1, 1 + children.STEPS)):
            if "status" in (word := zygote.answer()):
                return said  # it raised something
            said.append(word)
        time.sleep(dice.uniform(0, 0.03))  # not a wait for anything: the moment is what varies
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(child, signal.SIGKILL if how == "kill" else signal.SIGTERM)
    return said + zygote.answers()[0]


def damage(dice, root, step):
    """Flips a bit of a file of a step, or cuts it short."""
    files = [path for path in (Path(root) / str(step) / "state").rglob("*") if path.is_file()]
    file = dice.choice(sorted(files))
    data = bytearray(file.read_bytes())
    if dice.random() < 0.5:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    else:
        del data[dice.randrange(len(data)) :]
    file.write_bytes(data)


@pytest.mark.slow
def test_a_run_survives_whatever_comes(zygote, ram_path, trial):
    """No acknowledged step is lost but by damage, and then the one before it is there."""
    seed = random.randrange(1 << 32)
    dice, root, acked, rounds = random.Random(seed), ram_path / "run", 0, 0
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        rounds += 1
        how = dice.choice(["kill", "kill", "stop", "fail", "fail", "tear", "damage"])
        with trial("33", f"round {rounds} of seed {seed}: {how}"):
            if how == "damage" and root.is_dir():
                before = zygote.run(children.look, root)["steps"]
                if len(before) > 1:
                    damage(dice, root, before[-1])
                    acked = before[-2]
            said = train(zygote, dice, root, how)
            acked = max([acked, *(word["saved"] for word in said if "saved" in word)])
            if root.is_dir():
                there = zygote.run(children.look, root)
                assert max(there["steps"], default=0) >= acked, (acked, there, said)
                acked = max(there["steps"], default=0)
    assert rounds > 1
