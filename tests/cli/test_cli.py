"""The command line: output for people and for scripts, and exit codes."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.shell_completion import BashComplete
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy
from jaxckpt.cli import _look
from jaxckpt.cli._app import app
from jaxckpt.cli._space import space
from jaxckpt.storage import LocalStorage, PathIn
from jaxckpt.testing import WatchedStorage
from tests.commandline import TIMEOUT_S, cli, on_terminal, process, said_json
from tests.golden.fixture import golden_names
from tests.twins import watched

COMMANDS = {
    name: app.get_command(click.Context(app), name)
    for name in app.list_commands(click.Context(app))
}


def tree(mesh, scale=1.0):
    w = jax.device_put(scale * jnp.ones((8, 4)), NamedSharding(mesh, P("x", "y")))
    return {"params": {"dense": {"w": w, "b": np.zeros(4)}}, "step": 7, "name": "vit"}


@pytest.fixture
def root(ram_path, mesh):
    """A run of steps 100, 200 and 300, of which 200 is pinned."""
    root = ram_path / "run"
    with CheckpointManager(root) as manager:
        for step in (100, 200, 300):
            manager.save(
                step,
                tree(mesh, step),
                metrics={"loss": 30 / step},
                items={"config": {"lr": 0.1}},
                custom_metadata={"of": "a test"},
            )
        manager.wait_until_finished()
        manager.pin(200)
    return root


# --- ls -------------------------------------------------------------------------------------------


def test_ls_shows_every_step(root):
    """A line for each: number, whole or not, pinned, age, size, metrics; below, what is wrong."""
    (root / "300" / "commit_success.txt").unlink()

    code, out, err = cli("ls", root)

    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["step", "state", "age", "size", "metrics"]
    assert [re.split("  +", line.strip())[:2] for line in lines[1:4]] == [
        ["100", "complete"],
        ["200", "complete, pinned"],
        ["300", "INCOMPLETE"],
    ]
    assert lines[1].endswith("  loss=0.3")
    assert lines[4].startswith("step 300 is incomplete: ")
    assert lines[4].endswith("partial copy")
    assert lines[5].startswith(f"{root}: 3 steps, 1 incomplete, ")
    assert lines[5].endswith("newest complete step: 200")


def test_ls_as_json_has_all_facts(root):
    """The keys are documented in `docs/cli.md`."""
    (root / "notes").write_text("x")

    code, found = said_json("ls", root)

    assert code == 0
    assert set(found) == {"path", "steps", "strays", "goodput"}
    assert [part["end"] for part in found["goodput"]["parts"]] == ["closed"]
    assert [step["step"] for step in found["steps"]] == [100, 200, 300]
    assert [step["pinned"] for step in found["steps"]] == [False, True, False]
    assert found["steps"][0]["metrics"] == {"loss": 0.3}
    assert found["steps"][0]["whole"] is True
    assert found["steps"][0]["items"] == ["config", "metrics", "state"]
    assert found["strays"] == ["notes: not part of the run; left alone"]


@pytest.mark.parametrize("is_torn", [False, True])
def test_ls_of_one_step_shows_its_row_and_its_items(root, is_torn):
    """By its path or by its number, complete or not; as JSON, like a run with this step."""
    if is_torn:
        (root / "200" / "commit_success.txt").unlink()

    code, out, _ = cli("ls", root / "200")

    lines = out.splitlines()
    assert (code, len(lines)) == (0, 3)
    assert lines[1].split()[1] == ("INCOMPLETE," if is_torn else "complete,")
    if is_torn:
        assert lines[2].startswith("step 200 is incomplete: ")
    else:
        assert lines[2].startswith(f"{root}/200: config, metrics, state; written by jaxckpt ")
        assert cli("ls", root, 200)[1] == out
    [of_run] = [step for step in said_json("ls", root)[1]["steps"] if step["step"] == 200]
    assert said_json("ls", f"{root}/200/") == (
        0,
        {"path": str(root), "steps": [of_run], "strays": []},
    )


def test_ls_of_a_run_named_like_a_step_lists_its_steps(ram_path):
    """Such as `runs/2026`; and a step that is not there is named."""
    root = ram_path / "2026"
    with CheckpointManager(root, step_digits=4) as manager:
        manager.save(7, {"w": 1})

    assert cli("ls", root)[1].splitlines()[-1].startswith(f"{root}: 1 step, ")
    assert cli("ls", root / "0007")[1].splitlines()[-1].startswith(f"{root}/0007: state; ")
    assert "has no committed step 8" in cli("ls", root, 8)[2]


def test_metrics_that_json_has_no_word_for_are_texts(ram_path):
    """NaN and the infinities."""
    with CheckpointManager(ram_path / "run") as manager:
        manager.save(1, {"w": 1}, metrics={"a": np.nan, "b": np.inf, "c": -np.inf})

    _, found = said_json("ls", ram_path / "run")

    assert found["steps"][0]["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}


def test_ls_of_a_run_without_steps_says_so(ram_path):
    """As when its job has just started; strays are counted once they are many."""
    CheckpointManager(ram_path).close()
    for i in range(30):
        (ram_path / f"notes-{i:02}").mkdir()

    code, out, _ = cli("ls", ram_path)

    assert code == 0
    assert out.startswith(f"{ram_path}: 0 steps, 0 B\n")
    assert out.endswith("also there: 10 more\n")


@pytest.mark.parametrize("name", golden_names("manager-default"))
def test_runs_of_orbax_can_be_looked_at(golden, name):
    """`ls`, `show`, `du` and `verify`."""
    path = golden(name).path

    _, listed = said_json("ls", path)
    assert all(step["whole"] for step in listed["steps"])
    newest = listed["steps"][-1]
    _, shown = said_json("show", path)
    assert shown["path"] == newest["path"]
    assert shown["leaves"]
    _, used = said_json("du", path)
    assert [part["size_bytes"] for part in used["steps"]] == [
        step["size_bytes"] for step in listed["steps"]
    ]
    code, verified = said_json("verify", path)
    assert (code, verified["ok"]) == (0, True)


# --- show -----------------------------------------------------------------------------------------


def test_show_draws_the_tree(root):
    """Shapes, dtypes, shardings and bytes; of a run's root the newest step."""
    code, out, _ = cli("show", root)

    assert code == 0
    assert f"{root}/300 item 'state': 4 leaves" in out
    assert "other items: config, metrics" in out
    row = next(line for line in out.splitlines() if "─ w " in line)
    assert row.split() == "│ └─ w float32[8,4] P('x', 'y') 128 B".split()
    assert "\nmesh: x=4, y=2\n" in out
    assert "├─ name" in out


