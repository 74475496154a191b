"""Runs with a local disk in front of a bucket, which is slow, away, forbidden, or cut off."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
import time

import pytest

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier
from jaxckpt.errors import SaveFailed, StoreError
from jaxckpt.format import names
from jaxckpt.storage import locate
from tests.commandline import cli
from tests.faults.conftest import zygote  # noqa: F401  # a fixture
from tests.stores import children
from tests.stores.children import is_state, state
from tests.stores.killing import end_leases, kill
from tests.stores.proxy import Answer, Hang

LAST = KeepPolicy(last=2)
# Every third request on CI; all of them in the slow tests.
PARTS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]


def test_a_step_goes_to_the_store_and_comes_back_on_another_host(place, tmp_path):
    url, _, _ = place
    with CheckpointManager(url, local=tmp_path / "a", keep=LAST) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).durable()
        manager.wait_until_finished()
        assert manager.tiers == {"local": [2, 3], "durable": [2, 3], "waiting": []}

    with CheckpointManager(url, local=tmp_path / "b", keep=LAST) as manager:
        assert is_state(manager.restore(), 3)
        manager.save(4, state(4)).durable()
    assert jaxckpt.verify(f"{url}/4").ok
    assert is_state(jaxckpt.restore(f"{url}/4"), 4)


@pytest.mark.parametrize("fault", [Hang(), Answer(503), Answer(403)], ids=["hangs", "503", "403"])
def test_a_store_that_is_away_delays_no_save(place, tmp_path, fault):
    """While it is, local saves go on; afterwards the newest steps get there."""
    url, _, proxy = place
    with CheckpointManager(url, local=tmp_path / "local", keep=LAST) as manager:
        manager.save(1, state(1)).durable()
        proxy.add(fault)
        longest_s, handles = 0.0, []
        for step in range(2, 12):
            start_s = time.monotonic()
            handles.append(manager.save(step, state(step)))
            longest_s = max(longest_s, time.monotonic() - start_s)
            handles[-1].result(60)
        assert longest_s < 5  # a request waits for 8
        assert jaxckpt.verify(tmp_path / "local" / "11").ok
        proxy.heal()
        handles[-1].durable(60)
        assert manager.restore(step=11) is not None
        manager.wait_until_finished()
        durable = manager.tiers["durable"]
    assert durable[-1] == 11
    assert is_state(jaxckpt.restore(f"{url}/11"), 11)


def test_a_store_that_stays_forbidden_is_told(place, tmp_path):
    url, _, proxy = place
    local = tmp_path / "local"
    with CheckpointManager(
        url, local=LocalTier(local, durable_timeout_s=0.5), keep=LAST
    ) as manager:
        proxy.add(Answer(403))
        with pytest.raises(StoreError, match="permission"):
            manager.save(1, state(1)).durable(60)
        proxy.heal()
        manager.save(2, state(2)).durable(60)
        assert manager.tiers == {"local": [1, 2], "durable": [2], "waiting": []}


def test_a_damaged_object_is_mended_from_the_local_copy(place, tmp_path):
    url, _, _ = place
    with CheckpointManager(url, local=tmp_path / "local", keep=LAST) as manager:
        manager.save(1, state(1)).durable()
        storage, root = locate(url)
        sizes = {name: entry.size for name, entry in storage.files(f"{root}/1").items()}
        largest = max(sizes, key=sizes.__getitem__)
        data = bytearray(storage.read(f"{root}/1/{largest}", max_bytes=1 << 30))
        data[len(data) // 2] ^= 1
        storage.write(f"{root}/1/{largest}", bytes(data))
        assert jaxckpt.verify(f"{url}/1").damaged

        assert all(report.ok for report in manager.scrub().values())

        assert any("is mended from" in problem for problem in manager.problems)
    assert jaxckpt.verify(f"{url}/1").ok


def test_a_step_that_lost_its_marker_is_mended_and_not_collected(place, tmp_path):
    """It looks like a save under way, but its writer's file is gone as after a commit."""
    url, _, _ = place
    with CheckpointManager(url, local=tmp_path / "local", keep=LAST) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).durable()
    storage, root = locate(url)
    storage.delete(f"{root}/1/{names.COMMIT_MARKER}")

    assert cli("gc", url, "--last", 9, "--yes")[0] == 0
    code, out, _ = cli("heal", url, tmp_path / "local")

    assert (code, out) == (0, f"mended step 1: {names.COMMIT_MARKER}\n")
    assert jaxckpt.verify(f"{url}/1").ok
    assert is_state(jaxckpt.restore(f"{url}/1"), 1)


