"""Saves and restores report their progress while they run, and their duration at the end."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._core import box as _box
from jaxckpt._disk.chunks import LeafRead, layout_of
from jaxckpt._disk.find import find
from jaxckpt._disk.item import open_tree
from jaxckpt._disk.reader import read_leaves
from jaxckpt._progress import bar as _bar
from jaxckpt._progress.meter import display
from jaxckpt._save.job import SaveJob, is_under_way
from jaxckpt._save.save import prepare
from jaxckpt.errors import SaveFailed
from jaxckpt.integrations import metrics
from jaxckpt.multihost import slowest_of
from jaxckpt.storage import locate
from jaxckpt.testing import simulate
from jaxckpt.types import Progress, Timing

STATE = {"w": np.arange(4096, dtype=np.float32), "n": 3}
BYTES = 4 * 4096 + 8


class Refused(Exception):
    """The exception that a user's callback raises."""


def refuse(_):
    raise Refused


# --- on_progress ---------------------------------------------------------------------------------


def test_a_save_and_a_restore_end_with_all_their_bytes(tmp_path):
    """The last report of each says that it ended, with everything done."""
    seen = []

    jaxckpt.save(tmp_path / "a", STATE, on_progress=seen.append)
    jaxckpt.restore(tmp_path / "a", on_progress=seen.append)

    saved, restored = [one for one in seen if one.ended]
    assert (saved.kind, saved.done_bytes, saved.total_bytes) == ("save", BYTES, BYTES)
    assert (restored.kind, restored.done_bytes, restored.total_bytes) == ("restore", BYTES, BYTES)
    assert saved.path == restored.path == str(tmp_path / "a")


def test_bytes_grow_while_a_restore_reads(tmp_path):
    """They are counted as they come, within one array too."""
    jaxckpt.save(tmp_path / "a", {"w": np.zeros((64, 1 << 20), np.uint8)})
    item = find(*locate(tmp_path / "a"))
    counts = []

    tree = open_tree(item, "state")
    leaf = tree.tree.leaves[0]
    layout = layout_of(leaf.array, (_box.whole(leaf.shape),), np.dtype(np.uint8))
    reads = [LeafRead(leaf, layout)]
    for _ in read_leaves(tree, reads, budget_bytes=1 << 30, landed=counts.append):
        pass

    assert len(counts) > 1
    assert sum(counts) == 64 << 20


CALLS = {
    "save": lambda path: jaxckpt.save(path, STATE, on_progress=refuse),
    "save_async": lambda path: jaxckpt.save_async(path, STATE, on_progress=refuse).result(),
    "restore": lambda path: jaxckpt.restore(path, on_progress=refuse),
}


def test_a_callback_that_exits_fails_no_save(tmp_path):
    """A commit is reported even if `on_progress` calls `sys.exit`."""
    with jaxckpt.CheckpointManager(tmp_path / "run", on_progress=sys.exit) as manager:
        handle = manager.save(1, STATE)
        with pytest.raises(SystemExit):
            manager.wait_until_finished()

        assert handle.timing is not None
        assert manager.latest_step() == 1
        assert manager.save(1, STATE) is None


def test_on_commit_may_ask_what_there_is(tmp_path):
    """At every commit, also at one that `close` waits for."""
    seen = []
    with jaxckpt.CheckpointManager(
        tmp_path / "run",
        on_commit=lambda timing: seen.append((timing.step, manager.all_steps())),
        on_progress=lambda _: closing.wait(60),
    ) as manager:
        closing = Closing(manager)
        manager.save(1, STATE)

    assert seen == [(1, [1])]


class Closing:
    """Becomes true when `close` of a manager begins."""

    def __init__(self, manager):
        self._manager = manager

    def wait(self, timeout_s):
        deadline_s = time.monotonic() + timeout_s
        while not self._manager._saver.ended and time.monotonic() < deadline_s:
            pass


@pytest.mark.parametrize("ask", ["wait_until_finished", "close", "scrub"])
def test_on_commit_cannot_wait_for_itself(tmp_path, ask):
    """It raises at once, not after `timeout_s`; the manager continues to work."""
    with jaxckpt.CheckpointManager(
        tmp_path / "run", on_commit=lambda _: getattr(manager, ask)(), timeout_s=1e6
    ) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
            with pytest.raises(RuntimeError, match="on_commit cannot wait for saves"):
                manager.wait_until_finished()

        assert manager.all_steps() == [1, 2]


