"""When a run saves: rules add up, clocks become steps, and all processes decide alike."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt import SavePolicy
from jaxckpt._run.schedule import FIRST_GUESS, Costs, Schedule

LAWS = settings(deadline=None, derandomize=True, max_examples=100)


def run(policy, seconds, *, save_s=0.0, start_s=100.0):
    """Returns the steps that one process saves, given the times of steps, and `save_s` of saves.

    A save ends `save_s` after it began, in the background.
    """
    schedule, saved = Schedule(policy=policy, started_s=start_s), []
    now_s, busy_until_s = start_s, -math.inf
    for step, step_s in enumerate(seconds, 1):
        now_s += step_s
        decision = schedule.decide(step, now_s=now_s, busy=now_s < busy_until_s)
        assert decision.step == step
        assert decision.reason
        if decision.save:
            saved.append(step)
            busy_until_s = now_s + save_s
            schedule = schedule.saved(step, now_s=now_s)
    return saved


# --- rules that go by the step ------------------------------------------------------------------


rules = st.fixed_dictionaries(
    {},
    optional={
        "every_steps": st.integers(1, 12),
        "at_steps": st.lists(st.integers(0, 40), max_size=4),
        "first": st.booleans(),
        "when": st.sampled_from([lambda step: step > 30, lambda step: step % 7 == 3]),
        "every_seconds": st.floats(0.5, 20),
        "continuous": st.booleans(),
        "on_preemption": st.booleans(),
    },
)


def model(fields, seconds, save_s):
    """The same by the words of `SavePolicy`, rule by rule."""
    names = ("every_steps", "at_steps", "first", "when", "every_seconds", "continuous")
    wanted = {name: fields[name] for name in names if fields.get(name) not in (None, False)}
    saved, now_s, last_s = [], 0.0, 0.0
    for step, step_s in enumerate(seconds, 1):
        now_s += step_s
        rules = {
            "every_steps": lambda n, step=step: step % n == 0,
            "at_steps": lambda steps, step=step: step in steps,
            "first": lambda _: not saved,
            "when": lambda f, step=step: f(step),
            "every_seconds": lambda s, now_s=now_s, last_s=last_s: now_s - last_s >= s,
            "continuous": lambda _, now_s=now_s, last_s=last_s: (
                not saved or now_s >= last_s + save_s
            ),
        }
        if not wanted or any(rules[name](value) for name, value in wanted.items()):
            saved.append(step)
            last_s = now_s
    return saved


@settings(LAWS, max_examples=300)
@given(rules, st.lists(st.integers(0, 9), max_size=40), st.integers(0, 20))
def test_a_step_is_saved_if_any_rule_names_it(fields, seconds, save_s):
    """The union of the rules, whichever of them there are; no rule at all names every step."""
    saved = run(SavePolicy(**fields), seconds, save_s=save_s, start_s=0.0)

    assert saved == model(fields, seconds, save_s)


@pytest.mark.parametrize(
    "policy",
    [
        SavePolicy(),
        SavePolicy(on_preemption=True),
        SavePolicy(on_preemption=False),
        SavePolicy(first=False),
        SavePolicy(continuous=False),
    ],
)
def test_without_a_rule_every_call_saves(policy):
    """Neither `on_preemption` nor a flag that is off is a rule."""
    assert run(policy, [1, 1, 1]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (SavePolicy(every_steps=3), [3, 6]),
        (SavePolicy(at_steps=()), []),
        (SavePolicy(at_steps=[5, 2, 2]), [2, 5]),
        (SavePolicy(first=True), [1]),
        (SavePolicy(first=True, every_steps=4), [1, 4]),
        (SavePolicy(when=lambda step: step == 2), [2]),
        (SavePolicy(when=lambda step: None), []),
        (SavePolicy(every_seconds=2.5), [3, 6]),
        (SavePolicy(every_seconds=1000), []),
        (SavePolicy(every_seconds=4, every_steps=3), [3, 6]),
        (SavePolicy(continuous=True), [1, 4]),
        (SavePolicy(continuous=True, at_steps=[3]), [1, 3, 6]),
    ],
)
def test_what_each_rule_says(policy, steps):
    """Six steps of one second; a save takes three. A rule by the clock counts from any save."""
    assert run(policy, [1] * 6, save_s=3) == steps


def test_a_period_of_zero_is_never():
    """A config switches the saves off so; other rules still count."""
    for never in ({"every_steps": 0}, {"every_seconds": 0}, {"every_steps": 0, "every_seconds": 0}):
        policy = SavePolicy(**never)
        assert [step for step in range(50) if policy.matches(step)] == []
        assert policy.has_rules
        assert not policy.is_by_clock
        assert SavePolicy(**never, at_steps=[3]).matches(3)


def test_a_step_may_be_zero():
    """Step 0 is divisible by everything."""
    schedule = Schedule(policy=SavePolicy(every_steps=1000))

    decision = schedule.decide(0, now_s=0.0, busy=False)

    assert (decision.save, decision.reason) == (True, "every_steps=1000")


def test_a_decision_says_why():
    """The rule and its numbers, or what is not fulfilled."""
    policy = SavePolicy(every_steps=10, every_seconds=60)
    schedule = Schedule(policy=policy).saved(10, now_s=100.0)

    def reason(step, now_s):
        decision = schedule.decide(step, now_s=now_s, busy=False)
        return decision.save, decision.reason

    assert reason(20, 101.0) == (True, "every_steps=10")
    assert reason(21, 160.0) == (True, "60 s since the previous save")
    assert reason(21, 115.0) == (False, "15 of 60 s since the previous save")
    only_steps = Schedule(policy=SavePolicy(every_steps=10))
    decision = only_steps.decide(7, now_s=0.0, busy=False)
    assert decision.reason == "no rule matches: every_steps=10"


# --- auto: Young and Daly -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtbf_hours", "processes", "job_mtbf_s"),
    [
        (1, 1, 3600),
        (1, 2, 3600**2 / 7199),  # 1 / (1 - (1-p)^2) = 1 / (2p - p^2), p = 1/3600
        (10, 1, 36_000),
        (0.5, 2, 1800**2 / 3599),
        (1 / 3600, 5, 1),  # each fails every second, so the job does
        (1e-9, 1, 1),
    ],
)
def test_the_mtbf_of_a_job(mtbf_hours, processes, job_mtbf_s):
    """1/(1-(1-p)^N), by hand."""
    policy = SavePolicy.auto(mtbf_hours=mtbf_hours, processes=processes)

    assert policy.job_mtbf_s == pytest.approx(job_mtbf_s, rel=1e-9)


@LAWS
@given(st.integers(1, 10**6), st.integers(1, 2000))
def test_the_mtbf_of_a_job_is_not_lost_to_rounding(mtbf_hours, processes):
    """It equals the formula in exact fractions."""
    p = Fraction(1, mtbf_hours * 3600)

    policy = SavePolicy.auto(mtbf_hours=mtbf_hours, processes=processes)

    assert policy.job_mtbf_s == pytest.approx(float(1 / (1 - (1 - p) ** processes)), rel=1e-9)


@pytest.mark.parametrize(
    ("costs", "interval_s"),
    [
        (Costs(blocked_s=1, save_s=10, restore_s=0), 120),  # sqrt(2 * 1 * 7200)
        (Costs(blocked_s=9, save_s=10, restore_s=0), 360),
        (Costs(blocked_s=2, save_s=10, restore_s=2800), 200),  # sqrt(2 * 2 * 10000)
        (Costs(blocked_s=1, save_s=500, restore_s=0), 500),  # never shorter than a save
        (Costs(blocked_s=1), 120),
        (Costs(), 0),
    ],
)
def test_the_interval_that_loses_least(costs, interval_s):
    """sqrt(2 · cost · (MTBF + restart)), for a job that fails every two hours."""
    assert costs.interval_s(SavePolicy(job_mtbf_s=7200)) == pytest.approx(interval_s)


def test_the_shortest_interval_counts():
    """Time-based rules add up: the next save is at the soonest time that any rule gives."""
    costs = Costs(blocked_s=1, save_s=10)
    policy = SavePolicy(job_mtbf_s=7200, every_seconds=300)

    assert costs.interval_s(policy) == pytest.approx(120)
    assert costs.interval_s(replace(policy, every_seconds=60)) == 60
    assert costs.interval_s(replace(policy, continuous=True)) == 10
    assert costs.interval_s(SavePolicy(every_steps=1)) == math.inf


def test_auto_measures_first_and_then_waits():
    """The first call saves, to learn what that costs; the next is due after the interval."""
    schedule = Schedule(policy=SavePolicy(job_mtbf_s=7200), costs=Costs(save_s=10))

    def saves(step, now_s):
        return schedule.decide(step, now_s=now_s, busy=False).save

    assert saves(1, 0.0)
    schedule = schedule.saved(1, now_s=1000.0, blocked_s=1)
    assert not saves(2, 1119.0)
    assert saves(2, 1121.0)


def test_auto_takes_other_rules():
    """It takes the rules of `SavePolicy`."""
    policy = SavePolicy.auto(mtbf_hours=5, every_steps=3, on_preemption=False)

    assert (policy.every_steps, policy.on_preemption, policy.job_mtbf_s) == (3, False, 18_000)


# --- several processes --------------------------------------------------------------------------


def run_together(policy, seconds, *, count=3, saves_of=(), costs=Costs()):  # noqa: B008  # frozen
    """Returns the steps that a job of `count` processes saves, with clocks; all must decide alike.

    As in the manager, every process uses the costs that process 0 reports at a save. The clocks of
    the processes have nothing in common.
    """
    schedules = [
        Schedule(
            policy=policy,
            processes=count,
            started_s=-1e5 * index,
            costs=Costs(save_s=float(index)),
        )
        for index in range(count)
    ]
    saved, times_s, now_s = [], [], 50.0
    for step, step_s in enumerate(seconds, 1):
        now_s += step_s
        needs_pace = {schedule.needs_pace(step) for schedule in schedules}
        assert len(needs_pace) == 1
        if needs_pace.pop():
            agreed = replace(costs, step_s=(now_s - times_s[-1]) / (step - saved[-1]))
            schedules = [schedule.paced(agreed) for schedule in schedules]
        decisions = {
            schedule.decide(
                step,
                now_s=now_s * (index + 1) - 1e6 * index,
                busy=bool((step + index) % 2),
            )
            for index, schedule in enumerate(schedules)
        }
        assert len(decisions) == 1
        if decisions.pop().save or step in saves_of:
            agreed = costs
            if saved:
                agreed = replace(costs, step_s=(now_s - times_s[-1]) / (step - saved[-1]))
            schedules = [
                schedule.saved(step, now_s=now_s - 1e3 * index, agreed=agreed)
                for index, schedule in enumerate(schedules)
            ]
            saved.append(step)
            times_s.append(now_s)
    return saved, times_s


clock_rules = st.sampled_from(
    [
        SavePolicy(every_seconds=30),
        SavePolicy(every_seconds=5, every_steps=7),
        SavePolicy(every_seconds=0.001),
        SavePolicy(continuous=True),
        SavePolicy(job_mtbf_s=7200),
        SavePolicy(job_mtbf_s=7200, first=True, at_steps=[9, 10]),
        SavePolicy(every_steps=5),
    ]
)


@settings(LAWS, max_examples=300)
@given(
    clock_rules,
    st.lists(st.floats(0, 100), max_size=60),
    st.sets(st.integers(1, 60), max_size=5),
    st.builds(
        Costs,
        blocked_s=st.none() | st.floats(0, 5),
        save_s=st.none() | st.floats(0, 50),
        restore_s=st.none() | st.floats(0, 50),
    ),
)
def test_processes_that_were_told_the_same_decide_alike(policy, seconds, forced, costs):
    """This holds for any clocks, any durations of steps, and any extra saves."""
    run_together(policy, seconds, saves_of=forced, costs=costs)  # it compares them


@settings(LAWS, max_examples=40)
@given(st.floats(0.05, 10), st.floats(1, 500))
def test_a_steady_run_converges_to_the_interval(step_s, every_seconds):
    """Gaps grow by a factor until they are the interval, to one step, and stay so."""
    wanted = max(1, math.floor(every_seconds / step_s))
    steps = min(9 * wanted + 600, 15_000)

    saved, _ = run_together(SavePolicy(every_seconds=every_seconds), [step_s] * steps, count=2)

    gaps = [b - a for a, b in itertools.pairwise(saved)]
    assert saved[0] == 1
    assert all(b <= a * FIRST_GUESS for a, b in itertools.pairwise(gaps))
    assert all(abs(gap - wanted) <= 1 for gap in gaps[7:])


@settings(LAWS, max_examples=30)
@given(st.lists(st.floats(1, 4), min_size=50, max_size=50), st.integers(10, 300))
def test_an_uneven_run_saves_near_the_interval(seconds, every_seconds):
    """Steps that vary by a factor shift a save by that factor and one step, no more."""
    _, times_s = run_together(SavePolicy(every_seconds=every_seconds), seconds * 40, count=2)

    gaps_s = [b - a for a, b in itertools.pairwise(times_s)][5:]
    assert gaps_s
    assert min(gaps_s) >= every_seconds / 4 - 4
    assert max(gaps_s) <= every_seconds * 4 + 4


def test_the_second_gap_uses_the_time_of_the_first():
    """Steps of 1/16 s come to the interval of 1 s at the third save."""
    saved, _ = run_together(SavePolicy(every_seconds=1), [1 / 16] * 60)

    assert saved == [1, 9, 25, 41, 57]


def test_the_first_gap_of_long_steps_is_the_interval():
    """As soon as the first save has ended; else the second save comes eight steps later."""
    policy = SavePolicy(every_seconds=60)

    saved, _ = run_together(policy, [30.0] * 8, costs=Costs(save_s=1.0))
    unmeasured, _ = run_together(policy, [30.0] * 12)

    assert saved == [1, 3, 5, 7]
    assert unmeasured == [1, 9, 11]


def test_a_run_whose_steps_become_slow_comes_back_to_the_interval():
    """A measurement too short, as while jax only dispatches, is mended by the next ones."""
    seconds = [0.001] * 20 + [1.0] * 2000

    _, times_s = run_together(SavePolicy(every_seconds=60), seconds)

    gaps_s = [b - a for a, b in itertools.pairwise(times_s)]
    assert max(gaps_s) <= 60 * FIRST_GUESS * 2
    assert all(gap_s == pytest.approx(60, abs=1.5) for gap_s in gaps_s[-10:])


def test_saves_by_the_step_do_not_bring_more_by_the_clock():
    """Twenty saves by the clock, as many by the step, and the first saves of the run."""
    policy = SavePolicy(every_seconds=1000, every_steps=1001)

    saved, _ = run_together(policy, [1.0] * 20_000)

    assert len(saved) <= 20 + 20 + 5


# --- fields that are wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("every_steps", -1, ValueError),
        ("every_steps", 1.0, TypeError),
        ("every_steps", True, TypeError),
        ("every_steps", "5", TypeError),
        ("every_seconds", -0.5, ValueError),
        ("every_seconds", math.nan, ValueError),
        ("every_seconds", math.inf, ValueError),
        ("every_seconds", "60", TypeError),
        ("every_seconds", False, TypeError),
        ("job_mtbf_s", math.nan, ValueError),
        ("job_mtbf_s", -1, ValueError),
        ("job_mtbf_s", [], TypeError),
        ("at_steps", [1, -1], ValueError),
        ("at_steps", [1.5], ValueError),
        ("at_steps", "12", ValueError),
        ("at_steps", [True], ValueError),
        ("at_steps", 5, TypeError),
        ("first", 1, TypeError),
        ("on_preemption", "yes", TypeError),
        ("continuous", 0, TypeError),
        ("when", 5, TypeError),
        ("may_differ", 3, TypeError),
        ("may_differ", ["params", 3], TypeError),
    ],
)
def test_a_wrong_field_is_named(name, value, error):
    """At once, when the policy is made."""
    with pytest.raises(error, match=rf"SavePolicy: {name}"):
        SavePolicy(**{name: value})


def test_steps_may_be_numbers_of_numpy():
    """They become ints, so that policies compare."""
    wanted = SavePolicy(at_steps=(0, 20, 30))

    assert SavePolicy(at_steps=np.array([0, 20, 30])) == wanted
    assert SavePolicy(at_steps=[np.int32(0), np.uint8(20), 30]) == wanted
    with pytest.raises(ValueError, match="at_steps must be ints of 0 or more"):
        SavePolicy(at_steps=np.array([0.5]))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("mtbf_hours", 0, ValueError),
        ("mtbf_hours", -1, ValueError),
        ("mtbf_hours", math.nan, ValueError),
        ("mtbf_hours", math.inf, ValueError),
        ("mtbf_hours", "1000", TypeError),
        ("processes", 0, ValueError),
        ("processes", 1.5, TypeError),
        ("every_step", 5, TypeError),
    ],
)
def test_a_wrong_argument_of_auto_is_named(name, value, error):
    """As the fields are."""
    with pytest.raises(error, match=name):
        SavePolicy.auto(**{"mtbf_hours": 10, name: value})
    with pytest.raises(ValueError, match="processes=5 needs mtbf_hours="):
        SavePolicy.auto(processes=5)
