"""How many requests a run in a bucket takes, all in all and in a row, if it has many steps."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import jaxckpt
from jaxckpt.format import names
from jaxckpt.storage import _requests as requests_module
from jaxckpt.storage import locate
from tests.commandline import cli
from tests.stores.rounds import Rounds

STEPS = 70  # a few more than are looked at together
TREE = {"w": np.ones(4, np.float32)}


@pytest.fixture
def counting(proxied, gcs_server, limits):
    """Returns the URL of a bucket, its server, and what counts the requests of a call, by round."""
    limits(requests_module, _LEAST_PEERS=math.inf)  # no read is sent twice
    server, proxy = proxied(gcs_server)

    def count(call):
        proxy.rounds = rounds = Rounds()
        call()
        proxy.rounds = None
        return sum(map(len, rounds.requests)), rounds.count

    return f"{server.scheme}://{server.bucket}", server, count


def save(manager, step):
    manager.save(step, TREE, metrics={"loss": 1.0})
    manager.wait_until_finished()


def make_steps(url, server):
    """Makes a run with copies of one step."""
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        save(manager, 0)
    storage, path = locate(f"{url}/run/0")
    files = {
        name: storage.read(f"{path}/{name}", max_bytes=1 << 20) for name in storage.files(path)
    }
    bucket = server.running.bucket(server.bucket)
    for step in range(1, STEPS):
        for name, data in files.items():
            bucket.put(f"run/{step}/{name}", data, None)


def test_requests_do_not_grow_with_the_steps(counting):
    """Opening, a second save and `rm` take as many as in a run of two steps, but for metrics."""
    url, server, count = counting
    make_steps(url, server)
    managers = []
    keep = jaxckpt.KeepPolicy(best=2 * STEPS, metric="loss")

    opened = count(lambda: managers.append(jaxckpt.CheckpointManager(f"{url}/run", keep=keep)))
    first = count(lambda: save(managers[0], STEPS))
    second = count(lambda: save(managers[0], STEPS + 1))
    managers[0].close()
    removed = count(lambda: cli("rm", "-y", f"{url}/run", 3))

    assert opened <= (12, 5)  # the ledger is read and written beside others
    assert first[0] <= 4 * STEPS + 20  # two for the ledger, after the save
    # One listing and three reads of each, 32 and 64 at a time.
    assert first[1] <= math.ceil(STEPS / 32) + 3 * math.ceil(STEPS / 64) + 14
    assert second[0] <= 16
    assert second[1] <= 8
    assert removed[0] <= 40
    assert removed[1] <= 21


@pytest.mark.parametrize("command", [["ls"], ["gc", "-n", "--last", "3"]])
def test_commands_read_three_files_of_a_step_at_most(counting, command):
    """The record, the metadata and the metrics, 32 at a time, after a listing of all steps."""
    url, server, count = counting
    make_steps(url, server)

    found, in_a_row = count(lambda: cli(*command, f"{url}/run"))

    assert found <= 3 * STEPS + 10
    assert in_a_row <= math.ceil(3 * STEPS / 32) + 10


def test_a_step_that_is_not_deleted_is_left_as_it_was(counting):
    """Its claim is taken back, whether a pin or a reader keeps it."""
    url, _, _ = counting
    with jaxckpt.CheckpointManager(f"{url}/run", keep=jaxckpt.KeepPolicy(last=1)) as manager:
        save(manager, 1)
        manager.pin(1)
        save(manager, 2)
        storage, path = locate(f"{url}/run")
        pinned = storage.files(f"{path}/1")
        with manager._directory.leases.protect(2):
            save(manager, 3)
        held = storage.files(f"{path}/2")
        steps = manager.all_steps()

    assert steps == [1, 2, 3]
    assert names.WRITER not in pinned
    assert names.WRITER not in held
    assert names.DOOMED not in storage.entries(path)


def test_a_job_that_lost_the_run_claims_no_step(counting):
    """It had named a step to delete, and finds the next owner as it looks at the step."""
    url, _, _ = counting
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        for step in (1, 2):
            save(manager, step)
        storage, path = locate(f"{url}/run")
        deletion = manager._directory.deletion
        deletion.owner.token = "of another job"

        assert deletion.delete([1]) == []

        assert names.WRITER not in storage.files(f"{path}/1")
        assert jaxckpt.verify(f"{url}/run/1").ok


def test_nothing_is_deleted_while_a_step_that_the_policy_keeps_is_gone(counting):
    """Another program deleted it. The next save lists the steps again."""
    url, _, _ = counting
    keep = jaxckpt.KeepPolicy(last=2)
    with jaxckpt.CheckpointManager(f"{url}/run", keep=keep) as manager:
        for step in (1, 2, 3):
            save(manager, step)
        storage, path = locate(f"{url}/run")
        storage.delete(f"{path}/3")

        save(manager, 4)
        left = manager.all_steps()
        save(manager, 5)

        assert left == [2, 4]
        assert manager.all_steps() == [4, 5]


def test_the_rounds_see_what_waits_for_what(proxied, gcs_server):
    """A control: three requests at the same time are one round, three in a row are three."""
    server, proxy = proxied(gcs_server)
    storage, path = locate(f"{server.scheme}://{server.bucket}/a")
    proxy.rounds = rounds = Rounds()

    with ThreadPoolExecutor(3) as pool:
        [*pool.map(storage.files, [path] * 3)]
    together = rounds.count
    for _ in range(3):
        storage.files(path)

    assert together == 1
    assert rounds.count == 4
    proxy.rounds = None