@pytest.mark.parametrize("how", CALLS)
def test_what_on_progress_raises_is_raised_when_all_is_done(tmp_path, how):
    """The checkpoint is committed all the same."""
    path = tmp_path / "a"
    if how == "restore":
        jaxckpt.save(path, STATE)

    with pytest.raises(Refused):
        CALLS[how](path)

    assert jaxckpt.verify(path).ok


def test_a_manager_raises_what_its_callbacks_raised_at_the_next_call(tmp_path):
    """Both of them; the steps are committed."""
    for name, options in {"p": {"on_progress": refuse}, "c": {"on_commit": refuse}}.items():
        manager = jaxckpt.CheckpointManager(tmp_path / name, **options)
        manager.save(1, STATE)

        with pytest.raises(Refused):
            manager.wait_until_finished()

        assert manager.all_steps() == [1]
        manager.close()


def test_an_error_of_the_save_goes_before_that_of_on_progress(tmp_path):
    """A save that failed says why it did."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(SaveFailed):
        jaxckpt.save(tmp_path / "file" / "a", STATE, on_progress=refuse)


def test_on_progress_hears_who_is_waited_for(tmp_path):
    """In the phase that needs all processes, the waiting ones report who is missing."""
    seen, heard = [], threading.Event()

    def listen(progress):
        if progress.waiting_for:
            seen.append((progress.phase, progress.waiting_for))
            heard.set()

    def save(us):
        if us.index == 2:
            assert heard.wait(60)
        jaxckpt.save(tmp_path / "a", STATE, on_progress=listen if us.index == 0 else None)

    simulate(3, save)

    assert seen[0] == ("meet", (2,))


def test_the_snapshot_is_told_of_too(tmp_path):
    """Bringing values to the host may take long; what fails there ends the telling."""
    seen, looked = [], threading.Event()

    def listen(progress):
        seen.append((progress.phase, progress.ended))
        looked.set()

    class Slow:  # an iterator that is asked for its state during the snapshot
        def get_state(self):
            assert looked.wait(60)
            return {}

        def set_state(self, state):
            raise AssertionError

    with jaxckpt.CheckpointManager(tmp_path / "run", on_progress=listen) as manager:
        manager.save(1, STATE, items={"data": Slow()})
        manager.wait_until_finished()
        saved, seen[:] = list(seen), []
        with pytest.raises(jaxckpt.UnsupportedLeaf):
            manager.save(2, {"w": object()})

    assert saved[0] == ("snapshot", False)
    assert saved[-1] == ("commit", True)
    assert [ended for _, ended in seen] == [True]


def test_each_process_counts_the_bytes_that_it_writes(ram_path, mesh):
    """All write into one directory."""
    values = jax.device_put(np.zeros((512, 64), np.float32), NamedSharding(mesh, P("x", "y")))

    def save(_):
        request = prepare(ram_path / "a", {"w": values}, False, None, copy=False)
        SaveJob(request).run()
        return request.meter.done_bytes, request.meter.total_bytes

    for done, total in simulate(2, save):
        assert total == values.nbytes // 2
        assert total <= done < 1.1 * total


# --- Timing --------------------------------------------------------------------------------------


def test_each_save_and_restore_is_timed_by_phase(tmp_path):
    """`on_commit` gets each commit; the manager, the handle and the report have the timing too."""
    committed, reports = [], []

    with jaxckpt.CheckpointManager(tmp_path / "run", on_commit=committed.append) as manager:
        handle = manager.save(7, STATE)
        handle.result()
        manager.restore(report=reports.append)
        timings = manager.timings

    saved, restored = timings
    assert committed == [saved]
    assert list(saved.phases) == ["snapshot", "wait", "copy", "write", "meet", "commit"]
    assert list(restored.phases) == ["find", "read", "place"]
    assert (saved.step, saved.total_bytes, restored.step) == (7, BYTES, 7)
    assert sum(saved.phases.values()) <= saved.seconds
    assert handle.timing.phases.keys() == saved.phases.keys()
    assert reports[0].timing.total_bytes == BYTES


def test_the_phases_of_a_save_stay_with_the_step(tmp_path):
    """Its record has them, up to the commit."""
    jaxckpt.save(tmp_path / "a", STATE)

    record = find(*locate(tmp_path / "a")).record

    assert set(record.phases) == {"snapshot", "wait", "copy", "write", "meet"}


def test_all_processes_know_the_slowest(tmp_path):
    """The timing names it, with the bytes that all have written."""
    timings = simulate(2, lambda us: _saved(tmp_path / "a"))

    assert slowest_of([{"seconds": 0.1}, {"seconds": 3.0}, {"seconds": 0.2}]) == 1
    assert timings[0].slowest == timings[1].slowest in (0, 1)


def _saved(path):
    handle = jaxckpt.save_async(path, STATE)
    handle.result(60)
    return handle.timing


def test_batch_logs_get_one_line_for_each(tmp_path, caplog):
    """With the step, bytes, rate and phases."""
    with caplog.at_level(logging.INFO, "jaxckpt"):
        with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
            manager.save(7, STATE)
            manager.wait_until_finished()
            manager.restore()
        lines = [record.getMessage() for record in caplog.records if record.name == "jaxckpt"]

    saved, restored = lines
    assert saved.startswith(f"saved {tmp_path}/run/7: {BYTES} bytes here in ")
    assert restored.startswith(f"restored {tmp_path}/run/7: {BYTES} bytes here in ")
    rate = re.search(r" s, (.*) [kMG]?B/s \(snapshot ", saved)
    assert rate is not None
    assert float(rate[1]) > 0  # also of a small tree
    assert ", commit " in saved


def test_the_profiler_of_jax_shows_the_phases(tmp_path):
    """They are in the trace under their names."""
    with jax.profiler.trace(str(tmp_path / "trace")):
        jaxckpt.save(tmp_path / "a", {"w": jnp.ones(8)})
        jaxckpt.restore(tmp_path / "a")

    traced = b"".join(file.read_bytes() for file in (tmp_path / "trace").rglob("*.xplane.pb"))
    assert b"jaxckpt save write" in traced
    assert b"jaxckpt restore read" in traced


# --- the bar -------------------------------------------------------------------------------------

_PROGRAM = """
import sys
from jaxckpt._progress.meter import display
from jaxckpt.types import Progress

