"""A store that fails, and writers that are killed: nothing is lost, nothing half done is shown."""

from __future__ import annotations

import os
import signal
import time

import pytest

import jaxckpt
from jaxckpt.errors import CheckpointError, CorruptCheckpoint
from jaxckpt.storage import _settings as settings_module
from jaxckpt.storage import locate
from tests.faults.conftest import zygote  # noqa: F401  # a fixture
from tests.stores import children
from tests.stores.children import is_state, reach, state
from tests.stores.proxy import Answer, Hang, Reset, Truncate


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.setattr(settings_module, "_given", {})


@pytest.fixture(
    params=[
        pytest.param("moto_server", marks=pytest.mark.slow),
        "gcs_server",
        pytest.param("azurite_server", marks=pytest.mark.slow),
    ]
)
def place(request, proxied):
    """A URL in a new bucket behind a proxy: `url, server, proxy`."""
    server, proxy = proxied(request.getfixturevalue(request.param))
    url = f"{server.scheme}://{server.bucket}/runs"
    reach(url, server.env)
    yield url, server, proxy
    proxy.heal()


# --- writers that are killed -------------------------------------------------------------------


def kill_at_every_request(zygote, proxy, function, args):  # noqa: F811
    """Runs a function until it ends; kills it at its first request, at its second, ...

    Before the store acts on it, and after. Yields after each death.
    """
    for applied in (False, True):
        for number in range(1000):
            proxy.heal()
            proxy.requests.clear()
            fault = proxy.add(Hang(applied=applied), number=number)
            pid = zygote.start(function, *args())
            deadline_s = time.monotonic() + 60
            while not fault.done and time.monotonic() < deadline_s and _lives(pid):
                time.sleep(0.005)
            if fault.done:
                time.sleep(0.02 if applied else 0)  # the store acts
                os.kill(pid, signal.SIGKILL)
            said, status = zygote.answers()
            proxy.heal()
            yield number, status
            if status == 0:
                assert said == [{"done": True}]
                break


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_save_leaves_a_whole_checkpoint_or_none(place, zygote):  # noqa: F811
    """And the next save to the same path succeeds as soon as the dead one's lease is over."""
    url, server, proxy = place
    step, deaths = 0, 0

    def args():
        return f"{url}/a{step}", server.env, step

    for _, status in kill_at_every_request(zygote, proxy, children.save_alone, args):
        path = f"{url}/a{step}"
        storage, where = locate(path)
        committed = storage.kind(f"{where}/commit_success.txt") == "file"
        if committed:
            assert is_state(jaxckpt.restore(path), step)
            assert jaxckpt.verify(path).ok
        else:
            assert status != 0
            with pytest.raises(CheckpointError):
                jaxckpt.restore(path)
        if not committed and step % 8 == 0:
            time.sleep(children.LEASE_S + 2)
            jaxckpt.save(path, state(step))
            assert is_state(jaxckpt.restore(path), step)
        deaths += status != 0
        step += 1
    assert deaths >= 20


def test_a_killed_job_loses_no_step_and_shows_no_half_one(place, zygote):  # noqa: F811
    """A job that saves and deletes steps is killed at every request; the next one goes on."""
    url, server, proxy = place
    base, deaths = 0, 0

    def args():
        return f"{url}/run{base}", server.env, [10, 11], 1

    for _, status in kill_at_every_request(zygote, proxy, children.save_steps, args):
        run = f"{url}/run{base}"
        with jaxckpt.CheckpointManager(run, mode="r" if status == 0 else "w") as manager:
            listed = manager.all_steps()
            for step in listed:
                assert is_state(manager.restore(step=step), step)
            if status != 0 and base % 8 == 0:
                manager.save(20, state(20))
        if status == 0:
            assert listed == [11]
        elif base % 8 == 0:
            assert jaxckpt.open(run).path == f"{run}/20"
        deaths += status != 0
        base += 1
    assert deaths >= 30


# --- a store that fails ------------------------------------------------------------------------

FAULTS = {
    "429": Answer(429),
    "503": Answer(503),
    "403": Answer(403),
    "reset": Reset(),
    "truncated": Truncate(10),
    "applied, then 503": Answer(503, applied=True),
    "applied, then reset": Reset(applied=True),
}
# Which requests fail: those whose path contains this text, and have this method.
PLACES = {
    "data": ("", "/d/"),
    "marker": ("PUT", "commit_success.txt"),
    "claim": ("PUT", "_jaxckpt.writing"),
    "metadata": ("PUT", "_METADATA"),
    "list": ("GET", "list"),
    "record": ("", "_jaxckpt.json"),
    "manifest": ("", "manifest.ocdbt"),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_overcome_or_told(place, where, fault):
    """At a save and at a restore: right data or a typed error, and never damage."""
    url, _, proxy = place
    method, path = PLACES[where]
    proxy.add(FAULTS[fault], method=method, path=path, times=1)
    error = error_of(lambda: jaxckpt.save(f"{url}/a", state(1)))
    proxy.heal()
    if error is not None:
        assert fault == "403", error
        assert error_of(lambda: jaxckpt.restore(f"{url}/a")) is not None
        return
    assert jaxckpt.verify(f"{url}/a").ok
    found = {}
    proxy.add(FAULTS[fault], path=path, times=1)
    error = error_of(lambda: found.update(jaxckpt.restore(f"{url}/a")))
    if error is None:
        assert is_state(found, 1)
    else:
        assert not isinstance(error, CorruptCheckpoint), error
        assert fault == "403", error


def error_of(call):
    """Returns the typed error of a call, or None."""
    try:
        call()
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("where", ["data", "list", "record", "manifest"])
def test_a_black_hole_is_an_error_within_the_deadline(place, where, monkeypatch):
    """Never a hang: a restore that nobody answers says where it waited and how long."""
    url, _, proxy = place
    jaxckpt.save(f"{url}/a", state(1))
    proxy.add(Hang(), path=PLACES[where][1])
    if where == "data":  # TensorStore reads the nodes there, with a deadline that is set at start
        proxy.heal()
        proxy.add(Hang(), path="/d/", times=1)

    error = error_of(lambda: jaxckpt.restore(f"{url}/a"))

    if error is not None:
        assert not isinstance(error, CorruptCheckpoint), error
        assert "tries" in str(error)
