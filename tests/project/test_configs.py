"""The configs in `configs/` are complete, the same in both languages, and work with a run."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt._run.config import manager_arguments

gin = pytest.importorskip("gin")
pytest.importorskip("ml_collections")

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# What is left of steps 1 to 2000; those by the clock are not known.
KEPT = {"single_host": {1, 1000, 2000}, "multi_host": {500, 1500, 2000}, "spot": {1, 2000}}


@pytest.fixture(autouse=True)
def no_bindings():
    """gin has nothing bound before or after."""
    gin.clear_config()
    yield
    gin.clear_config()


def ml_collections_config(name):
    return runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]().checkpoint


def load_gin(name):
    from jaxckpt.integrations import gin as configured

    gin.clear_config()  # it is locked once something was made of it
    gin.add_config_file_search_path(str(CONFIGS))
    configured.load([CONFIGS / f"{name}.gin"])
    return configured


def run_of(name, kind, directory):
    """Opens a run in a directory as a config says."""
    if kind == "py":
        return CheckpointManager.from_config(ml_collections_config(name), directory=directory)
    return load_gin(name).CheckpointManager(directory)


@pytest.mark.parametrize("kind", ["py", "gin"])
@pytest.mark.parametrize("name", KEPT)
def test_a_run_works_with_a_config(ram_path, name, kind):
    """It saves and keeps steps by the rules, and resumes."""
    state = {"w": np.zeros(3)}
    with run_of(name, kind, ram_path / "run") as manager:
        for step in range(1, 2001):
            state = {"w": state["w"] + 1}
            manager.save(step, state, metrics={"loss": 1 / step}, force=step == 2000)
        manager.wait_until_finished()
        steps = set(manager.all_steps())

    assert steps == KEPT[name] or (name == "spot" and steps > KEPT[name])
    with run_of(name, kind, ram_path / "run") as manager:
        again, start = manager.restore_or(lambda: {"w": np.zeros(3)})
    assert start == again["w"][0] == 2000


@pytest.mark.parametrize("name", [*KEPT, "demo"])
def test_both_languages_say_the_same(name):
    """Every argument of the manager, and every rule."""
    config = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    said = manager_arguments(CheckpointManager, config["checkpoint"], {})
    if name == "demo":
        gin.external_configurable(lambda **_: None, name="Config", module="demo")

    load_gin(name)

    bound = {
        k: v for k, v in gin.get_bindings("jaxckpt.CheckpointManager").items() if v is not None
    }
    defaults = inspect.signature(CheckpointManager).parameters
    assert {**bound} == {
        key: value for key, value in said.items() if key in bound or value != defaults[key].default
    }
    if name == "demo":
        sizes = gin.get_bindings("demo.Config")
        assert sizes == {key: value for key, value in config.items() if key != "checkpoint"}


@pytest.mark.parametrize("kind", ["py", "gin"])
def test_single_host_says_all_options(kind):
    """But for functions, which a program gives, and for what `auto` works out."""
    text = (CONFIGS / f"single_host.{kind}").read_text()
    options = {*inspect.signature(CheckpointManager).parameters}
    options |= {
        field.name for kind in (SavePolicy, KeepPolicy, LocalTier) for field in fields(kind)
    }
    options -= {"when", "on_progress", "on_commit", "notice", "job_mtbf_s"}

    said = {*re.findall(r'\b(\w+)"?\s*[=:]', text)}

    assert options <= said
