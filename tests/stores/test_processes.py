"""Several real processes save to a store and restore from it together."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import jaxckpt
from jaxckpt.storage import locate
from tests.run.test_tiers import damage

SERVERS = ["gcs_server", "moto_server", "azurite_server"]


@pytest.mark.parametrize("name", SERVERS)
def test_processes_save_and_restore_together(request, use_store, run_processes, name):
    """Each process writes its share; nothing of an attempt is in the way of the next one."""
    server = use_store(request.getfixturevalue(name))
    url = f"{server.scheme}://{server.bucket}/run"

    done = run_processes(
        "stores:save_and_restore", count=2, devices_per_process=2, args=[url, server.env]
    )

    for i, one in enumerate(done):
        assert one.result == {"steps": [2, 3], "same": True, "text": "step 3", "data": 100 + i}
    assert jaxckpt.verify(f"{url}/3").ok
    alone = jaxckpt.restore(f"{url}/3")
    assert np.array_equal(alone["split"], np.arange(1 << 18, dtype=np.float32).reshape(8, -1) + 3)
    assert not any(file.startswith("1/") for file in locate(url)[0].files(url))


def test_checkpointers_of_the_drop_in_save_together(gcs_server, use_store, run_processes):
    """What process 0 has begun to write is not taken for another checkpoint by a later process."""
    server = use_store(gcs_server)
    args = [f"gs://{server.bucket}", server.env]

    done = run_processes("drop_in:saves_late", count=2, args=args, timeout_s=100)

    assert [one.result for one in done] == [True, True]


@pytest.mark.parametrize("name", SERVERS)
def test_hosts_upload_what_is_on_their_disks(request, use_store, run_processes, tmp_path, name):
    """All parts of a step become one there; a new host reads in it what no disk has."""
    server = use_store(request.getfixturevalue(name))
    url = f"{server.scheme}://{server.bucket}/run"
    kinds = ["split", "whole", "count"]

    def train(steps):
        args = [tmp_path, steps, [0, 1], kinds, True, True, url, server.env]
        return [one.result for one in run_processes("tiers:train_apart", args=args)]

    for one in train(3):
        assert one["tiers"] == {"local": [2, 3], "durable": [2], "waiting": []}
        assert one["problems"] == []
    assert jaxckpt.verify(f"{url}/2").ok
    assert jaxckpt.restore(f"{url}/2", as_numpy=True)["whole"][7] == 14
    assert not any(".orbax-checkpoint-tmp" in file for file in locate(url)[0].files(url))

    shutil.rmtree(tmp_path / "host0")
    said = train(0)
    assert [one["start"] for one in said] == [2, 2]
    for host, one in enumerate(said):
        assert f"/host{host}/local/share_0/2." in one["places"][0]
        assert any(problem.endswith(f" were read in {url}") for problem in one["problems"])

    share = tmp_path / "host1" / "local" / "share_0" / "2"
    damage(share / "state" / "ocdbt.process_held" / "d")
    assert "is mended from" in "".join(train(0)[1]["problems"])
    assert jaxckpt.verify(share).ok


def test_a_store_is_asked_once_for_what_all_processes_want(
    gcs_server, use_store, run_processes, tmp_path
):
    """By default, however a program restores: counted at the store, with all metadata."""
    server = use_store(gcs_server)
    url = f"gs://{server.bucket}/run"
    args = [url, 70, server.env]
    (saved,) = run_processes("once:save_run", count=1, devices_per_process=8, args=args)

    for way in ("path", "manager", "restore_or", "drop-in", "local"):
        server.running.requests.clear()
        args = [url, way, tmp_path, server.env]
        done = run_processes("once:restore_by", devices_per_process=1, args=args)
        assert all(one.result for one in done), way
        sent = sum(one.sent_bytes for one in server.running.requests.all())
        assert saved.result < sent < 1.05 * saved.result, way


@pytest.mark.parametrize(("carry_s", "once"), [(1.2, 6), (1.3, 2)])
def test_the_rest_is_carried_or_read_directly_as_all_agree(
    gcs_server, use_store, run_processes, carry_s, once
):
    """By default; six leaves, a second to read each, and as many to carry it: not measured ones."""
    server = use_store(gcs_server)
    url = f"gs://{server.bucket}/a"
    args = [url, 102, server.env, 6]
    run_processes("once:save_parts", count=1, devices_per_process=8, args=args)

    done = run_processes(
        "once:restore_at_rates", devices_per_process=1, args=[url, carry_s, server.env]
    )

    names = [f"w{i}" for i in range(once)]
    for one in done:
        assert one.result == {"same": True, "once": names, "read": once + 2 * (6 - once)}
