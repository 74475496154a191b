"""The golden checkpoints: the archives, their index, and the expected contents."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.golden.fixture import Golden, PrngKey, Sample, golden_names

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASES = (
    "0.1.0 0.1.6 0.2.7 0.3.5 0.4.8 0.5.10 0.5.15 0.6.4 0.7.0 0.9.1 0.11.0 0.11.25 0.12.4 0.12.8"
)


def test_the_index_names_what_the_archives_hold():
    """Each archive holds exactly the samples that the index says, and no name occurs twice."""
    index = json.loads((GOLDEN / "index.json").read_text())

    for archive, names in index.items():
        with tarfile.open(GOLDEN / archive) as tar:
            assert {name.partition("/")[0] for name in tar.getnames()} == set(names)
    both = len(golden_names()) + len(golden_names(of="jaxckpt"))
    assert both == sum(map(len, index.values()))


@pytest.mark.parametrize("release", RELEASES.split())
def test_every_release_has_samples(release: str):
    """The releases that mark a change of format are all here."""
    assert len(golden_names(f"orbax-{release}-")) >= 7


@pytest.mark.parametrize("release", ["0.4.0", "0.4.1", "0.4.2", "0.5.3"])
def test_releases_with_an_oddity_have_samples(release: str):
    """What only these releases wrote is here, too."""
    assert golden_names(f"orbax-{release}-")


@pytest.mark.parametrize("name", golden_names())
def test_samples_are_whole(golden: Golden, name: str):
    """A sample has a checkpoint, leaves, and leaves of the shapes and dtypes it says."""
    sample = golden(name)

    assert sample.name == name
    assert any(sample.path.iterdir())
    assert sample.expected
    facts = json.loads((sample.path.parent / "expected.json").read_text())["leaves"]
    for fact in facts.values():
        leaf = sample.expected[tuple(fact["path"])]
        if fact["kind"] in ("jax.Array", "ndarray"):
            assert isinstance(leaf, np.ndarray)
            assert (leaf.dtype.name, list(leaf.shape)) == (fact["dtype"], fact["shape"])
        elif fact["kind"] == "prng_key":
            assert isinstance(leaf, PrngKey)
            assert leaf.data.dtype == np.uint32
            assert list(leaf.data.shape[:-1]) == fact["shape"]
        else:
            assert type(leaf).__name__ == fact["kind"]
    assert len(facts) == len(sample.expected)


def test_leaves_have_their_types(golden: Golden):
    """The values are of the types that a reader should give."""
    kinds = golden("orbax-0.12.8-leaf-kinds-zarr2").expected
    tree = golden("orbax-0.12.8-pytree-default").expected
    keys = golden("orbax-0.12.8-prng-keys").expected
    bare = golden("orbax-0.12.8-bare-leaf").expected

    assert type(kinds["py_int",]) is int
    assert kinds["str",] == 'hé"llo\n'
    assert type(kinds["np_f32",]) is np.float32
    leaf = kinds["int4",]
    assert isinstance(leaf, np.ndarray)
    assert leaf.dtype == np.dtype(ml_dtypes.int4)
    assert type(tree["lr",]) is float
    emb = tree["params", "emb"]
    assert isinstance(emb, np.ndarray)
    assert emb.dtype == np.dtype(ml_dtypes.bfloat16)
    key = keys["rbg",]
    assert isinstance(key, PrngKey)
    assert (key.impl, key.data.shape) == ("rbg", (4,))
    assert list(bare) == [()]


def test_values_are_in_the_byte_order_of_this_machine(golden: Golden):
    """Orbax stores little-endian whatever it is given, so that is what a reader gives back."""
    leaf = golden("orbax-0.12.8-leaf-kinds-zarr2").expected["be",]

    assert isinstance(leaf, np.ndarray)
    assert leaf.dtype == np.dtype(np.int32)
    assert leaf.dtype.isnative


def test_versions_compare():
    """Releases order by number, not by text."""
    versions = [
        Sample(name="", path=Path(), expected={}, about={"orbax_version": v}).version
        for v in RELEASES.split()
    ]

    assert versions == sorted(versions)


def test_an_unknown_name_is_a_key_error(golden: Golden):
    """A sample that does not exist is not guessed."""
    with pytest.raises(KeyError, match="orbax-9"):
        golden("orbax-9.9.9-nothing")
