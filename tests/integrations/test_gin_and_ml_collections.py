"""gin and ml_collections set the same options, and misspelt names are reported."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt._run.config import manager_arguments

ROOT = Path(__file__).parents[2]


# --- gin -------------------------------------------------------------------------------------


@pytest.fixture
def configured():
    """`jaxckpt.integrations.gin`, with nothing bound before or after."""
    gin = pytest.importorskip("gin")
    from jaxckpt.integrations import gin as configured

    gin.clear_config()
    yield configured
    gin.clear_config()


def test_gin_sets_the_options_of_a_manager(configured, ram_path):
    """It sets options of the manager and its policies; arguments in the code override them."""
    configured.load(
        (),
        [
            f"CheckpointManager.directory = '{ram_path}/run'",
            "CheckpointManager.save = @SavePolicy()",
            "CheckpointManager.keep = @KeepPolicy()",
            "CheckpointManager.timeout_s = 60.0",
            "SavePolicy.every_steps = 10",
            "SavePolicy.at_steps = (33,)",
            "KeepPolicy.last = 3",
        ],
    )

    with configured.CheckpointManager(timeout_s=30.0) as manager:
        for step in range(1, 51):
            manager.save(step, {"w": step})
        manager.wait_until_finished()
        assert manager.all_steps() == [33, 40, 50]

    assert manager.timeout_s == 30.0
    assert manager.keep == KeepPolicy(last=3)
    assert (type(manager), type(manager.keep)) == (CheckpointManager, KeepPolicy)


@pytest.mark.parametrize(
    ("bindings", "save", "keep"),
    [
        (["KeepPolicy.last = 2"], SavePolicy(), KeepPolicy(last=2)),
        (["SavePolicy.every_seconds = '15m'"], SavePolicy(every_seconds=900), KeepPolicy()),
        (["SavePolicy.auto.mtbf_hours = 9"], SavePolicy.auto(mtbf_hours=9), KeepPolicy()),
        (["a/KeepPolicy.last = 2"], SavePolicy(), KeepPolicy()),
        (
            ["KeepPolicy.last = 2", "CheckpointManager.keep = @a/KeepPolicy()"],
            SavePolicy(),
            KeepPolicy(last=2),
        ),
        (
            [
                "SavePolicy.every_steps = 2",
                "SavePolicy.auto.mtbf_hours = 9",
                "CheckpointManager.save = @SavePolicy()",
            ],
            SavePolicy(every_steps=2),
            KeepPolicy(),
        ),
    ],
)
def test_fields_of_policies_apply_without_a_reference(configured, ram_path, bindings, save, keep):
    """Bound fields count although nobody binds `save` and `keep` to the policies."""
    configured.load((), [*bindings, "CheckpointManager.budget_bytes = '1GB'"])

    with configured.CheckpointManager(ram_path / "run") as manager:
        assert manager._saver.due.schedules[0].policy == save
        assert manager.keep == keep
        assert manager.budget_bytes == 10**9


def test_gin_sets_the_local_place(configured, ram_path):
    """A bound directory is enough; the policies of the place are bound to it."""
    configured.load(
        (),
        [
            f"CheckpointManager.directory = '{ram_path}/run'",
            f"LocalTier.directory = '{ram_path}/local'",
            "LocalTier.keep = @local/KeepPolicy()",
            "LocalTier.durable_timeout_s = '15m'",
            "local/KeepPolicy.last = 1",
        ],
    )

    with configured.CheckpointManager() as manager:
        for step in (1, 2):
            manager.save(step, {"w": step})
        manager.wait_until_finished()  # also until the local steps not kept are deleted
        assert manager.tiers == {"local": [2], "durable": [1, 2], "waiting": []}
        assert manager._tiers.sender.processes.timeout_s == 900

    with configured.CheckpointManager(local=None) as manager:
        assert manager.tiers == {"local": [], "durable": [1, 2], "waiting": []}


def test_two_bound_save_policies_are_an_error(configured, ram_path):
    """One of them would be ignored."""
    configured.load((), ["SavePolicy.first = True", "SavePolicy.auto.mtbf_hours = 9"])

    with pytest.raises(ValueError, match=r"choose one with CheckpointManager\.save = @"):
        configured.CheckpointManager(ram_path / "run")
    assert not (ram_path / "run").exists()


def test_gin_leaves_jaxckpt_as_it_is(configured):
    """Only what its module exports is bound."""
    configured.load((), ["KeepPolicy.last = 3"])

    assert KeepPolicy() == KeepPolicy(last=None)
    assert configured.KeepPolicy() == KeepPolicy(last=3)


def test_gin_sets_the_fields_of_auto(configured, ram_path):
    """It sets the arguments of `auto` and the fields of the policy that it makes."""
    configured.load(
        (),
        [
            "CheckpointManager.save = @SavePolicy.auto()",
            "SavePolicy.auto.mtbf_hours = 1000",
            "SavePolicy.auto.processes = 500",
            "SavePolicy.auto.at_steps = (7,)",
        ],
    )

    wanted = SavePolicy.auto(mtbf_hours=1000, processes=500, at_steps=(7,))
    assert configured.auto() == wanted
    with configured.CheckpointManager(ram_path / "run") as manager:
        assert manager.save(7, {"w": 1}) is not None


def test_gin_files_come_before_bindings(configured, tmp_path):
    """A binding on the command line has the last word."""
    file = tmp_path / "a.gin"
    file.write_text("jaxckpt.KeepPolicy.last = 3\nKeepPolicy.every_steps = 100\n")

    configured.load([file], ["KeepPolicy.last = 5"])

    assert configured.KeepPolicy() == KeepPolicy(last=5, every_steps=100)


def test_gin_takes_one_file_and_one_binding(configured, tmp_path):
    """Each as a text, which is not taken apart into letters."""
    (tmp_path / "a.gin").write_text("KeepPolicy.last = 3\n")

    configured.load(f"{tmp_path}/a.gin", "KeepPolicy.every_steps = 100")

    assert configured.KeepPolicy() == KeepPolicy(last=3, every_steps=100)


@pytest.mark.parametrize(
    ("binding", "hint"),
    [
        ("KeepPolicy.lats = 3", "Did you mean 'last'?"),
        ("train/KeepPolicy.lats = 3", "Did you mean 'last'?"),
        ("jaxckpt.SavePolicy.evry_steps = 3", "Did you mean 'every_steps'?"),
        ("CheckpointManager.timeout = 3", "Did you mean 'timeout_s'?"),
        ("SavePolicy.auto.mtbf_hour = 3", "Did you mean 'mtbf_hours'?"),
        ("SavePolicy.auto.job_mtbf_s = 3", "Did you mean 'mtbf_hours'?"),
        ("SavePolicy.auto.zzz = 3", "It has mtbf_hours, processes, every_steps,"),
        ("KeepPolicy.zzz = 3", "It has last, every_steps,"),
        ("KepPolicy.last = 3", "Did you mean 'KeepPolicy'?"),
        ("LocalTier.kep = 3", "Did you mean 'keep'?"),
        ("CheckpointManager.local_keep = 3", "Pass local=LocalTier(..., keep=...)."),
        ("CheckpointManager.keep = @KeepPolcy()", "Did you mean 'KeepPolicy'?"),
    ],
)
def test_a_name_that_is_misspelt_in_gin_is_an_error(configured, tmp_path, binding, hint):
    """It says where it is, and which one is likely."""
    file = tmp_path / "a.gin"
    file.write_text(f"KeepPolicy.best = 3\n{binding}\n")

    with pytest.raises(ValueError, match=r"a\.gin.* line 2") as caught:
        configured.load([file])

    assert hint in str(caught.value)
    assert binding in str(caught.value)


def test_a_field_that_is_misspelt_of_the_programs_own_class(configured):
    """Also of a dataclass, from which gin derives one that takes anything."""
    import gin

    @dataclasses.dataclass
    class Sizes:
        rows: int = 1

    gin.external_configurable(Sizes, module="of_a_test")
    with pytest.raises(ValueError, match=r"Did you mean 'rows'\?"):
        configured.load((), ["Sizes.rovs = 3"])


def test_a_value_that_is_wrong_in_gin_is_named(configured):
    """By the policy, when it is made."""
    configured.load((), ["KeepPolicy.last = 'three'"])

    with pytest.raises(TypeError, match="KeepPolicy: last"):
        configured.KeepPolicy()


def test_another_error_of_gin_is_left_alone(configured):
    """A syntax error says what it did."""
    with pytest.raises(SyntaxError):
        configured.load((), ["KeepPolicy.last 3"])


# --- ml_collections --------------------------------------------------------------------------


@pytest.fixture
def manager_config():
    pytest.importorskip("ml_collections")
    from jaxckpt.integrations.ml_collections import manager_config

    return manager_config


def test_manager_config_has_every_field(manager_config):
    """The fields of the manager, of its policies, and of `SavePolicy.auto`."""
    config = manager_config()

    assert set(config) == set(inspect.signature(CheckpointManager).parameters)
    assert set(config.save) == {field.name for field in fields(SavePolicy)} | {"auto"}
    assert set(config.keep) == {field.name for field in fields(KeepPolicy)}
    assert set(config.save.auto) == {"mtbf_hours", "processes"}


def test_from_config_takes_manager_config(manager_config, ram_path):
    """As it is; what was not set has its default."""
    config = manager_config(directory=ram_path / "run", save={"every_steps": 2})
    config.keep.last = 2
    config.timeout_s = 60

    with CheckpointManager.from_config(config) as manager:
        for step in range(1, 9):
            manager.save(step, {"w": step})
        manager.wait_until_finished()
        assert manager.all_steps() == [6, 8]

    assert manager.keep == KeepPolicy(last=2)
    assert manager_arguments(CheckpointManager, config, {})["save"] == SavePolicy(every_steps=2)
    assert (manager.timeout_s, manager.budget_bytes, manager.mode) == (60.0, 1 << 30, "w")


def test_manager_config_has_auto(manager_config, ram_path):
    """In force once it has `mtbf_hours`."""
    config = manager_config(directory=ram_path / "run", save={"auto": {"mtbf_hours": 100}})
    config.save.auto.processes = 50

    CheckpointManager.from_config(config).close()
    wanted = SavePolicy.auto(mtbf_hours=100, processes=50)
    assert manager_arguments(CheckpointManager, config, {})["save"] == wanted


def test_manager_config_has_the_local_place(manager_config, ram_path):
    """In force once it has `directory`; its policies are not those of the run."""
    config = manager_config(directory=ram_path / "run", save={"every_steps": 2})
    assert manager_arguments(CheckpointManager, config, {})["local"] is None

    config.local.directory = "/mnt/disk"
    tier = manager_arguments(CheckpointManager, config, {})["local"]
    assert tier == LocalTier("/mnt/disk")
    config.local.save.every_steps = 1
    tier = manager_arguments(CheckpointManager, config, {})["local"]
    assert (tier.save, config.save.every_steps) == (SavePolicy(every_steps=1), 2)
    assert manager_config(local=ram_path).local.directory == str(ram_path)
    assert manager_config(local={"directory": ram_path}).local.directory == str(ram_path)


def test_manager_config_takes_units(manager_config, ram_path):
    """At once, or set later; the error of a wrong one comes when the run is opened."""
    config = manager_config(directory=ram_path / "run", save={"every_seconds": "15m"})
    config.budget_bytes = "1GB"

    with CheckpointManager.from_config(config) as manager:
        assert manager.budget_bytes == 10**9
        assert manager._saver.due.schedules[0].policy.every_seconds == 900
    config.timeout_s = "soon"
    with pytest.raises(ValueError, match="timeout_s in the config must be a duration"):
        CheckpointManager.from_config(config)


def test_manager_config_takes_functions(manager_config, ram_path):
    """As the rules that are functions."""
    config = manager_config(directory=ram_path / "run")
    config.save.when = lambda step: step == 3

    with CheckpointManager.from_config(config) as manager:
        assert [step for step in range(5) if manager.should_save(step)] == [3]


def test_manager_config_needs_a_directory(manager_config):
    """The directory has no default."""
    with pytest.raises(TypeError, match="lacks 'directory'"):
        CheckpointManager.from_config(manager_config())


@pytest.mark.parametrize(
    ("said", "likely"),
    [
        ({"keeps": {}}, "keep"),
        ({"keep": {"lats": 3}}, "last"),
        ({"save": {"evry_steps": 3}}, "every_steps"),
        ({"save": {"auto": {"mtbf_hour": 3}}}, "mtbf_hours"),
        ({"local": {"durable_timeout": 3}}, "durable_timeout_s"),
    ],
)
def test_a_name_that_is_misspelt_in_manager_config_is_an_error(manager_config, said, likely):
    """With the likely one."""
    with pytest.raises((KeyError, AttributeError), match=f'Did you mean "{likely}"'):
        manager_config(**said)


def test_a_value_of_the_wrong_type_is_refused(manager_config):
    """Where it is set."""
    config = manager_config()

    with pytest.raises(TypeError):
        config.keep.last = "three"
    with pytest.raises(TypeError, match="save must be a dict of fields, got None"):
        manager_config(save=None)


# --- absl flags ------------------------------------------------------------------------------


def run_flags(*flags):
    pytest.importorskip("ml_collections")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "examples/flags.py", "--config=configs/train.py", *flags]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_flags_override_a_config_file(ram_path):
    """`examples/flags.py` keeps steps as a flag says, and resumes where it was."""
    directory = f"--config.checkpoint.directory={ram_path}/run"

    first = run_flags(directory, "--config.checkpoint.keep.last=2")
    options = ("timeout_s=15m", "incremental=False", "save.at_steps=27,28")
    options = [f"--config.checkpoint.{option}" for option in options]
    second = run_flags(directory, "--config.steps=30", *options)

    assert first.stdout == "from step 0\nkept steps [15, 20]\n", first.stderr
    assert second.stdout == "from step 20\nkept steps [27, 28, 30]\n", second.stderr
    assert jaxckpt.verify(ram_path / "run" / "30").ok


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.checkpoint.keep.lats=2", 'Did you mean "last"'),
        ("--config.checkpoint.keep.last=two", "two"),
    ],
)
def test_a_flag_that_is_wrong_is_an_error(ram_path, flag, message):
    """Before anything is opened."""
    done = run_flags(f"--config.checkpoint.directory={ram_path}/run", flag)

    assert done.returncode != 0
    assert message in done.stderr
    assert not (ram_path / "run").exists()


# --- both ------------------------------------------------------------------------------------


def test_nothing_imports_the_integrations():
    """jaxckpt works without gin and ml_collections."""
    code = (
        "import sys, jaxckpt; [getattr(jaxckpt, name) for name in jaxckpt.__all__];"
        "print([name for name in sys.modules if name.split('.')[0] in ('gin', 'ml_collections')"
        " or name.startswith(('jaxckpt.integrations', 'jaxckpt.pages'))])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
