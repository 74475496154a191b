"""`jaxckpt upload` into a bucket: copied, checked, and gone on with after a kill."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import jaxckpt
from jaxckpt._disk.pace import GaveWay, Pace
from jaxckpt._run.index import StepIndex
from jaxckpt._run.upload import upload
from jaxckpt.format import names, ocdbt
from jaxckpt.storage import locate
from tests.commandline import said_json
from tests.stores.killing import end_leases
from tests.waiting import wait_until

SIZE = 1 << 20


def test_a_killed_upload_goes_on(place, tmp_path, limits):
    """At most 55 % is sent again, once the lease of the dead process has ended."""
    limits(ocdbt, DATA_FILE_BYTES=4 * SIZE)  # else a test needs some GB
    url = place[0]
    root = tmp_path / "local"
    with jaxckpt.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, {f"w{i}": np.full(SIZE, step, np.float32) for i in range(12)})
    total = sum(path.stat().st_size for path in (root / "2").rglob("*") if path.is_file())
    command = [sys.executable, "-m", "jaxckpt", "upload", root, url, "--max-rate", "12MB"]
    storage, path = locate(url)

    with subprocess.Popen([*map(str, command)]) as child:
        wait_until(lambda: child.poll() is not None or _bytes_in(storage, path) >= total / 2)
        assert child.poll() is None
        child.kill()
    end_leases(url)
    code, done = said_json("upload", root, url)

    assert code == 0
    assert done[0]["step"] == 2
    assert done[0]["sent_bytes"] <= 0.55 * total
    for step in (1, 2):
        assert jaxckpt.verify(f"{url}/{step}").ok
        assert np.array_equal(jaxckpt.restore(f"{url}/{step}")["w3"], np.full(SIZE, step))


def test_an_upload_that_gives_way_goes_on(place, tmp_path, limits):
    """What was sent stays; the store reports no error, and nothing is tried again meanwhile."""
    limits(ocdbt, DATA_FILE_BYTES=4 * SIZE)
    url, root = place[0], tmp_path / "local"
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, {f"w{i}": np.full(SIZE, i, np.float32) for i in range(12)})
    total = sum(path.stat().st_size for path in (root / "1").rglob("*") if path.is_file())
    indexes = [StepIndex(*locate(one)) for one in (root, url)]
    pace = Pace(12 * SIZE)  # about four seconds
    threading.Timer(2.0, pace.give_way).start()

    with pytest.raises(GaveWay):
        upload(*indexes, 1, pace=pace)
    pace.gives_way = False
    pace.max_bytes_per_s = None
    done = upload(*indexes, 1, pace=pace)

    assert done.found_bytes > 0
    assert done.sent_bytes + done.found_bytes == pytest.approx(total, rel=0.01)
    assert jaxckpt.verify(f"{url}/1").ok


def _bytes_in(storage, path):
    found = storage.files(path).items()
    return sum(entry.size for name, entry in found if names.is_data_file(name))
