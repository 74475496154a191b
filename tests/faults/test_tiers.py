"""Kills of runs with a local disk in front: what was acknowledged, in either place, restores."""

from __future__ import annotations

import itertools
import shutil

import pytest

from tests.faults import tier_children
from tests.run.test_identity import as_before

STEPS = 2
# The changes are divided: a test has a limit of time, and every fifth one shows the most.
PARTS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))]
TENTHS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]


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


@pytest.mark.parametrize("part", TENTHS)
@pytest.mark.parametrize("run", ["A", "B"], ids=["an upgrade", "another run"])
def test_a_kill_mixes_up_no_runs(zygote, ram_path, trial, run, part):
    """Run A has steps in a local directory, there without an id; it goes on, or run B begins."""
    before = ram_path / "before"
    before.mkdir()
    for _ in range(2):
        zygote.run(tier_children.train_beside, before, "A")
    as_before(before)
    for n in itertools.count(1 + part, len(TENTHS)):
        here = ram_path / str(n)
        shutil.copytree(before, here)
        zygote.start(tier_children.train_beside, here, run, ["kill", n])
        words, status = zygote.answers()
        told = {key: value for word in words for key, value in word.items()}
        least = {"A": 2, "B": 0} | {run: told.get("saved", {"A": 2, "B": 0}[run])}
        with trial("46", f"run {run} killed at change {n} beside the steps of run A"):
            for name in "AB":
                again = zygote.run(tier_children.resume_beside, here, name)
                assert again["found"] in (least[name], least[name] + 1)
                assert again["problems"] == []
        shutil.rmtree(here)
        if status == 0:
            break
    assert n > 200