def test_show_takes_globs_and_a_depth(root):
    """Globs over leaf paths choose; what lies deeper is folded with its count and bytes."""
    code, out, _ = cli("show", root, "params", "st*", "--depth", "2")

    assert code == 0
    assert "3 leaves of 4" in out
    assert [line.split()[0:3] for line in out.splitlines()[-3:]] == [
        ["├─", "params"],
        ["│", "└─", "dense"],
        ["└─", "step", "int"],
    ]
    assert "(2 leaves)" in out


def test_show_as_json_has_all_leaves(root):
    """With shape, dtype, sharding and bytes."""
    _, found = said_json("show", root / "100", "params/dense/w")

    assert (found["item"], found["items"]) == ("state", ["config", "metrics", "state"])
    assert found["writer"] == f"jaxckpt {jaxckpt.__version__}"
    assert found["custom_metadata"] == {"of": "a test"}
    assert found["leaves"] == [
        {
            "path": "params/dense/w",
            "kind": "array",
            "dtype": "float32",
            "shape": [8, 4],
            "sharding": "P('x', 'y') on (x=4, y=2)",
            "size_bytes": 128,
            "compression": None,
        }
    ]


def test_show_prints_a_json_item(root):
    """A JSON item has no tree; a glob is refused."""
    _, out, _ = cli("show", root, "--item", "config")
    _, found = said_json("show", root, "--item", "config")
    code, _, err = cli("show", root, "lr", "--item", "config")

    assert '"lr": 0.1' in out
    assert (found["leaves"], found["value"]) == ([], {"lr": 0.1})
    assert code == 2
    assert "is not a tree" in err


def test_show_lists_the_items_beside_a_damaged_one(root):
    """With the damage, and exit code 1; another item can be shown as always."""
    (root / "300" / "state" / "_METADATA").write_bytes(b"{")

    code, out, err = cli("show", root / "300")
    _, found = said_json("show", root / "300", "--item", "state")

    assert (code, err) == (1, "")
    assert f"{root}/300 item 'config': not a tree" in out
    assert f"item 'state': BAD. {root}/300/state/_METADATA is damaged" in out
    assert list(found["problems"]) == ["state"]
    assert "config" in found["items"]
    assert cli("show", root / "300", "--item", "config")[0] == 0


def test_show_of_a_bad_safetensors_file_says_so(tmp_path):
    """It is read without an import; a file that is none is damage, not a mistake."""
    (file := tmp_path / "m.safetensors").write_bytes(b"1234567")

    code, out, err = cli("show", file)

    assert (code, err) == (1, "")
    assert out == f"{file}: BAD. {file} is not a safetensors file: 7 bytes\n"


def test_show_reads_the_data_only_if_asked(root):
    """`--stats`: the numbers of each array, NaNs among them."""
    values = np.array([1.0, 2.0, np.nan, np.inf], np.float32)
    jaxckpt.save(root.parent / "one", {"w": values, "name": "x"})

    code, found = said_json("show", root.parent / "one", "--stats")
    _, out, _ = cli("show", root.parent / "one", "--stats")

    statistics = {leaf["path"]: leaf.get("statistics") for leaf in found["leaves"]}["w"]
    assert code == 0
    assert (statistics["nan"], statistics["inf"], statistics["zeros"]) == (1, 1, 0)
    assert {"min", "max", "mean", "std", "norm"} <= set(out.splitlines()[1].split())


def test_show_tells_metadata_as_text(root):
    """One line for each entry, of objects inside it too."""
    metadata = {"git": "abc", "config": {"lr": 0.5, "dims": [1, 2], "none": None}}
    jaxckpt.save(root.parent / "a", {"w": 1}, custom_metadata=metadata)

    _, out, _ = cli("show", root.parent / "a")

    assert out.splitlines()[1:7] == [
        "custom metadata:",
        "  git: abc",
        "  config:",
        "    lr: 0.5",
        "    dims: [1, 2]",
        "    none: null",
    ]


def test_a_glob_that_means_nothing_is_refused(root):
    """The error lists what there is."""
    code, _, err = cli("show", root, "prams")

    assert code == 2
    assert "matches no leaf" in err
    assert "params/dense/w" in err


# --- du -------------------------------------------------------------------------------------------


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_du_adds_up(root):
    """Items make a step, steps and the rest make the whole; branches are bytes of values."""
    (root / "9.jaxckpt-bad-0123").mkdir()
    (root / "9.jaxckpt-bad-0123" / "data").write_bytes(bytes(1000))

    code, found = said_json("du", root)

    first = found["steps"][0]
    assert code == 0
    assert found["size_bytes"] == bytes_of(root)
    assert found["other_bytes"] == found["size_bytes"] - sum(
        bytes_of(root / name) for name in ("100", "200", "300")
    )
    assert first["size_bytes"] == bytes_of(root / "100") == sum(first["items"].values())
    assert first["items"]["state"] == bytes_of(root / "100" / "state")
    assert first["branches"]["state/params"] == 8 * 4 * 4 + 4 * 8
    assert found["branches"]["state/params"] == 3 * first["branches"]["state/params"]
    assert found["items"]["config"] == 3 * first["items"]["config"]
    assert found["shared_bytes"] == 0


def test_du_leaves_out_a_step_that_its_job_deletes_meanwhile(root):
    """Between the listing of the run and the sizes of the files."""

    def before(verb, path):
        if (verb, path) == ("entries", f"{root}/300/state"):  # the others are described by then
            shutil.rmtree(root / "100", ignore_errors=True)

    found = space(watched(root, before))

    assert not (root / "100").exists()
    assert [step.step for step in found.steps] == [200, 300]


