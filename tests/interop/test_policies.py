"""The policies of Orbax and of jaxckpt choose the same steps, as the page about Orbax says."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt import KeepPolicy, SavePolicy
from jaxckpt._run.schedule import Schedule
from jaxckpt.types import StepInfo

ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint import v1  # noqa: E402

saves = v1.training.save_decision_policies
keeps = v1.training.preservation_policies

NOW = datetime.datetime.now(tz=datetime.UTC)


@dataclass
class Info:
    """The facts about a step that Orbax's policies get."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None = field(default_factory=dict)


# --- when to save ------------------------------------------------------------------------------

SAVES = {
    "FixedIntervalPolicy": (saves.FixedIntervalPolicy(3), SavePolicy(every_steps=3)),
    "SpecificStepsPolicy": (saves.SpecificStepsPolicy([2, 5]), SavePolicy(at_steps=(2, 5))),
    "InitialSavePolicy": (saves.InitialSavePolicy(), SavePolicy(first=True)),
    "AnySavePolicy": (
        saves.AnySavePolicy([saves.FixedIntervalPolicy(4), saves.InitialSavePolicy()]),
        SavePolicy(every_steps=4, first=True),
    ),
}


def orbax_saves(policy: Any, steps: list[int]) -> list[int]:
    context = saves.DecisionContext(
        is_saving_in_progress=False,
        reached_preemption=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(),
    )
    saved: list[Info] = []
    for step in steps:
        info = Info(step, NOW)
        if policy.should_save(info, saved, context=context):
            saved.append(info)
    return [info.step for info in saved]


def our_saves(policy: SavePolicy, steps: list[int]) -> list[int]:
    schedule, saved = Schedule(policy=policy), []
    for step in steps:
        decision = schedule.decide(step, now_s=0.0, busy=False)
        if decision.save:
            saved.append(step)
            schedule = schedule.saved(step, now_s=0.0)
    return saved


@pytest.mark.parametrize("name", SAVES)
@given(steps=st.sets(st.integers(0, 30)).map(sorted))
def test_a_run_is_saved_at_the_same_steps(name, steps):
    """For a new run with any steps."""
    theirs, ours = SAVES[name]

    assert our_saves(ours, steps) == orbax_saves(theirs, steps)


# --- what to keep ------------------------------------------------------------------------------


def loss_of(metrics: dict[str, Any]) -> float:
    return metrics["loss"]


KEEPS = {
    "LatestN": (keeps.LatestN(2), KeepPolicy(last=2)),
    "LatestDuration": (
        keeps.LatestDuration(datetime.timedelta(hours=3, minutes=30)),
        KeepPolicy(newer_than_s=3.5 * 3600),
    ),
    "EveryNSteps": (keeps.EveryNSteps(3), KeepPolicy(every_steps=3)),
    "EveryNSeconds": (keeps.EveryNSeconds(7200), KeepPolicy(every_seconds=7200)),
    "CustomSteps": (
        keeps.CustomSteps([1, 7]),
        KeepPolicy(when=lambda info: info.step in (1, 7)),
    ),
    "BestN": (
        keeps.BestN(get_metric_fn=loss_of, n=2),
        KeepPolicy(best=2, metric="loss", mode="max"),
    ),
    "BestN, reverse": (
        keeps.BestN(get_metric_fn=loss_of, reverse=True, n=2),
        KeepPolicy(best=2, metric="loss"),
    ),
    "PreserveAll": (keeps.PreserveAll(), KeepPolicy()),
    "AnyPreservationPolicy": (
        keeps.AnyPreservationPolicy([keeps.LatestN(1), keeps.EveryNSteps(4)]),
        KeepPolicy(last=1, every_steps=4),
    ),
}


@st.composite
def runs(draw) -> list[Info]:
    """Steps of a run, with the hours since each was saved, and losses of which some are equal."""
    steps = sorted(draw(st.sets(st.integers(0, 20), min_size=1)))
    hours = draw(st.lists(st.integers(0, 9), min_size=len(steps), max_size=len(steps)))
    return [
        Info(step, NOW - datetime.timedelta(hours=ago), {"loss": draw(st.integers(0, 4)) / 4})
        for step, ago in zip(steps, sorted(hours, reverse=True), strict=True)
    ]


@pytest.mark.parametrize("name", KEEPS)
@given(run=runs())
def test_the_same_steps_are_kept(name, run):
    """And ours keep the newest one, always."""
    theirs, ours = KEEPS[name]

    flags = theirs.should_preserve(run, context=keeps.PreservationContext())
    infos = [StepInfo(step=i.step, saved_s=i.time.timestamp(), metrics=i.metrics) for i in run]
    kept = ours.kept(infos, now_s=NOW.timestamp())

    wanted = {info.step for info, flag in zip(run, flags, strict=True) if flag}
    assert set(kept) == wanted | {run[-1].step}


def test_a_metric_that_is_not_there_keeps_a_step_with_orbax_alone():
    """By default; here it takes another rule."""
    run = [Info(1, NOW, None), Info(2, NOW, {"loss": 0.1}), Info(3, NOW, {"loss": 0.2})]
    infos = [StepInfo(step=i.step, saved_s=0.0, metrics=i.metrics or {}) for i in run]

    best = keeps.BestN(get_metric_fn=loss_of, reverse=True, n=1)
    flags = best.should_preserve(run, context=keeps.PreservationContext())
    ours = KeepPolicy(best=1, metric="loss")
    both = KeepPolicy(best=1, metric="loss", when=lambda info: "loss" not in info.metrics)

    assert flags == [True, True, False]
    assert set(ours.kept(infos, now_s=0.0)) == {2, 3}
    assert set(both.kept(infos, now_s=0.0)) == {1, 2, 3}
