"""How many requests a run in a bucket takes, all in all and in a row, if it has many steps."""

from __future__ import annotations

import math
import operator
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxckpt
from jaxckpt.format import names
from jaxckpt.format.step import decode_record, encode_record
from jaxckpt.pages.overview import overview
from jaxckpt.storage import _requests as requests_module
from jaxckpt.storage import locate
from tests.commandline import cli
from tests.stores.proxy import Answer
from tests.stores.rounds import Rounds

STEPS = 70
PAGE = (Path(__file__).parents[2] / "docs" / "stores.md").read_text("utf-8")
TABLE = PAGE[PAGE.index("| in a run of |") :].partition("\n\n")[0]
TREE = {"w": np.ones(4, np.float32)}


@pytest.fixture
def counting(proxied, gcs_server, limits):
    """Returns the URL of a bucket, its server, and what counts the requests of a call, by round."""
    limits(requests_module, _LEAST_PEERS=math.inf)  # no read is sent twice
    server, proxy = proxied(gcs_server)
    url = f"{server.scheme}://{server.bucket}"
    settings = jaxckpt.StoreSettings(endpoint=server.url, lease_s=4 * 3600)  # without renewals
    jaxckpt.use_store(url, settings)

    def count(call):
        proxy.rounds = rounds = Rounds()
        call()
        proxy.rounds = None
        return sum(map(len, rounds.requests)), rounds.count

    return url, server, count


def save(manager, step):
    manager.save(step, TREE, metrics={"loss": 1.0})
    manager.wait_until_finished()


def make_steps(url, server, steps=STEPS):
    """Makes a run with copies of one step."""
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        save(manager, 0)
    storage, path = locate(f"{url}/run/0")
    files = {
        name: storage.read(f"{path}/{name}", max_bytes=1 << 20) for name in storage.files(path)
    }
    bucket = server.running.bucket(server.bucket)
    for step in range(1, steps):
        for name, data in files.items():
            bucket.put(f"run/{step}/{name}", data, None)


def told(steps):
    """The column of the page for a run of so many steps: by what is done, requests and in a row."""
    title, *rows = re.findall(r"^\| (in a run of|.+?) \| (.+) \|$", TABLE, re.MULTILINE)
    column = title[1].split(" | ").index(f"{steps:,} steps")
    cells = {what: cells.split(" | ")[column] for what, cells in rows}
    return {
        what: tuple(int(n.replace(",", "")) for n in cell.split(" in ")[0].split(", "))
        for what, cell in cells.items()
        if cell[0].isdigit()
    }