def test_du_counts_hard_links_once(root):
    """Steps may share files within a run and with another run."""
    jaxckpt.fork(root / "300", root.parent / "forked")
    for path in (root / "300").rglob("*"):  # a copy by `cp -al` in the same run
        target = root / "400" / path.relative_to(root / "300")
        if path.is_dir():
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(exist_ok=True)
            os.link(path, target)

    _, found = said_json("du", root)
    _, out, _ = cli("du", root)

    sizes = {part["step"]: part["size_bytes"] for part in found["steps"]}
    assert sizes[400] == sizes[300]
    inodes = {p.stat().st_ino: p.stat().st_size for p in root.rglob("*") if p.is_file()}
    assert found["size_bytes"] == sum(inodes.values())
    assert found["shared_bytes"] == sizes[300]
    assert sum(found["items"].values()) == sizes[100] + sizes[200] + sizes[300]
    assert "of it shared" in out


def test_du_of_one_checkpoint(root):
    """The checkpoint may be a step, an incomplete one too, or not."""
    jaxckpt.save(root.parent / "weights", {"w": np.ones(100)})

    (root / "300" / "commit_success.txt").unlink()  # which leaves it incomplete

    _, step = said_json("du", root / "100")
    _, torn = said_json("du", root / "300")
    _, weights = said_json("du", root.parent / "weights")
    _, item = said_json("du", root / "100" / "state")

    numbers = [[part["step"] for part in one["steps"]] for one in (step, item)]
    assert numbers == [[100], [100]]
    assert step["size_bytes"] == bytes_of(root / "100")
    assert torn["size_bytes"] == bytes_of(root / "300")
    assert weights["branches"] == {"state/w": 800}
    assert (weights["other_bytes"], weights["steps"][0]["step"]) == (0, None)


# --- verify, diff, report -------------------------------------------------------------------------


def flip(folder):
    """Damages a byte in the middle of the largest file."""
    data = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_verify_says_good_or_bad(root):
    """Exit code 0, or 1 and the leaf that is damaged."""
    good, out, _ = cli("verify", root / "100")
    flip(root / "100" / "state")
    bad, said, _ = cli("verify", root / "100")
    code, found = said_json("verify", root / "100")

    assert (good, bad, code) == (0, 1, 1)
    assert f"{root}/100: good." in out
    assert f"{root}/100: BAD." in said
    assert (found["ok"], found["damaged"]) == (False, True)
    assert found["problems"][0]["message"] in said


def truncated(folder):
    """Cuts the largest file in two; returns it, and how large it was."""
    file = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    os.truncate(file, size // 2)
    return file, size


@pytest.fixture
def many(ram_path):
    """A run of two steps of twenty leaves."""
    root = ram_path / "run"
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, {f"w{i:02}": np.full(9000, i + step) for i in range(20)})
    return root


def test_verify_tells_the_problem_of_a_file_once(many):
    """With all leaves that it concerns."""
    file, size = truncated(many / "2" / "state")

    _, said, _ = cli("verify", many, 2)
    _, found = said_json("verify", many, 2)

    leaves = [problem["leaf"] for problem in found["problems"][1:]]
    assert len(leaves) > 5
    assert said.splitlines()[1:] == [
        f"  bad: {file} has {size // 2} bytes, expected {size}",
        f"    of {len(leaves)} leaves: {', '.join(leaves)}",
    ]


def test_a_pin_is_no_stray_file_of_a_step(root):
    """Verify knows what it is."""
    _, found = said_json("verify", root / "200")

    assert (found["ok"], found["unchecked"]) == (True, [])


def test_diff_says_what_differs(root):
    """Exit code 1, the leaf and by how much; 0 for the same, or what is within the tolerance."""
    same, _, _ = cli("diff", root / "100", root / "100")
    differs, out, _ = cli("diff", root / "100", root / "300")
    near, _, _ = cli("diff", root / "100", root / "300", "--atol", "200")
    code, found = said_json("diff", root / "100", root / "300", "--skip", "name")

    assert (same, differs, near, code) == (0, 1, 0, 1)
    assert "params/dense/w" in out
    assert [(leaf["path"], leaf["max_abs"]) for leaf in found["changed"]] == [
        ("params/dense/w", 200.0)
    ]
    assert (found["equal"], found["only_a"], found["only_b"]) == (False, [], [])


def test_report_writes_a_page(root):
    """At the path asked for."""
    page = root.parent / "page.html"

    code, found = said_json("report", root, "-o", page)

    assert code == 0
    assert found == {"path": str(page), "size_bytes": page.stat().st_size}
    assert "<html" in page.read_text()


# --- convert, export, import, fork ----------------------------------------------------------------


def test_convert_asks_before_it_replaces_what_is_at_a_url(root):
    target = f"memory://{root.parent.name}/weights"

    assert cli("convert", root, target)[:2] == (0, f"wrote {target}\n")
    assert f"Replace {target}?" in cli("convert", root, target, "--overwrite")[2]
    assert said_json("convert", root, f"{target}2") == (
        0,
        {"path": f"{target}2", "not_copied": ["config", "metrics"]},
    )


def test_convert_and_import_write_no_step_of_a_run_beside_its_job(root):
    """Nor replace a pinned step after the job."""
    other, file = root.parent / "other", root.parent / "m.safetensors"
    jaxckpt.save(other, {"w": np.ones(3)})
    cli("export", other, file)
    over = ("--overwrite", "--yes")
    with CheckpointManager(root) as manager:
        manager.save(400, {"w": np.zeros(3)}).result()
        refused = [
            cli("convert", other, root / "100", *over),
            cli("convert", other, root / "900"),
            cli("import", file, root / "900"),
        ]

    pinned, free = (cli("convert", other, root / step, *over) for step in ("200", "400"))

    assert [code for code, _, err in refused if "in use by a running job" in err] == [2] * 3
    assert (pinned[0], f"jaxckpt unpin {root}/200" in pinned[2]) == (2, True)
    assert (free[0], "params" in jaxckpt.restore(root / "200")) == (0, True)


def test_convert_deletes_no_items_that_it_does_not_copy(root):
    """A step is not compressed in place, nor replaced, with its metrics lost on the way."""
    other, link = root.parent / "other", root.parent / "link"
    jaxckpt.save(other, {"w": np.ones(3)})
    link.symlink_to(root)

    for source, run in ((root / "300", root), (other, root), (other, link), (root, link)):
        target = f"{run}/300"
        code, out, err = cli("convert", source, target, "--compression=zstd", "--overwrite", "-y")

        assert (code, out) == (2, "")
        assert f"{target} has several items (config, metrics, state)" in err
        assert f"write it to another path, or delete {target} first" in err
    assert "loss=0.1" in cli("ls", root)[1]
    assert cli("verify", root / "300")[0] == 0


