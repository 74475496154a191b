"""Several real processes train with one manager each: together, with one missing, in turns."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import jaxckpt
from jaxckpt.format import names
from tests.multiprocess import Job
from tests.workers import manages as worker

pytestmark = pytest.mark.multihost

STEPS = 60
ROUNDS = ["costs", "written", "committed", "kept"]
PHASES = ["begin", "writing", "written", "renaming", "committed", "deleting"]


# --- training ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of 2 and of 4 processes: where, and what each process says of its own."""
    root = tmp_path_factory.mktemp("trained")
    roots = {count: root / f"by{count}" for count in (2, 4)}
    said = {}
    for count, path in roots.items():
        with Job(
            "manages:train", count=count, devices_per_process=8 // count, args=[path, STEPS]
        ) as job:
            said[count] = [done.result for done in job.wait()]
    return roots, said


@pytest.fixture(scope="module")
def gone_on(trained, tmp_path_factory):
    """Resumes each run in a job of the other size; returns the reports of its processes."""
    roots, _ = trained
    said = {}
    for saved_by, count in ((2, 4), (4, 2)):
        copy = tmp_path_factory.mktemp("copy") / "run"
        shutil.copytree(roots[saved_by], copy)
        with Job("manages:go_on", count=count, devices_per_process=8 // count, args=[copy]) as job:
            said[saved_by] = [done.result for done in job.wait()]
    return said


@pytest.mark.parametrize("count", [2, 4])
def test_all_processes_save_the_same_steps_by_step_and_by_the_clock(trained, count):
    """The clocks are the processes' own; the steps are not."""
    _, said = trained
    saved = [one["saved"] for one in said[count]]

    assert all(steps == saved[0] for steps in saved)
    assert {25, 50} <= set(saved[0])
    assert saved[0][0] == 1  # by the clock, before there is a measurement
    assert saved[0][1] <= 9


@pytest.mark.parametrize("count", [2, 4])
def test_a_save_takes_four_rounds_and_a_step_that_does_not_save_none(trained, count):
    """Rounds are for opening, for restoring, and for saves: one as the policy has a clock."""
    _, said = trained

    for one in said[count]:
        in_saves = [name for name in one["in saves"] if name != "pace"]  # once, after the first
        assert in_saves == [f"{n}/{w}" for n in one["saved"] for w in ROUNDS]
        assert len(one["in saves"]) == len(in_saves) + 1
        assert one["others"] == ["CheckpointManager", "open", "steps", "test trained"]
        assert one["asked"] == ["pace"]


@pytest.mark.parametrize("count", [2, 4])
def test_all_processes_see_what_is_kept(trained, count):
    """The last two steps and the best; every process knows the metrics."""
    roots, said = trained
    saved = said[count][0]["saved"]
    best = min(saved, key=lambda step: (abs(step - worker.BEST_AT), -step))
    kept = sorted({best, *saved[-2:]})

    for one in said[count]:
        assert one["kept"] == kept
        assert (one["best"], one["latest"]) == (best, saved[-1])
        assert one["total"] == worker.values_at(saved[-1])["split"].sum()
    check_root(roots[count], kept)


@pytest.mark.parametrize("saved_by", [2, 4])
def test_a_job_of_another_size_goes_on(gone_on, trained, saved_by):
    """Arrays are resharded; all get the same step; it saves on."""
    _, trained_said = trained
    newest = trained_said[saved_by][0]["saved"][-1]

    assert [one["step"] for one in gone_on[saved_by]] == [newest] * (6 - saved_by)
    assert [one["newest"] for one in gone_on[saved_by]] == [newest + 1] * (6 - saved_by)


@pytest.mark.parametrize("saved_by", [2, 4])
def test_data_of_another_number_of_processes_is_refused(gone_on, trained, saved_by):
    """The error names both counts; the states can be had as they are."""
    _, trained_said = trained
    count, newest = 6 - saved_by, trained_said[saved_by][0]["saved"][-1]

    for one in gone_on[saved_by]:
        assert one["refused"]["type"] == "TreeMismatch"
        assert f"{saved_by} processes" in one["refused"]["text"]
        assert f"there are {count}" in one["refused"]["text"]
        assert one["states"] == [{"given": newest, "process": i} for i in range(saved_by)]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_job_of_the_same_size_goes_on_with_its_data(trained, run_processes, count):
    """Each process gets the state of its own."""
    roots, said = trained
    newest = said[count][0]["saved"][-1]

    done = run_processes("manages:go_on_alike", count=count, args=[roots[count]])

    assert [one.result for one in done] == [{"step": newest, "given": newest}] * count


def test_what_others_wrote_before_process_0_began_is_kept(start_processes, tmp_path):
    """Process 0 takes what it finds of its own attempt for no leftover."""
    job = start_processes("manages:begin_late", count=2, devices_per_process=2, args=[tmp_path])

    job.wait_for(1, "written")
    job.release("begin")
    job.wait()

    check_root(tmp_path, [1])


# --- failing alone ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed_alone(run_processes, tmp_path_factory):
    """Returns the reports of three processes on the cases in `fail_alone`, and their directory."""
    root = tmp_path_factory.mktemp("failed")
    done = run_processes("manages:fail_alone", count=3, devices_per_process=2, args=[root])
    return root, [one.result for one in done]


@pytest.mark.parametrize(
    ("case", "own", "text"),
    [
        ("leaf 1", "UnsupportedLeaf", "extra"),
        ("leaf 0", "UnsupportedLeaf", "extra"),
        ("full 1", "SaveFailed", "No space left"),
        ("full 0", "SaveFailed", "No space left"),
    ],
)
def test_all_processes_hear_who_failed_alone(failed_alone, case, own, text):
    """It raises its own error, the others one that names it; the next save is whole."""
    _, results = failed_alone
    said = [result["words"][case] for result in results]
    loser = int(case[-1])

    for index, word in enumerate(said):
        assert word["type"] == (own if index == loser else "ProcessesDisagree")
        assert text in word["text"]
        if index != loser:
            assert word["named"] == [loser]
    assert [result["words"][f"after {case}"] for result in results] == [None] * 3


def test_a_step_that_one_failed_to_save_is_not_there(failed_alone):
    """All see the same steps, and each is whole."""
    root, results = failed_alone

    assert [result["steps"] for result in results] == [[6, 12, 18, 24]] * 3
    check_root(root, [6, 12, 18, 24])


@pytest.mark.parametrize(
    "case",
    [
        "leaf 1",
        "leaf 0",
        "full 1",
        "full 0",
    ],
)
def test_a_failed_save_leaves_no_bytes(failed_alone, case):
    """Nor does one that process 0 refused while the others wrote."""
    _, results = failed_alone

    assert [result["left"][case] for result in results] == [[]] * 3


def test_one_who_failed_alone_keeps_to_the_schedule_of_the_others(run_processes, tmp_path):
    """With time-based rules too, all processes continue to save the same steps."""
    done = run_processes(
        "manages:fail_by_the_clock", count=2, devices_per_process=2, args=[tmp_path], check=False
    )

    first, second = [one.result for one in done]
    assert (first["failed"], second["failed"]) == ("ProcessesDisagree", "UnsupportedLeaf")
    assert first["due"] == second["due"]
    assert len(first["due"]) > 3
    assert first["closed"] is second["closed"] is None


def test_one_who_could_not_save_when_told_to_stop_does_what_the_others_do(
    start_processes, tmp_path
):
    """Either all of them try again at the next step, or none."""
    job = start_processes(
        "manages:fail_when_told", count=2, devices_per_process=2, args=[tmp_path, 100_000]
    )

    wait_for_all(job, [0, 1], "training")
    job.processes[0].send_signal(signal.SIGTERM)
    first, second = [one.result for one in job.wait(check=False)]

    assert first == second


# --- losing one -------------------------------------------------------------------------------


def where_of(phase, victim):
    """Returns which process pauses: after `written`, only process 0 acts."""
    return victim if phase in ("begin", "writing") else 0


def cases(counts):
    """Returns every phase and victim; of a larger job, or late in the other process, it is slow."""
    late = PHASES[2::2] + PHASES[5:]

    def marks(*case):
        count, phase, victim = case
        return [pytest.mark.slow] if count > 2 or (victim and phase in late) else []

    return [
        pytest.param(count, phase, victim, marks=marks(count, phase, victim))
        for count, victims in counts.items()
        for phase in PHASES
        for victim in victims
    ]


@pytest.mark.faults
@pytest.mark.parametrize(("count", "phase", "victim"), cases({2: [0, 1], 4: [0, 1, 3]}))
def test_a_process_is_killed(start_processes, ram_path, count, phase, victim):
    """The others end, or name the missing process; a smaller job resumes from a complete step."""
    job = start_processes(
        "manages:lose",
        count=count,
        devices_per_process=8 // count,
        args=[ram_path, [("lost", phase, where_of(phase, victim))], 2.0],
    )

    job.release("lost go")
    job.wait_for(where_of(phase, victim), "lost")
    job.kill(victim)
    job.release("lost on")
    job.release("last save")
    done = job.wait(check=False)

    for one in done:
        if one.index == victim:
            assert one.result is None
        elif one.result is None:  # JAX ends the others when process 0 is gone
            assert victim == 0
            assert one.returncode != 0
        else:
            said = one.result["words"][0]["lost"] or one.result["after"]
            assert said["type"] in ("CheckpointTimeout", "ProcessesDisagree")
            assert victim in said["named"]
    whole = check_root(ram_path)
    is_before = phase in PHASES[:2] or (victim == 0 and phase in PHASES[:4])
    assert whole[-1] == (1 if is_before else 2)
    check_that_a_job_of_one_goes_on(ram_path, whole[-1])


def rounds_of_stops(victims, phases):
    return [(f"{phase}-{victim}", phase, victim) for victim in victims for phase in phases]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("count", "rounds"),
    [
        (2, rounds_of_stops([1], ["writing", "renaming"]) + rounds_of_stops([0], PHASES[::2])),
        pytest.param(2, rounds_of_stops([1, 0], PHASES), marks=pytest.mark.slow),
        pytest.param(4, rounds_of_stops([1, 3, 0], PHASES[::2]), marks=pytest.mark.slow),
    ],
    ids=["some", "all of two", "some of four"],
)
def test_a_process_hangs(start_processes, ram_path, count, rounds):
    """The others hear in time who is missing; when it is back, the next save is one of all."""
    timeout_s = 2.0
    job = start_processes(
        "manages:lose",
        count=count,
        devices_per_process=8 // count,
        args=[ram_path, [(n, phase, where_of(phase, v)) for n, phase, v in rounds], timeout_s],
        timeout_s=110,
    )

    for name, phase, victim in rounds:
        others = [index for index in range(count) if index != victim]
        job.release(f"{name} go")
        job.wait_for(where_of(phase, victim), name)
        job.stop(victim)
        job.release(f"{name} on")
        wait_for_all(job, others, f"{name} over")
        check_root(ram_path)
        job.resume(victim)
        wait_for_all(job, [victim], f"{name} over")
        check_root(ram_path)
    job.release("last save")
    done = job.wait()

    results = [one.result for one in done]
    for at, (_, phase, victim) in enumerate(rounds):
        for index, word in enumerate(result["words"][at] for result in results):
            assert word["good"] is None
            is_waited_for = phase in PHASES[:2] or victim == 0
            if index != victim and is_waited_for:
                assert word["lost"]["type"] == "CheckpointTimeout"
                assert word["lost"]["named"] == [victim]
                assert word["lost"]["s"] < 4 * timeout_s
            elif index != victim:
                assert word["lost"] is None
    assert all(result["after"] is result["closed"] is None for result in results)
    last = results[0]["last"]
    check_root(ram_path, [last])
    check_that_a_job_of_one_goes_on(ram_path, last)


