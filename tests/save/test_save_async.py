"""`save_async` saves the values at the time of the call, and no error gets lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import CheckpointTimeout, SaveFailed, StepExists, UnsupportedLeaf
from jaxckpt._save.handle import SaveHandle
from jaxckpt._save.job import SaveJob, is_under_way
from jaxckpt._save.save import prepare, start
from jaxckpt.storage import LocalStorage
from jaxckpt.testing import FailingStorage
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def donate():
    """Computes in place of its argument, which is gone after."""
    return jax.jit(lambda x: x * -1 - 7, donate_argnums=0)


def test_what_happens_after_the_call_is_not_saved(ram_path, mesh, donate):
    """Fifty times: numpy leaves are written to, jax arrays donated or deleted, at once."""
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    handles = []
    for n in range(50):
        host = np.full(40_000, n, np.float32)
        tree = {
            "host": host,
            "donated": jax.device_put(np.full((8, 5_000), n, np.float32), sharding),
            "deleted": jnp.full(30_000, n, np.int32),
            "single": jnp.full(10, n, np.float32),
        }
        handles.append(jaxckpt.save_async(ram_path / str(n), tree))
        host[:] = -1
        tree["donated"] = donate(tree["donated"])
        tree["single"] = donate(tree["single"])
        tree.pop("deleted").delete()
        tree["reuse"] = jnp.full((8, 5_000), -2, np.float32)

    for n, handle in enumerate(handles):
        handle.result()
        got = jaxckpt.restore(ram_path / str(n), as_numpy=True)
        assert all((leaf == n).all() for leaf in got.values()), n


def test_a_failure_is_raised_each_time_it_is_asked_for(tmp_path):
    """The handle keeps it."""
    full = FailingStorage(LocalStorage(), 3, OSError(28, "No space left on device"))
    request = prepare(tmp_path / "a", {"n": 1}, False, None, copy=True)
    handle = start(replace(request, storage=full))

    for _ in range(3):
        with pytest.raises(SaveFailed, match="No space left"):
            handle.result()
    assert handle.done()
    assert "failed" in repr(handle)
    with pytest.raises(jaxckpt.CheckpointNotFound):
        jaxckpt.restore(tmp_path / "a")


def test_what_can_be_told_at_once_is(tmp_path):
    """A bad leaf and an existing checkpoint are raised by the call."""
    with pytest.raises(UnsupportedLeaf):
        jaxckpt.save_async(tmp_path / "a", {"x": object()})
    jaxckpt.save_async(tmp_path / "a", {"x": 1}).result()
    with pytest.raises(StepExists):
        jaxckpt.save_async(tmp_path / "a", {"x": 1})


class Gate:
    """A storage whose new directories wait until the gate is open."""

    def __init__(self):
        self._inner, self.open = LocalStorage(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def make_dir(self, path):
        assert self.open.wait(60)
        self._inner.make_dir(path)


def test_a_wait_may_end_before_the_save(tmp_path):
    """`timeout_s` is of the wait: the save goes on, and ends well."""
    gate = Gate()
    request = prepare(tmp_path / "a", {"n": 1}, False, None, copy=True)
    handle = start(replace(request, storage=gate))

    with pytest.raises(CheckpointTimeout, match="the save continues"):
        handle.result(timeout_s=0.01)
    assert not handle.done()
    assert "under way" in repr(handle)
    gate.open.set()
    handle.result()

    assert "committed" in repr(handle)
    assert jaxckpt.restore(tmp_path / "a") == {"n": 1}


def test_a_save_taken_back_lets_no_save_overtake_the_one_before(tmp_path):
    """An interrupt ends the wait of the second; the third waits for the first."""
    gate = Gate()
    requests = [prepare(tmp_path / "a", {"n": n}, True, None, copy=True) for n in range(3)]
    first = start(replace(requests[0], storage=gate))
    second = SaveJob(requests[1])
    second.queue()
    second.leave()
    assert is_under_way(first.path)
    third = start(requests[2])

    with pytest.raises(CheckpointTimeout):
        third.result(timeout_s=0.5)
    gate.open.set()
    third.result()
    assert jaxckpt.restore(tmp_path / "a") == {"n": 2}


def test_saves_of_one_path_at_once(tmp_path):
    """One of many wins, and the others are told that something is there."""
    requests = [prepare(tmp_path / "a", {"n": n}, False, None, copy=True) for n in range(4)]
    handles = [start(request) for request in requests]
    won = []
    for n, handle in enumerate(handles):
        try:
            handle.result()
        except (StepExists, SaveFailed):
            continue
        won.append({"n": n})

    assert won == [jaxckpt.restore(tmp_path / "a")]


@pytest.mark.parametrize(
    "ending", ["", "1 / 0", pytest.param("raise SystemExit(3)", marks=pytest.mark.slow)]
)
def test_exit_completes_the_save(tmp_path, ending):
    """However the interpreter ends, it waits for the save in progress."""
    code = f"""
