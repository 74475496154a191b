"""The laws of `Processes` (in `tests/workers/multihost.py`) for one, simulated and real ones."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import CheckpointTimeout, ProcessesDisagree, StepExists
from jaxckpt.multihost import (
    Distributed,
    Group,
    Processes,
    Single,
    _service,
    check_alike,
    current,
    lead,
    meet,
    playing,
)
from jaxckpt.testing import MemoryService, ProcessKilled, simulate
from tests.multiprocess import JobFailed
from tests.workers import multihost as worker

LAWS = sorted(worker.LAWS)


@pytest.mark.parametrize("law", [law for law in LAWS if law not in worker.NEEDS_PEERS])
def test_one_process_obeys(law):
    """One process alone keeps every law that needs no peers."""
    worker.LAWS[law](Single())


@pytest.mark.multihost
@pytest.mark.parametrize("law", LAWS)
def test_simulated_processes_obey(law):
    """Threads keep the same laws as processes."""
    simulate(4, worker.LAWS[law])


@pytest.mark.multihost
@pytest.mark.parametrize(
    ("error", "others"),
    [(StepExists("there"), "StepExists"), (ValueError("no"), "ProcessesDisagree")],
)
def test_where_process_0_leads_all_raise_if_it_fails(error, others):
    """Process 0 its own error; the others the same one, if all would see the same on the disk."""

    def fail():
        raise error

    def raised(us):
        try:
            lead(us.within(60), "name", fail, where="/run/1")
        except Exception as caught:
            return type(caught).__name__, str(caught), getattr(caught, "failures", None)

    own, *heard = simulate(3, raised)

    assert own[0] == type(error).__name__
    assert heard[0] == heard[1]
    assert heard[0][0] == others
    if others == "ProcessesDisagree":
        assert heard[0][1:] == ("/run/1: process 0 failed: ValueError: no", {0: "ValueError: no"})


@pytest.mark.multihost
@pytest.mark.parametrize("apart", [False, True])
def test_the_leaders_of_groups_act_for_a_job(apart):
    """Process 0 in a place of all, else each process; all hear the verdict, or what failed."""

    def act(us, failing=()):
        group = Group.apart(us) if apart else Group.together(us)
        with group.leading("act", max, where="there") as led:
            if group.leads:
                if us.index in failing:
                    raise KeyError(us.index)
                led.value = 10 + us.index
        facts = group.job is us, group.follows, group.part, group.common("/a")
        return group.leads, led.value, facts

    def act_and_fail(us):
        with pytest.raises((KeyError, ProcessesDisagree)) as caught:
            act(us, failing=(0, 2))
        return caught.type.__name__

    found = simulate(3, act)
    failed = simulate(3, act_and_fail)

    if not apart:
        facts = True, False, None, "/a"
        assert found == [(i == 0, 10, facts) for i in range(3)]
        assert failed == ["KeyError", "ProcessesDisagree", "ProcessesDisagree"]
        return
    alike = "the disks of 3 processes"
    assert found == [(True, 12, (True, i > 0, (i, 3), alike)) for i in range(3)]
    assert failed == ["KeyError", "ProcessesDisagree", "KeyError"]


@pytest.mark.multihost
def test_a_meeting_names_all_that_failed():
    """One that failed raises its own error, the others who and why; its value is there."""

    def report(us):
        problem = KeyError(us.index) if us.index else None
        met = meet(us.within(60), "name", us.index * 10, problem, mark="odd" * (us.index == 2))
        with pytest.raises((KeyError, ProcessesDisagree)) as caught:
            met.check(problem, "/run/1", "Try again.")
        return met.values, met.marks, type(caught.value).__name__, str(caught.value)

    first, *failed = simulate(3, report)

    assert first[:3] == ({1: 10, 2: 20}, {1: "", 2: "odd"}, "ProcessesDisagree")
    assert first[3].splitlines() == [
        "/run/1:",
        "  process 1: KeyError: 1",
        "  process 2: KeyError: 2",
        "Try again.",
    ]
    assert [kind for *_, kind, _ in failed] == ["KeyError", "KeyError"]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def broken(request, run_processes):
    """The laws that real processes broke, with tracebacks, by process: one job for all laws."""
    done = run_processes("multihost:obey", count=request.param, devices_per_process=1)
    return [process.result for process in done]


@pytest.mark.multihost
@pytest.mark.parametrize("law", LAWS)
def test_real_processes_obey(law, broken):
    """Processes over JAX's coordination service keep the laws."""
    assert [tracebacks[law] for tracebacks in broken] == [None] * len(broken)