def wait_for_all(job, indices, point):
    for index in indices:
        job.wait_for(index, point)


def test_a_larger_job_goes_on_after_a_kill(start_processes, ram_path):
    """Four processes resume a run of two, one of which was killed in the middle of a save."""
    job = start_processes("manages:lose", count=2, args=[ram_path, [("lost", "written", 0)], 2.0])
    job.release("lost go")
    job.wait_for(0, "lost")
    job.kill(0)
    job.wait(check=False)

    larger = start_processes(
        "manages:lose", count=4, devices_per_process=2, args=[ram_path, [], 20.0]
    )
    larger.release("last save")
    done = larger.wait()

    assert [one.result["after"] for one in done] == [None] * 4
    assert [one.result["last"] for one in done] == [2] * 4
    assert sorted(os.listdir(ram_path)) == ["2", names.LEDGER, names.LOCK, names.OWNER, names.RUN]
    check_root(ram_path, [2])


def check_root(root, wanted=None):
    """Fails unless every step that looks committed is complete; returns these steps."""
    known = (names.RUN, names.LOCK, names.OWNER, names.LEDGER, names.DOOMED)
    entries = [
        name for name in os.listdir(root) if not names.is_temporary(name) and name not in known
    ]
    steps = sorted(map(int, entries))
    for step in steps:
        path = Path(root, str(step))
        try:
            assert jaxckpt.verify(path).ok
            worker.check_state(jaxckpt.restore(path), step)
        except jaxckpt.CheckpointNotFound:
            if path.exists():  # else the policy of the run has deleted it meanwhile
                raise
    assert wanted is None or steps == wanted
    return steps


