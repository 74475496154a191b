"""Jobs that read steps from disks without a process: peers, served over HTTP."""

from __future__ import annotations

import contextlib
import logging
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt.format import names
from jaxckpt.format.step import decode_record, encode_record
from jaxckpt.storage import LocalStorage, PathIn
from jaxckpt.testing import WatchedStorage
from tests.static_server import served

NEWEST = 3  # the directory has the step before
NOWHERE = "http://127.0.0.1:9"


def state_at(step):
    return {"w": jnp.arange(4096.0).reshape(64, 64) + step, "b": jnp.full(3, step)}


@contextlib.contextmanager
def opened(root, host, peers, read=None, **options):
    """A manager on a host; `read` gets the paths of values read in the directory."""

    def before(verb, path):
        if verb == "read_into" and read is not None:
            read.append(path)

    every = jaxckpt.SavePolicy(every_steps=1)
    with jaxckpt.CheckpointManager(
        PathIn(WatchedStorage(LocalStorage(), before), f"{root}/run"),
        save=jaxckpt.SavePolicy(every_steps=2),
        local=jaxckpt.LocalTier(f"{root}/{host}", save=every, peers=peers),
        **options,
    ) as manager:
        yield manager


def train(root, host="host0", peers=(NOWHERE,)):
    """Saves three steps on a host, and the second in the directory too."""
    with opened(root, host, peers) as manager:
        for step in range(1, NEWEST + 1):
            manager.save(step, state_at(step))
            manager.wait_until_finished()


def restored(root, peers, host="host1"):
    """Restores on another host; returns the step, what was read of the directory, and problems."""
    read: list[str] = []
    with opened(root, host, peers, read) as manager:
        state, start = manager.restore_or(lambda: state_at(0))
        for name, value in state_at(start).items():
            assert np.array_equal(state[name], value), name
        return start, len(read), manager.problems


def test_a_new_host_gets_the_newest_step_from_a_peer(tmp_path):
    """The directory has only the step before, and none of its values are read."""
    train(tmp_path)
    seen: list = []
    with served(tmp_path / "host0", seen=seen) as url:
        start, read, problems = restored(tmp_path, [NOWHERE, url])

        assert (start, read) == (NEWEST, 0)
        assert any("read at peers or in" in text for text in problems)
        assert any(f"the peer {NOWHERE} is left out" in text for text in problems)
        assert not [*tmp_path.glob("host1/*tmp*")]
        assert not any(path.endswith("/") for path, _ in seen)


def test_the_run_goes_on_from_a_step_of_a_peer(tmp_path):
    """The next save is on the new disk, and restores from there."""
    train(tmp_path)
    with (
        served(tmp_path / "host0") as url,
        opened(tmp_path, "host1", [url]) as manager,
    ):
        _, start = manager.restore_or(lambda: state_at(0))
        manager.save(start + 1, state_at(start + 1))
        manager.wait_until_finished()

    assert restored(tmp_path, [])[:1] == (NEWEST + 1,)


def test_a_peer_is_not_asked_for_values_if_this_disk_has_them(tmp_path):
    """Only the small files are read that show which steps it has."""
    train(tmp_path)
    seen: list = []
    with served(tmp_path / "host0", seen=seen) as url:
        assert restored(tmp_path, [url], host="host0")[0] == NEWEST

    assert seen
    assert not [path for path, _ in seen if "/state/" in path]


@pytest.mark.parametrize("good", ["another peer", "the directory"])
def test_a_wrong_byte_is_not_loaded(tmp_path, good):
    """The next source is, and the problem names the peer and the chunk."""
    train(tmp_path)

    def flip(path, data):
        if "/d/" not in path or len(data) < 1 << 13:  # a value, not a node of the tree
            return data
        return data[:40] + bytes([data[40] ^ 1]) + data[41:]

    with (
        served(tmp_path / "host0", change=flip) as bad,
        served(tmp_path / "host0") as other,
    ):
        peers = [bad, other] if good == "another peer" else [bad]
        start, read, problems = restored(tmp_path, peers)

    assert start == (NEWEST if good == "another peer" else 2)
    assert (read == 0) == (good == "another peer")
    assert any(bad in text and "damaged" in text for text in problems)


def test_a_server_without_ranges_is_not_read(tmp_path):
    train(tmp_path)
    with served(tmp_path / "host0", has_ranges=False) as url:
        start, _, problems = restored(tmp_path, [url])

    assert start == 2
    assert any(url in text and "left out" in text for text in problems)


def test_a_peer_with_steps_of_another_run_is_left_alone(tmp_path):
    """Its steps are in another directory, and named alike."""
    train(tmp_path)
    (tmp_path / "other").mkdir()
    train(tmp_path / "other")
    with served(tmp_path / "other" / "host0") as url:
        assert restored(tmp_path, [url])[0] == 2