@pytest.mark.parametrize("command", ["convert", "cp"])
def test_convert_copies_a_part_in_another_dtype(root, command):
    """Under both names; what is there is replaced only if asked for, and with a yes."""
    target = root.parent / "weights"
    argv = (command, root, target, "--only", "params", "--dtype", "bfloat16")

    code, out, err = cli(*argv)
    assert (code, out) == (0, f"wrote {target}\n")
    assert err.startswith("not copied: config, metrics.")
    assert cli(*argv)[0] == 2
    unanswered, _, err = cli(*argv, "--overwrite")
    assert unanswered == 2
    assert f"Replace {target}? stdin is not a terminal" in err
    facts = {"path": str(target), "not_copied": ["config", "metrics"]}
    assert said_json(*argv, "--overwrite", "--yes") == (0, facts)

    assert {leaf.dtype for leaf in jaxckpt.open(target).leaves.values()} == {"bfloat16"}
    assert list(jaxckpt.open(target)) == ["params/dense/b", "params/dense/w"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), "pass --overwrite to replace"),
        (("--only", "nothing"), "only 'nothing' matches no leaf"),
        (("--only", "params", "--skip", "params"), "leave no leaf"),
        (("--dtype", "int32"), "dtype 'int32' is not a floating-point dtype"),
    ],
)
def test_an_error_names_options_and_no_python(root, options, wanted):
    """The messages of the library are right on a command line, too."""
    target = root.parent / "there"
    jaxckpt.save(target, {"w": np.ones(2)})

    code, _, err = cli("convert", root, target, *options)

    assert code == 2
    assert wanted in err.replace("\n", " ")
    assert not re.search(r"=True|=\[|\(\.\.\.", err)


def test_convert_writes_plain_files(root):
    """And what it wrote has the same values."""
    target = root.parent / "plain"

    assert cli("convert", root, target, "--no-ocdbt")[0] == 0

    assert list(target.rglob("zarr.json"))
    assert cli("diff", root, target, "--item", "state")[0] == 0


def test_safetensors_come_and_go(root):
    """One file, or several of a size; back again the values are the same."""
    one, many = root.parent / "a.safetensors", root.parent / "m" / "model.safetensors"
    index = f"{many}.index.json"
    many.parent.mkdir()
    sharded = ("export", root, many, "--only", "params", "--max-shard", "100B")

    assert cli("export", root, one, "--only", "params")[:2] == (0, f"wrote {one}\n")
    assert cli(*sharded)[:2] == (0, f"wrote {index}\n")
    assert cli("import", one, root.parent / "b")[0] == 0
    assert cli("import", index, root.parent / "c")[0] == 0
    files = ", ".join(sorted(map(str, many.parent.glob(f"{many.stem}-*"))))
    assert f"Replace {index}, {files}?" in cli(*sharded, "--overwrite")[2]
    os.unlink(index)  # the shards are deleted, too
    assert f"Replace {files}?" in cli(*sharded[:5], "--overwrite")[2]

    assert len(list(many.parent.glob("*.safetensors"))) == 2
    assert cli("diff", root.parent / "b", root.parent / "c")[0] == 0
    for size in ("many", "infGB", "nanGB"):
        code, _, err = cli("export", root, root.parent / "x", "--max-shard", size)
        assert (code, "must be a size" in err) == (2, True)


def test_fork_starts_a_run(root):
    """At a step of another, under another number if asked for."""
    code, found = said_json("fork", root / "200", root.parent / "new", "--step", "0")

    assert (code, found) == (0, {"path": f"{root.parent}/new/0"})
    assert [step["step"] for step in said_json("ls", root.parent / "new")[1]["steps"]] == [0]


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_may_be_a_path_or_a_number_after_its_run(root):
    """Of every command that takes one; of names with zeros, too."""
    new = root.parent / "new"
    padded = root.parent / "padded"
    with CheckpointManager(padded, step_prefix="s", step_digits=5) as manager:
        manager.save(7, {"w": 1})
    pairs = [
        (["show", root / "100", "step"], ["show", root, "100", "step"]),
        (["show", "--json", padded / "s_00007"], ["show", "--json", padded, 7]),
        (["du", root / "100"], ["du", root, 100]),
        (["verify", f"{root}/100"], ["verify", f"{root}/", 100]),
        (["diff", root / "100", root / "200"], ["diff", root, 100, root, 200]),
        (["diff", root / "100", root / "200"], ["diff", root, 100, 200]),
        (["diff", root / "100", root], ["diff", root, 100, root]),
        (
            ["diff", root / "100", root / "200", "--rtol=1", "--atol=100"],
            ["diff", root, 100, "--rtol", 1, 200, "--atol", 100],
        ),
        (["convert", root / "100", new / "a"], ["cp", root, 100, new / "a", "--overwrite", "-y"]),
        (
            ["convert", root / "100", new / "a", "--overwrite", "-y"],
            ["convert", root, "--dtype", "float32", 100, "--overwrite", new / "a", "-y"],
        ),
        (["fork", root / "100", new / "b"], ["fork", root, 100, new / "b"]),
        (
            ["plan", root / "100", "--hosts=2", "--devices-per-host=1", "--mesh=x=2"],
            ["plan", root, "--hosts", 2, 100, "--devices-per-host", 1, "--mesh", "x=2"],
        ),
        (["pin", root / "100"], ["pin", root, 100]),
        (["rm", root / "100", "-n"], ["rm", root, 100, "-n"]),
    ]
    export = new / "x.safetensors"
    options = ["--only", "params", "--overwrite", "-y"]
    pairs.append(
        (["export", root / "100", export, *options], ["export", root, 100, export, *options])
    )

    for by_path, by_number in pairs:
        if by_path[0] == "rm":
            cli("unpin", root, 100)
        wanted = cli(*by_path)
        if by_path[0] == "fork":
            shutil.rmtree(new / "b")
        assert wanted[0] in (0, 1)
        assert cli(*by_number) == wanted


