"""What a killed writer left in a bucket is removed by the next writer, and nothing else is."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading

import pytest

import jaxckpt
from jaxckpt._disk import transaction
from jaxckpt.errors import SaveFailed, StoreError
from jaxckpt.format import names
from jaxckpt.format.step import Record, decode_record
from jaxckpt.storage import locate
from tests.commandline import cli
from tests.faults.conftest import zygote  # noqa: F401  # a fixture
from tests.stores import children
from tests.stores.children import is_state, state
from tests.stores.killing import end_leases, kill, lease_of, wait_for
from tests.stores.proxy import Answer, Hang, Hold
from tests.waiting import wait_until

TOKEN = "0123456789abcdef"


def files_of(url):
    """All objects below a URL, unfinished ones included."""
    storage, path = locate(url)
    return {one["path"].removeprefix(storage._key(path) + "/") for one in storage._below(path)}


def steps_with_files(run):
    return {file.partition("/")[0] for file in files_of(run) if "/" in file}


def recorded(url):
    """The files that belong to a checkpoint."""
    storage, path = locate(url)
    file = f"{path}/{names.RECORD}"
    record = decode_record(storage.read(file, max_bytes=1 << 20), file=file)
    return {*record.files, names.RECORD, names.COMMIT_MARKER}


def requests_of(zygote, proxy, function, *args):  # noqa: F811
    proxy.requests.clear()
    zygote.start(function, *args)
    zygote.answers()
    return len(proxy.requests.all())


def kill_saves_of_20(place, zygote, every):  # noqa: F811
    """Kills jobs at requests of their save of step 20, after step 10; returns the runs."""
    url, server, proxy = place
    first = requests_of(zygote, proxy, children.save_steps, f"{url}/a", server.env, [10], 9)
    runs, number = [], first - 1  # the last request releases the lock
    while True:
        run = f"{url}/run{number}"
        args = children.save_steps, run, server.env, [10, 20], 9
        if not kill(zygote, proxy, number, *args):
            return runs
        runs.append(run)
        number += every


def test_what_killed_saves_left_is_removed_at_the_next_opening(place, zygote):  # noqa: F811
    """Once the lease is over. The job resumes from the older step and saves other numbers."""
    runs = kill_saves_of_20(place, zygote, every=2)
    assert any("20" in steps_with_files(run) for run in runs)
    end_leases(place[0])
    removed = 0

    for run in runs:
        had = steps_with_files(run)
        with jaxckpt.CheckpointManager(run) as manager:
            steps = manager.all_steps()
            assert steps_with_files(run) == set(map(str, steps))
            removed += len(had) - len(steps)
            assert not [problem for problem in manager.problems if "left" in problem]
            assert is_state(manager.restore(), steps[-1])
            manager.save(25, state(25))
        assert steps_with_files(run) == {*map(str, steps), "25"}
        for step in (*steps, 25):
            assert files_of(f"{run}/{step}") == recorded(f"{run}/{step}")
    assert len(runs) >= 5
    assert removed >= 3


def test_what_a_killed_save_left_goes_when_its_lease_is_over(place, zygote):  # noqa: F811
    """A job that starts at once leaves it alone, and removes it with a later save."""
    url, server, proxy = place
    first = requests_of(zygote, proxy, children.save_steps, f"{url}/a", server.env, [10], 9)
    for more in range(6, 0, -1):  # the first save takes fewer requests at times
        run = f"{url}/run{more}"
        assert kill(zygote, proxy, first + more, children.save_steps, run, server.env, [10, 20], 9)
        left = files_of(f"{run}/20")
        if names.COMMIT_MARKER not in left:
            break
    assert steps_with_files(run) == {"10", "20"}

    is_over = lease_of(f"{run}/20")
    with jaxckpt.CheckpointManager(run) as manager:
        manager.save(12, state(12)).result()
        assert is_over() or files_of(f"{run}/20") == left
        wait_until(is_over)  # the manager's own leases go on meanwhile
        manager.save(14, state(14)).result()
        assert steps_with_files(run) == {"10", "12", "14"}


def test_what_a_killed_deletion_left_is_removed_at_the_next_opening(place, zygote):  # noqa: F811
    """Also if it is older than the newest step."""
    url, server, proxy = place
    with jaxckpt.CheckpointManager(f"{url}/a") as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    number, halves = 0, []
    while True:
        run = f"{url}/run{number}"
        for step in (1, 2, 3):
            copy(f"{url}/a/{step}", f"{run}/{step}")
        if not kill(zygote, proxy, number, children.delete_step, run, server.env, 2):
            break
        files = files_of(f"{run}/2")
        if files and names.COMMIT_MARKER not in files:
            halves.append(run)
        number += 1
    end_leases(url)

    for run in halves:
        jaxckpt.CheckpointManager(run).close()
        assert steps_with_files(run) == {"1", "3"}
    assert halves


@pytest.mark.parametrize("then", ["the next deletion", "the next opening"])
def test_what_a_refused_deletion_left_is_removed(place, trial, then):
    """At each of its requests one 403, which is told; a lease that went on is waited for."""
    url, _, proxy = place
    for number in itertools.count():
        run = f"{url}/{number}"
        manager = jaxckpt.CheckpointManager(run)
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.wait_until_finished()
        proxy.requests.clear()
        refused = proxy.add(Answer(403), number=number)
        with contextlib.suppress(ValueError, StoreError):
            manager.delete(1)
        proxy.heal()
        end_leases(run)
        with trial("36", f"403 at request {number} of a deletion, then {then}"):
            if then == "the next deletion":
                manager.delete(2)
            manager.close()
            if then == "the next opening":
                jaxckpt.CheckpointManager(run).close()
            steps = jaxckpt.CheckpointManager(run, mode="r").all_steps()
            assert steps in ([1, 3], [3], [1, 2, 3], [2, 3])
            assert (2 in steps) == (then == "the next opening")
            assert steps_with_files(run) == set(map(str, steps))
            assert names.DOOMED not in files_of(run)
        if not refused.done:
            break
    assert number >= 10


def test_a_late_request_of_a_deletion_dooms_no_step_saved_since(place):
    """The store acts on it once the step is deleted and saved again, after it was sent again."""
    url, _, proxy = place
    acts = threading.Event()
    with jaxckpt.CheckpointManager(url) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).result()
        held = proxy.add(Hold(acts), method="PUT", path="doomed", times=1)
        manager.delete(2)
        manager.save(2, state(3)).result()
        assert held.done == 1
        assert names.DOOMED not in files_of(url)
        acts.set()
        wait_until(lambda: names.DOOMED in files_of(url))

    with jaxckpt.CheckpointManager(url) as manager:
        assert manager.all_steps() == [1, 2]
        assert is_state(manager.restore(), 3)
        assert names.DOOMED not in files_of(url)


def test_a_late_marker_of_a_deleted_step_is_no_step(place):
    """The store acts on its request after it was sent again, and the step was deleted."""
    url, _, proxy = place
    acts = threading.Event()
    with jaxckpt.CheckpointManager(url) as manager:
        manager.save(1, state(1)).result()
        held = proxy.add(Hold(acts), method="PUT", path=f"2/{names.COMMIT_MARKER}", times=1)
        manager.save(2, state(2)).result()
        manager.delete(2)
        assert held.done == 1
        acts.set()
        wait_until(lambda: files_of(f"{url}/2") == {names.COMMIT_MARKER})
        assert jaxckpt.CheckpointManager(url, mode="r").all_steps() == [1]

        manager.save(2, state(3)).result()
        assert is_state(manager.restore(), 3)
    assert files_of(f"{url}/2") == recorded(f"{url}/2")


def test_who_may_not_delete_saves_on(place, trial):
    """Each step that the policy would delete stays, and `problems` says why."""
    url, _, proxy = place
    proxy.add(Answer(403), method="DELETE")
    proxy.add(Answer(403), method="POST", path="delete")
    with jaxckpt.CheckpointManager(url, keep=jaxckpt.KeepPolicy(last=1)) as manager:
        for step in range(1, 5):
            manager.save(step, state(step)).result()
        told = manager.problems
    proxy.heal()

    with trial("36", "each deletion of a run is refused"):
        assert jaxckpt.CheckpointManager(url, mode="r").all_steps() == [1, 2, 3, 4]
        assert any("cannot be deleted" in one and "no permission" in one for one in told)
    end_leases(url)
    with jaxckpt.CheckpointManager(url, keep=jaxckpt.KeepPolicy(last=1)) as manager:
        manager.save(5, state(5)).result()
    assert steps_with_files(url) == {"5"}
    assert names.DOOMED not in files_of(url)


@pytest.fixture
def lagging(gcs_server, use_store):
    """A bucket whose listings can be stopped: `url, bucket`."""
    server = use_store(gcs_server)
    return f"gs://{server.bucket}/run", server.running.bucket(server.bucket)


def test_a_deletion_leaves_nothing_where_listings_lag(lagging):
    """The file that it writes itself, by which others see it, is deleted by name."""
    run, bucket = lagging
    with jaxckpt.CheckpointManager(run, keep=jaxckpt.KeepPolicy(last=1)) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).result()
        manager.save(3, state(3)).result()
        manager.wait_until_finished()
        bucket.freeze(lists=True)
        manager.save(4, state(4)).result()
        manager.delete(3)
    bucket.thaw()

    assert steps_with_files(run) == {"4"}


def test_a_step_that_a_listing_does_not_show_yet_is_not_lost(lagging):
    """A job that starts meanwhile resumes at an older one, which RELIABILITY.md says."""
    run, bucket = lagging
    with jaxckpt.CheckpointManager(run) as manager:
        manager.save(1, state(1)).result()
        bucket.freeze(lists=True)
        manager.save(2, state(2)).result()

    assert jaxckpt.CheckpointManager(run, mode="r").latest_step() == 1
    bucket.thaw()
    assert jaxckpt.verify(f"{run}/2").ok
    assert is_state(jaxckpt.restore(run), 2)


def test_a_file_that_a_listing_does_not_show_is_no_damage(lagging):
    """Else the step would be set aside, without that file."""
    run, bucket = lagging
    with jaxckpt.CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).result()
    storage, path = locate(run)
    file = f"{path}/2/state/{names.OCDBT_MANIFEST}"
    data = storage.read(file, max_bytes=1 << 20)
    storage.delete(file)
    bucket.freeze(lists=True)
    storage.write(file, data)

    with jaxckpt.CheckpointManager(run) as manager:
        with pytest.raises(OSError, match="not listed"):
            manager.restore()
        assert manager.scrub()[2].damaged  # says who reads it by the listing
        assert any("not listed" in problem for problem in manager.problems)
        bucket.thaw()
        assert is_state(manager.restore(), 2)


def test_where_reads_lag_a_save_fails_and_the_next_one_works(lagging):
    """It cannot find its own file, so another writer may have taken over; nothing is lost."""
    run, bucket = lagging
    with jaxckpt.CheckpointManager(run) as manager:
        manager.save(1, state(1)).result()
        bucket.freeze(reads=True)
        with pytest.raises(SaveFailed, match="another writer took over"):
            manager.save(2, state(2)).result()
        assert is_state(manager.restore(), 1)
        bucket.thaw()
        manager.save(3, state(3)).result()
        assert manager.all_steps() == [1, 3]


def copy(source, target):
    storage, path = locate(source)
    for file in storage.files(path):
        storage.link(f"{path}/{file}", f"{locate(target)[1]}/{file}")


def test_the_next_save_removes_what_a_killed_one_left(place, zygote):  # noqa: F811
    """Of a checkpoint outside a run."""
    url, server, proxy = place
    number, paths = 0, []
    while True:
        path = f"{url}/a{number}"
        if not kill(zygote, proxy, number, children.save_alone, path, server.env, 1):
            break
        paths.append(path)
        number += 2
    end_leases(url)

    for path in paths:
        if names.COMMIT_MARKER not in files_of(path):
            jaxckpt.save(path, state(2))
            assert is_state(jaxckpt.restore(path), 2)
            assert files_of(path) == recorded(path)
    assert len(paths) >= 5


def test_what_arrives_after_an_interrupted_save_blocks_no_other(place):
    """The request goes on while the save cleans up after itself."""
    url, _, proxy = place
    arrives = threading.Event()

    def interrupt(_):
        os.kill(os.getpid(), signal.SIGINT)
        return True

    held = proxy.add(Hold(arrives), method="PUT", path="/d/", when=interrupt, times=1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    with pytest.raises(KeyboardInterrupt):
        jaxckpt.save(f"{url}/a", state(1))
    signal.signal(signal.SIGINT, before)
    assert files_of(f"{url}/a") == {names.WRITER}
    arrives.set()
    wait_until(lambda: len(files_of(f"{url}/a")) == 2)

    jaxckpt.save(f"{url}/a", state(2))
    assert held.done == 1
    assert is_state(jaxckpt.restore(f"{url}/a"), 2)
    assert files_of(f"{url}/a") == recorded(f"{url}/a")


def test_what_a_store_does_after_a_failed_save_blocks_no_other(place):
    """It acts on a request that it did not answer, once the save has been cleaned up."""
    url, _, proxy = place
    acts = threading.Event()
    held = proxy.add(Hold(acts), method="PUT", path="/d/", times=1)
    proxy.add(Answer(503), method="PUT", path="/d/")
    with jaxckpt.CheckpointManager(f"{url}/a") as manager:
        with pytest.raises(SaveFailed):
            manager.save(1, state(1)).result()
        assert files_of(f"{url}/a/1") == {names.WRITER}
        proxy.heal()
        acts.set()
        wait_until(lambda: len(files_of(f"{url}/a/1")) == 2)

        manager.save(1, state(2)).result()
    assert held.done == 1
    assert is_state(jaxckpt.restore(f"{url}/a/1"), 2)
    assert files_of(f"{url}/a/1") == recorded(f"{url}/a/1")


def test_a_live_writer_of_the_run_is_not_disturbed(place, zygote):  # noqa: F811
    """A job that opens the run meanwhile removes nothing of it, and the save is committed."""
    url, server, proxy = place
    first = requests_of(zygote, proxy, children.save_steps, f"{url}/a", server.env, [10], 9)
    for number in range(first, first + 12, 3):
        run = f"{url}/run{number}"
        proxy.requests.clear()
        fault = proxy.add(Hang(), number=number, times=1)  # tried again after a second
        pid = zygote.start(children.save_steps, run, server.env, [10, 20], 9)
        wait_for(fault, pid)
        jaxckpt.CheckpointManager(run).close()
        said, status = zygote.answers()

        assert (said, status) == ([{"done": True}], 0), zygote.errors()
        assert is_state(jaxckpt.restore(f"{run}/20"), 20)
        proxy.heal()


def test_a_live_save_beside_the_steps_is_not_disturbed(place):
    """One that no manager makes: it can be committed after a job has taken the run over."""
    url, _, _ = place
    storage, path = locate(f"{url}/run")
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        manager.save(10, state(10))
    alone = transaction.begin(storage, f"{path}/20", overwrite=False)
    storage.create(f"{path}/20/a", b"1")

    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        assert manager.all_steps() == [10]
        manager.save(15, state(15)).result()
        alone.commit({"b": b"2"}, Record(), known={})
        manager.save(25, state(25)).result()
        assert manager.all_steps() == [10, 15, 20, 25]
    assert {"20/a", "20/b"} <= files_of(f"{url}/run")


def test_nothing_else_is_removed(place):
    """Not another program's directory or half step, not a copy that somebody is making."""
    url, _, _ = place
    storage, path = locate(f"{url}/run")
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        manager.save(10, state(10))
    others = {
        "20/notes.txt": b"1",
        f"40/{names.RECORD}": b"{}",
        "40/state/d/1": b"1",
        f"50/state/ocdbt.process_0.{TOKEN}/d/1": b"1",
        "50/state/mine": b"1",
        "x/y": b"1",
    }
    if storage.scheme == "gs":  # elsewhere there is no Orbax
        others |= {"30/_CHECKPOINT_METADATA": b"{}", "30/state/ocdbt.process_0/d/1": b"1"}
    ours = {f"60/state/ocdbt.process_1.{TOKEN}/d/1": b"1", "70/.jaxckpt-tmp-1": b"1"}
    for file, data in (others | ours).items():
        storage.write(f"{path}/{file}", data)

    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        assert manager.all_steps() == [10]
        assert manager.restore() is not None
        told = [text for text in manager.problems if "is left alone" in text]

    assert files_of(f"{url}/run").isdisjoint(ours)
    assert others.keys() <= files_of(f"{url}/run")
    assert len(told) == len({file.partition("/")[0] for file in others} - {"x"})


def test_gc_removes_what_is_left_anywhere_in_a_run(place):
    """Also below the newest step, where an opening does not look; it says so first."""
    url, _, _ = place
    storage, path = locate(f"{url}/run")
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        for step in (10, 20):
            manager.save(step, state(step))
    left = {f"5/{names.WRITER}", "5/state/d/1", "7/notes.txt"}
    for file in left:
        storage.write(f"{path}/{file}", b"1")
    jaxckpt.CheckpointManager(f"{url}/run").close()
    assert left <= files_of(f"{url}/run")

    code, out, _ = cli("gc", f"{url}/run", "--last", "2", "--dry-run")
    assert code == 0
    assert "1 unfinished step to remove: 5" in out
    assert left <= files_of(f"{url}/run")
    code, out, err = cli("gc", f"{url}/run", "--last", "2", "--yes", "--json")

    assert code == 0, err
    found = json.loads(out)
    assert (found["deleted"], found["unfinished"], found["removed"]) == ([], [5], [5])
    assert steps_with_files(f"{url}/run") == {"7", "10", "20"}