def test_a_step_that_the_run_left_behind_is_not_taken_from_a_peer(tmp_path):
    """The run went on from the step before on another disk."""
    train(tmp_path)
    with opened(tmp_path, "host1", []) as manager:
        _, start = manager.restore_or(lambda: state_at(0))
        for step in range(start + 2, start + 5):  # 3 is only on the first disk
            manager.save(step, state_at(step))
            manager.wait_until_finished()
    for step in (5, 6):
        shutil.rmtree(tmp_path / "host1" / str(step), ignore_errors=True)
    shutil.rmtree(tmp_path / "run" / "6", ignore_errors=True)
    with served(tmp_path / "host0") as url:
        assert restored(tmp_path, [url], host="host2")[0] == 4


def test_the_password_is_sent_and_never_shown(tmp_path, monkeypatch, caplog):
    train(tmp_path)
    monkeypatch.setenv("JAXCKPT_PEER_USER", "ann")
    caplog.set_level(logging.DEBUG)
    with served(tmp_path / "host0", login="ann:s3cret") as url:
        for password, wanted in (("s3cret", NEWEST), ("wr0ng", 2)):
            monkeypatch.setenv("JAXCKPT_PEER_PASSWORD", password)
            shutil.rmtree(tmp_path / "host1", ignore_errors=True)
            start, _, problems = restored(tmp_path, [url])
            assert start == wanted
            assert password not in caplog.text + str(problems)

    assert any("JAXCKPT_PEER_USER" in text for text in problems)


def test_a_redirect_does_not_carry_the_password(tmp_path, monkeypatch):
    train(tmp_path)
    monkeypatch.setenv("JAXCKPT_PEER_USER", "ann")
    monkeypatch.setenv("JAXCKPT_PEER_PASSWORD", "s3cret")
    first: list = []
    other: list = []
    with (
        served(tmp_path / "host0", seen=other) as there,
        served(tmp_path, seen=first, moved=there) as url,
    ):
        assert restored(tmp_path, [url])[0] == NEWEST

    lower = [[{k.lower() for k in headers} for _, headers in seen] for seen in (first, other)]
    assert lower[0]
    assert all("authorization" in headers for headers in lower[0])
    assert lower[1]
    assert not any("authorization" in headers for headers in lower[1])


@pytest.mark.parametrize("url", ["http://ann:s3cret@host/", "ftp://host/", "http://host/?a=b", 3])
def test_a_peer_is_a_plain_url(url):
    with pytest.raises(ValueError, match="a peer must be http:// or https://") as raised:
        jaxckpt.LocalTier("/mnt/nvme", peers=[url])

    assert "s3cret" not in str(raised.value)
    assert ("JAXCKPT_PEER_PASSWORD" in str(raised.value)) == ("@" in str(url))


def test_a_step_is_announced_before_it_is_committed(tmp_path):
    """So that a peer finds the newest step of a host that died at any moment."""
    told = []

    def look(verb, path):
        if verb == "rename" and path.startswith(f"{tmp_path}/host0/"):
            told.append((tmp_path / "host0" / names.STEPS).read_text())

    storage = WatchedStorage(LocalStorage(), look)
    tier = jaxckpt.LocalTier(PathIn(storage, f"{tmp_path}/host0"), peers=[NOWHERE])
    with jaxckpt.CheckpointManager(f"{tmp_path}/run", local=tier) as manager:
        manager.save(1, state_at(1))
        manager.wait_until_finished()

    assert told
    assert "1" in told[0]


@pytest.mark.parametrize(
    "file",
    [
        names.RUN,
        names.STEPS,
        names.RECORD,
        names.TREE_METADATA,
        names.OCDBT_MANIFEST,
        names.CHUNK_SUMS,
    ],
)
@pytest.mark.parametrize("sent", [b"", b"[]", b"\xff" * 4096, b'["../../2", "/etc", "3/../3", 3]'])
def test_a_peer_that_sends_nonsense_is_left_out(tmp_path, file, sent):
    """Whatever is in a file, and how much of it; the directory is read."""
    train(tmp_path)

    def change(path, data):
        return sent if path.endswith(file) else data

    seen: list = []
    with served(tmp_path / "host0", change=change, seen=seen) as url:
        assert restored(tmp_path, [url])[0] == 2

    assert not [path for path, _ in seen if ".." in path or "/etc" in path]


def test_a_step_without_checksums_is_not_read(tmp_path):
    """Its record, which has a right digest, does not name them."""
    train(tmp_path)
    file = tmp_path / "host0" / str(NEWEST) / names.RECORD
    record = decode_record(file.read_bytes(), file=str(file))
    files = {name: one for name, one in record.files.items() if names.CHUNK_SUMS not in name}
    file.chmod(0o644)
    file.write_bytes(encode_record(replace(record, files=files)))
    with served(tmp_path / "host0") as url:
        start, _, problems = restored(tmp_path, [url])

    assert start == 2
    assert any("cannot be checked" in text for text in problems)
