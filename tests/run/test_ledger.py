"""The ledger of a run: what each start of a job leaves in it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxckpt
from jaxckpt._run import ledger as ledger_module
from jaxckpt._run.manager import saver_of
from jaxckpt._run.schedule import PRIOR_MTBF_S
from jaxckpt.errors import StoreError
from jaxckpt.format import names
from jaxckpt.format.ledger import (
    CLOSED,
    MAX_BYTES,
    PREEMPTED,
    WENT_BACK,
    Start,
    decode_ledger,
    encode_ledger,
)
from jaxckpt.pages.goodput import account
from jaxckpt.storage import LocalStorage, PathIn
from jaxckpt.testing import WatchedStorage, simulate
from tests.commandline import cli

STATE = {"w": np.ones(4, np.float32)}


def lines(root):
    """What the ledger of a run has."""
    try:
        return decode_ledger((root / names.LEDGER).read_bytes())
    except FileNotFoundError:
        return []


def train(manager, start, stop):
    for step in range(start, stop):
        manager.save(step, STATE)


def test_a_start_leaves_one_line(tmp_path):
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        [begun] = lines(tmp_path)
        manager.restore_or(lambda: STATE)
        train(manager, 1, 6)
    [line] = lines(tmp_path)

    assert (begun.end, begun.first, begun.saves) == ("", None, 0)
    assert (line.end, line.began, line.first, line.reached, line.saved) == (CLOSED, 0, 1, 5, 5)
    assert (line.start, line.opened_s, line.saves) == (begun.start, begun.opened_s, 5)
    assert line.saving_s > 0
    assert 0 <= line.trained_s + line.blocked_s <= line.seen_s - line.opened_s + 0.01


def test_the_next_start_adds_a_line_and_keeps_the_first(tmp_path):
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        train(manager, 1, 4)
    first = (tmp_path / names.LEDGER).read_bytes()
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.restore_or(lambda: STATE)
        train(manager, 4, 6)

    assert (tmp_path / names.LEDGER).read_bytes().startswith(first)
    [_, line] = lines(tmp_path)
    assert (line.began, line.first, line.saved) == (3, 4, 5)
    assert line.restore_s > 0


def test_an_exception_in_the_block_is_the_cause(tmp_path):
    manager = jaxckpt.CheckpointManager(tmp_path)
    train(manager, 1, 3)
    with pytest.raises(ZeroDivisionError), manager:
        manager.save(3 // 0, STATE)

    assert [line.end for line in lines(tmp_path)] == ["failed: ZeroDivisionError"]


def test_ctrl_c_is_no_failure(tmp_path):
    with pytest.raises(KeyboardInterrupt), jaxckpt.CheckpointManager(tmp_path):
        raise KeyboardInterrupt

    assert [line.end for line in lines(tmp_path)] == [CLOSED]


def test_a_preempted_start_is_known_before_it_is_closed(tmp_path):
    """The machine may be gone as soon as the last save is committed."""
    with jaxckpt.CheckpointManager(tmp_path, save=jaxckpt.SavePolicy(every_steps=100)) as manager:
        train(manager, 1, 3)
        os.kill(os.getpid(), signal.SIGUSR1)
        train(manager, 3, 4)
        manager.wait_until_finished()
        [line] = lines(tmp_path)

    assert (line.end, line.reached, line.saved) == (PREEMPTED, 3, 3)
    assert lines(tmp_path)[0].end == PREEMPTED


def test_the_next_manager_of_the_process_closes_the_one_before(tmp_path):
    """Its end is written first."""
    first = jaxckpt.CheckpointManager(tmp_path)
    train(first, 1, 4)
    with jaxckpt.CheckpointManager(tmp_path):
        found = account(lines(tmp_path))

    assert [part.end for part in found.parts] == [CLOSED, "running or killed"]
    assert found.failures == 0


def test_a_job_that_goes_back_begins_a_line(tmp_path):
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        train(manager, 1, 6)
        for step in (5, 4, 3):
            manager.delete(step)
        manager.restore(STATE)
        train(manager, 3, 8)
    back, line = lines(tmp_path)

    assert (back.end, back.reached, line.began, line.saved) == (WENT_BACK, 5, 2, 7)
    assert [part.lost for part in account([back, line]).parts] == [3, 0]
    assert back.start == line.start


def test_a_look_at_an_older_step_is_not_going_back(tmp_path):
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        train(manager, 1, 4)
        manager.restore(STATE, step=1)
        train(manager, 4, 6)
        manager.restore(STATE, step=2)

    assert [(line.began, line.first, line.saved) for line in lines(tmp_path)] == [(0, 1, 5)]


def test_a_reader_writes_nothing(tmp_path):
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        train(manager, 1, 3)
    before = (tmp_path / names.LEDGER).read_bytes()
    with jaxckpt.CheckpointManager(tmp_path, mode="r") as reader:
        reader.restore(STATE)
        saver_of(reader).ledger.write()

    assert (tmp_path / names.LEDGER).read_bytes() == before


def test_a_job_that_lost_the_run_writes_nothing(tmp_path):
    """Neither its end, nor what it has learned since."""
    stale = jaxckpt.CheckpointManager(tmp_path)
    train(stale, 1, 3)
    stale.wait_until_finished()
    owner = tmp_path / names.OWNER
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "token": "of another job"}))
    before = (tmp_path / names.LEDGER).read_bytes()

    stale.close()

    assert (tmp_path / names.LEDGER).read_bytes() == before


def test_what_a_stale_job_replaced_is_written_again(tmp_path):
    """It stood still between its look at the owner's file and its write."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        train(manager, 1, 3)
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        (tmp_path / names.LEDGER).write_bytes(encode_ledger([Start(start="stale")]))
        train(manager, 3, 4)

    assert [(line.saved, line.end) for line in lines(tmp_path)] == [(2, CLOSED), (3, CLOSED)]