def test_a_number_is_only_a_step_after_a_run(root, tmp_path, monkeypatch):
    """A destination may be a number; a step that is not there is an error that says which are."""
    jaxckpt.save(root.parent / "list", [1, 2])
    monkeypatch.chdir(tmp_path)

    assert cli("convert", root, 100, 200)[0] == 0
    assert os.listdir(tmp_path) == ["200"]
    assert "1 leaf of 2" in cli("show", root.parent / "list", 0)[1]
    for command in ("du", "verify"):
        code, _, err = cli(command, root, 150)
        assert (code, "has no committed step 150. It has 100, 200, 300" in err) == (2, True)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("sow run", ["No such command 'sow'. Did you mean 'show'?"]),
        ("list run", ["No such command 'list'. Did you mean 'ls'?"]),
        ("ls nowhere", ["{cwd}/nowhere: no such file or directory. {cwd} contains ", "run"]),
        ("scrub nowhere", ["{cwd}/nowhere: no such", "{cwd} contains "]),
        ("rm nowhere 1", ["{cwd}/nowhere: no such", "{cwd} contains "]),
        ("ls file", ["{cwd}/file is a file, not a directory", "the directory that contains the"]),
        ("ls weights", ["{cwd}/weights is a checkpoint, not a run"]),
        ("ls empty", ["{cwd}/empty is not a run: it has no steps. It contains nothing"]),
        ("scrub empty", ["{cwd}/empty is not a run: it has no steps"]),
        ("du file", ["{cwd}/file is a file, not a directory", "the directory that contains the"]),
        ("du notes", ["{cwd}/notes is not a run: it has no steps. It contains a"]),
        ("du empty", ["{cwd}/empty is not a run: it has no steps. It contains nothing"]),
        ("report notes", ["{cwd}/notes is not a run: it has no steps. It contains a"]),
        ("report run/300", ["is a checkpoint, not a run", "Did you mean {cwd}/run?"]),
        ("show run/300 prams", ["error: 'prams' matches no leaf. Did you mean 'params'?"]),
        ("show run 9", ["error: '9' matches no leaf", "The run has no step 9 either"]),
        ("show m.npz", ["{cwd}/m.npz is no checkpoint, safetensors file or Flax"]),
        ("diff run file", ["{cwd}/file is no checkpoint, safetensors file or Flax"]),
        ("verify file", ["{cwd}/file is no checkpoint, safetensors file or Flax"]),
        (
            "convert run/300 run/200",
            ["{cwd}/run/200 already exists", "pass --overwrite to replace"],
        ),
        ("convert run/300 file", ["{cwd}/file is a file, and is not replaced. Choose another"]),
        ("convert run/300 file/x", ["Not a directory: '{cwd}/file'"]),
        ("convert run new --dtype flaot32", ["'flaot32' is not a", "Did you mean 'float32'?"]),
        ("convert run new --dtype int8", ["'int8' is not a", "These are bfloat16, float16"]),
        ("export run m", ["m must end in .safetensors, such as {cwd}/m.safetensors"]),
        ("export run m.safetensors --only step", ["pass --overwrite to replace"]),
        ("export run file/x.safetensors --only step", ["{cwd}/file: Not a directory"]),
        ("heal run run", ["OTHER must be another place than ROOT, which is"]),
        ("export run m.safetensors --max-shard 0", ["'--max-shard': must be positive, got 0"]),
        ("fork weights x", ["{cwd}/weights is not named like a step; pass a number: --step 0"]),
        ("fork run file", ["{cwd}/file: Not a directory"]),
        ("pin run", ["Name the steps, as in `run 1000`; {cwd}/run has 100, 200, 300"]),
        ("pin run abc", ["'abc' is not a valid number of a step."]),
        ("fork run x --step y", ["'y' is not a valid number of a step."]),
        ("rm weights", ["Name the steps", "{cwd}/weights is not a run, nor a step of one"]),
        ("unpin run/9", ["{cwd}/run has no committed step 9. It has 100, 200, 300"]),
        ("gc run --best 1", ["--best needs --metric"]),
        ("gc notes --last 1", ["{cwd}/notes is not a run: it has no steps. It contains a"]),
    ],
)
def test_a_mistake_is_answered_with_the_place_and_what_to_do(root, command, parts, monkeypatch):
    """What was wanted, what is there, and the option that helps; nothing is changed."""
    monkeypatch.chdir(root.parent)
    Path("file").write_text("hello")
    Path("empty").mkdir()
    Path("notes/a").mkdir(parents=True)
    for name in ("m.safetensors", "m.npz"):
        Path(name).write_bytes(b"12345678")
    jaxckpt.save("weights", {"w": 1})
    before = sorted(root.parent.rglob("*"))

    code, _, err = cli(*command.split())

    assert code == 2
    for part in parts:
        assert part.format(cwd=root.parent) in err
    assert sorted(root.parent.rglob("*")) == before


