"""Orbax's policies save and keep the same steps through the drop-in."""

from __future__ import annotations

import datetime
import time

import pytest
from orbax.checkpoint._src.checkpoint_managers import preservation_policy as keeps
from orbax.checkpoint._src.checkpoint_managers import save_decision_policy as saves

from jaxckpt.orbax import policies
from jaxckpt.types import StepInfo

STEPS = [
    StepInfo(step=n, saved_s=1000.0 + 10 * n, metrics={"loss": n * 7 % 5} if n % 4 else {})
    for n in range(1, 13)
]


def loss(metrics):
    return metrics["loss"]


class Odd:
    """A policy of the program's own."""

    def should_preserve(self, checkpoints, *, context):
        return [c.step % 2 == 1 for c in checkpoints]

    def should_save(self, step, previous_steps, *, context):
        return step.step % 2 == 1 and len(previous_steps) == len(STEPS)


@pytest.mark.parametrize(
    "make",
    [
        lambda k: k.LatestN(3),
        lambda k: k.LatestN(),
        lambda k: k.LatestN(0),
        lambda k: k.EveryNSeconds(25),
        lambda k: k.EveryNSteps(3),
        lambda k: k.EveryNSteps(5, False),
        lambda k: k.EveryNSteps(2, True, 3),
        lambda k: k.EveryNStepsClosest(5),
        lambda k: k.EveryNStepsClosest(5, 2),
        lambda k: k.CustomSteps([2, 5]),
        lambda k: k.BestN(get_metric_fn=loss, n=2),
        lambda k: k.BestN(get_metric_fn=loss, n=2, reverse=True),
        lambda k: k.BestN(get_metric_fn=loss, n=2, keep_checkpoints_without_metrics=False),
        lambda k: k.LatestDuration(datetime.timedelta(hours=1)),
        lambda k: k.AnyPreservationPolicy([k.LatestN(2), k.EveryNSteps(4)]),
        lambda k: k.AnyPreservationPolicy(
            [k.LatestN(1), k.AnyPreservationPolicy([k.LatestN(4), k.EveryNSteps(7, False)])]
        ),
        lambda k: k.AnyPreservationPolicy(
            [k.BestN(get_metric_fn=f, n=1) for f in (loss, lambda m: -loss(m))]
        ),
        lambda k: k.PreserveAll(),
        lambda k: k.AnyPreservationPolicy([Odd(), k.LatestN(1)]),
    ],
    ids=map(str, range(19)),
)
def test_preservation(make):
    """Orbax's objects and the drop-in's keep the same steps, and jaxckpt the newest besides."""
    infos = policies.infos(STEPS)
    context = policies.PreservationContext()
    wanted = [*make(keeps).should_preserve(infos, context=context)]

    assert [*make(policies).should_preserve(infos, context=context)] == wanted
    for policy in (make(keeps), make(policies)):
        kept = policies.keep_policy(policy, lambda: STEPS).kept(STEPS, now_s=time.time())
        assert [info.step in kept for info in STEPS] == [*wanted[:-1], True]


@pytest.mark.parametrize("name", ["EveryNSteps", "EveryNStepsClosest"])
def test_an_interval_of_zero_is_refused(name):
    """By Orbax's policies and the drop-in's."""
    for library in (keeps, policies):
        with pytest.raises(ValueError):  # noqa: PT011  # Orbax's words differ
            getattr(library, name)(0).should_preserve(policies.infos(STEPS), context=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: s.FixedIntervalPolicy(3),
        lambda s: s.SpecificStepsPolicy({2, 5}),
        lambda s: s.AnySavePolicy([s.FixedIntervalPolicy(3), s.SpecificStepsPolicy(range(4))]),
        lambda s: s.AnySavePolicy([s.FixedIntervalPolicy(2), s.FixedIntervalPolicy(5)]),
        lambda s: s.AnySavePolicy([]),
        lambda s: s.PreemptionCheckpointingPolicy(),
        lambda s: Odd(),
    ],
    ids=map(str, range(7)),
)
def test_save_decisions(make):
    """Orbax's objects and the drop-in's save the same steps."""
    context = policies.DecisionContext(is_saving_in_progress=False, reached_preemption=False)
    infos = policies.infos(STEPS)
    wanted = [
        n for n, i in enumerate(infos, 1) if make(saves).should_save(i, infos, context=context)
    ]

    for library in (saves, policies):
        policy = policies.save_policy(make(library), lambda: STEPS)
        assert [n for n in range(1, 13) if policy.matches(n)] == wanted


def test_rules_by_the_clock_and_for_the_first_call():
    """They become the fields of jaxckpt's policy."""
    for library in (saves, policies):
        rules = [library.InitialSavePolicy(), library.PreemptionCheckpointingPolicy()]
        steps = [STEPS, []]  # the run loses them: then the next step is due
        policy = policies.save_policy(
            library.AnySavePolicy(rules), list, is_new=lambda steps=steps: not steps.pop(0)
        )
        assert policy.on_preemption
        assert (policy.matches(1), policy.matches(2)) == (None, "when")

        rule = library.ContinuousCheckpointingPolicy(minimum_interval_secs=60)
        policy = policies.save_policy(rule, list)
        assert (policy.every_seconds, policy.on_preemption, policy.matches(1)) == (
            60,
            False,
            "when",
        )
        assert policies.save_policy(library.ContinuousCheckpointingPolicy(), list).continuous