@pytest.mark.multihost
def test_another_limit_makes_no_other_processes():
    """They are equal, as caches need; rounds of a name go on counting, and so do those to die."""

    def gather(us):
        limits = [us.within(20), us, us.within(30)]
        assert {us} == {*limits}
        assert [one.timeout_s for one in limits] == [20, 1200, 30]
        return [one.gather("again", n) for n, one in enumerate(limits[:: 1 - 2 * us.index])]

    assert simulate(2, gather) == [[[0, 0], [1, 1], [2, 2]]] * 2
    assert simulate(1, gather, kill={0: 2}) == [None]
    assert Single() == Single().within(5)
    assert Single().within(5).timeout_s == 5


def test_current_is_single_in_a_job_of_one():
    """Without `jax.distributed` there is no process to wait for."""
    assert isinstance(current(), Single)


def test_import_costs_no_jax():
    """The command line can import the package without JAX."""
    code = "import sys, jaxckpt.multihost, jaxckpt.testing; assert 'jax' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_kinds_are_processes():
    """The three fit the protocol."""
    kinds: list[Processes] = [Single(), Distributed(index=0, count=1, service=MemoryService())]

    assert [kind.count for kind in kinds] == [1, 1]


@pytest.mark.multihost
def test_old_keys_are_deleted():
    """A long job does not fill the coordinator: what all have read goes."""

    def many_rounds(us):
        for n in range(100):
            us.within(30).agree(f"{n}", n)
            us.within(30).gather(f"{n}", n)
        return len(us.service.entries)

    assert max(simulate(3, many_rounds)) < 20


@pytest.mark.multihost
def test_a_round_that_failed_is_deleted_when_all_know():
    """A late process still finds out; after that nothing is left."""

    def fail_once(us):
        worker.law_a_missing_process_is_named_on_all(us)
        for n in range(3):
            us.within(30).gather(f"{n}", None)
        return [key for key in us.service.entries if "missing" in key]

    assert simulate(3, fail_once) == [[]] * 3


@pytest.mark.multihost
@pytest.mark.parametrize("alone", [0, 1, 2])
def test_a_call_that_one_process_made_alone_spoils_no_later_one(alone):
    """The others would wait for each other in rounds of different numbers for ever."""

    def call_alone_once(us):
        if us.index == alone:
            with pytest.raises(CheckpointTimeout):
                us.within(0.2).gather("restore", "alone")
        us.within(30).gather("next", None)
        return [us.within(30).gather("restore", f"{us.index} {n}") for n in range(3)]

    found = simulate(3, call_alone_once)

    assert found == [[[f"{i} {n}" for i in range(3)] for n in range(3)]] * 3


@pytest.mark.multihost
@pytest.mark.parametrize("seed", range(5))
def test_no_process_succeeds_where_another_fails(seed):
    """At the edge of the time limit all get the values or all the same error."""
    count, timeout_s = 4, 0.02

    def race(us):
        dice = random.Random(f"{seed} {us.index}")
        outcomes = []
        for n in range(20):
            us.within(30).gather(f"start {n}", None)
            time.sleep(dice.choice([0, 0.5, 0.9, 1.0, 1.1]) * timeout_s)
            try:
                outcomes.append(us.within(timeout_s).gather(f"{n}", us.index))
            except CheckpointTimeout as error:
                outcomes.append(error.missing)
        return outcomes

    outcomes = simulate(count, race)

    assert outcomes == [outcomes[0]] * count


