"""Laws that hold for every `Processes`, and workers that die, hang or arrive late."""

from __future__ import annotations

import faulthandler
import threading
import time
import traceback

import pytest

from jaxckpt.errors import CheckpointTimeout, ProcessesDisagree
from jaxckpt.multihost import Distributed, current

LONG_S = 60.0  # never reached


def let_the_last_be_late(us):
    if us.index == us.count - 1:
        time.sleep(0.2)


def law_gather_gives_every_value_to_all(us):
    """Everybody gets the value of everybody, by index."""
    got = us.within(LONG_S).gather("values", {"index": us.index, "twice": [us.index] * 2})

    assert got == [{"index": i, "twice": [i, i]} for i in range(us.count)]


def law_agree_gives_the_value_of_process_0(us):
    """Everybody gets what process 0 says, whatever they say themselves."""
    assert us.within(LONG_S).agree("value", {"index": us.index}) == {"index": 0}


def law_nobody_leaves_a_barrier_before_all_are_there(us):
    """The last to arrive comes before the first to leave, though one is late."""
    let_the_last_be_late(us)
    arrived = time.monotonic()  # one clock for all processes of a machine
    us.within(LONG_S).gather("meet", None)
    left = time.monotonic()

    times = us.within(LONG_S).gather("times", [arrived, left])

    assert max(arrived for arrived, _ in times) <= min(left for _, left in times)


def law_values_come_back_as_json_on_all(us):
    """The sender too gets the value as changed by JSON."""
    value = {1: (1, 2.5, None, True), "inf": float("inf")}

    assert us.within(LONG_S).agree("json", value) == {
        "1": [1, 2.5, None, True],
        "inf": value["inf"],
    }
    assert us.within(LONG_S).gather("json", value)[0]["1"] == [1, 2.5, None, True]


def law_what_is_not_json_is_refused_before_it_is_sent(us):
    """A value that JSON cannot hold is the caller's mistake."""
    with pytest.raises(TypeError):
        us.within(LONG_S).gather("not json", object())
    with pytest.raises(TypeError):
        us.within(LONG_S).agree("not json", object())


def law_a_name_used_again_is_a_new_meeting(us):
    """No round sees a value of an earlier one of the same name."""
    for n in range(10):
        assert us.within(LONG_S).gather("again", [n, us.index]) == [[n, i] for i in range(us.count)]
        assert us.within(LONG_S).agree("again", n) == n
        us.within(LONG_S).gather("again", None)


def law_no_name_is_part_of_another(us):
    """Slashes and numbers in a name are only letters."""
    names = ["a", "a/1", "a/1/from", "a/1/from/0", "a%2F1", "", "/", "."]
    for name in names:
        assert us.within(LONG_S).agree(name, name) == name
    for name in reversed(names):
        assert us.within(LONG_S).gather(name, name) == [name] * us.count


def law_names_and_values_may_be_any_text(us):
    """Unicode, control characters, half of a surrogate pair."""
    for text in ["Schritt 7/ß", "保存", "🙂", "a\nb\tc\0d"]:
        assert us.within(LONG_S).gather(text, text) == [text] * us.count
    assert us.within(LONG_S).agree("lone", "\ud800") == "\ud800"


def law_values_may_be_large(us):
    """A few megabytes from each pass whole."""
    mine = str(us.index) * (3 << 20)

    got = us.within(LONG_S).gather("large", mine)

    assert [(value[0], len(value)) for value in got] == [(str(i), 3 << 20) for i in range(us.count)]
    assert us.within(LONG_S).agree("large", mine) == "0" * (3 << 20)


def law_a_slow_reader_loses_nothing(us):
    """Process 0 may be many rounds ahead."""
    let_the_last_be_late(us)

    assert [us.within(LONG_S).agree(f"ahead {n}", n) for n in range(50)] == list(range(50))


