"""`jaxckpt upload` into a bucket: copied, checked, and gone on with after a kill."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

import jaxckpt
from jaxckpt.format import names
from jaxckpt.storage import _arrays, locate
from tests.commandline import said_json
from tests.stores.killing import end_leases

SIZE = 1 << 20


def test_a_killed_upload_goes_on(place, tmp_path, monkeypatch):
    """At most 55 % is sent again, once the lease of the dead process has ended."""
    monkeypatch.setattr(_arrays, "_DATA_FILE_BYTES", 4 * SIZE)  # else a test needs some GB
    url = place[0]
    root = tmp_path / "local"
    with jaxckpt.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, {f"w{i}": np.full(SIZE, step, np.float32) for i in range(12)})
    total = sum(path.stat().st_size for path in (root / "2").rglob("*") if path.is_file())
    command = [sys.executable, "-m", "jaxckpt", "upload", root, url, "--max-rate", "12MB"]
    storage, path = locate(url)

    with subprocess.Popen([*map(str, command)]) as child:
        while _bytes_in(storage, path) < total / 2:
            assert child.poll() is None
            time.sleep(0.02)  # the store cannot be waited on
        child.kill()
    end_leases(url)
    code, done = said_json("upload", root, url)

    assert code == 0
    assert done[0]["step"] == 2
    assert done[0]["sent_bytes"] <= 0.55 * total
    for step in (1, 2):
        assert jaxckpt.verify(f"{url}/{step}").ok
        assert np.array_equal(jaxckpt.restore(f"{url}/{step}")["w3"], np.full(SIZE, step))


def _bytes_in(storage, path):
    found = storage.files(path).items()
    return sum(entry.size for name, entry in found if names.is_data_file(name))
