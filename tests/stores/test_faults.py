"""A store that fails, and writers that are killed: nothing is lost, nothing half done is shown."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import unquote

import pytest

import jaxckpt
from jaxckpt._run.index import StepIndex
from jaxckpt._run.ledger import read_ledger
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, SaveFailed, StoreError
from jaxckpt.storage import locate
from jaxckpt.storage._object import ObjectStorage
from jaxckpt.storage._settings import settings_of
from tests.faults.conftest import zygote  # noqa: F401  # a fixture
from tests.stores import children
from tests.stores.children import is_state, reach, state
from tests.stores.killing import end_leases, kill
from tests.stores.proxy import Answer, Hang, Reset, Truncate

WRITERS = 8
KILLED = [[], [("", None)], [("", 10)], [("", 11)], [("closed", 11)]]
EVERY = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
# All requests of a long function are divided among tests, each of which has a limit of time.
PARTS = pytest.mark.parametrize("part", [(when, n) for when in (False, True) for n in (0, 1)])


# --- writers that are killed -------------------------------------------------------------------


def kill_at_requests(zygote, proxy, function, args, *, applied, first, every):  # noqa: F811
    """Runs a function until it ends, and kills it at some of its requests, each time a later one.

    Before the store acts on it, or after. `args()` returns its arguments each time. Yields what
    was done and whether the function ended by itself.
    """
    for number in range(first, 1000, every):
        ended = not kill(zygote, proxy, number, function, *args(), applied=applied)
        when = "after" if applied else "before"
        yield f"{function.__name__} killed {when} the store acts on request {number}", ended
        if ended:
            break


def kill_in_part(zygote, proxy, function, args, part):  # noqa: F811
    applied, first = part
    return kill_at_requests(zygote, proxy, function, args, applied=applied, first=first, every=2)


def kill_at_some(zygote, proxy, function, args, every):  # noqa: F811
    for applied in (False, True):
        yield from kill_at_requests(
            zygote, proxy, function, args, applied=applied, first=int(applied), every=every
        )


def is_committed(url):
    storage, path = locate(url)
    return storage.kind(f"{path}/commit_success.txt") == "file"


@PARTS
def test_a_killed_save_leaves_a_whole_checkpoint_or_none(place, zygote, trial, part):  # noqa: F811
    """And the next save to the same path succeeds as soon as the dead one's lease is over."""
    url, server, proxy = place
    numbers = itertools.count()

    def args():
        nonlocal step
        step = next(numbers)
        return f"{url}/a{step}", server.env, step

    step = 0
    for what, ended in kill_in_part(zygote, proxy, children.save_alone, args, part):
        path = f"{url}/a{step}"
        with trial("35", what):
            if is_committed(path):
                assert is_state(jaxckpt.restore(path), step)
                assert jaxckpt.verify(path).ok
                continue
            assert not ended
            with pytest.raises(CheckpointError):
                jaxckpt.restore(path)
            if step % 8 == 0:
                end_leases(path)
                jaxckpt.save(path, state(step))
                assert is_state(jaxckpt.restore(path), step)
    assert step >= 10


@EVERY
def test_a_killed_replacement_leaves_one_of_both_or_none(place, zygote, trial, every):  # noqa: F811
    """With "delete_first" the old one may be gone before the new one is there; never a mixture."""
    url, server, proxy = place
    numbers = itertools.count()
    found = set()

    def args():
        nonlocal n
        n = next(numbers)
        jaxckpt.save(f"{url}/b{n}", state(1))
        return f"{url}/b{n}", server.env, 2

    n = 0
    for what, ended in kill_at_some(zygote, proxy, children.replace_alone, args, every):
        path = f"{url}/b{n}"
        with trial("35", what):
            if is_committed(path):
                step = 1 if is_state(jaxckpt.restore(path), 1) else 2
                assert is_state(jaxckpt.restore(path), step)
                assert jaxckpt.verify(path).ok
                assert step == 2 or not ended
                found.add(step)
                continue
            assert not ended
            with pytest.raises(CheckpointError):
                jaxckpt.restore(path)
            if None not in found:
                found.add(None)
                end_leases(path)
                jaxckpt.save(path, state(3), overwrite="delete_first")
                assert is_state(jaxckpt.restore(path), 3)
    assert found == {1, 2, None}