import sys, jaxckpt, numpy as np
jaxckpt.save_async(sys.argv[1], {{"w": np.arange(1_000_000)}})
{ending}
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, check=False)

    assert np.array_equal(jaxckpt.restore(tmp_path / "a")["w"], np.arange(1_000_000))


def test_a_function_is_called_when_a_save_ends(tmp_path):
    """Before `result` returns, or at once if it has ended; its error is raised by `result`."""
    called = []
    handle = jaxckpt.save_async(tmp_path / "a", {"w": np.arange(3)})
    handle.on_end(lambda ended: called.append(ended.timing is not None))
    handle.result()
    handle.on_end(lambda ended: called.append(ended.done()))

    assert called == [True, True]

    full = FailingStorage(LocalStorage(), 3, OSError(28, "No space left on device"))
    request = prepare(tmp_path / "b", {"n": 1}, False, None, copy=True)
    handle = start(replace(request, storage=full))
    handle.on_end(lambda ended: called.append(ended.timing))
    with pytest.raises(SaveFailed):
        handle.result()
    assert called[-1] is None


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_failing_function_does_not_undo_the_save(tmp_path, error):
    """`result` raises its error, whatever it is; the checkpoint is there."""
    waits = threading.Event()

    def wait(_: jaxckpt.types.Progress) -> None:
        waits.wait(60)

    def raise_error(_: jaxckpt.SaveHandle) -> None:
        raise error

    handle = jaxckpt.save_async(tmp_path / "a", {"n": 1}, on_progress=wait)
    handle.on_end(raise_error)
    waits.set()

    with pytest.raises(error):
        handle.result(60)
    assert jaxckpt.restore(tmp_path / "a") == {"n": 1}


def test_a_function_cannot_wait_for_the_save_that_waits_for_it(tmp_path):
    """It would wait for ever; `result` raises its error, and the checkpoint is there."""
    waits = threading.Event()

    def wait(_: jaxckpt.types.Progress) -> None:
        waits.wait(60)

    handle = jaxckpt.save_async(tmp_path / "a", {"n": 1}, on_progress=wait)
    handle.on_end(lambda ended: ended.result(60))
    waits.set()

    with pytest.raises(RuntimeError, match="cannot wait for saves"):
        handle.result(60)
    assert jaxckpt.restore(tmp_path / "a") == {"n": 1}


def interrupted_at(n, call):
    """Raises KeyboardInterrupt at the n-th event between a save's queue and its thread's start."""
    files, events = ("_save/job.py", "_save/handle.py", "_save/worker.py", "/threading.py"), [0]
    begins = SaveHandle.begin.__code__

    def look(frame, event, _):
        code, at_begin = frame.f_code, event == "call" and frame.f_code is begins
        # Python's own events may lose their locks if they are interrupted in these.
        in_event = code.co_name in ("__enter__", "__exit__") and frame.f_back is not None
        in_event = in_event and frame.f_back.f_code.co_filename.endswith("/threading.py")
        is_ours = code.co_filename.endswith(files) and not in_event
        if (events[0] or at_begin) and is_ours and event in ("call", "return"):
            events[0] += 1
            if events[0] == n:
                raise KeyboardInterrupt
        if event == "return" and code is begins:
            sys.setprofile(None)

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupted_call_leaves_nothing_that_a_later_save_waits_for(ram_path):
    """Wherever the interrupt comes: the save ends by itself, or it never begins."""
    for n in count(1):
        path = str(ram_path / str(n))
        if not interrupted_at(n, lambda path=path: jaxckpt.save_async(path, {"n": 1})):
            break
        wait_until(lambda path=path: not is_under_way(path), limit_s=10)
    assert n > 20


def test_a_save_interrupted_anywhere_gives_its_turn_back(ram_path):
    """Also after the commit, when the program may already be leaving the save."""
    path, events = str(ram_path / "a"), [0]

    def look(frame, event, _):
        if frame.f_code.co_filename.endswith("_save/job.py") and event in ("call", "return"):
            events[0] -= 1
            if not events[0]:
                raise KeyboardInterrupt

    for n in count(1):
        events[0] = n
        sys.setprofile(look)
        try:
            jaxckpt.save(path, {"n": n}, overwrite=True)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        jaxckpt.save_async(path, {"n": -n}, overwrite=True).result(30)
        assert jaxckpt.restore(path) == {"n": -n}
    assert n > 20


def test_an_interrupted_save_of_a_manager_is_not_waited_for(ram_path):
    with jaxckpt.CheckpointManager(ram_path / "run", timeout_s=10) as manager:
        for n in count(1):
            if not interrupted_at(n, lambda n=n: manager.save(n, {"n": n})):
                break
            manager.wait_until_finished()
            assert not is_under_way(str(ram_path / "run" / str(n)))
        assert n > 20
        saved = manager.save(n + 1, {"n": n})
        assert saved is not None
        saved.result(10)  # no lock of an interrupted call is in the way of the saving thread
        manager.wait_until_finished()
        assert manager.all_steps()[-2:] == [n, n + 1]