def check_that_a_job_of_one_goes_on(root, newest):
    """Here: restores the newest, saves on, and leaves nothing but steps."""
    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        state, step = manager.restore_or(worker.make_init())
        worker.check_state(state, step)
        assert step == newest
        for step in (newest + 1, newest + 2):
            manager.save(step, worker.state_at(step))
    assert check_root(root) == [newest + 1, newest + 2]
    left = {str(newest + 1), str(newest + 2), names.RUN, names.LOCK, names.OWNER, names.LEDGER}
    assert set(os.listdir(root)) == left


# --- another job ------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["begin", "writing", "written", "renaming"])
def test_a_job_that_wakes_up_after_another_has_taken_over_cannot_save(
    start_processes, ram_path, phase
):
    """The new job's steps stay; each save of the old job raises an error that names the new one."""
    job = start_processes(
        "manages:be_replaced", count=2, devices_per_process=2, args=[ram_path, phase]
    )
    job.wait_for(0, "paused")
    job.stop(0)

    with jaxckpt.CheckpointManager(ram_path) as manager:
        state, step = manager.restore_or(worker.make_init())
        worker.check_state(state, 1)
        for step in (2, 3):
            manager.save(step, worker.state_at(step))
            manager.wait_until_finished()
        job.resume(0)
        job.release("on")
        done = job.wait()
        manager.save(4, worker.state_at(4))

    for one in done:
        assert one.result["closed"] is None
        other_job = f"another job (process {os.getpid()} "
        assert other_job in one.result["2"]["text"]
        assert one.result["3"]["type"] in ("SaveFailed", "ProcessesDisagree")
        assert other_job in one.result["3"]["text"]
    check_root(ram_path, [1, 2, 3, 4])
    with jaxckpt.CheckpointManager(ram_path):
        assert sorted(os.listdir(ram_path)) == [
            "1",
            "2",
            "3",
            "4",
            names.LEDGER,
            names.LOCK,
            names.OWNER,
            names.RUN,
        ]


