"""Retention: each rule agrees with a slow model, and laws hold for every policy."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt import CheckpointManager, KeepPolicy
from jaxckpt.types import StepInfo

LAWS = settings(deadline=None, derandomize=True, max_examples=300)
NOW_S = 100.0

values = st.one_of(
    st.integers(-3, 3),
    st.floats(-3, 3),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, True, False, None, "1", [1], 10**400]),
)
metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), values, max_size=2)


@st.composite
def histories(draw):
    """Steps of a run, mostly in the order of their times; a clock may have gone back."""
    numbers = draw(st.lists(st.integers(0, 60), max_size=12, unique=True).map(sorted))
    times = draw(
        st.lists(st.integers(0, 100), min_size=len(numbers), max_size=len(numbers)).flatmap(
            lambda times: st.sampled_from([times, sorted(times)])
        )
    )
    return [
        StepInfo(
            step=step, saved_s=float(saved_s), metrics=draw(metrics), pinned=draw(st.booleans())
        )
        for step, saved_s in zip(numbers, times, strict=True)
    ]


policies = st.builds(
    KeepPolicy,
    last=st.none() | st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 20),
    every_seconds=st.none() | st.sampled_from([0.5, 10, 25.0]),
    best=st.none() | st.integers(1, 4),
    metric=st.sampled_from(["loss", "acc"]),
    mode=st.sampled_from(["min", "max"]),
    newer_than_s=st.none() | st.sampled_from([1, 30.0]),
    when=st.none() | st.just(lambda info: info.step % 5 == 4),
)


def is_number(value):
    if value is None or isinstance(value, (bool, str, list)):
        return False
    return value == value


def is_better(a, b, policy):
    """Returns whether `a` ranks before `b`: by its metric, then as the newer one."""
    x, y = a.metrics[policy.metric], b.metrics[policy.metric]
    if x == y:
        return a.step > b.step
    return x < y if policy.mode == "min" else x > y


def model(infos, policy):
    """The steps that stay, by the words of `KeepPolicy`, the slow way."""
    kept = {info.step for info in infos if info.pinned}
    kept |= {max((info.step for info in infos), default=-1)} - {-1}
    rules = [policy.last, policy.every_steps, policy.every_seconds, policy.best]
    if all(rule is None for rule in [*rules, policy.newer_than_s, policy.when]):
        return {info.step for info in infos}
    valued = [info for info in infos if is_number(info.metrics.get(policy.metric))]
    others = [info for info in infos if info not in valued]
    if policy.best is not None and not valued:
        return {info.step for info in infos}
    anchor_s = None
    for info in infos:
        newer = sum(other.step > info.step for other in infos)
        if info in valued:
            better = sum(is_better(other, info, policy) for other in valued)
        else:
            better = len(valued) + sum(other.step > info.step for other in others)
        is_spaced = anchor_s is None or not 0 <= info.saved_s - anchor_s < (
            policy.every_seconds or 0
        )
        if is_spaced:
            anchor_s = info.saved_s
        if (
            (policy.last is not None and newer < policy.last)
            or (policy.every_steps is not None and info.step % policy.every_steps == 0)
            or (policy.every_seconds is not None and is_spaced)
            or (policy.best is not None and better < policy.best)
            or (policy.newer_than_s is not None and info.saved_s >= NOW_S - policy.newer_than_s)
            or (policy.when is not None and policy.when(info))
        ):
            kept.add(info.step)
    return kept


LAWS_OF_A_POLICY = []


def law(check):
    """Adds a law, which has to hold for each history and policy that is drawn."""
    LAWS_OF_A_POLICY.append(check)
    return check


@law
def what_stays_is_what_any_rule_keeps(infos, policy, kept):
    """The union of the rules, pinned steps and the newest; with no rule all."""
    assert set(kept) == model(infos, policy)


@law
def the_order_of_the_steps_does_not_matter(infos, policy, kept):
    """Neither for what stays nor for why."""
    shuffled = Random(len(infos)).sample(infos, len(infos))

    assert policy.kept(shuffled, now_s=NOW_S) == kept


@law
def the_newest_stays(infos, policy, kept):
    """This holds for any policy; the steps that stay are a subset of the existing ones."""
    assert set(kept) <= {info.step for info in infos}
    assert not infos or kept[infos[-1].step].startswith("newest")
    assert all(kept.values())


@law
def applied_again_to_what_stayed_it_keeps_all(infos, policy, kept):
    """A second start deletes no more: no rule counts on steps that are gone."""
    stayed = [info for info in infos if info.step in kept]

    assert set(policy.kept(stayed, now_s=NOW_S)) == set(kept)


@law
def the_ranking_is_total(infos, policy, kept):
    """Each step that has the metric comes before all that are worse, or equal and older."""
    ranked = policy.ranked(infos)

    assert {info.step for info in ranked} == {
        info.step for info in infos if is_number(info.metrics.get(policy.metric))
    }
    for before, after in itertools.pairwise(ranked):
        assert is_better(before, after, policy)


@law
def each_step_that_stays_has_a_reason(infos, policy, kept):
    """`why` names the very steps that `kept` keeps, in order, and each has a reason."""
    why = policy.why(infos, now_s=NOW_S)

    assert list(why) == sorted(kept)
    assert all(why.values())


@LAWS
@given(histories(), policies)
def test_laws_of_every_policy(infos, policy):
    """Each law above, for the same histories and policies."""
    kept = policy.kept(infos, now_s=NOW_S)
    for check in LAWS_OF_A_POLICY:
        check(infos, policy, kept)


@LAWS
@given(st.lists(st.floats(0, 30), max_size=40), st.sampled_from([5, 20.0]))
def test_steps_that_are_kept_by_the_clock_stay(gaps_s, every_seconds):
    """Deleting after each save leaves the same as deciding once at the end."""
    policy, saved_s, infos, stayed = KeepPolicy(every_seconds=every_seconds), 0.0, [], []
    for step, gap_s in enumerate(gaps_s):
        saved_s += gap_s
        infos.append(StepInfo(step=step, saved_s=saved_s))
        kept = policy.kept([*stayed, infos[-1]], now_s=saved_s)
        stayed = [info for info in [*stayed, infos[-1]] if info.step in kept]

    assert {info.step for info in stayed} == set(policy.kept(infos, now_s=saved_s))
    for before, after in itertools.pairwise(stayed[:-1]):
        assert after.saved_s - before.saved_s >= every_seconds


def test_a_clock_that_went_back_deletes_nothing_by_that():
    """A step that seems older than the one before says nothing about their distance: it stays."""
    times = [0.0, 1.0, 20.0, 5.0, 6.0, 30.0]
    infos = [StepInfo(step=step, saved_s=saved_s) for step, saved_s in enumerate(times)]

    assert set(KeepPolicy(every_seconds=10).kept(infos, now_s=0.0)) == {0, 2, 3, 5}


def test_a_step_from_the_future_is_new():
    """A clock that was ahead for a while deletes nothing."""
    infos = [StepInfo(step=1, saved_s=1e12), StepInfo(step=2, saved_s=0.0)]

    assert set(KeepPolicy(newer_than_s=60).kept(infos, now_s=1e9)) == {1, 2}


def of_losses(*losses):
    """Steps 1, 2, ... with these losses; None is a step without one."""
    return [
        StepInfo(step=step, saved_s=0.0, metrics={} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("losses", "best", "mode", "kept"),
    [
        ([3, 1, 2, 9], 1, "min", {2, 4}),
        ([3, 1, 2, 9], 2, "min", {2, 3, 4}),
        ([3, 9, 2, 1], 1, "max", {2, 4}),
        ([1, 1, 1, 5], 1, "min", {3, 4}),  # of equal ones the newer
        ([1.0, True, 1, 5], 1, "min", {3, 4}),
        ([math.nan, None, True, "0", 7, 8], 1, "min", {5, 6}),
        ([math.nan, None], 1, "min", {1, 2}),
        ([math.inf, -math.inf, 0, 5], 1, "min", {2, 4}),
        ([math.inf, -math.inf, 0, 5], 1, "max", {1, 4}),
        ([math.inf, math.nan, None, 5], 2, "min", {1, 4}),
        ([math.nan, None, 7, 5], 3, "min", {2, 3, 4}),
        ([math.nan, None, 7, 5], 9, "min", {1, 2, 3, 4}),
        ([-0.0, 0.0, 5], 1, "min", {2, 3}),
        ([2**60 + 1, 2**60, 5], 1, "max", {1, 3}),
        ([10**400, 1.5, 5], 1, "max", {1, 3}),
    ],
)
def test_the_best_steps(losses, best, mode, kept):
    """NaN, None, bool and text rank last; infinities do rank. The newest stays too, or all."""
    policy = KeepPolicy(best=best, metric="loss", mode=mode)

    assert set(policy.kept(of_losses(*losses), now_s=0.0)) == kept


def test_why_a_step_stays():
    """All rules that keep it, in words."""
    infos = of_losses(5, 1, 7, 3)
    policy = KeepPolicy(last=2, every_steps=4, best=1, metric="loss")

    assert policy.why(infos, now_s=0.0) == {
        2: ("best 1 by loss",),
        3: ("last 2",),
        4: ("newest", "last 2", "every 4 steps"),
    }
    assert KeepPolicy().why([infos[0], replace(infos[1], pinned=True)], now_s=0.0) == {
        1: ("no rule, so all",),
        2: ("newest", "pinned", "no rule, so all"),
    }


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (KeepPolicy(every_seconds=900), "every 900 s"),
        (KeepPolicy(newer_than_s=0.5), "newer than 0.5 s"),
        (KeepPolicy(when=lambda info: info.step == 1), "when(...)"),
    ],
)
def test_every_rule_has_words(policy, why):
    """This includes time-based rules and the user's own."""
    infos = [StepInfo(step=1, saved_s=NOW_S), StepInfo(step=2, saved_s=NOW_S)]

    assert policy.why(infos, now_s=NOW_S)[1] == (why,)


