"""The names of the drop-in."""

from __future__ import annotations

import asyncio
import importlib
import re
import subprocess
import sys

import orbax.checkpoint as theirs
import pytest

import jaxckpt.orbax as ours
from jaxckpt.cli._migrate.source import _HOMES

# Of which a count of 22 programs found no use.
LEFT_OUT = {
    *(f"Proto{kind}" for kind in ("CheckpointHandler", "Save", "Restore")),
    *("CompositeOptions", "RestoreTransform"),
}

PROGRAM = """
import sys, jaxckpt.orbax as ocp
assert "jax" not in sys.modules
for name in dir(ocp):
    if name != "v1":
        getattr(ocp, name)
assert not [name for name in sys.modules if name.split(".")[0] == "orbax"]
"""


def test_orbax_is_never_imported():
    """Nor JAX, before a name is used."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_the_names_are_those_of_orbax():
    """Every class at the top of Orbax is there, but those that no program uses."""
    found = [name for name in dir(theirs) if not name.startswith("_") and name[0].isupper()]

    assert {name for name in found if not hasattr(ours, name)} == LEFT_OUT & {*found}


def test_the_version_is_one_of_orbax():
    """Programs compare it."""
    assert re.fullmatch(r"0\.1[2-9]\.\d+", ours.__version__)


def test_an_unknown_name_is_an_attribute_error():
    """It points to the table of names."""
    with pytest.raises(AttributeError, match=r"docs/orbax\.md"):
        _ = ours.nothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("module", ["args", "checkpoint_managers", "checkpointers", "path"])
def test_modules_have_the_names_of_orbax(module):
    """Of those modules that programs import from most."""
    names = [name for name in vars(getattr(theirs, module)) if name[0].isupper()]

    lacking = {name for name in names if not hasattr(getattr(ours, module), name)}
    assert lacking == LEFT_OUT & {*names}


@pytest.mark.parametrize(("old", "new"), _HOMES)
def test_each_place_of_orbax_has_one_in_the_drop_in(old, new):
    """Private ones, from which programs import policies, too."""
    assert importlib.import_module(old)
    assert importlib.import_module(new)


def test_names_of_programs():
    """Those that programs import from modules are there, and do what they say."""

    class Named(ours.step.NameFormat[ours.step.Metadata]):
        def build_name(self, step):
            return f"step-{step}"

    futures, impl = ours.future, ours.pathways.CheckpointingImpl
    waiting = futures.CommitFutureAwaitingContractedSignals(asyncio.sleep(0, 3))

    assert [waiting.result(), waiting.result()] == [3, None]
    assert ours.path.step.build_step_path("a", Named(), 3).name == "step-3"
    assert impl.from_options(use_persistence_array_handler=False) is impl.NO_DISPATCHER
    assert not ours.multihost.is_jax_distributed_client_initialized()
    assert issubclass(ours.logging.CloudLogger, ours.logging.AbstractLogger)
    assert ours.handlers.StandardSaveArgs is ours.args.StandardSave  # pyright: ignore
    assert ours.arrays.to_shape_dtype_struct is ours.utils.to_shape_dtype_struct
    assert ours.experimental.v1.path.PathAwaitingCreation.await_creation
    assert ours.type_handlers.ParamInfo(name="w", use_zarr3=True).is_ocdbt_checkpoint is None


@pytest.mark.parametrize("end", ["", "-17", "-1764475200123456"])
def test_the_suffix_of_unfinished_saves_is_in_those_of_every_orbax(end):
    """Since 0.11.25 their names end with it; before, a number followed."""
    assert ours.utils.TMP_DIR_SUFFIX == theirs.utils.TMP_DIR_SUFFIX
    assert ours.utils.TMP_DIR_SUFFIX in f"100.orbax-checkpoint-tmp{end}"


def test_without_etils_the_error_names_the_extra(monkeypatch):
    """Orbax returns its paths."""
    monkeypatch.setitem(sys.modules, "etils", None)  # as if it were not installed

    with pytest.raises(ImportError, match=r"pip install 'etils\[epath\]'"):
        importlib.reload(ours)