def test_a_run_goes_on_while_its_bucket_is_away(place, tmp_path):
    """A job that starts then has the local steps, and uploads them when the store answers."""
    url, _, proxy = place
    local = tmp_path / "local"
    with CheckpointManager(url, local=local, keep=LAST) as manager:
        manager.save(1, state(1)).durable()
    proxy.add(Answer(503))
    with CheckpointManager(url, local=local, keep=LAST) as manager:
        assert is_state(manager.restore(), 1)
        handle = manager.save(2, state(2))
        handle.result(60)
        threading.Timer(0.5, proxy.heal).start()
        handle.durable(60)
    assert is_state(jaxckpt.restore(url), 2)


def test_a_start_does_not_wait_for_a_bucket_that_does_not_answer(place, tmp_path, limits):
    """Nor do later calls; the first upload that gets through opens the run there."""
    url, _, proxy = place
    local = tmp_path / "local"
    with CheckpointManager(url, local=local, keep=LAST) as manager:
        manager.save(1, state(1)).durable()
    limits("jaxckpt._run.root", AWAY_S=0.2)
    proxy.add(Hang())
    with CheckpointManager(url, local=local, keep=LAST) as manager:
        reach = manager._directory.reach
        reach.away_s = 60.0  # from now on nothing waits for it
        assert is_state(manager.restore(), 1)
        assert (manager.all_steps(), manager.latest_step()) == ([1], 1)
        assert manager.tiers == {"local": [1], "durable": None, "waiting": [1]}
        handle = manager.save(2, state(2))
        handle.result(60)
        assert reach.away
        proxy.heal()
        handle.durable(60)
        assert manager.tiers == {"local": [1, 2], "durable": [1, 2], "waiting": []}
    assert is_state(jaxckpt.restore(url), 2)


def test_an_upload_does_not_pass_newer_steps_of_another_job(place, tmp_path, limits):
    """They were saved elsewhere, and could not be seen when this job began."""
    url, _, proxy = place
    local = tmp_path / "local"
    with CheckpointManager(url, local=local, keep=LAST) as manager:
        manager.save(1, state(1)).durable()
    with CheckpointManager(url, keep=LAST) as other:
        other.save(10, state(10))
    limits("jaxckpt._run.root", AWAY_S=0.2)
    proxy.add(Answer(503))
    with CheckpointManager(url, local=local, keep=LAST) as manager:
        handle = manager.save(2, state(2))
        handle.result(60)
        proxy.heal()
        with pytest.raises(SaveFailed, match="step 10 there was saved by another job"):
            handle.durable(60)
    assert is_state(jaxckpt.restore(url), 10)


def test_a_program_ends_although_its_bucket_does_not_answer(place, tmp_path):
    """Threads that wait for it do not hold the end, which names the steps not uploaded."""
    url, _, proxy = place
    local = tmp_path / "local"
    with CheckpointManager(url, local=local, keep=LAST) as manager:
        manager.save(1, state(1)).durable()
    proxy.add(Hang())
    code = """
import sys, jaxckpt
from jaxckpt._run import root
root.AWAY_S = 0.2
local = jaxckpt.LocalTier(sys.argv[2], durable_timeout_s=3)
manager = jaxckpt.CheckpointManager(sys.argv[1], local=local)
assert manager.restored_step is None and manager.tiers["durable"] is None
"""
    command = [sys.executable, "-W", "ignore", "-c", code, url, str(local)]
    # One request alone would wait for 60 s.
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert "steps [1] are not uploaded" in done.stderr
    assert f"jaxckpt upload {local} {url}" in done.stderr


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("part", PARTS)
def test_a_kill_at_any_request_loses_nothing_acknowledged(
    place,
    zygote,  # noqa: F811
    trial,
    tmp_path,
    part,
    applied,
):
    """On its host the newest saved step restores, anywhere the newest durable one."""
    url, server, proxy = place
    for number in itertools.count(part, len(PARTS)):
        root, local = f"{url}/{number}", tmp_path / str(number)
        args = (root, server.env, str(local), [1, 2])
        said = []
        ended = not kill(
            zygote, proxy, number, children.save_in_tiers, *args, applied=applied, said=said
        )
        told = {key: value for word in said for key, value in word.items()}
        when = "after" if applied else "before"
        with trial("40", f"a kill {when} the store acts on request {number}"):
            with CheckpointManager(root, mode="r") as reader:
                newest = reader.latest_step() or 0  # an older one may be half deleted
                assert newest >= told.get("durable", 0)
                assert not newest or is_state(reader.restore(), newest)
            end_leases(root)
            with CheckpointManager(root, local=local) as manager:
                assert (manager.latest_step() or 0) >= told.get("saved", 0)
                if told.get("saved"):
                    assert is_state(manager.restore(), manager.restored_step)
                manager.save(20, state(20)).durable()
            assert is_state(jaxckpt.restore(root), 20)
        shutil.rmtree(local)
        if ended:
            break
    assert number > 20