def law_threads_of_one_process_meet_independently(us):
    """A thread that waits does not hold up another, in whatever order they come."""
    got = {}

    def meet(thread):
        for n in range(10):
            got[thread, n] = us.within(LONG_S).gather(f"thread {thread}/{n}", [thread, n])

    order = [0, 1, 2] if us.index % 2 else [2, 1, 0]
    threads = [threading.Thread(target=meet, args=(thread,)) for thread in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert got == {(t, n): [[t, n]] * us.count for t in range(3) for n in range(10)}


def law_a_missing_process_is_named_on_all(us):
    """All who wait learn who is missing, it learns it when it comes, and then all is well again."""
    last = us.count - 1
    for meet in verbs(us):
        us.within(LONG_S).gather("start", None)
        if us.index == last:
            us.within(LONG_S).agree("the others gave up", None)
        missed(meet, "missing", [last])
        if us.index != last:
            us.within(LONG_S).agree("the others gave up", None)
        assert us.within(LONG_S).gather("after", us.index) == list(range(us.count))


def law_all_who_are_missing_are_named(us):
    """Only process 1 comes in time."""
    missing = [index for index in range(us.count) if index != 1]
    us.within(LONG_S).gather("start", None)
    if us.index != 1:
        us.within(LONG_S).gather("process 1 gave up", None)
    missed(verbs(us)[0], "alone", missing)
    if us.index == 1:
        us.within(LONG_S).gather("process 1 gave up", None)


def law_process_0_may_be_the_missing_one(us):
    """It also learns that it came too late, in an `agree` too."""

    def agree(name):
        us.within(short_s(us)).agree(name, None)

    for meet in [*verbs(us), agree]:
        us.within(LONG_S).gather("start", None)
        if us.index == 0:
            us.within(LONG_S).gather("the others gave up", None)
        missed(meet, "without 0", [0])
        if us.index != 0:
            us.within(LONG_S).gather("the others gave up", None)


def law_a_judge_that_fails_ends_the_round_on_all(us):
    """Process 0 raises its error at once, and the others are told of it before the time limit."""

    def judge(values):
        raise ZeroDivisionError(values)

    def give_no_json(values):
        return judge

    for bad, kind in ((judge, ZeroDivisionError), (give_no_json, TypeError)):
        with pytest.raises(ProcessesDisagree if us.index else kind) as caught:
            us.within(600.0).gather("judged", us.index, bad)  # longer than a test may take
        if us.index:
            assert caught.value.failures[0].startswith(f"{kind.__name__}: ")
            assert "judged: process 0 failed: " in str(caught.value)
    assert us.within(LONG_S).agree("next", us.index) == 0


def short_s(us):
    """Reached in each round that somebody misses; threads are quicker than processes."""
    return 1.0 if isinstance(us, Distributed) else 0.3


def verbs(us):
    """The rounds that wait for everybody."""
    return [
        lambda name: us.within(short_s(us)).gather(name, us.index),
        lambda name: us.within(short_s(us)).gather(name, None),
    ]


def missed(meet, name, missing):
    """Checks that a round fails, in time, and names who is missing."""
    start = time.monotonic()
    with pytest.raises(CheckpointTimeout, match=name) as caught:
        meet(name)
    assert list(caught.value.missing) == missing
    assert time.monotonic() - start < 5


LAWS = {name: law for name, law in globals().items() if name.startswith("law_")}
# Nobody can be missing where there is one.
NEEDS_PEERS = {name for name in LAWS if "missing" in name}


def obey(me):
    """Tries all laws on a real job; returns the traceback of each one that is broken."""
    us = current()
    assert (us.index, us.count) == (me.index, me.count)
    assert current() is us
    return {name: tried(law, us) for name, law in LAWS.items()}


def tried(law, us):
    try:
        law(us)
    except Exception:
        return traceback.format_exc()
    return None


def devices(me):
    """Returns which process drives each device."""
    import jax

    us = current()
    return [us.process_of(device) for device in jax.devices()]


def lose_one(me, loser):
    """Everybody meets; then `loser` never comes again. Returns what a gather says then."""
    # At an abort it reads the stacks of threads that run on, and may crash over that.
    faulthandler.disable()
    us = current()
    us.within(LONG_S).gather("start", None)
    me.reach("started")
    if me.index == loser:
        me.wait_for("never")
    me.wait_for("lost")
    return said(lambda: us.within(2.0).gather("after", me.index))


def die_in_the_middle(me, loser):
    """`loser` kills itself while the others are already waiting for it."""
    us = current()
    us.within(LONG_S).gather("start", None)
    if me.index == loser:
        time.sleep(0.3)
        me.die()
    return said(lambda: us.within(2.0).gather("after", me.index))


def said(meet):
    start = time.monotonic()
    try:
        meet()
    except CheckpointTimeout as error:
        return {"missing": error.missing, "text": str(error), "s": time.monotonic() - start}
    return None


def fail_one(me):
    print(f"hello from {me.index}")
    if me.index == 1:
        raise ValueError("planted")


def hang(me):
    me.reach("hanging")
    me.wait_for("never")


def add_up(me, numbers, path):
    """Sums over all devices of the job, so that the collectives are known to work."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    ones = jax.make_array_from_callback((16,), sharding, lambda index: jnp.ones(16)[index])
    return [float(jax.jit(jnp.sum)(ones)), sum(numbers), path]
