"""Helpers that tests of programs import from `orbax.checkpoint.test_utils`."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxckpt.orbax._trees import as_data
from jaxckpt.orbax.tree import to_flat_dict


def erase_and_create_empty(directory: str | os.PathLike[str]) -> epath.Path:
    """Deletes a directory with all that is in it, and makes an empty one."""
    path = epath.Path(directory)
    if path.exists():
        path.rmtree()
    path.mkdir()
    return path


def create_sharded_array(arr: Any, mesh: Any, mesh_axes: Any) -> jax.Array:
    """Returns an array with a sharding."""
    value = np.asarray(arr)
    sharding = jax.sharding.NamedSharding(mesh, mesh_axes)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def assert_array_equal(testclass: Any, v_expected: Any, v_actual: Any) -> None:
    """Asserts that two leaves have the same type and value."""
    testclass.assertIsInstance(v_actual, type(v_expected))  # noqa: PT009  # unittest's
    if hasattr(v_expected, "dtype"):
        testclass.assertEqual(v_expected.dtype, v_actual.dtype)  # noqa: PT009
    np.testing.assert_array_equal(np.asarray(as_data(v_expected)), np.asarray(as_data(v_actual)))


def assert_tree_equal(testclass: Any, expected: Any, actual: Any) -> None:
    """Asserts that two trees have the same leaves."""
    wanted, found = to_flat_dict(expected), to_flat_dict(actual)
    testclass.assertCountEqual(wanted, found)  # noqa: PT009
    for names, leaf in wanted.items():
        assert_array_equal(testclass, leaf, found[names])
