"""A table of mounts for the tests of storages."""

from __future__ import annotations

import os

import pytest

from jaxckpt.storage import _limit, _mounts, _storage_on


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """Makes the file system of `tmp_path` appear in the table of mounts with another type.

    `mounted("nfs4 server rw")`; `mounted(None)` takes the table away.
    """
    device = os.stat(tmp_path).st_dev

    def forget():
        _storage_on.cache_clear()
        _limit.ask.cache_clear()

    def mount(what):
        table = tmp_path / "mountinfo"
        number = f"{os.major(device)}:{os.minor(device)}"
        if what is not None:
            table.write_text(
                f"20 1 0:0 / / rw - ext4 /dev/a rw\n36 20 {number} / /mnt/a\\040b rw - {what}\n"
            )
        monkeypatch.setattr(_mounts, "_TABLE", str(table))
        forget()

    yield mount
    forget()
