"""Sets ceilings on what each leaf costs, in calls of Python functions and in page faults.

Neither depends on how busy the machine is. Calls include those of jax and numpy.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import jaxckpt

LEAVES = 4000


def calls_of(call: Callable[[], object]) -> int:
    """Counts the calls of Python functions, in all threads; the second time, with filled caches."""
    call()
    events: list[str] = []  # appending is safe in any thread
    threading.setprofile(lambda _, event, __: events.append(event))
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return events.count("call")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A tree of many small arrays, as long as a kilobyte, in layers."""
    path = tmp_path_factory.mktemp("many") / "a"
    tree = {
        f"layer_{n:02}": {f"w{i}": np.full(256, n * i, np.float32) for i in range(100)}
        for n in range(LEAVES // 100)
    }
    jaxckpt.save(path, tree)
    return path, tree


def test_one_leaf_costs_the_same_in_a_tree_of_any_size(many, tmp_path):
    """Neither the other leaves nor their places are decoded."""
    path, tree = many
    jaxckpt.save(tmp_path / "few", {"layer_07": {"w9": tree["layer_07"]["w9"], "b": 1}})

    def restore(path):
        return jaxckpt.open(path)["layer_07/w9"].restore()

    assert np.array_equal(restore(path), tree["layer_07"]["w9"])
    of_many, of_few = (calls_of(lambda at=at: restore(at)) for at in (path, tmp_path / "few"))
    assert of_many < of_few + 200 < 2000
