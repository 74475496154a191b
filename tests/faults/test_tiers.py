"""Kills of runs with a local disk in front: what was acknowledged, in either place, restores."""

from __future__ import annotations

import itertools
import shutil

import pytest

from tests.faults import tier_children

STEPS = 2
# The changes are divided: a test has a limit of time, and every fifth one shows the most.
PARTS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))]


@pytest.mark.parametrize("part", PARTS)
def test_a_kill_at_any_change_loses_nothing_acknowledged(zygote, ram_path, trial, part):
    """On the same host the newest saved step restores, on another one the newest durable one."""
    found = {"saved": [], "durable": []}
    for n in itertools.count(1 + part, len(PARTS)):
        here, elsewhere = ram_path / str(n), ram_path / f"{n} elsewhere"
        here.mkdir()
        zygote.start(tier_children.train, here, STEPS, ["kill", n])
        words, status = zygote.answers()
        told = {key: value for word in words for key, value in word.items()}
        shutil.copytree(here, elsewhere, ignore=lambda *_: ["local"])
        for place, newest in ((here, "saved"), (elsewhere, "durable")):
            with trial("39", f"a kill at change {n}, then the newest {newest} step"):
                again = zygote.run(tier_children.resume, place, newest == "saved")
                assert again["found"] >= told.get(newest, 0)
                assert again["problems"] == []
                found[newest].append(again["found"])
            shutil.rmtree(place)
        if status == 0:
            break
    assert n > 60
    assert all({*steps} == {0, 1, 2} for steps in found.values())
