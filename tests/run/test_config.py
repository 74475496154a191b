"""Configs as dicts and `ml_collections.ConfigDict` open a run, and misspelt names are reported."""

from __future__ import annotations

import types
from dataclasses import fields

import pytest

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, SavePolicy


@pytest.fixture(params=["dict", "read-only mapping", "ConfigDict", "FrozenConfigDict"])
def make(request):
    """Makes a config of each kind from a dict."""
    if request.param == "dict":
        return dict
    if request.param == "read-only mapping":
        return types.MappingProxyType
    ml_collections = pytest.importorskip("ml_collections")
    return getattr(ml_collections, request.param)


def test_a_config_names_the_arguments(make, ram_path):
    """A config has the arguments of `CheckpointManager`, and policies as dicts of their fields."""
    config = make(
        {
            "directory": str(ram_path / "run"),
            "save": {"every_steps": 2, "at_steps": (5,), "on_preemption": False},
            "keep": {"last": 3, "best": 1, "metric": "loss", "mode": "max"},
            "budget_bytes": 1 << 20,
            "timeout_s": 60,
            "step_prefix": "ckpt",
            "step_digits": 4,
        }
    )

    with CheckpointManager.from_config(config) as manager:
        for step in range(1, 8):
            manager.save(step, {"w": step}, metrics={"loss": -step})

    assert (manager.budget_bytes, manager.timeout_s) == (1 << 20, 60)
    assert manager.keep == KeepPolicy(last=3, best=1, metric="loss", mode="max")
    found = sorted(path.name for path in (ram_path / "run").iterdir() if path.is_dir())
    assert found == ["ckpt_0002", "ckpt_0004", "ckpt_0005", "ckpt_0006"]


def test_a_config_may_say_little(make, ram_path):
    """All but the directory has a default, and None means it."""
    config = make({"directory": str(ram_path / "run"), "save": None, "keep": None})

    with CheckpointManager.from_config(config) as manager:
        assert manager.keep == KeepPolicy()
        assert manager.should_save(3)


def test_empty_policies_have_no_rules(make, ram_path):
    """As `SavePolicy()` and `KeepPolicy()`."""
    config = make({"directory": str(ram_path / "run"), "save": {}, "keep": {}})

    with CheckpointManager.from_config(config) as manager:
        assert manager.keep == KeepPolicy()
        assert manager.should_save(3)


def test_a_config_may_have_auto(make, ram_path):
    """The arguments of `SavePolicy.auto`, beside other rules."""
    auto = {"mtbf_hours": 100, "processes": 50}
    config = make({"directory": str(ram_path / "run"), "save": {"auto": auto, "at_steps": (9,)}})

    with CheckpointManager.from_config(config) as manager:
        assert manager._saver.due.schedules[0].policy == SavePolicy.auto(**auto, at_steps=(9,))


def test_a_config_may_hold_policies(ram_path):
    """Policy objects are used unchanged, for example if they hold functions."""
    keep = KeepPolicy(when=lambda info: True)
    config = {"directory": ram_path / "run", "keep": keep, "save": SavePolicy(every_steps=7)}

    with CheckpointManager.from_config(config) as manager:
        assert manager.keep is keep
        assert not manager.should_save(3)


def test_bytes_and_seconds_may_have_a_unit(make, ram_path):
    """As people write them; a text without a unit is in bytes or seconds."""
    config = make(
        {
            "directory": str(ram_path / "run"),
            "budget_bytes": "1.5 GiB",
            "timeout_s": "90",
            "save": {"every_seconds": "15m", "auto": {"mtbf_hours": 100}},
            "keep": {"every_seconds": "6h", "newer_than_s": "2w", "last": 1},
        }
    )

    with CheckpointManager.from_config(config) as manager:
        assert (manager.budget_bytes, manager.timeout_s) == (3 << 29, 90)
        assert manager.keep == KeepPolicy(every_seconds=21_600, newer_than_s=1_209_600, last=1)
        wanted = SavePolicy.auto(mtbf_hours=100, every_seconds=900)
        assert manager._saver.due.schedules[0].policy == wanted


def test_overrides_go_before(make, ram_path):
    """A whole argument at a time; also the directory, which a config may leave out."""
    config = make({"keep": {"last": 3, "every_steps": 10}, "timeout_s": 5.0})

    with CheckpointManager.from_config(
        config, directory=ram_path / "run", keep={"last": 1}, mode="w"
    ) as manager:
        assert manager.directory == str(ram_path / "run")
        assert manager.keep == KeepPolicy(last=1)
        assert manager.timeout_s == 5.0


