"""Trees whose names nearly collide are restored as saved, or refused before a write."""

from __future__ import annotations

import itertools
import os
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import jaxckpt
from jaxckpt.errors import UnsupportedLeaf
from jaxckpt.storage import locate
from tests.strategies import same

_count = itertools.count()

# fmt: off
PARTS = [
    "a", "b", "a.b", "a/b", "a~b", "a~1b", "a~0b", "~", "~0", "~1", "~01", ".", "..", "...", "/",
    "//", "", " ", "a ", " a", "0", "00", "-0", "1", "01", "1.0", "True", "None", "null", "A",
    "c", "c/0", "zarr.json", ".zarray", "d", "manifest.ocdbt", "_METADATA", "_sharding",
    "_strings.json", "array_metadatas", "checkpoint", "metadata", "state", "default", "metrics",
    "ocdbt.process_0", "commit_success.txt", "\u00e9", "e\u0301", "\u212b", "\u00c5", "A\u030a",
    "\ufb01", "fi", "\u017f", "s", "\u0130", "i\u0307", "\u200b", "\u202e", "\ufeff", "\t", "\n",
    "\r", "\x1b", "\x7f", "\x01", "\uffff", "\U0001f600", "\ud800", "\0", "a\0b", "'", '"', "\\",
    "\\u0041", "%2e", "%2F", "$tuple", "*", "?", "[a]", "x" * 300, "x" * 5000, "ä" * 200,
]
# fmt: on
KEYS = [
    *PARTS,
    0,
    1,
    -1,
    10**20,
    True,
    False,
    None,
    0.0,
    1.0,
    -0.0,
    1.5,
    b"a",
    (),
    ("a",),
    ("a", "b"),
]
KEYS += [("a", 0), (0,), ("",), (None,)]


@st.composite
def near(draw):
    """Names that are like each other: forms of one name, and its parts joined in other ways."""
    parts = draw(st.lists(st.sampled_from(PARTS[:30]), min_size=1, max_size=3))
    form = draw(st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
    return unicodedata.normalize(form, draw(st.sampled_from(["", ".", "/", "~1", "~"])).join(parts))


def keys():
    return st.sampled_from(KEYS) | near() | st.text(max_size=3)


def leaves():
    number = st.integers(0, 10**6)
    return st.one_of(
        number.map(lambda n: np.full(3, n, np.int32)),
        number.map(lambda n: np.full(2000, n, np.int32)),  # not in a node of the database
        number,
        number.map(str),
        st.just(None),
        number.map(lambda n: str(n).encode()),
    )


def trees():
    return st.recursive(
        leaves(),
        lambda children: st.one_of(
            st.dictionaries(keys(), children, max_size=4),
            st.dictionaries(st.sampled_from(PARTS[:14]), children, min_size=2, max_size=4),
            st.lists(children, max_size=3),
            st.lists(children, max_size=2).map(tuple),
        ),
        max_leaves=8,
    )


def comes_back(tree, path):
    """Whether a tree comes back as it was; False if it was refused, and then nothing is there."""
    storage, where = locate(path)
    parent, name = os.path.split(where)
    try:
        jaxckpt.save(path, tree)
    except UnsupportedLeaf as error:
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        assert len(refused) > 20
        assert storage.kind(where) is None
        assert storage.kind(parent) is None or not [
            entry for entry in storage.entries(parent) if entry.startswith(name)
        ]
        return False
    assert same(jaxckpt.restore(path), tree), "another tree"
    assert same(jaxckpt.restore(path, tree, as_numpy=True), tree), "another tree, with like"
    assert jaxckpt.verify(path).ok
    storage.delete(where)
    return True


@pytest.mark.parametrize("part", range(4))
def test_trees_of_near_names(trial, part):
    """In memory: the same tree to the bit, or UnsupportedLeaf and nothing written."""
    came = []

    @seed(part)  # each part has trees of its own, the same ones every time
    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trees())
    def check(tree):
        with trial("16", f"{tree!a:.500}"):
            came.append(comes_back(tree, f"memory://names-{part}/{next(_count)}"))

    check()

    assert sum(came) > 30


def test_trees_of_near_names_on_a_disk(trial, ram_path):
    """Each pair of names, side by side and one below the other."""
    came = []
    for a, b in itertools.combinations(PARTS[:24], 2):
        for tree in ({a: 1, b: np.arange(3)}, {a: {b: np.arange(2)}, f"{a}.{b}": np.arange(2) + 5}):
            if len(came) < 400:
                with trial("16", repr(tree)):
                    came.append(comes_back(tree, ram_path / str(next(_count))))

    assert True in came
    assert False in came


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": np.arange(3)}, "a.b": np.arange(3) + 5},
        {"x": [np.arange(3)], "x.0": np.arange(3) + 5},
        {"a": {"b/c": np.arange(3)}, "a/b": {"c": np.arange(3)}},
        {1: np.arange(3), "1": np.arange(3) + 5},
        {"a": {"b": "text"}, "a.b": "other"},
        {"e\u0301": np.arange(3), "\u00e9": np.arange(3) + 5},
    ],
    ids=["dot", "index", "slash", "int", "text", "forms"],
)
def test_names_that_orbax_mixes_up(trial, ram_path, tree):
    """Pairs of names of which Orbax silently loses one."""
    with trial("16", repr(tree)):
        comes_back(tree, ram_path / "x")


def test_a_store_that_mixes_names_up_is_seen(monkeypatch):
    """A control: leaves whose keys lose a sign take each other's place, and this is seen."""
    from jaxckpt.format.tree import Leaf

    prefix = Leaf.prefix.fget
    monkeypatch.setattr(Leaf, "prefix", property(lambda leaf: prefix(leaf).replace("~", "")))

    with pytest.raises(Exception, match=r"_jaxckpt.sums has 8 bytes, expected 4"):
        comes_back({"a": np.arange(3), "a~": np.arange(3) + 5}, f"memory://names/{next(_count)}")