_ROOTS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@pytest.fixture
def forbid():
    """`forbid(path)` takes all permissions away, here also from root, as which CI may run."""
    libc, changed = ctypes.CDLL(None, use_errno=True), []
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the version of these calls; this thread
    ours = (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0:
        assert libc.capget(header, ours) == 0
        assert libc.capset(header, (ctypes.c_uint32 * 6)(ours[0] & ~_ROOTS, *ours[1:])) == 0

    def forbid(path):
        changed.append((path, path.stat().st_mode))
        path.chmod(0)
        with pytest.raises(PermissionError):
            os.listdir(path)

    yield forbid
    for path, mode in changed:
        path.chmod(mode)
    if os.geteuid() == 0:
        assert libc.capset(header, ours) == 0


def test_a_permission_that_lacks_is_named_with_the_file(root, forbid):
    """Without the number of the error; what `verify` cannot read is not called bad."""
    forbid(root)

    for command in ("ls", "show", "du"):
        _, _, err = cli(command, root)
        assert err == f"error: {root}: Permission denied. `ls -ld` shows who may\n"
    code, out, _ = cli("verify", root)
    assert (code, f"{root}: UNREADABLE. " in out) == (2, True)


def test_a_step_without_permission_is_listed_as_unreadable(root, forbid):
    """With the reason, by `ls` of the run and of the step; `gc` leaves it."""
    forbid(root / "200")

    for lines in (cli("ls", root)[1], cli("ls", root / "200")[1]):
        assert re.search(r"^ *200  UNREADABLE ", lines, re.MULTILINE)
        assert f"step 200 cannot be read: [Errno 13] Permission denied: '{root}/200'" in lines
    planned = said_json("gc", root, "--last", 1, "--dry-run")[1]
    assert planned["delete"] == [100]
    assert {"step": 200, "why": ["unreadable: see `jaxckpt scrub` and `heal`"]} in planned["keep"]


# --- errors, terminals, processes -----------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["ls", "nowhere"],
        ["show", "nowhere"],
        ["du", "nowhere"],
        ["verify", "nowhere"],
        ["diff", "nowhere", "nowhere"],
        ["scrub", "nowhere"],
        ["gc", "nowhere", "--last", "1"],
        ["rm", "nowhere", "1"],
        ["pin", "nowhere", "1"],
        ["fork", "nowhere", "new"],
        ["convert", "nowhere", "new"],
        ["export", "nowhere", "new.safetensors"],
        ["import", "nowhere", "new"],
        ["report", "nowhere"],
        ["ls", "hdfs://host/run"],
        ["ls"],
        ["frobnicate"],
        ["show", "nowhere", "--depth", "0"],
    ],
    ids=" ".join,
)
def test_an_error_is_told_in_words(ram_path, monkeypatch, argv):
    """Exit code 2, nothing on stdout, no traceback, and nothing made."""
    monkeypatch.chdir(ram_path)

    code, out, err = cli(*argv)

    assert (code, out) == (2, "")
    assert err.lower().count("error:") == 1
    assert "Traceback" not in err
    assert list(ram_path.iterdir()) == []


def test_debug_shows_where_an_error_came_from(ram_path):
    """Instead of its words alone; the exit code is the same."""
    code, _, err = cli("--debug", "ls", ram_path / "nowhere")

    assert code == 2
    assert err.startswith("Traceback")
    assert "CheckpointNotFound" in err


def test_what_cannot_be_printed_is_no_damage(root):
    """The exit code is not the one that `verify` and `diff` have for what is wrong."""
    command = [sys.executable, "-m", "jaxckpt", "ls", str(root)]

    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], check=False, timeout=60)

    assert done.returncode == 2


def test_a_terminal_without_the_signs_gets_all_lines(root):
    """With `?` in their places."""
    jaxckpt.save(root.parent / "a", {"a": 1, "名": 2})

    done = process("show", root.parent / "a", PYTHONIOENCODING="latin-1")

    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["??", "a"], ["??", "?"]]


def test_version_and_help():
    """The program and each command have them; no line is wider than the terminal."""
    assert cli("--version")[:2] == (0, f"jaxckpt, version {jaxckpt.__version__}\n")
    assert cli("--help")[0] == 0
    for name, command in COMMANDS.items():
        for columns in (60, 80):
            text = command.get_help(click.Context(command, info_name=name, terminal_width=columns))
            assert max(map(len, text.splitlines())) <= columns
        assert cli(name, "--help")[0] == 0


@pytest.mark.parametrize("columns", [60, 80])
def test_the_help_has_the_commands_in_groups(columns):
    """Those of `docs/cli.md`, with a line for each command where 80 columns are available."""
    text = app.get_help(click.Context(app, info_name="jaxckpt", terminal_width=columns))

    sections = re.findall(r"^(\S.*):\n((?:  .*\n)+)", text, re.MULTILINE)
    found = {
        title: re.findall(r"^  ([a-z]+) ", body, re.MULTILINE)
        for title, body in sections
        if title != "Options"
    }
    table = re.findall(r"^\| (\[`.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert found == {
        what[0].upper() + what[1:].replace("`", ""): re.findall(r"`([a-z]+)`", names)
        for names, what in table
    }
    assert "..." not in text.replace("[ARGS]...", "")
    lines = [line for _, body in sections[1:] for line in body.splitlines()]
    assert max(map(len, lines)) <= columns
    assert (len(lines) == len(COMMANDS) == 21) == (columns == 80)


def test_a_warning_is_told_on_stderr(root):
    """As when the newest step of a run is not whole and another one is shown."""
    (root / "300" / "commit_success.txt").unlink()

    code, out, err = cli("show", root)

    assert code == 0
    assert f"{root}/200 item" in out
    assert err.startswith(f"warning: {root}: took 200. Skipped: 300: ")


def test_a_terminal_gets_a_table_and_a_pipe_plain_text(root):
    """Both with the same facts."""
    code, seen = on_terminal("ls", root)
    piped = process("ls", root)

    assert (code, piped.returncode) == (0, 0)
    assert "\x1b[" in seen
    assert "───" in seen
    assert piped.stdout.isascii()
    assert all(str(step) in text for step in (100, 200, 300) for text in (seen, piped.stdout))


@pytest.mark.parametrize("columns", [80, 60])
def test_rows_about_steps_fit_a_narrow_terminal(root, columns):
    """The state comes first; of the metrics the first ones, and how many are left out."""
    metrics = {"loss": 0.25, "accuracy": 0.123456, "perplexity_of_validation": 12.5, "rate": 1e-5}
    with CheckpointManager(root) as manager:
        manager.save(12_345_678, {"w": 1}, metrics=metrics)
    flip(root / "200" / "state")

    for argv, state in (
        (["ls"], "complete"),
        (["rm", "12345678", "-n"], "complete"),
        (["gc", "--last", "2", "-n"], "keep"),
        (["gc", "--every-steps", "7", "-n"], "keep"),
    ):
        _, seen = on_terminal(argv[0], root, *argv[1:], COLUMNS=str(columns), NO_COLOR="1")

        rows = re.sub(r"\x1b\[[0-9;]*m", "", seen).split(f"{root}")[0].splitlines()
        assert max(map(len, rows)) <= columns
        (row,) = [row for row in rows if row.startswith("12345678 ")]
        assert re.match(rf"12345678 +{state} ", row)
        assert re.search(r", \+\d *$", row)
    _, used = on_terminal("du", root, COLUMNS=str(columns), NO_COLOR="1")
    assert [len(re.findall(rf"^{n} ", used, re.M)) for n in (100, 200, 12345678)] == [1, 1, 1]