show = display(None, 0)
print("bar" if show else "none", "jaxckpt._progress.bar" in sys.modules, file=sys.stderr)
for done, ended in (0, False), (3_000_000, False), (8_000_000, True):
    if show:
        show(Progress(kind="save", path="/run/1000", phase="write", done_bytes=done,
                      total_bytes=8_000_000, seconds=2.0, ended=ended))
"""


def test_a_terminal_shows_a_bar():
    """With the step, the bytes and the phase."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    child = subprocess.Popen([sys.executable, "-c", _PROGRAM], stderr=theirs)
    os.close(theirs)

    shown = b""
    while chunk := _read(ours):
        shown += chunk

    assert child.wait(60) == 0
    assert b"saving 1000: write" in shown
    assert b"3.00M/8.00M" in shown
    assert b"8.00M/8.00M" in shown
    os.close(ours)


def _read(file):
    try:
        return os.read(file, 1 << 16)
    except OSError:  # how a terminal says that nobody writes any more
        return b""


def test_a_batch_log_shows_none():
    """Where nobody looks nothing is drawn, and the module that draws is not even imported."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], stderr=subprocess.PIPE, timeout=60, check=True
    )

    assert done.stderr == b"none False\n"


def test_only_process_0_shows_a_bar():
    """The bar covers the other processes; a callback of the user is called in each process."""
    assert display(None, 1) is None
    assert display(print, 1) is print


def test_a_bar_says_who_is_waited_for():
    """By index, the first of them."""
    progress = Progress(
        kind="save",
        path="/run/9",
        phase="meet",
        done_bytes=1,
        total_bytes=1,
        seconds=9.0,
        waiting_for=tuple(range(1, 12)),
    )

    assert _bar.words(progress) == "saving 9: waits for process 1, 2, 3, 4, 5, 6, 7, 8, ..."


# --- where it is sent ----------------------------------------------------------------------------

TIMING = Timing(
    kind="save",
    path="/run/7",
    step=7,
    total_bytes=2_000_000_000,
    seconds=5.0,
    phases={"snapshot": 0.5, "wait": 1.0, "write": 3.5},
)


def test_waiting_is_left_out_of_the_rate():
    """A save that waited for another one was not slower for it."""
    assert TIMING.gb_per_s == 0.5


def test_a_timing_is_a_sentence():
    """As the last value of a notebook's cell, too."""
    assert (
        repr(TIMING)
        == str(TIMING)
        == (
            "saved /run/7: 2000000000 bytes here in 5.00 s, 500 MB/s "
            "(snapshot 0.50, wait 1.00, write 3.50 s)"
        )
    )