def test_a_config_is_not_changed(make, ram_path):
    """It may be used again, and be logged."""
    said = {
        "directory": str(ram_path / "run"),
        "save": {"auto": {"mtbf_hours": 1, "processes": 2}, "first": True},
        "keep": {"last": 2},
    }
    config = make(said)

    for _ in range(2):
        CheckpointManager.from_config(config).close()

    assert {name: config[name] for name in said} == {name: make(said)[name] for name in said}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"directori": "x"}, "the config has no field 'directori'. Did you mean 'directory'?"),
        ({"keeps": {}}, "the config has no field 'keeps'. Did you mean 'keep'?"),
        ({"timeout": 5}, "the config has no field 'timeout'. Did you mean 'timeout_s'?"),
        ({"keep": {"lats": 3}}, "keep has no field 'lats'. Did you mean 'last'?"),
        ({"keep": {"every_step": 3}}, "keep has no field 'every_step'. Did you mean 'every_steps'"),
        ({"save": {"evry_steps": 3}}, "save has no field 'evry_steps'. Did you mean 'every_steps'"),
        ({"save": {"atuo": {}}}, "save has no field 'atuo'. Did you mean 'auto'?"),
        (
            {"save": {"auto": {"mtbf_hour": 3}}},
            "save.auto has no field 'mtbf_hour'. Did you mean 'mtbf_hours'?",
        ),
        ({"save": {"auto": {"mtbf_hours": 1, "every_steps": 3}}}, "save.auto has no field"),
        ({"keep": {"auto": {}}}, "keep has no field 'auto'"),
        ({"local": {"keep": {"last": 1}}}, "LocalTier: directory must be a path, got None"),
        ({"local": {"dir": "x"}}, "LocalTier takes no argument 'dir'. It has directory, save,"),
        ({"self": 1}, "the config has no field 'self'"),
        ({"zzz": 1}, "the config has no field 'zzz'. It has directory, save, keep, mode,"),
    ],
)
def test_a_name_that_is_misspelt_is_an_error(make, ram_path, config, message):
    """At each level, with the likely name, or all; nothing is opened."""
    wanted = {"directory": str(ram_path / "run"), **config}

    with pytest.raises(TypeError) as caught:
        CheckpointManager.from_config(make(wanted))

    assert message in str(caught.value)
    assert not (ram_path / "run").exists()


def test_a_misspelt_override_is_an_error(ram_path):
    """As one in the config is."""
    with pytest.raises(TypeError, match="Did you mean 'step_prefix'"):
        CheckpointManager.from_config({"directory": ram_path / "run"}, step_prefx="a")


def test_a_config_without_a_directory_is_an_error(make):
    """It says what is missing."""
    with pytest.raises(TypeError, match="lacks 'directory'"):
        CheckpointManager.from_config(make({"keep": {"last": 3}}))


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        ({"keep": 3}, TypeError, "keep must be a dict, got 3"),
        ({"save": "always"}, TypeError, "save must be a dict"),
        ({"save": [1]}, TypeError, "save must be a dict"),
        ({"save": {"auto": 100}}, TypeError, "save.auto must be a dict, got 100"),
        ({"save": {"auto": {"processes": 2}}}, ValueError, "mtbf_hours"),
        ({"save": {"auto": {"mtbf_hours": -1}}}, ValueError, "mtbf_hours"),
        ({"save": {"auto": {"mtbf_hours": "9"}}}, TypeError, "mtbf_hours"),
        ({"save": {"auto": {"mtbf_hours": 1}, "job_mtbf_s": 1}}, TypeError, "job_mtbf_s"),
        ({"save": {"every_steps": "10"}}, TypeError, "SavePolicy: every_steps"),
        ({"save": {"at_steps": 5}}, TypeError, "SavePolicy: at_steps"),
        ({"keep": {"last": 0}}, ValueError, "KeepPolicy: last"),
        ({"keep": {"best": 3}}, ValueError, "metric"),
        ({"mode": "a"}, ValueError, "mode"),
        ({"timeout_s": "1 hour"}, ValueError, "timeout_s in the config must be a duration such as"),
        ({"timeout_s": "-1s"}, ValueError, "timeout_s in the config must be a duration such as"),
        ({"budget_bytes": "1 GBit"}, ValueError, "budget_bytes in the config must be a size such"),
        ({"keep": {"every_seconds": "1y"}}, ValueError, "every_seconds in keep must be a duration"),
        ({"keep": {"metric": "15m", "last": "15m"}}, TypeError, "KeepPolicy: last"),
        ({"timeout_s": -1}, ValueError, "timeout_s"),
        ({"budget_bytes": 1e9}, TypeError, "budget_bytes"),
        ({"step_digits": 0}, ValueError, "step_digits"),
        ({"step_digits": "4"}, TypeError, "step_digits"),
        ({"step_digits": 30}, ValueError, "step_digits"),
        ({"step_prefix": 5}, TypeError, "step_prefix"),
        ({"step_prefix": "a/b"}, ValueError, "step_prefix"),
        ({"step_prefix": "a\nb"}, ValueError, "step_prefix: .* no control characters"),
        ({"step_prefix": "a\x85b"}, ValueError, "step_prefix: .* no control characters"),
        ({"step_prefix": "é" * 91}, ValueError, "step_prefix: at most 180 bytes"),
        ({"step_prefix": "a\ud800"}, ValueError, "step_prefix: .* UTF-8.*: 'a.*ud800'"),
        ({"local": "/nvme/a\ud800"}, ValueError, "half of a surrogate pair, got .*ud800"),
    ],
)
def test_a_value_that_is_wrong_is_named(ram_path, config, error, named):
    """And the run is not opened."""
    with pytest.raises(error, match=named):
        CheckpointManager.from_config({"directory": str(ram_path / "run"), **config})

    assert not (ram_path / "run").exists()


@pytest.mark.parametrize("config", [None, 5, "runs/a", ["directory"]])
def test_what_is_no_config_is_refused(config):
    """TypeError that shows it."""
    with pytest.raises(TypeError, match="the config must be a dict"):
        CheckpointManager.from_config(config)


def test_policies_are_plain_fields():
    """Every field has a default, and a config can hold each by its name."""
    for policy in (SavePolicy, KeepPolicy):
        fields_of = {field.name: getattr(policy(), field.name) for field in fields(policy)}
        assert policy(**fields_of) == policy()
    assert set(vars(jaxckpt)["__all__"]) >= {"SavePolicy", "KeepPolicy", "CheckpointManager"}
