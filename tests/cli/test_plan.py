"""`jaxckpt plan` says what the processes of a real job write and read, to the byte."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.cli._plan.cluster import cluster_of
from jaxckpt.cli._plan.loads import HostLoads, loads_of
from jaxckpt.cli._plan.tree import planned
from tests.commandline import cli
from tests.workers.planned import HOST, LAYOUTS, TREES, dtype_of, spec_of

QUICK = ((2, 4), (3, 2), (4, 2))
JOBS = [
    pytest.param(*job, marks=[] if job in QUICK else pytest.mark.slow)
    for job in sorted({(count, devices) for _, count, devices, _ in LAYOUTS})
]
WAYS = ("save", "save_disk", "restore", "restore_once", "restore_disk")


def loads(kind, hosts, devices, axes):
    tree, specs = dict(HOST), {}
    for name, (shape, dtype, spec) in TREES[kind].items():
        tree[name] = jax.ShapeDtypeStruct(shape, dtype_of(dtype))
        specs[(name,)] = [*spec_of(spec)]
    cluster = cluster_of(hosts, devices, axes)
    return loads_of(planned(tree, specs, cluster), cluster)


def cells(found: HostLoads):
    return {way: [*dataclasses.astuple(getattr(found, way))] for way in WAYS}


@pytest.mark.multihost
@pytest.mark.parametrize(("count", "devices"), JOBS)
def test_a_plan_has_the_bytes_and_requests_of_the_real_job(run_processes, tmp_path, count, devices):
    """Of each process, on 20 layouts of 2 to 16 processes, as their storages count them."""
    numbers = [n for n, (_, *which, _) in enumerate(LAYOUTS) if which == [count, devices]]

    done = run_processes(
        "planned:count_layouts",
        count=count,
        devices_per_process=devices,
        args=[tmp_path, numbers],
        timeout_s=110,
    )

    for n in numbers:
        found = loads(*LAYOUTS[n])
        for i, one in enumerate(done):
            counted = one.result[str(n)]
            moved = counted.pop("moved")
            assert counted == cells(found[i]), (LAYOUTS[n], i)
            assert moved == sum(host.moved_bytes for host in found), LAYOUTS[n]


# --- the command -----------------------------------------------------------------------------

MODEL = """
import jax, numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

def state():
    mesh = AbstractMesh((1, 1), ("dp", "tp"))
    w = NamedSharding(mesh, P("dp", "tp"))
    return {"w": jax.ShapeDtypeStruct((256, 128), np.float32, sharding=w), "step": 0}

def with_specs():
    tree = {name: jax.ShapeDtypeStruct((256, 128), np.float32) for name in ("w", "b")}
    return tree, {"w": P("dp", "tp"), "b": P("pipeline", None)}

def seven():
    return {"w": object()}