@PARTS
def test_a_killed_job_loses_no_step_and_shows_no_half_one(place, zygote, trial, part):  # noqa: F811
    """A job that saves and deletes steps is killed at every request; the next one goes on."""
    url, server, proxy = place
    numbers = itertools.count()

    def args():
        nonlocal n
        n = next(numbers)
        return f"{url}/run{n}", server.env, [10, 11], 1

    n = 0
    for what, ended in kill_in_part(zygote, proxy, children.save_steps, args, part):
        run = f"{url}/run{n}"
        with trial("35", what):
            goes_on = not ended and n % 8 == 0
            with jaxckpt.CheckpointManager(run, mode="r" if ended else "w") as manager:
                listed = manager.all_steps()
                for step in listed:
                    assert is_state(manager.restore(step=step), step)
                if goes_on:
                    manager.save(20, state(20))
            if ended:
                assert listed == [11]
            elif goes_on:
                assert jaxckpt.open(run).path == f"{run}/20"
        with trial("56", f"the ledger after {what}"):
            found = [(one.end, one.saved) for one in read_ledger(StepIndex(*locate(run)))]
            # A line of the killed job, if it had taken the run over; then ours, if we have.
            ours = [("closed", 20 if goes_on else None)]
            assert found in (
                [[("closed", 11)]] if ended else [a + b for a in KILLED for b in ([], ours)]
            )
            assert found[-1:] == ours or not goes_on
    assert n >= 15


@EVERY
def test_a_killed_deletion_leaves_a_whole_step_or_none(place, zygote, trial, every):  # noqa: F811
    """The other step stays in any case, and the next deletion ends what this one began."""
    url, server, proxy = place
    numbers = itertools.count()

    def args():
        nonlocal n
        n = next(numbers)
        with jaxckpt.CheckpointManager(f"{url}/gone{n}") as manager:
            for step in (1, 2):
                manager.save(step, state(step))
        return f"{url}/gone{n}", server.env, 1

    n = 0
    for what, ended in kill_at_some(zygote, proxy, children.delete_step, args, every):
        run = f"{url}/gone{n}"
        with trial("35", what):
            with jaxckpt.CheckpointManager(run, mode="r" if ended else "w") as manager:
                listed = manager.all_steps()
                assert 2 in listed
                for step in listed:
                    assert is_state(manager.restore(step=step), step)
                if n % 8 == 0 and 1 in listed:
                    manager.delete(1)
                    assert manager.all_steps() == [2]
            assert listed == [2] or not ended
    assert n >= 5


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
def test_one_fault_is_overcome_or_told(place, trial, where, fault):
    """At a save and at a restore: right data or a typed error, and never damage."""
    url, _, proxy = place
    method, path = PLACES[where]
    with trial("36", f"{fault} at {where} of a save"):
        proxy.add(FAULTS[fault], method=method, path=path, times=1)
        error = error_of(lambda: jaxckpt.save(f"{url}/a", state(1)))
        proxy.heal()
        if error is not None:
            assert fault == "403", error
            assert error_of(lambda: jaxckpt.restore(f"{url}/a")) is not None
            return
        assert jaxckpt.verify(f"{url}/a").ok
    with trial("36", f"{fault} at {where} of a restore"):
        found = {}
        proxy.add(FAULTS[fault], path=path, times=1)
        error = error_of(lambda: found.update(jaxckpt.restore(f"{url}/a")))
        if error is None:
            assert is_state(found, 1)
        else:
            assert not isinstance(error, CorruptCheckpoint), error
            assert fault == "403", error