def test_it_is_written_now_and_then(tmp_path, limits):
    """After the first save, and when two minutes have passed since: never with each save."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        for step in range(1, 6):
            manager.save(step, STATE)
            manager.wait_until_finished()
            if step == 4:
                limits(ledger_module, EVERY_S=0.0)
            assert lines(tmp_path)[0].saved == (1 if step < 5 else 5)


@pytest.mark.parametrize(
    ("last", "end"), [("", "not closed"), ("1 // 0", "failed: ZeroDivisionError")]
)
def test_a_program_without_a_close_says_how_it_ended(tmp_path, last, end):
    """Its saves are waited for first."""
    program = f"""
import jaxckpt
manager = jaxckpt.CheckpointManager({str(tmp_path)!r})
manager.save(1, {{"n": 1}})
{last}
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, timeout=60)

    assert [(line.end, line.saved) for line in lines(tmp_path)] == [(end, 1)]


# --- trouble -------------------------------------------------------------------------------------


def refuse(verb, path):
    """Refuses to write the ledger."""
    if verb == "write" and path.endswith(names.LEDGER):
        raise StoreError(f"{path}: refused")


def test_a_refused_write_costs_no_save_and_is_said_once(tmp_path, caplog):
    root = PathIn(WatchedStorage(LocalStorage(), refuse), str(tmp_path))
    with caplog.at_level(logging.WARNING), jaxckpt.CheckpointManager(root) as manager:
        train(manager, 1, 4)
        manager.wait_until_finished()

        assert manager.all_steps() == [1, 2, 3]
        assert ["refused" in one for one in manager.problems] == [True]
    assert lines(tmp_path) == []
    assert len([one for one in caplog.records if "_jaxckpt.ledger" in one.message]) == 1

    with jaxckpt.CheckpointManager(tmp_path) as manager:  # it works again
        train(manager, 4, 5)
    assert [line.saved for line in lines(tmp_path)] == [4]


def write_torn(file):
    file.write_bytes(file.read_bytes() + file.read_bytes()[:40])


def write_garbage(file):
    file.write_bytes(b'\0\xff{}\n[1]\n"x"\n{"start": 3}\n' + file.read_bytes())


def write_huge(file):
    with file.open("wb") as stream:
        stream.truncate(1 << 30)


