"""Checkpoints written by releases of Orbax, Flax and jaxckpt, and their expected contents.

    from tests.golden.fixture import Golden, golden_names

    @pytest.mark.parametrize("name", golden_names())
    def test_reads(golden: Golden, name: str) -> None:
        sample = golden(name)
        tree = read(sample.path)             # sample.expected[("params", "w")] is an array

The samples of one archive are unpacked together, once per session and process, when the first one
is requested. They are shared: a test that writes into a sample copies it first. The samples of
jaxckpt have another `expected.json`, see `ours.py`; `golden_folder(name)` gives their folders.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import pytest

HERE = Path(__file__).parent
INDEX = HERE / "index.json"


class PrngKey(NamedTuple):
    """A typed PRNG key: `jax.random.key_impl` and `jax.random.key_data` of it."""

    impl: str
    data: np.ndarray


Leaf: TypeAlias = np.ndarray | np.generic | bool | int | float | str | PrngKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One checkpoint.

    Attributes:
        name: `orbax-<version>-<what>`.
        path: What was written: a checkpoint, a manager's root, or a directory of Flax's.
        expected: The leaves of the tree by key path. Every step of a manager holds the same tree.
            Of `item-kinds`, the first key is the name of the item.
            Empty containers and None are not listed. Numpy scalars are numpy scalars here, though
            Orbax gives them back as Python's.
        about: The rest of `expected.json`: releases, a note, `items` (JSON items of each step, in
            which "step" stands for its number), `item` (which of several items is the tree).
    """

    name: str
    path: Path
    expected: Mapping[tuple[str, ...], Leaf]
    about: Mapping[str, Any]

    @property
    def version(self) -> tuple[int, ...]:
        """The Orbax release that wrote it, as a tuple that compares."""
        return tuple(int(part) for part in self.about["orbax_version"].split("."))


Golden: TypeAlias = Callable[[str], Sample]


@cache
def _index() -> dict[str, str]:
    """The archive of each sample."""
    archives: dict[str, list[str]] = json.loads(INDEX.read_text())
    return {name: archive for archive, names in archives.items() for name in names}


def golden_names(contains: str = "", *, of: str = "orbax") -> list[str]:
    """Returns the names of the samples of a library that contain `contains`, for `parametrize`."""
    return sorted(name for name in _index() if contains in name and name.startswith(f"{of}-"))


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a sample by its name."""

    @cache
    def unpacked(archive: str) -> Path:
        into = tmp_path_factory.mktemp(archive.partition(".")[0])
        with tarfile.open(HERE / archive) as tar:
            tar.extractall(into, filter="data")
        return into

    return lambda name: unpacked(_index()[name]) / name


@pytest.fixture(scope="session")
def golden(golden_folder: Callable[[str], Path]) -> Golden:
    """Gives a sample of Orbax or Flax by its name."""
    return cache(lambda name: load_sample(golden_folder(name)))


def load_sample(root: Path) -> Sample:
    """Reads a sample from a directory with `ckpt/`, `expected.json` and `expected.npz`."""
    about = json.loads((root / "expected.json").read_text())
    leaves = about.pop("leaves")
    with np.load(root / "expected.npz") as values:
        expected = {
            tuple(facts["path"]): _leaf(facts, values, entry) for entry, facts in leaves.items()
        }
    return Sample(name=root.name, path=root / "ckpt", expected=expected, about=about)


def _leaf(facts: Mapping[str, Any], values: Mapping[str, np.ndarray], entry: str) -> Leaf:
    kind = facts["kind"]
    if kind == "str":
        return facts["value"]
    if kind == "prng_key":
        return PrngKey(facts["impl"], values[entry])
    value = values[entry]
    value = value.astype(value.dtype.newbyteorder("="), copy=False)  # one was saved big-endian
    if "npz_view" in facts:
        value = value.view(np.dtype(getattr(ml_dtypes, facts["dtype"])))
    if kind in ("bool", "int", "float"):
        return value.item()
    return value if kind in ("jax.Array", "ndarray") else value[()]
