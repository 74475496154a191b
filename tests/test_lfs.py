"""Checkpoints in a clone of a git repository that lacks its large files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CorruptCheckpoint
from jaxckpt.format import names

TREE = {"w": np.arange(50_000.0), "b": np.ones(3)}


def to_pointer(file):
    """Replaces a file by what git puts there without Git LFS."""
    data = file.read_bytes()
    file.write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{hashlib.sha256(data).hexdigest()}\nsize {len(data)}\n"
    )


def largest(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def ours(folder):
    jaxckpt.save(folder / "step", TREE)
    return folder / "step"


def orbax(folder):
    ocp = pytest.importorskip("orbax.checkpoint")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(folder / "step", TREE)
    return folder / "step"


@pytest.mark.parametrize(
    "name", [names.RECORD, names.CHECKPOINT_METADATA, "state/_METADATA", "state/_jaxckpt.sums", ""]
)
def test_every_file_of_ours_is_named(tmp_path, name):
    """The JSON files, the checksums and the values, the last to be found."""
    step = ours(tmp_path)
    file = step / name if name else largest(step)
    to_pointer(file)

    for report in (check_restore(step, file), jaxckpt.verify(step)):
        assert "git lfs pull" in str(report)


def check_restore(path: Path, file: Path) -> CorruptCheckpoint:
    with pytest.raises(CorruptCheckpoint, match="is a Git LFS pointer") as caught:
        jaxckpt.restore(path)
    assert caught.value.file == str(file)
    return caught.value


@pytest.mark.parametrize("name", ["_METADATA", "w/.zarray", "w/0"])
def test_files_of_orbax_are_named(tmp_path, name):
    """Of a database, git fetches the small files."""
    step = orbax(tmp_path)
    to_pointer(step / name)

    check_restore(step, step / name)


@pytest.mark.parametrize("suffix", [".safetensors", ".safetensors.index.json", ""])
def test_a_file_of_weights_is_named(tmp_path, suffix):
    """Safetensors and their index, and a checkpoint of Flax; the text is enough."""
    pytest.importorskip("msgpack")
    file = tmp_path / f"checkpoint_1{suffix}"
    file.write_bytes(b"weights")
    to_pointer(file)

    error = check_restore(file, file)

    assert "git lfs pull" in str(error)
    with pytest.raises(CorruptCheckpoint, match="git lfs pull"):
        jaxckpt.convert(file, tmp_path / "new")


def test_a_text_about_versions_is_no_pointer(tmp_path):
    """Only what begins like a pointer is one."""
    file = tmp_path / "step"
    step = ours(tmp_path)
    (step / names.CHECKPOINT_METADATA).write_text("version 1\n")

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(file)
    assert "git" not in str(caught.value)