def rows_on(columns, *argv):
    """The rows of the table that a command shows on a terminal of this width."""
    _, seen = on_terminal(*argv, COLUMNS=str(columns), NO_COLOR="1")
    lines = re.sub(r"\x1b\[[0-9;]*[mK]", "", seen).splitlines()
    start = next(i for i, line in enumerate(lines) if set(line) == {"─"})
    assert len(lines[start]) <= columns
    return [line.rstrip() for line in lines[start - 1 :]]


def test_a_narrow_terminal_folds_prose_and_nothing_else(root):
    """Numbers and names stay in one piece, however many columns there are."""
    program = root.parent / "p.py"
    program.write_text("from orbax.checkpoint import CheckpointManager, logging, nothing\n")

    head, _, *rows = rows_on(110, "migrate", program)

    assert head.split() == ["place", "name", "drop-in", "why"]
    assert len(rows) > 4


@pytest.mark.parametrize(
    ("columns", "spared"), [(72, "std norm zeros"), (50, "std norm zeros bytes type")]
)
def test_the_numbers_of_leaves_fit_a_narrow_terminal(root, columns, spared):
    """The standard deviation, the norm and the zeros leave first, then size and type."""
    everything = "leaf type bytes min max mean std norm nan inf zeros".split()

    head, _, *rows = rows_on(columns, "show", root, "--stats")

    assert head.split() == [name for name in everything if name not in spared.split()]
    assert re.search(r"─ w .* 300 +300 +300 ", "\n".join(rows))


def test_the_shardings_of_leaves_fit_a_narrow_terminal(root):
    """They leave the table; types and sizes stay."""
    assert rows_on(60, "show", root)[0].split() == ["leaf", "type", "sharding", "bytes"]
    assert rows_on(40, "show", root)[0].split() == ["leaf", "type", "bytes"]


def test_differences_fit_a_narrow_terminal(root):
    """The names and how much differs stay; a pipe gets everything."""
    argv = ("diff", root, 100, 300)
    everything = ["leaf", "type", "differ", "at", "most", "relative"]

    assert rows_on(50, *argv)[0].split() == ["leaf", "differ", "at", "most"]
    assert rows_on(80, *argv)[0].split() == everything
    assert cli(*argv)[1].splitlines()[1].split() == everything


@pytest.mark.parametrize("columns", [60, 80])
def test_scrub_has_a_line_for_each_step_and_says_what_to_do(many, columns):
    """A truncated file has many problems: file, first leaf, and how many more."""
    truncated(many / "2" / "state")

    head, _, *rows = rows_on(columns, "scrub", many, "-n")
    _, piped, _ = cli("scrub", many, "--dry-run")

    more = len(said_json("verify", many, 2)[1]["problems"]) - 2
    assert head.split() == ["step", "state", "read", "what"]
    assert re.fullmatch(r" *1   good .*", rows[0])
    assert re.fullmatch(rf" *2   BAD .* state/d/[0-9a-f]{{8}}…, leaf w\d\d, \+{more}", rows[1])
    assert rows[2].startswith(f"{many}: 2 steps read, 1 damaged"[:columns])
    assert re.search(rf"state/d/[0-9a-f]{{8}}…, leaf w\d\d, \+{more}\n", piped)
    assert piped.splitlines()[-3:] == [
        f"All problems of a step:  jaxckpt verify {many} 2",
        f"Mend from a copy:        jaxckpt heal {many} OTHER",
        f"Set damaged steps aside: jaxckpt scrub {many}",
    ]


def test_colors_can_be_turned_off(root):
    """By NO_COLOR, as elsewhere; errors too."""
    assert "\x1b[3" not in on_terminal("ls", root, NO_COLOR="1")[1]
    assert "\x1b[" in on_terminal("ls", "nowhere")[1]
    assert "\x1b[" not in on_terminal("ls", "nowhere", NO_COLOR="1")[1]


def test_what_a_checkpoint_holds_gives_a_terminal_no_commands(root):
    """Names of leaves, metrics and files are shown, and not obeyed."""
    hostile = "\x1b]0;title\x07\x1b[2J"
    with CheckpointManager(root) as manager:
        manager.save(400, {hostile: 1}, metrics={hostile: 1}, items={"x": [1]})
    (root / hostile).mkdir()
    jaxckpt.save(root.parent / hostile, {"x": 1})
    (root / "500" / hostile).mkdir(parents=True)  # what a warning tells of

    for argv in (
        ["ls", root],
        ["show", root],
        ["du", root],
        ["diff", root / "300", root / "400"],
        ["verify", root.parent / hostile],
        ["show", root.parent / hostile],
        ["convert", root, root.parent / hostile, "--overwrite"],
        ["gc", root, "--best", "1", "--metric", "x", "-n"],
    ):
        _, seen = on_terminal(*argv, answer="n\n", NO_COLOR="1")

        assert "\x1b]0" not in seen
        assert "\x1b[2J" not in seen
        assert "x1b]0;title" in seen


@pytest.mark.parametrize(
    ("streams", "code"),
    [(">/dev/full 2>/dev/full", 2), (">/dev/full 2>&-", 2), (">&-", 2), ("2>&- <&-", 0)],
)
def test_broken_streams_are_not_damage(root, streams, code):
    """A full disk is an error, as is a closed stdout; the other streams may be closed."""
    program = f"{sys.executable} -m jaxckpt verify {root} {streams}"

    ended = subprocess.run(
        ["sh", "-c", program], capture_output=True, timeout=TIMEOUT_S, check=False
    )

    assert (ended.returncode, ended.stderr) == (code, b"")