def test_a_step_that_cannot_be_read_now_is_not_skipped(place):
    """Whoever asks for the newest step gets an error, never an older one without a word."""
    url, _, proxy = place
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    proxy.add(Answer(503), path="run/2")

    calls = [
        partial(jaxckpt.restore, f"{url}/run"),
        partial(jaxckpt.open, f"{url}/run"),
        partial(jaxckpt.fork, f"{url}/run", f"{url}/other"),
        partial(jaxckpt.CheckpointManager(f"{url}/run", mode="r").restore),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="overloaded"):
            call()
    proxy.heal()

    assert is_state(jaxckpt.restore(f"{url}/run"), 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_of_a_deletion_is_overcome_or_told(place, trial, fault):
    """At each of its requests: the step is gone or whole, and the other one stays."""
    url, _, proxy = place
    for number in itertools.count():
        run = f"{url}/{number}"
        with jaxckpt.CheckpointManager(run) as manager, trial("36", f"{fault}, deleting: {number}"):
            for step in (1, 2):
                manager.save(step, state(step))
            manager.wait_until_finished()
            proxy.requests.clear()
            failing = proxy.add(FAULTS[fault], number=number)
            error = error_of(partial(manager.delete, 1))
            proxy.heal()
            listed = jaxckpt.CheckpointManager(run, mode="r").all_steps()
            assert listed == [2] or (error is not None and listed == [1, 2])
            assert error is None or fault == "403", error  # which is told
            for step in listed:
                assert is_state(jaxckpt.restore(f"{run}/{step}"), step)
        if not failing.done:
            break
    assert number >= 3


@pytest.mark.parametrize("file", ["commit_success.txt", "_jaxckpt.writing", "_jaxckpt.json"])
def test_a_file_that_is_made_but_said_to_exist_is_not_another_writers(place, trial, file):
    """Some stores send a request again by themselves, and answer it as a second one: 412."""
    url, _, proxy = place
    with trial("36", f"applied, then 412 at {file}"):
        fault = proxy.add(Answer(412, applied=True), method="PUT", path=f"/a/{file}", times=1)

        jaxckpt.save(f"{url}/a", state(1))

        assert fault.done == 1
        assert jaxckpt.verify(f"{url}/a").ok


def test_a_claim_of_the_same_bytes_is_not_this_writers(place):
    """Two processes that upload one step write the same token."""
    url, _, _ = place
    storage, path = locate(f"{url}/a/lock")
    first = storage.hold(path, b"token", new=True)
    assert first is not None

    assert storage.hold(path, b"token", new=True) is None
    first.release()


@pytest.mark.parametrize("applied", [True, False])
def test_a_commit_that_nobody_answers_may_be_there(place, trial, applied):
    """The error says so, and where to look. The step is there or not, and whole if it is."""
    url, _, proxy = place
    with trial("36", f"no answer about a marker from then on, applied: {applied}"):
        silent = []

        def is_silent(request):
            silent.extend([request] if "/2/commit_success.txt" in unquote(request.path) else [])
            return bool(silent)

        with jaxckpt.CheckpointManager(f"{url}/run") as manager:
            manager.save(1, state(1)).result()
            proxy.add(Reset(applied=applied), when=is_silent)
            handle = manager.save(2, state(2))
            with pytest.raises(SaveFailed, match=r"may be committed.*jaxckpt ls .*/run") as caught:
                handle.result()
            proxy.heal()
        assert isinstance(caught.value.__cause__, StoreError)
        listed = jaxckpt.CheckpointManager(f"{url}/run", mode="r").all_steps()
        assert listed == ([1, 2] if applied else [1])
        assert is_state(jaxckpt.restore(f"{url}/run"), 1 + applied)


@pytest.mark.parametrize(
    "save", [jaxckpt.save, lambda path, tree: jaxckpt.save_async(path, tree).result()]
)
def test_a_store_that_refuses_a_save_is_the_cause_of_its_failure(place, save):
    """As with a full disk: whoever catches SaveFailed catches this too."""
    url, _, proxy = place
    proxy.add(Answer(403), method="PUT", path="/a/")

    with pytest.raises(SaveFailed, match="no permission") as caught:
        save(f"{url}/a", state(1))

    assert isinstance(caught.value.__cause__, StoreError)
    assert "may be committed" not in str(caught.value)


def error_of(call):
    """Returns the typed error of a call, or None."""
    try:
        call()
    except (CheckpointError, ValueError) as error:
        return error
    return None


@pytest.mark.parametrize(
    "number", [n if n in (0, 5, 10) else pytest.param(n, marks=pytest.mark.slow) for n in range(20)]
)
@pytest.mark.parametrize("verb", ["save", "restore"])
def test_a_black_hole_is_an_error_within_the_deadline(place, trial, verb, number):
    """From any request on nobody answers: never a hang, and the error says how long it waited."""
    url, _, proxy = place
    restored = {}
    calls = {
        "save": lambda number: jaxckpt.save(f"{url}/{number}", state(1)),
        "restore": lambda number: restored.update(jaxckpt.restore(f"{url}/a")),
    }
    jaxckpt.save(f"{url}/a", state(1))
    proxy.requests.clear()
    calls[verb](-1)
    if number >= proxy.requests.count():
        pytest.skip("it has fewer requests")
    restored.clear()
    with trial("37", f"no answer to a {verb} from request {number} on"):
        proxy.requests.clear()
        hole = proxy.add(Hang(), when=lambda request: request.number >= number)

        error = error_of(partial(calls[verb], number))  # a hang ends the test after two minutes

        if not hole.done:
            pytest.skip("it had fewer requests this time: none was sent a second time")
        if error is None:  # after its commit, or where the answer to a second request came first
            proxy.heal()
            assert is_state(restored or jaxckpt.restore(f"{url}/{number}"), 1)
        else:
            assert not isinstance(error, CorruptCheckpoint), error
            assert re.search(r"\d tr(y|ies)\)|\d retry attempts failed", str(error)), error


# --- writers that race -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("moto_server", 100),
        ("gcs_server", 100),
        ("seaweedfs_server", 4),
        pytest.param("seaweedfs_server", 20, marks=pytest.mark.slow),
    ],
)
def test_of_many_creates_one_wins(request, use_store, trial, name, rounds):
    """Each writer with connections of its own, as in processes of their own."""
    server = use_store(request.getfixturevalue(name))
    url = f"{server.scheme}://{server.bucket}"
    place = (server.scheme, server.bucket)
    writers = [ObjectStorage(*place, settings_of(*place)) for _ in range(WRITERS)]
    start = threading.Barrier(WRITERS)

    def create(number, path):
        start.wait()
        return writers[number].create(path, b"writer %d" % number)

    with ThreadPoolExecutor(WRITERS) as pool:
        for n in range(rounds):
            with trial("38", f"{name}, round {n}"):
                won = [*pool.map(create, range(WRITERS), [f"{url}/{n}"] * WRITERS)]
                assert won.count(True) == 1
                stored = writers[0].read(f"{url}/{n}", max_bytes=100)
                assert stored == b"writer %d" % won.index(True)


@pytest.mark.parametrize("name", ["moto_server", "gcs_server"])
def test_of_many_saves_one_wins(request, use_store, zygote, trial, name):  # noqa: F811
    """Processes save one path at the same moment: one succeeds, and what is there is its own."""
    server = use_store(request.getfixturevalue(name))
    url = f"{server.scheme}://{server.bucket}"
    reach(url, server.env)
    for n in range(4):
        with trial("38", f"{name}, saves of round {n}"):
            zygote.start(children.race_to_save, f"{url}/{n}", server.env, WRITERS)
            said, status = zygote.answers()
            assert (status, len(said)) == (0, WRITERS)
            winners = [one["writer"] for one in said if not one["error"]]
            assert len(winners) == 1, [one["error"] for one in said]
            [won] = winners
            for error in {one["error"] for one in said} - {""}:
                assert re.search("exist|other writer|another writer", error), error
            assert is_state(jaxckpt.restore(f"{url}/{n}"), won)
            assert jaxckpt.verify(f"{url}/{n}").ok