class Counting:
    """A service that counts calls, and the bytes that each process sends and is sent."""

    def __init__(self, service, count):
        self.service, self.calls, self.moved = service, [], [0] * count

    def of(self, index):
        """Returns the service as one process sees it."""
        return CountedBy(self, index)


class CountedBy:
    def __init__(self, counting, index):
        self._counting, self._index = counting, index

    def __getattr__(self, verb):
        def call(*args, **kwargs):
            found = getattr(self._counting.service, verb)(*args, **kwargs)
            sent = [arg for arg in args if isinstance(arg, bytes)]
            got = found.values() if isinstance(found, dict) else [found]
            sizes = [len(data) for data in (*sent, *got) if isinstance(data, bytes)]
            self._counting.calls.append(verb)
            self._counting.moved[self._index] += sum(sizes)
            return found

        return call


def counted(count, act):
    """Runs simulated processes; returns what their service counted."""
    counting = Counting(MemoryService(), count)

    def run(us):
        mine = Distributed(index=us.index, count=count, service=counting.of(us.index))
        with playing(mine):
            return act(mine)

    simulate(count, run, timeout_s=120)
    return counting


@pytest.mark.multihost
def test_gather_costs_few_messages():
    """Calls to the service grow with the number of processes, not with its square."""
    calls = counted(32, lambda us: us.within(30).gather("x", us.index)).calls

    # Each process puts its value and reads the outcome. Process 0 puts that, and reads the values:
    # those that have come all at once.
    assert calls.count("put") == 32 + 1
    assert 31 + 1 <= calls.count("wait") <= 31 + 31
    assert calls.count("under") <= 5


@pytest.mark.multihost
def test_process_0_asks_for_few_values_if_all_are_there():
    """One, and then a listing; the rest is not waited for one by one."""
    service = MemoryService()
    waits = Counting(service, 200)
    for index in range(1, 200):
        service.put(f"jaxckpt/gather/x/1/from/{index}", b"[]\n7", timeout_s=1)

    values = Distributed(index=0, count=200, service=waits.of(0)).within(5).gather("x", 7)

    assert values == [7] * 200
    assert waits.calls == ["put", "wait", "under", "put"]


def run_once(root):
    """Saves and restores by functions and a manager."""

    def act(us):
        jaxckpt.save(f"{root}/a", {"w": np.arange(4), "n": 1})
        jaxckpt.restore(f"{root}/a")
        with jaxckpt.CheckpointManager(f"{root}/run") as manager:
            manager.save(1, {"w": np.arange(4)})
            manager.wait_until_finished()
            manager.restore()

    return act


@pytest.mark.multihost
def test_bytes_of_a_process_do_not_grow_with_the_processes(tmp_path):
    """Each sends its report and hears a verdict; only process 0 hears all."""
    found = {n: counted(n, run_once(tmp_path / str(n))).moved for n in (2, 4, 8, 16)}

    for n, (first, *others) in found.items():
        assert max(others) < 1.05 * found[2][1]
        assert first < 3 * sum(others) + found[2][0], n


@pytest.mark.multihost
def test_processes_with_other_fields_differ():
    """Process 0 judges for all: an error of its own would leave the others waiting."""

    def compare(us):
        fields = {"keep": None} if us.index else {"keep.last": 2}
        with pytest.raises(ProcessesDisagree, match=r"keep\.last=None, process 0 has keep\.last=2"):
            check_alike(us.within(20), "a manager", fields, hint="")

    simulate(2, compare)


@pytest.mark.multihost
def test_a_few_of_many_failed_processes_are_named():
    """The message goes to all; it says how many more there are."""

    def fail(us):
        problem = ValueError("x" * 100) if us.index else None
        met = meet(us.within(60), "name", None, problem)
        with pytest.raises(ProcessesDisagree) as caught:
            met.check(None, "/run/1")
        return caught.value

    errors = simulate(40, fail)

    assert {len(error.failures) for error in errors} == {8}
    assert {str(error).splitlines()[-1] for error in errors} == {"  and 31 more processes"}