@pytest.mark.parametrize("steps", [70, 200, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_are_at_most_those_of_the_page(counting, tmp_path, steps):
    """A run of fewer than 1,000 objects is listed in one request; ten are of each step here."""
    url, server, count = counting
    make_steps(url, server, steps)
    keep, managers = jaxckpt.KeepPolicy(best=2 * steps, metric="loss"), []
    report = "-o", tmp_path / "report.html"

    def open_manager():
        managers.append(jaxckpt.CheckpointManager(f"{url}/run", keep=keep))

    counted = {
        what: count(call)
        for what, call in {
            "`jaxckpt ls`": lambda: cli("ls", f"{url}/run"),
            "`jaxckpt gc -n`": lambda: cli("gc", "-n", "--last", "3", f"{url}/run"),
            "`jaxckpt du`": lambda: cli("du", f"{url}/run"),
            "`jaxckpt report`": lambda: cli("report", f"{url}/run", *report),
            "opening a manager": open_manager,
            "its first save with `best`": lambda: save(managers[0], steps),
            "its second save": lambda: save(managers[0], steps + 1),
            "closing it": lambda: managers[0].close(),
            "`jaxckpt rm` of a step": lambda: cli("rm", "-y", f"{url}/run", 3),
        }.items()
    }

    print(counted)
    assert report[1].exists()
    assert counted.keys() == told(steps).keys()
    # Threads that start late, on a busy machine, make another round of the same requests.
    limits = {what: (most, in_a_row + 2) for what, (most, in_a_row) in told(steps).items()}
    above = {what for what in counted if any(map(operator.gt, counted[what], limits[what]))}
    assert above == set()


def test_steps_without_metrics_in_the_record_have_them_all_the_same(counting):
    """An earlier release wrote such records: two more files of each step are read."""
    url, server, count = counting
    make_steps(url, server)
    storage, path = locate(f"{url}/run")
    bucket = server.running.bucket(server.bucket)
    for step in range(STEPS):
        file = f"{path}/{step}/{names.RECORD}"
        record = decode_record(storage.read(file, max_bytes=1 << 20), file=file)
        files = {name: replace(facts, text=None) for name, facts in record.files.items()}
        bucket.put(f"run/{step}/{names.RECORD}", encode_record(replace(record, files=files)), None)

    found = count(lambda: cli("ls", f"{url}/run"))
    steps = overview(f"{url}/run").steps

    assert found <= (3 * STEPS + 3, 8)
    assert [step.metrics for step in steps] == [{"loss": 1.0}] * STEPS


def test_a_store_that_limits_the_rate_of_requests_is_asked_again(proxied, gcs_server):
    """Many steps are looked at together: most requests are refused at first, and none for good."""
    server, proxy = proxied(gcs_server)
    url = f"{server.scheme}://{server.bucket}"
    jaxckpt.use_store(url, jaxckpt.StoreSettings(endpoint=server.url, lease_s=4 * 3600))
    make_steps(url, server)
    next_s = [0.0]  # when the store takes another request

    def is_too_soon(_):
        now_s = time.monotonic()
        if now_s < next_s[0]:
            return True
        next_s[0] = max(next_s[0], now_s - 0.1) + 0.01
        return False

    refused = proxy.add(Answer(503), when=is_too_soon)
    steps = overview(f"{url}/run").steps

    assert refused.done > 0
    assert [(step.metrics, step.problem) for step in steps] == [({"loss": 1.0}, None)] * STEPS


@pytest.mark.parametrize("starts", ["as asked", "anew", "anew, in no order"])
def test_many_objects_are_listed_from_several_places(counting, starts):
    """Each is found once, also if the store ignores where a list is to start, and sorts nothing."""
    url, server, count = counting
    storage, path = locate(f"{url}/run")
    steps = [f"{step}/{n}" for step in range(400) for n in range(8)]
    wanted = sorted(["0", "25", "399.txt", "_jaxckpt.owner", *steps, "9/a/b", "z"])
    for name in wanted:
        server.running.bucket(server.bucket).put(f"run/{name}", b"", None)
    server.running.bucket(server.bucket).begins_anew = starts != "as asked"
    if starts == "anew, in no order":
        server.running.bucket(server.bucket).order = lambda name: zlib.crc32(name.encode())
    found = []

    requests, in_a_row = count(lambda: found.append(storage.files(path)))

    assert [*found[0]] == wanted
    if starts == "as asked":
        assert (requests, in_a_row) <= (2 + math.ceil(len(wanted) / 800), 3)


@pytest.mark.parametrize("do", ["files", "delete"])
def test_what_is_deleted_while_it_is_listed_is_no_error(counting, do):
    """Another program deletes all of it between two pages."""
    url, server, _ = counting
    storage, path = locate(f"{url}/run")
    bucket = server.running.bucket(server.bucket)
    for n in range(1001):
        bucket.put(f"run/{n}", b"", None)
    bucket.goes_when_listed = True

    getattr(storage, do)(path)

    assert storage.files(path) == {}


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


def test_a_step_that_a_reader_holds_is_not_even_claimed(counting):
    """The listing that shows the step shows the lease."""
    url, server, _ = counting
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        save(manager, 1)
        server.running.requests.clear()
        with (
            manager._directory.leases.protect(1),
            pytest.raises(ValueError, match="a reader holds it"),
        ):
            manager.delete(1)

    written = [one.path for one in server.running.requests.all(method="PUT")]
    assert any("lease" in path for path in written)
    assert not any("doomed" in path or "writing" in path for path in written)


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


@pytest.mark.parametrize("file", ["", f"/{names.COMMIT_MARKER}"], ids=["step", "marker"])
def test_nothing_is_deleted_while_a_step_that_the_policy_keeps_is_gone(counting, file):
    """Another program deleted it, or only its marker. The next save lists the steps again."""
    url, _, _ = counting
    keep = jaxckpt.KeepPolicy(last=2)
    with jaxckpt.CheckpointManager(f"{url}/run", keep=keep) as manager:
        for step in (1, 2, 3):
            save(manager, step)
        storage, path = locate(f"{url}/run")
        storage.delete(f"{path}/3{file}")

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