value = 7
"""
SIZES = ["--hosts", "2", "--devices-per-host", "4", "--mesh", "dp=4,tp=2"]
RATES = [
    "--store-rate",
    "1MB",
    "--host-rate",
    "100kB/s",
    "--link-rate",
    "1MB",
    "--disk-rate",
    "2MB",
]
RATES += ["--copy-rate", "1MB", "--mtbf", "100h"]


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "planned_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("planned_model", None)


def facts_of(*args):
    code, out, err = cli("plan", *args, *SIZES, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_function_of_the_current_directory_is_planned(model):
    """Its shardings and its specs say the same."""
    one, two = facts_of("planned_model:state"), facts_of("planned_model:with_specs")

    assert one["state_bytes"] == 256 * 128 * 4 + 8  # the step is an int64
    assert one["device_bytes"] == 256 * 128 * 4 // 8
    assert one["mesh"] == {"dp": 4, "tp": 2}
    assert two["state_bytes"] == 2 * 256 * 128 * 4
    assert [one["replicated"], two["replicated"]] == [[], ["b"]]
    assert two["device_bytes"] == 256 * 128 * 4 // 8 + 256 * 128 * 4


def test_leaves_whose_axes_are_missing_are_named(model):
    """They are replicated, and the table says so."""
    code, out, _ = cli("plan", "planned_model:with_specs", *SIZES)

    assert code == 0
    assert "1 leaf replicated along axes of their specs that the mesh lacks" in out
    assert out.rstrip().endswith("not measurements.")


def test_a_checkpoint_is_planned_with_its_specs(tmp_path, mesh):
    """Its shapes and specs count, not the devices that it was saved on."""
    value = jax.device_put(np.ones((256, 128), np.float32), NamedSharding(mesh, P("x", "y")))
    host = {"name": "a", "none": None, "x/y": {}, "key": jax.random.key(1)}
    jaxckpt.save(tmp_path / "a", {"w": value, **host})

    code, out, err = cli("plan", tmp_path / "a", *SIZES[:4], "--mesh", "x=8,z=1", "--json")

    assert code == 0, err
    found = json.loads(out)
    assert found["leaves"] == 2
    assert found["replicated"] == ["w"]  # along y
    assert found["device_bytes"] == 256 * 128 * 4 // 8 + 8


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("planned_modul:state", "there is no module planned_modul in"),
        ("planned_model:stat", "the module planned_model has no function 'stat'"),
        ("planned_model:value", "the module planned_model has no function 'value'"),
        ("planned_model:seven", "returned a tree with <object"),
        ("missing", "no such file or directory"),
    ],
)
def test_what_cannot_be_planned_is_named(model, target, problem):
    """A module, a function or a path that is not there, or a tree of something else."""
    code, _, err = cli("plan", target, *SIZES)

    assert code == 2
    assert problem in err


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ("dp=4,tp=4", "the mesh has 16 devices, but 2 hosts of 4 devices have 8"),
        ("dp4", "must be axes and sizes"),
        ("dp=0,tp=8", "must be axes and sizes"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(model, mesh, problem):
    """Its devices are those of the hosts."""
    code, _, err = cli("plan", "planned_model:state", *SIZES[:4], "--mesh", mesh)

    assert code == 2
    assert problem in err


def test_seconds_follow_from_the_rates(model):
    """The busiest host, or all hosts at the store, whichever takes longer; then what is moved."""
    found = facts_of("planned_model:with_specs", *RATES)

    busiest = max(one["save"]["bytes"] for one in found["each"])
    save, _, direct, once, _ = found["transfers"]
    assert save["seconds"] == busiest / 1e5
    assert direct["seconds"] == max(one["restore"]["bytes"] for one in found["each"]) / 1e5
    read = max(one["restore_once"]["bytes"] for one in found["each"])
    assert once["seconds"] == pytest.approx(read / 1e5 + found["moved_bytes"] / 1e6)
    store = found["outlooks"][0]
    assert store["committed_s"] == pytest.approx(store["blocked_s"] + save["seconds"])
    restart_s = min(direct["seconds"], once["seconds"])
    best = math.sqrt(2 * store["blocked_s"] * (found["job_mtbf_s"] + restart_s))
    assert store["interval_s"] == pytest.approx(best)
    assert found["job_mtbf_s"] == pytest.approx(100 * 3600 / 2, rel=1e-3)


def test_without_rates_there_are_no_seconds(model):
    """Bytes and requests are there all the same."""
    found = facts_of("planned_model:state")

    assert {one["seconds"] for one in found["transfers"]} == {None}
    assert all(one["goodput"] is None for one in found["outlooks"])
    assert all(one["all_hosts"]["bytes"] for one in found["transfers"])


def test_the_best_interval_has_the_best_goodput(model):
    """The formula of the goodput and that of the interval agree, within a part of a percent."""
    found = facts_of("planned_model:with_specs", *RATES)

    for one in found["outlooks"]:
        most = max(goodput for _, goodput in one["curve"])
        assert [one["interval_s"], one["goodput"]] in one["curve"]
        assert one["goodput"] == pytest.approx(most, rel=1e-3)
        assert one["goodput"] > one["curve"][0][1]
        assert one["goodput"] > one["curve"][-1][1]


def test_a_report_draws_the_plan(model, tmp_path):
    """The goodput over the interval, of the store and of local disks; nothing else is a plan."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": 1.5})
    _, out, _ = cli("plan", "planned_model:with_specs", *SIZES, *RATES, "--json")
    (tmp_path / "plan.json").write_text(out)
    (tmp_path / "bad.json").write_text('{"hosts": "<b>"}')

    code, _, err = cli("report", "run", "-o", "a.html", "--plan", "plan.json")
    bad = cli("report", "run", "-o", "b.html", "--plan", "bad.json")

    assert (code, err) == (0, "")
    page = (tmp_path / "a.html").read_text("utf-8")
    assert page.count("goodput in %, over seconds between saves") == 2
    assert page.count("polyline") >= 2
    assert (bad[0], "bad.json is not a plan" in bad[2]) == (2, True)
    assert not (tmp_path / "b.html").exists()


# --- docs/plan.md ----------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```\n\$ jaxckpt (plan .*?[^\\])\n(.*?)^```",
    (ROOT / "docs" / "plan.md").read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("model", ["70b", pytest.param("405b", marks=pytest.mark.slow)])
def test_the_plans_of_the_docs_are_made_by_the_command(monkeypatch, model):
    """As it prints them, from the top of the repository."""
    monkeypatch.chdir(ROOT)
    ((command, wanted),) = [block for block in BLOCKS if model in block[0]]

    code, out, err = cli(*shlex.split(command.replace("\\\n", " ")))

    assert (code, err) == (0, "")
    assert out == wanted


@pytest.mark.parametrize(
    "bad", ["[" * 100_000, '{"hosts": 1, "devices_per_host": 1, "state_bytes": 1%s}']
)
def test_a_report_refuses_a_plan_that_is_too_deep_or_too_large(tmp_path, bad):
    """In one line, like any other file that is not a plan."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": 1.5})
    plan = tmp_path / "plan.json"
    plan.write_text(bad.replace("%s", "0" * 400))

    code, _, err = cli("report", tmp_path / "run", "-o", tmp_path / "a.html", "--plan", plan)

    assert (code, f"{plan} is not a plan" in err, "Traceback" in err) == (2, True, False)


def test_a_cluster_too_large_to_plan_for_is_refused(model):
    """Before a list of its devices is made, which would take all memory."""
    sizes = ["--hosts", 10**9, "--devices-per-host", 8, "--mesh", f"dp={8 * 10**9}"]

    code, _, err = cli("plan", "planned_model:with_specs", *sizes)

    assert (code, "at most 1,048,576 devices, got 8,000,000,000" in err) == (2, True)