def test_no_steps_keep_nothing():
    """An empty run."""
    assert KeepPolicy(last=3).kept([], now_s=0.0) == {}


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"last": 0}, ValueError, r"KeepPolicy: last"),
        ({"last": 1.5}, TypeError, r"KeepPolicy: last"),
        ({"last": True}, TypeError, r"KeepPolicy: last"),
        ({"every_steps": -3}, ValueError, r"KeepPolicy: every_steps"),
        ({"every_steps": "3"}, TypeError, r"KeepPolicy: every_steps"),
        ({"every_seconds": math.nan}, ValueError, r"KeepPolicy: every_seconds"),
        ({"every_seconds": -1}, ValueError, r"KeepPolicy: every_seconds"),
        ({"newer_than_s": 0}, ValueError, r"KeepPolicy: newer_than_s"),
        ({"newer_than_s": "1 h"}, TypeError, r"KeepPolicy: newer_than_s"),
        ({"best": 0, "metric": "loss"}, ValueError, r"KeepPolicy: best"),
        ({"best": 2}, ValueError, "metric"),
        ({"metric": 5}, TypeError, r"KeepPolicy: metric"),
        ({"mode": "least"}, ValueError, r"KeepPolicy: mode"),
        ({"when": 3}, TypeError, r"KeepPolicy: when"),
        ({"move_to": 3}, TypeError, r"KeepPolicy: move_to must be a name for a directory"),
        *(
            ({"move_to": name}, ValueError, r"KeepPolicy: move_to")
            for name in ("", "..", "a/b", "7", "ckpt_7", "metadata", "_jaxckpt.owner", "a\0")
        ),
    ],
)
def test_a_wrong_field_is_named(fields, error, named):
    """At once, when the policy is made."""
    with pytest.raises(error, match=named):
        KeepPolicy(**fields)


def test_a_save_asks_once_which_steps_stay(tmp_path):
    """However many steps there are: the answer may be as long."""
    asked = []
    with CheckpointManager(tmp_path, keep=KeepPolicy(last=20)) as manager:
        for step in range(9):
            manager.save(step, {"a": 1}).result()
        manager._directory.committed(
            StepInfo(step=8, saved_s=0.0), stay=lambda: asked.append(1) or ()
        )

    assert len(asked) <= 2