def test_a_job_that_wakes_up_before_another_has_saved_keeps_the_run(start_processes, ram_path):
    """Its steps are whole; the new job finds them, and saves the first step after them."""
    job = start_processes(
        "manages:be_replaced", count=2, devices_per_process=2, args=[ram_path, "renaming"]
    )
    job.wait_for(0, "paused")
    job.stop(0)

    with jaxckpt.CheckpointManager(ram_path) as manager:
        assert manager.restore_or(worker.make_init())[1] == 1
        assert any("running job" in problem for problem in manager.problems)
        job.resume(0)
        job.release("on")
        done = job.wait()
        assert manager.save(2, worker.state_at(2)) is None
        assert manager.restore_or(worker.make_init())[1] == 3
        manager.save(4, worker.state_at(4))

    assert all(one.result == {"2": None, "3": None, "closed": None} for one in done)
    check_root(ram_path, [1, 2, 3, 4])


def test_a_job_that_wakes_up_past_its_last_look_does_not_keep_the_owner_from_saving(
    start_processes, ram_path
):
    """The new job is in the middle of the same step when the old job continues with its rename."""
    job = start_processes(
        "manages:be_replaced", count=2, devices_per_process=2, args=[ram_path, "renaming"]
    )
    job.wait_for(0, "paused")
    job.stop(0)
    done = []

    def before(verb, path):
        if not done and worker.phase_of(verb, path, 0) == "written":
            job.resume(0)
            job.release("on")
            done.extend(job.wait())

    with jaxckpt.CheckpointManager(ram_path) as manager:
        manager.restore_or(worker.make_init())
        worker.watch(manager, before)
        handle = manager.save(2, worker.state_at(2))
        handle.result()

    assert [one.result["2"] is not None for one in done] == [True, True]