def test_a_service_that_is_gone_says_what_to_do():
    """An error of the client becomes one of ours, with the cause: it names process 0 anywhere."""

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("UNAVAILABLE: Socket closed")

    one, zero = (
        Distributed(index=index, count=2, service=_service._Service(Gone())).within(5)
        for index in (1, 0)
    )

    for call in (one.gather, zero.gather, one.agree, zero.agree):
        with pytest.raises(ProcessesDisagree, match=r"Socket closed(.|\n)*restart") as caught:
            call("x", None)
        assert caught.value.failures == {0: "UNAVAILABLE: Socket closed"}


def test_a_service_that_hangs_does_not_hang_us():
    """Calls of the client without a time limit get one."""
    release = threading.Event()

    class Hanging:
        def key_value_set_bytes(self, key, value):
            release.wait(30)

    us = Distributed(index=0, count=2, service=_service._Service(Hanging()))

    with pytest.raises(CheckpointTimeout, match="did not answer") as caught:
        us.within(0.1).gather("x", None)
    release.set()

    assert caught.value.missing == (0,)


def test_a_call_works_while_the_interpreter_shuts_down():
    """When it starts no threads any more, such as in a finalizer."""
    program = """
from jaxckpt.multihost import Distributed, _service

class Client:
    def key_value_set_bytes(self, key, value):
        pass

class Last:
    us = Distributed(index=0, count=1, service=_service._Service(Client()))

    def __del__(self):
        print(self.us.within(5).gather("x", 7))

last = Last()
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[7]\n", "")


@pytest.mark.multihost
def test_a_long_wait_names_the_process_that_did_not_make_the_call(caplog):
    """In one warning before the time limit, and the error says what to look for."""

    def meet_without(us):
        if us.index == 1:
            return None
        with pytest.raises(CheckpointTimeout) as caught:
            us.within(1.0).gather("x", us.index, where="saving /run/5")
        return str(caught.value)

    errors = simulate(3, meet_without, warn_after_s=0.1)

    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == (
        "saving /run/5: process 0 of 3 has waited 0.1 s for process 1, which is slow, hangs, was "
        "killed, or did not make this call: every process has to"
    )
    for error in (errors[0], errors[2]):
        assert error.startswith("saving /run/5: process")
        assert "missing process 1\n" in error
        assert "or did not make this call: every process has to" in error


@pytest.mark.multihost
def test_a_long_wait_names_process_0(caplog):
    """Each of the others logs that it is missing, and nobody does who has not come."""

    def meet_without(us):
        if us.index:
            with pytest.raises(CheckpointTimeout):
                us.within(1.0).gather("x", us.index)

    simulate(3, meet_without, warn_after_s=0.1)

    found = sorted(record.getMessage().partition(", which")[0] for record in caplog.records)
    assert found == [f"x: process {n} of 3 has waited 0.1 s for process 0" for n in (1, 2)]


@pytest.mark.multihost
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_simulated_death(rounds):
    """A killed process takes part in so many rounds; the next one names it to the others."""

    def meet(us):
        for n in range(4):
            try:
                us.within(0.3).gather(f"{n}", us.index)
            except CheckpointTimeout as error:
                return n, error.missing
        return None

    assert simulate(3, meet, kill={1: rounds}) == [(rounds, (1,)), None, (rounds, (1,))]


@pytest.mark.multihost
def test_simulated_death_runs_no_error_handler():
    """A kill is not an Exception; `die` is one wherever the function likes."""
    handled = []

    def die(us):
        try:
            us.die()
        except Exception:
            handled.append(us.index)
        except ProcessKilled:
            with pytest.raises(ProcessKilled):
                us.within(1).gather("x", None)
            raise

    assert simulate(2, die) == [None, None]
    assert handled == []


@pytest.mark.multihost
def test_simulate_raises_the_first_error_and_notes_the_others():
    """The cause comes first, not the time-out of a peer with a lower index."""

    def fail(us):
        if us.index == 2:
            raise ValueError("the cause")
        us.within(0.2).gather("x", None)

    with pytest.raises(ValueError, match="the cause") as caught:
        simulate(3, fail)

    assert len(caught.value.__notes__) == 3
    assert any("process 0 raised CheckpointTimeout" in note for note in caught.value.__notes__)


@pytest.mark.multihost
def test_simulate_shows_who_hangs_and_where():
    """A test that would hang fails with a stack."""
    release = threading.Event()

    def hang(us):
        if us.index == 1:
            release.wait(30)

    with pytest.raises(TimeoutError, match=r"process-1 is still running(.|\n)*in hang"):
        simulate(2, hang, timeout_s=0.2)
    release.set()


@pytest.mark.multihost
def test_simulated_processes_share_the_devices():
    """Each drives as many as the others, in order."""
    import jax

    got = simulate(4, lambda us: [us.process_of(device) for device in jax.devices()])

    assert got == [[0, 0, 1, 1, 2, 2, 3, 3]] * 4


@pytest.mark.multihost
def test_real_processes_know_who_drives_a_device(run_processes):
    """As JAX says it."""
    done = run_processes("multihost:devices", count=2, devices_per_process=2)

    assert [process.result for process in done] == [[0, 0, 1, 1]] * 2


@pytest.mark.multihost
def test_a_killed_process_is_named_before_jax_aborts(run_processes):
    """SIGKILL while the others wait: they get an error that names it, in time to act on it."""
    done = run_processes("multihost:die_in_the_middle", count=3, args=[2], check=False)

    assert [process.returncode for process in done] == [0, 0, -9]
    assert [process.result["missing"] for process in done[:2]] == [[2], [2]]
    assert "log" in done[1].result["text"]


@pytest.mark.multihost
@pytest.mark.parametrize("loser", [0, 1])
def test_a_stopped_process_is_named(start_processes, loser):
    """SIGSTOP is a hang; with process 0 the coordination service hangs too."""
    job = start_processes("multihost:lose_one", count=2, args=[loser])
    for index in range(2):
        job.wait_for(index, "started")

    job.stop(loser)
    job.release("lost")
    done = job.wait(check=False)

    survivor = done[1 - loser].result
    assert survivor["missing"] == [loser]
    assert survivor["s"] < 2 * 2.0 + 1


@pytest.mark.multihost
def test_jax_aborts_all_when_process_0_is_killed(start_processes):
    """No code of ours runs then, so a commit must not need any."""
    job = start_processes("multihost:lose_one", count=2, args=[0])
    for index in range(2):
        job.wait_for(index, "started")

    job.kill(0)
    done = job.wait(check=False)

    assert [process.returncode for process in done] == [-9, -6]


@pytest.mark.multihost
def test_a_job_computes_and_returns(run_processes, tmp_path):
    """Collectives work, arguments and results pass."""
    done = run_processes("multihost:add_up", count=2, args=[[1, 2], tmp_path])

    assert [process.result for process in done] == [[16.0, 3, str(tmp_path)]] * 2


@pytest.mark.multihost
def test_a_failed_job_shows_all_outputs(run_processes):
    """The test that started it fails with what each process printed."""
    with pytest.raises(JobFailed, match=r"(?s)hello from 0.*hello from 1.*ValueError: planted"):
        run_processes("multihost:fail_one", count=2, devices_per_process=1)


@pytest.mark.multihost
def test_a_hanging_job_is_killed_and_shows_where(start_processes):
    """At the time limit every process prints its stacks and ends."""
    job = start_processes("multihost:hang", count=2, devices_per_process=1)
    for index in range(2):
        job.wait_for(index, "hanging")
    job._deadline = 0  # as if the time were up

    with pytest.raises(JobFailed, match=r"(?s)ran out of time.*in hang.*in hang"):
        job.wait()

    assert all(process.poll() is not None for process in job.processes)