def test_a_reader_that_goes_away_is_no_error(root):
    """As `head` does."""
    with subprocess.Popen(
        [sys.executable, "-m", "jaxckpt", "ls", str(root), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        program.stdout.close()
        code, said = program.wait(TIMEOUT_S), program.stderr.read()

    assert (code, said) == (141, b"")


@pytest.mark.parametrize("command", ["ls", "show", "du", "pin", "gc"])
def test_quick_commands_import_neither_jax_nor_tensorstore(root, command):
    """So that they start quickly, and leave accelerators alone."""
    options = {"pin": ["100"], "gc": ["--last", "1", "--dry-run"]}.get(command, [])
    code = (
        "import sys; from jaxckpt.cli import main; code = main(); "
        "print({'jax', 'tensorstore', 'rich'} & {*sys.modules}, file=sys.stderr); sys.exit(code)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, command, str(root), *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "set()\n")


def test_help_and_version_import_only_what_they_need():
    """No array library, and of our commands only the one that is asked for."""
    code = """
import sys
from jaxckpt.cli import main
heavy = {"jax", "numpy", "tensorstore", "obstore", "rich"}
main(["--version"])
main(["ls", "--help"])
ours = {name for name in sys.modules if name.startswith("jaxckpt.cli.")}
for name in sys.argv[1:]:
    main([name, "--help"])
main(["--help"])
print(sorted(ours), heavy & {*sys.modules}, file=sys.stderr)
"""

    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )

    ours = [f"jaxckpt.cli.{name}" for name in ("_app", "_look", "_options", "_output")]
    assert done.stderr == f"{ours} set()\n"


def test_without_its_extra_it_says_what_to_install(root):
    """One line and exit code 2."""
    code = "import sys; sys.modules['click'] = None; import jaxckpt.cli as c; sys.exit(c.main())"

    done = subprocess.run(
        [sys.executable, "-c", code, "ls", str(root)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 2
    assert done.stderr == "error: the command line needs click: pip install click\n"


def test_no_accelerator_is_touched():
    """Commands that need jax run it on the CPU, whatever JAX_PLATFORMS says."""
    code = "import os; from jaxckpt.cli import main; main(); print(os.environ['JAX_PLATFORMS'])"

    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "tpu"},
    )

    assert done.stdout.endswith("\ncpu\n")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("jaxckpt ", {"ls", "show", "verify", "cp", "gc", "report"}),
        ("jaxckpt gc --ev", {"--every-steps"}),
        ("jaxckpt rm {root} ", {"100", "200", "300"}),
        ("jaxckpt rm {root}/nowhere ", set()),
    ],
)
def test_a_shell_completes_the_line(root, words, wanted):
    """Commands, options, and the steps of the run that was named."""
    words = words.format(root=root)
    line = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}

    done = process(_JAXCKPT_COMPLETE="bash_complete", **line)

    found = {line.partition(",")[2] for line in done.stdout.split()}
    assert wanted <= found
    assert wanted or not found
    assert done.stderr == ""


WITHOUT_STEPS = {"report", "scrub", "doctor", "import", "heal", "gc", "migrate"}


def test_the_steps_of_every_command_complete(root):
    """After the path of the run; after another path there is nothing, and no error."""

    def completed(*line):
        found = BashComplete(app, {}, "jaxckpt", "_").get_completions([*map(str, line)], "1")
        return [item.value for item in found if item.type == "plain"]

    after = {"upload": ["elsewhere", "--step"]}
    found = {name: completed(name, root, *after.get(name, ())) for name in COMMANDS}
    other = {name: completed(name, f"{root}-nowhere", *after.get(name, ())) for name in COMMANDS}

    assert found == {name: [] if name in WITHOUT_STEPS else ["100"] for name in COMMANDS}
    assert not any(other.values())
    assert completed("diff", root, 100) == ["100"]  # the second step of the same run
    assert completed("ls", root, 150) == ["100"]  # which it is not, so far


def test_bash_takes_the_completion_script():
    """It defines what bash then calls."""
    script = process(_JAXCKPT_COMPLETE="bash_source").stdout

    checked = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p jaxckpt"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert "_jaxckpt_completion" in checked.stdout


# --- docs/cli.md ----------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")
SECTIONS = {
    section.partition("\n")[0]: section
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}
WITHOUT_SECTION = {"cp": "convert", "unpin": "pin"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name):
    """Each option is in the section of its command; `unpin` and `cp` share a section."""
    section = SECTIONS[WITHOUT_SECTION.get(name, name)]

    options = [
        option
        for parameter in COMMANDS[name].params
        if parameter.param_type_name == "option"
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    ]
    assert [option for option in options if option not in section] == []


def keys_of(facts):
    """The keys of an object, and of the objects in its lists; not of what users named."""
    found = set(facts)
    for value in facts.values():
        if isinstance(value, list):
            found |= {key for one in value if isinstance(one, dict) for key in keys_of(one)}
    if isinstance(statistics := facts.get("statistics"), dict):
        found |= set(statistics)
    return found


@pytest.mark.parametrize(
    "argv",
    [
        "ls {root}",
        "show {root} --stats",
        "show {root} --item config",
        "du {root}",
        "verify {root}/100",
        "diff {root}/100 {root}/200",
        "scrub {root} --dry-run",
        "convert {root} {new}",
        "export {root} {new}.safetensors --only params",
        "fork {root} {new}",
        "pin {root} 100",
        "rm {root} 100 --dry-run",
        "gc {root} --last 1 --dry-run",
        "report {root} -o {new}",
        "doctor {root}",
        "migrate {program}",
        "plan {root} --hosts 1 --devices-per-host 1 --mesh data=1 --mtbf 9d",
    ],
    ids=lambda argv: argv.replace("/", "-"),
)
def test_every_key_of_the_json_is_documented(root, argv):
    """This includes the keys for damage found by `verify` and `scrub`."""
    if argv.startswith(("verify", "scrub")):
        flip(root / "100" / "state")

    program = root.parent / "program.py"
    program.write_text("from orbax.checkpoint import args\n")
    names = {"root": root, "new": root.parent / "new", "program": program}
    _, facts = said_json(*argv.format(**names).split())

    section = SECTIONS[argv.partition(" ")[0]]
    if argv.startswith("scrub"):
        section += SECTIONS["verify"]
    assert {key for key in keys_of(facts) if f"`{key}`" not in section} == set()


def test_show_begins_anew_if_a_job_deletes_the_step_just_opened(tmp_path, capsys):
    saved = []

    def before(verb, path):
        if "/1/" in path and "/d/" in path and not saved:  # once it is open
            saved.append(manager.save(2, {"w": jnp.full(100_000, 2.0)}).result())
            manager.wait_until_finished()

    with CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as manager:
        manager.save(1, {"w": jnp.full(100_000, 1.0)}).result()
        run = PathIn(WatchedStorage(LocalStorage(), before), str(tmp_path))
        assert _look.show.callback(run, (), None, None, True, False) == 0

    assert saved
    assert f"{tmp_path}/2" in capsys.readouterr().out