# --- being told to stop -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "told", "number"),
    [
        (2, 1, signal.SIGTERM),
        (2, 0, signal.SIGUSR1),
        (4, 2, signal.SIGUSR1),
        pytest.param(2, 0, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, 1, signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(4, 0, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(4, 3, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_process_saves_one_step_in_all(
    start_processes, tmp_path, count, told, number
):
    """Once, whole; reached_preemption is true everywhere from that step on; all exit with 0."""
    job = start_processes(
        "manages:train_until_told", count=count, devices_per_process=2, args=[tmp_path, 100_000]
    )

    wait_for_all(job, range(count), "training")
    job.processes[told].send_signal(number)
    results = [one.result for one in job.wait()]

    step = results[0]["step"]
    assert 5 <= step < 100_000
    for result in results:
        assert result["saved"] == [1, step]
        assert (result["step"], result["why"]) == (step, "preemption")
        assert (result["again"], result["later"]) == ([False, False], True)
    # The program's own handler of before is called too.
    called = [index == told and number == signal.SIGUSR1 for index in range(count)]
    assert [result["handled"] for result in results] == called
    check_root(tmp_path, [1, step])


@pytest.mark.parametrize(
    ("asks", "before"),
    [
        ([51, 52], 0),  # a resumed job that is told while it compiles
        ([60, 70, 80], 1),  # `save` is called at every tenth step only
        ([60, 50, 51], 2),
        ([5_000_000_000, 5_000_100_000], 1),  # tokens
    ],
)
def test_the_next_call_after_a_signal_hears_it_whatever_the_steps(
    run_processes, tmp_path, asks, before
):
    """jax itself counts each step, from 1 on."""
    done = run_processes("manages:be_told", count=2, args=[tmp_path, asks, before])

    expected = {"reached": [index >= before for index in range(len(asks))], "all": [asks[before]]}
    assert [one.result for one in done] == [expected, expected]


# --- ending without closing -------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "timeout_s"), [([3, 3], 60), ([3, 2], 4)])
def test_the_end_of_the_processes_waits_for_their_saves(
    start_processes, tmp_path, steps, timeout_s
):
    """Before JAX shuts down; if one leaves early, the other does not wait for ever."""
    job = start_processes(
        "manages:leave_open",
        count=2,
        devices_per_process=2,
        args=[tmp_path, steps, timeout_s],
        fresh=True,
    )

    done = job.wait(check=False)

    # The step without its other process fails, or does not finish in time.
    assert done[0].returncode in ((0, 1) if steps == [3, 2] else (0,)), done[0].stdout
    assert done[1].returncode == 0, done[1].stdout
    assert ("CheckpointTimeout" in done[0].stdout) == (steps == [3, 2])
    check_root(tmp_path, list(range(min(steps))))
