"""Options, args, policies and metadata of the drop-in are classes with a place, types and words."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import pickle

import numpy as np
import pytest

import jaxckpt.orbax as ocp
from jaxckpt.orbax import v1

MODULES = [
    getattr(ocp, name)
    for name in ("args", "metadata", "options", "policies", "transform_utils", "type_handlers")
]
# One of each place, with values in its fields.
OBJECTS = [
    ocp.CheckpointManagerOptions(max_to_keep=3, save_on_steps=[1, 2], best_fn=len),
    ocp.AsyncOptions(timeout_secs=5),
    ocp.options.FileOptions(path_permission_mode=0o770),
    ocp.args.StandardSave({"w": np.ones(2).tolist()}),
    ocp.args.PyTreeRestore(restore_args={"w": ocp.ArrayRestoreArgs(shape=(3,))}),
    ocp.args.Composite(state=ocp.args.JsonSave({"a": 1})),
    ocp.checkpoint_managers.AnyPreservationPolicy(
        [ocp.checkpoint_managers.LatestN(2), ocp.checkpoint_managers.EveryNSteps(4, False, 3)]
    ),
    ocp.checkpoint_managers.AnySavePolicy([ocp.checkpoint_managers.FixedIntervalPolicy(3)]),
    ocp.checkpoint_managers.PolicyCheckpointInfo(3, datetime.datetime(2026, 1, 1), {"loss": 1.0}),
    ocp.Transform(original_key="a", value_fn=len),
    ocp.metadata.ScalarMetadata("w", "there", dtype=np.dtype("int32")),
    v1.options.ArrayOptions(
        saving=v1.options.ArrayOptions.Saving(
            storage_options=v1.options.ArrayOptions.Saving.StorageOptions(dtype="float32")
        )
    ),
    v1.training.save_decision_policies.ContinuousCheckpointingPolicy(minimum_interval_secs=4),
]


def records():
    """All dataclasses in the modules, and those in other ones."""
    todo = [value for module in (*MODULES, v1.options) for value in vars(module).values()]
    while todo:
        value = todo.pop()
        if inspect.isclass(value) and dataclasses.is_dataclass(value):
            yield value
            todo += [one for one in vars(value).values() if inspect.isclass(one)]


CLASSES = {
    f"{cls.__module__}.{cls.__qualname__}": cls
    for cls in records()
    if cls.__module__.startswith("jaxckpt.orbax.") and not cls.__name__.startswith("_")
}


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_objects_can_be_pickled(value):
    """A process gets what another one made."""
    got = pickle.loads(pickle.dumps(value))

    assert (type(got), got) == (type(value), value)


def test_classes_are_where_users_import_them_from():
    """Their modules are public, and have them under their names, which errors and reprs show."""
    for place, cls in CLASSES.items():
        assert "._" not in place
        assert pickle.loads(pickle.dumps(cls)) is cls
    assert len(CLASSES) > 55
    assert repr(ocp.options.FileOptions(0o770)) == (
        "FileOptions(path_permission_mode=504, skip_sync_file_validations=False)"
    )


def test_every_field_has_a_type_and_words():
    """In the class, or in the one below which it is."""
    for place, cls in CLASSES.items():
        words = " ".join(base.__doc__ or "" for base in cls.__mro__)
        types = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
        for field in dataclasses.fields(cls):
            assert field.name in types, f"{place}.{field.name}"
            assert field.name in words, f"{place}.{field.name}"


def test_equal_steps():
    """A step is the same whatever its metrics are, as Orbax compares them."""
    at, info = datetime.datetime(2026, 1, 1), ocp.checkpoint_manager.CheckpointInfo

    assert len({info(1, at, {"x": 1}), info(1, at), info(2, at)}) == 2
