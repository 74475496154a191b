"""Notices that a host ends soon: those of cloud providers, on loopback, and what a manager does."""

from __future__ import annotations

import datetime
import http.server
import logging
import threading
import urllib.error

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointManager, LocalTier, SavePolicy
from jaxckpt._disk.pace import Pace
from jaxckpt._run import preemption
from jaxckpt.integrations import notices
from tests.waiting import wait_until


class Metadata(http.server.BaseHTTPRequestHandler):
    """Answers by method and path; wants the headers that the providers want."""

    answers: dict[tuple[str, str], str]
    asked: list[str]
    token: str | None = None  # the one that a provider takes; any if it is None

    def do_GET(self):
        self.asked.append(f"{self.command} {self.path}")
        text = self.answers.get((self.command, self.path))
        wanted = {"/comp": "Metadata-Flavor", "/meta": "Metadata", "/late": "X-aws-ec2-metadata"}
        header = next(name for prefix, name in wanted.items() if self.path.startswith(prefix))
        has_header = any(name.lower().startswith(header.lower()) for name in self.headers)
        code = 403 if not has_header else 404 if text is None else 200
        given = self.headers["X-aws-ec2-metadata-token"]
        if given is not None and self.token not in (None, given):
            code = 401
        self.send_response(code)
        self.end_headers()
        self.wfile.write((text or "").encode())

    do_PUT = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def metadata():
    """A server with no answers yet: its URL, and the answers to give."""
    handler = type("Handler", (Metadata,), {"answers": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def in_seconds(seconds, form):
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).strftime(
        form
    )


def test_gcp(metadata):
    url, handler = metadata
    path = "/computeMetadata/v1/instance/preempted"
    for answer, wanted in (("FALSE", None), ("TRUE\n", 30.0)):
        handler.answers["GET", path] = answer
        assert notices.gcp(url)() == wanted


def test_aws(metadata):
    """With a token that is asked for once; without an action there is no notice."""
    url, handler = metadata
    handler.answers["PUT", "/latest/api/token"] = "abc"
    notice = notices.aws(url)
    assert notice() is None

    at = in_seconds(119, "%Y-%m-%dT%H:%M:%SZ")
    path = "/latest/meta-data/spot/instance-action"
    handler.answers["GET", path] = f'{{"action": "terminate", "time": "{at}"}}'
    assert 110 < (notice() or 0) < 120
    assert [one.split()[0] for one in handler.asked] == ["PUT", "GET", "GET"]


def test_aws_asks_for_another_token_when_its_own_is_refused(metadata):
    """At the next call; a host that was stopped and started knows none of before."""
    url, handler = metadata
    handler.answers["PUT", "/latest/api/token"] = "old"
    notice = notices.aws(url)
    assert notice() is None

    handler.token = "new"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        notice()
    handler.answers["PUT", "/latest/api/token"] = "new"

    assert (notice(), notice()) == (None, None)
    assert [one.split()[0] for one in handler.asked] == ["PUT", "GET", "GET", "PUT", "GET", "GET"]


def test_azure(metadata):
    """The earliest eviction; other events do not count."""
    url, handler = metadata
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    handler.answers["GET", path] = '{"Events": [{"EventType": "Freeze", "NotBefore": ""}]}'
    assert notices.azure(url)() is None

    at = in_seconds(60, "%a, %d %b %Y %H:%M:%S GMT")
    event = f'{{"EventType": "Preempt", "NotBefore": "{at}"}}'
    handler.answers["GET", path] = f'{{"Events": [{event}]}}'
    assert 50 < (notices.azure(url)() or 0) < 61
    handler.answers["GET", path] = '{"Events": [{"EventType": "Preempt", "NotBefore": ""}]}'
    assert notices.azure(url)() == 0.0


def test_azure_tells_each_machine_of_a_set_what_happens_to_the_others(metadata):
    """Only the machine that is named ends; without its own name, it is safer to believe it."""
    url, handler = metadata
    event = '{"EventType": "Preempt", "NotBefore": "", "Resources": ["Spot_7", "spot_8"]}'
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    handler.answers["GET", path] = f'{{"Events": [{event}]}}'
    assert notices.azure(url)() == 0.0

    name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    for machine, wanted in (("spot_3", None), ("spot_7", 0.0)):
        handler.answers["GET", name] = machine
        assert notices.azure(url)() == wanted


def test_what_is_no_metadata_server_is_an_error(metadata):
    url, handler = metadata
    with pytest.raises(urllib.error.URLError):
        notices.gcp("http://127.0.0.1:9")()
    handler.answers["GET", "/latest/meta-data/spot/instance-action"] = "{}"
    handler.answers["PUT", "/latest/api/token"] = "abc"
    with pytest.raises(KeyError):
        notices.aws(url)()


@pytest.mark.parametrize("tiers", [False, True])
def test_a_manager_saves_when_there_is_a_notice(tmp_path, limits, caplog, tiers):
    """At the next call; an error of the notice is reported once, and a signal changes nothing."""
    limits(preemption, _POLL_S=0.01)
    answers = [OSError("away"), OSError("away"), None, 25.0]
    asked = threading.Event()

    def notice():
        answer = answers.pop(0)
        if not answers:
            asked.set()
        if isinstance(answer, OSError):
            raise answer
        return answer

    options = {"local": tmp_path / "local"} if tiers else {}
    save = SavePolicy(every_steps=100)
    with (
        caplog.at_level(logging.WARNING, "jaxckpt"),
        CheckpointManager(tmp_path / "run", save=save, notice=notice, **options) as manager,
    ):
        manager.save(0, {"w": 0}, force=True)
        manager.wait_until_finished()
        asked.wait(60)
        wait_until(lambda: manager._saver.preemption.left_s is not None)
        assert manager.save(7, {"w": 7}) is not None
        assert manager.reached_preemption(7)
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be asked: away" in one for one in said) == 1
    assert sum("this host ends in 25 s" in one for one in said) == 1
    assert any("a save takes about" in one and "this fits" in one for one in said)
    assert any("its upload" in one for one in said) == tiers
    with CheckpointManager(tmp_path / "run", mode="r") as reader:
        assert reader.latest_step() == 7


class SlowNetwork(Pace):
    """An upload of a step takes a second, without a limit that is lifted."""

    def wait(self, size):
        self.rest(size / 400_000)


@pytest.mark.parametrize(("left_s", "order"), [(60.0, [1, 3, 2]), (0.5, [1, 2, 3])])
def test_an_older_upload_gives_way_if_the_last_one_fits(tmp_path, limits, caplog, left_s, order):
    """Otherwise the older one, which is further, is more likely to arrive."""
    limits(preemption, _POLL_S=0.01)
    noticed = threading.Event()
    with (
        caplog.at_level(logging.INFO, "jaxckpt"),
        CheckpointManager(
            tmp_path / "run",
            save=SavePolicy(every_steps=1),
            notice=lambda: left_s if noticed.is_set() else None,
            local=LocalTier(tmp_path / "local"),
        ) as manager,
    ):
        manager._tiers.sender.pace = SlowNetwork()
        manager.save(1, {"w": np.zeros(100_000, np.float32)}).durable()
        manager.save(2, {"w": np.ones(100_000, np.float32)}).result()
        noticed.set()
        wait_until(lambda: manager._saver.preemption.left_s is not None)
        manager.save(3, {"w": np.full(100_000, 3, np.float32)})
        manager.wait_until_finished()
        assert manager.tiers["waiting"] == []
    said = [record.getMessage() for record in caplog.records]
    names = [str(tmp_path / "run" / str(step)) for step in order]
    assert [one.split(": ")[0] for one in said if one.startswith("uploaded ")] == [
        f"uploaded {name}" for name in names
    ]
    assert any("gives way to that of a newer step" in one for one in said) == (order[1] == 3)
    for step in (1, 2, 3):
        assert jaxckpt.verify(tmp_path / "run" / str(step)).ok


def test_a_notice_needs_the_policy(tmp_path):
    with pytest.raises(ValueError, match="on_preemption"):
        CheckpointManager(
            tmp_path / "run", save=SavePolicy(on_preemption=False), notice=lambda: None
        )
    with pytest.raises(TypeError, match="notice"):
        CheckpointManager(tmp_path / "run", notice=3)


def test_a_notice_that_comes_too_late(tmp_path, limits, caplog):
    """By the history of the run neither fits: it is saved locally, and the log says why."""
    limits(preemption, _POLL_S=0.01)
    told = threading.Event()
    save = SavePolicy(every_steps=100)
    with (
        caplog.at_level(logging.WARNING, "jaxckpt"),
        CheckpointManager(
            tmp_path / "run",
            save=save,
            notice=lambda: 1e-9 if told.is_set() else None,
            local=tmp_path / "local",
        ) as manager,
    ):
        manager.save(0, {"w": 0}, force=True)
        manager.wait_until_finished()
        told.set()
        wait_until(lambda: manager._saver.preemption.left_s is not None)
        manager.save(7, {"w": 7}).result()
        assert manager.tiers["local"] == [0, 7]
    said = [record.getMessage() for record in caplog.records]
    told = "the upload begins with state: what is not sent is only on the disks of hosts"
    assert any(f"does not fit; it is saved here, and {told}" in s for s in said)


def test_a_notice_that_was_not_made_is_reported(tmp_path, limits, caplog):
    """`notices.gcp` returns a notice and is none itself: `notices.gcp()` is."""
    limits(preemption, _POLL_S=0.01)

    with CheckpointManager(tmp_path, notice=notices.gcp):
        wait_until(lambda: "cannot be asked" in caplog.text)

    assert "real number, not 'function'" in caplog.text