def write_nothing(file):
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "kept"), [(write_torn, 1), (write_garbage, 1), (write_nothing, 0), (write_huge, 0)]
)
def test_a_damaged_ledger_stops_nothing(tmp_path, damage, kept):
    """Of 1 GB nothing is read, and that is said; a bad line is skipped without a word."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        train(manager, 1, 3)
    damage(tmp_path / names.LEDGER)

    assert cli("ls", tmp_path)[0] == 0
    assert cli("ls", "--json", tmp_path)[0] == 0
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        assert [names.LEDGER in one for one in manager.problems] == [True] * (damage is write_huge)
        train(manager, 3, 4)
    assert [line.saved for line in lines(tmp_path)] == [*[2] * kept, 3]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_something_else_of_that_name_is_left_alone(tmp_path, make):
    """A FIFO is not waited for."""
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / names.LEDGER)
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        train(manager, 1, 3)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]


def test_only_process_0_writes(tmp_path):
    """Four processes leave one line for a start, with what process 0 has seen."""

    def work(processes):
        with jaxckpt.CheckpointManager(tmp_path) as manager:
            train(manager, 1, 4)

    simulate(4, work, timeout_s=30)
    [line] = lines(tmp_path)

    assert (line.saved, line.saves, line.end) == (3, 3, CLOSED)


# --- the file ------------------------------------------------------------------------------------


def test_the_file_is_bounded():
    """It has the newest 256 lines, in less than a quarter of what is read."""
    starts = [
        Start(
            start="0" * 16,
            end=f"failed: {'x' * 500}",
            saves=n,
            **dict.fromkeys(("opened_s", "seen_s", "restore_s", "trained_s"), 1e10),
            **dict.fromkeys(("began", "first", "reached", "saved"), 10**18 - 1),
        )
        for n in range(1_000)
    ]
    data = encode_ledger(starts)

    assert [one.saves for one in decode_ledger(data)] == [*range(744, 1_000)]
    assert len(data) < MAX_BYTES


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"start": 3}',
        b'{"saves": -1}',
        b'{"saves": 1.5}',
        b'{"saves": true}',
        b'{"began": null}',
        b'{"opened_s": NaN}',
        b'{"opened_s": Infinity}',
        b'{"opened_s": 1e300}',
        b'{"reached": 1000000000000000000000000}',
        b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"start": "' + b"x" * 2_000 + b'"}',
        b"\xff\xfe",
    ],
)
def test_a_foreign_line_is_skipped(line):
    good = encode_ledger([Start(start="a", saves=3)])

    assert [one.start for one in decode_ledger(good + line + b"\n" + good)] == ["a", "a"]


def test_an_unknown_key_is_ignored():
    """A newer release may write more."""
    [found] = decode_ledger(b'{"start":"a","saves":2,"new":[1]}\n')

    assert (found.start, found.saves) == ("a", 2)


# --- learning ------------------------------------------------------------------------------------


def test_auto_learns_the_mtbf_of_the_job(tmp_path):
    """Three starts were killed, each after 100 s on average; before, it assumes a day."""
    policy = jaxckpt.SavePolicy.auto()
    failed = [
        Start(start=str(n), opened_s=n * 1e3, seen_s=n * 1e3 + 100, first=1, reached=9)
        for n in range(3)
    ]
    found = {}
    for known in (2, 3):
        root = tmp_path / str(known)
        root.mkdir()
        (root / names.LEDGER).write_bytes(encode_ledger(failed[:known]))
        with jaxckpt.CheckpointManager(root, save=policy) as manager:
            manager.save(1, STATE)
            manager.wait_until_finished()
            schedule = saver_of(manager).due.schedules[0]
            found[known] = schedule.costs.mtbf_of(policy), schedule.explanation()

    assert found[2][0] == PRIOR_MTBF_S
    assert found[3][0] == pytest.approx(100, rel=0.1)
    assert "a job MTBF of 24.0 h" in found[2][1]
    assert "a job MTBF of 0.0 h" in found[3][1]


def test_a_given_mtbf_is_not_learned(tmp_path):
    policy = jaxckpt.SavePolicy.auto(mtbf_hours=5)
    with jaxckpt.CheckpointManager(tmp_path, save=policy) as manager:
        manager.save(1, STATE)
        manager.wait_until_finished()

        assert saver_of(manager).due.schedules[0].costs.mtbf_of(policy) == pytest.approx(18_000)
