"""Several real processes save to a store and restore from it together."""

from __future__ import annotations

import numpy as np
import pytest

import jaxckpt
from jaxckpt.storage import locate


@pytest.mark.parametrize("name", ["gcs_server", "moto_server", "azurite_server"])
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