def test_tensorboard_gets_every_number(tmp_path):
    """Real event files hold them, under the step."""
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        metrics.to_writer(writer)(TIMING)

    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert all(name.encode() in written for name in metrics.scalars(TIMING))


def test_a_writer_of_clu_gets_them_at_once():
    """By its own method."""
    sent = []

    class Writer:
        def write_scalars(self, step, scalars):
            sent.append((step, scalars))

    metrics.to_writer(Writer())(TIMING)

    assert sent == [(7, metrics.scalars(TIMING))]
    with pytest.raises(TypeError, match="neither"):
        metrics.to_writer(object())


def test_prometheus_gets_sums_by_phase():
    """As a server would be asked for them."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()

    for _ in range(2):  # as of two managers in a process
        metrics.to_prometheus(registry)(TIMING)

    labels = {"kind": "save", "phase": "write"}
    assert registry.get_sample_value("jaxckpt_phase_seconds_sum", labels) == 7.0
    assert registry.get_sample_value("jaxckpt_bytes_total", {"kind": "save"}) == 4e9
    assert registry.get_sample_value("jaxckpt_last_step", {"kind": "save"}) == 7


def test_opentelemetry_gets_sums_by_phase():
    """As its reader sees them."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])

    metrics.to_opentelemetry(provider.get_meter("test"))(TIMING)

    [scope] = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {metric.name: list(metric.data.data_points) for metric in scope.metrics}
    by_phase = {point.attributes["phase"]: point.sum for point in found["jaxckpt.phase.duration"]}
    assert by_phase == TIMING.phases
    assert [point.value for point in found["jaxckpt.io"]] == [TIMING.total_bytes]
    provider.shutdown()


def test_the_path_is_free_when_the_last_call_of_on_progress_is_made(tmp_path):
    """It may save there again, and an interrupt during it leaves nothing that waits."""
    seen = []

    def on_progress(progress):
        if progress.ended:
            seen.append(is_under_way(progress.path))

    jaxckpt.save(tmp_path / "a", {"w": np.ones(3)}, on_progress=on_progress)

    assert seen == [False]


def test_a_save_that_cannot_begin_is_reported_no_more(tmp_path):
    """Process 1 waits in vain for where process 0 saves."""
    last, both = threading.Event(), threading.Barrier(2)

    def run(processes):
        both.wait()
        manager = jaxckpt.CheckpointManager(
            tmp_path / "run",
            local=tmp_path / "local",
            timeout_s=4.0,
            on_progress=lambda progress: last.set() if progress.ended else None,
        )
        if processes.index == 1:
            with pytest.raises(jaxckpt.CheckpointTimeout):
                manager.save(1, {"n": 1})

    simulate(2, run)

    assert last.wait(10)


def test_a_function_of_atexit_saves_and_restores_with_on_progress(tmp_path):
    """No thread starts then; the work is done in the calling one."""
    values = np.arange(3.0)
    safetensors.numpy.save_file({"w": values}, tmp_path / "a.safetensors")
    script = f"""
import atexit, jaxckpt
def last_words():
    tree = jaxckpt.restore(path, as_numpy=True, on_progress=print)
    jaxckpt.save({str(tmp_path / "x")!r}, tree, on_progress=print)
path = {str(tmp_path / "a.safetensors")!r}
jaxckpt.restore(path)  # imports what makes threads
atexit.register(last_words)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr
    assert (jaxckpt.restore(tmp_path / "x")["w"] == values).all()
