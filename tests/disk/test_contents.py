"""Files that are copied are checked on the way, as a verification would."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxckpt
from jaxckpt._disk.contents import Contents
from jaxckpt._disk.find import find
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import arrays, names, ocdbt
from jaxckpt.storage import LocalStorage, _large


@pytest.fixture(params=["plain", "inner", "zstd", "inner zstd"])
def saved(request, ram_path, limits):
    """A checkpoint of small and large chunks, in files with several of them."""
    limits(arrays, MAX_UNIT_BYTES=1 << 11 if "inner" in request.param else 1 << 25)
    limits(ocdbt, DATA_FILE_BYTES=1 << 13)
    limits(_large, _PIECE_BYTES=1000)
    rng = np.random.default_rng(0)
    tree = {f"w{i}": rng.integers(0, 9, (size,)) for i, size in enumerate((1100, 9, 700, 0))}
    tree |= {"key": jax.random.key(3), "n": 4, "text": "t" * 300}
    zstd = "zstd" if "zstd" in request.param else None
    jaxckpt.save(ram_path / "x", tree, compression=zstd)
    return ram_path / "x"


def flip_at(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def copied(path):
    """Reads all files of a checkpoint, as a copy of it does."""
    found = find(LocalStorage(), str(path))
    contents = Contents.of(found)
    assert contents.is_known
    files = found.recorded(found.path).items()
    return {name: b"".join(contents.pieces(name, facts.size)) for name, facts in files}


def test_a_good_checkpoint_is_copied_as_it_is(saved):
    files = copied(saved)

    assert files == {name: (saved / name).read_bytes() for name in files}
    assert sum(map(names.is_data_file, files)) > 1


def test_every_bad_byte_is_found(saved):
    """Of chunks, their checksums, indexes and nodes, and of small files."""
    for name, data in copied(saved).items():
        for at in (*range(0, len(data), 97), *range(max(0, len(data) - 9), len(data))):
            flip_at(saved / name, at)
            with pytest.raises(CorruptCheckpoint, match=name.split("/")[0]):
                copied(saved)
            flip_at(saved / name, at)
    assert jaxckpt.verify(saved).ok


def test_a_chunk_of_another_save_is_found(ram_path):
    """Its own checksum is right; that of the record is not."""
    for folder, first in (("a", 0), ("b", 1)):
        jaxckpt.save(ram_path / folder, {"w": np.arange(first, first + 5000)})
    files = [
        max((ram_path / folder / "state" / "d").iterdir(), key=lambda file: file.stat().st_size)
        for folder in "ab"
    ]
    mine, other = (bytearray(file.read_bytes()) for file in files)
    size = 5000 * 8 + arrays.CRC_BYTES
    mine[:size] = other[:size]
    files[0].write_bytes(mine)

    with pytest.raises(CorruptCheckpoint, match="not the one that was written"):
        copied(ram_path / "a")
