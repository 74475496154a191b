"""`overview` lists every step of a run with its recorded facts, complete or not."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointManager, CheckpointNotFound
from jaxckpt._run import index as index_module
from jaxckpt._run.index import StepIndex
from jaxckpt.cli._owned import owned
from jaxckpt.format import names
from jaxckpt.pages.overview import look, overview
from jaxckpt.storage import LocalStorage, PathIn, listed, locate
from jaxckpt.testing import WatchedStorage
from tests.golden.fixture import golden_names

TOKEN = "0123456789abcdef"


@pytest.fixture
def root(ram_path):
    """A run of steps 5 and 7, the first of them pinned."""
    root = ram_path / "run"
    with CheckpointManager(root) as manager:
        for step in (5, 7):
            manager.save(
                step,
                {"w": np.arange(1000, dtype=np.float32)},
                items={"config": {"lr": 0.1}},
                metrics={"loss": 1 / step},
                custom_metadata={"of": "a test"},
            )
        manager.wait_until_finished()
        manager.pin(5)
    return root


def problems_of(root):
    return {step.step: step.problem for step in overview(root).steps}


def test_a_step_is_shown_with_all_that_it_says(root):
    """Metrics, pin, items, time, phases, writer, custom metadata, and what its files take."""
    saved = overview(root).steps[0]

    sizes = [path.stat().st_size for path in (root / "5").rglob("*") if path.is_file()]
    assert (saved.step, saved.name, saved.path) == (5, "5", str(root / "5"))
    assert (saved.size_bytes, saved.files) == (sum(sizes), len(sizes))
    assert saved.metrics == {"loss": 0.2}
    assert saved.pinned
    assert saved.problem is None
    assert saved.writer == f"jaxckpt {jaxckpt.__version__}"
    assert saved.custom_metadata == {"of": "a test"}
    assert saved.items == ("config", "metrics", "state")
    assert saved.phases["write"] > 0
    assert saved.saved_s is not None
    assert abs(saved.saved_s - (root / "5").stat().st_mtime) < 60


def test_steps_come_in_order_and_only_one_is_pinned(root):
    """By number, not by name."""
    with CheckpointManager(root) as manager:
        manager.save(10, {"w": 1})

    steps = overview(root).steps

    assert [(step.step, step.pinned) for step in steps] == [(5, True), (7, False), (10, False)]
    assert steps[2].metrics == {}


def test_a_fork_tells_its_lineage(root, ram_path):
    """From the record."""
    jaxckpt.fork(root / "7", ram_path / "other")

    (forked,) = overview(ram_path / "other").steps

    assert forked.lineage["path"] == str(root / "7")


@pytest.mark.parametrize("name", golden_names("manager"))
def test_runs_of_orbax_are_shown(golden, name):
    """Runs in all layouts and with all step names are complete, with their metrics if recorded."""
    sample = golden(name)

    found = overview(sample.path)

    with CheckpointManager(sample.path, mode="r") as manager:
        assert [step.step for step in found.steps] == manager.all_steps()
        assert all(step.metrics == manager.metrics(step.step) for step in found.steps)
    assert found.steps
    assert all(step.problem is None and step.writer == "orbax" for step in found.steps)
    assert all(step.size_bytes > 0 and step.items for step in found.steps)


def test_files_of_flax_are_shown(golden, ram_path):
    """By the step in their names."""
    source = golden("orbax-0.11.25-flax-legacy").path
    file = source if source.is_file() else next(p for p in source.rglob("*") if p.is_file())
    for step in (3, 20):
        shutil.copy(file, ram_path / f"checkpoint_{step}")

    steps = overview(ram_path).steps

    assert [(step.step, step.writer, step.problem) for step in steps] == [
        (3, "flax", None),
        (20, "flax", None),
    ]
    assert steps[0].size_bytes == file.stat().st_size


def test_what_is_not_whole_is_shown_with_the_reason(root):
    """Torn copies, empty and foreign directories are shown with the facts that they record."""
    (root / "7" / names.COMMIT_MARKER).unlink()
    (root / "8").mkdir()
    (root / "9").mkdir()
    (root / "9" / "notes").write_text("x")

    found = {step.step: step for step in overview(root).steps}

    assert found[5].problem is None
    assert "commit_success.txt is missing: the step is incomplete" in found[7].problem
    assert "contains nothing" in found[8].problem
    assert "contains notes" in found[9].problem
    assert found[7].size_bytes > 4000


@pytest.mark.parametrize("damage", ["cut", "removed", "longer"])
def test_damage_that_metadata_and_sizes_tell_is_shown(root, damage):
    """A data file is cut or missing, or a metadata file is longer; the other facts are shown."""
    data = max((root / "7" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    if damage == "cut":
        os.truncate(data, data.stat().st_size - 1)
    elif damage == "removed":
        data.unlink()
    else:
        data = root / "7" / "metrics" / "metrics"
        data.write_bytes(data.read_bytes() + b" ")

    seven = overview(root).steps[1]

    assert str(data) in seven.problem
    assert seven.custom_metadata == {"of": "a test"}
    assert problems_of(root)[5] is None


def test_a_record_that_cannot_be_read_is_a_problem(root):
    """Nothing else of that step is believed but its size."""
    (root / "7" / names.RECORD).write_bytes(b"{}")

    seven = overview(root).steps[1]

    assert names.RECORD in seven.problem
    assert (seven.metrics, seven.items, seven.saved_s) == ({}, (), None)


def test_what_else_lies_in_the_root_is_told(root):
    """Set aside, under way, being deleted, waiting, stray; not the files of the run itself."""
    strays = {
        f"9.jaxckpt-bad-{TOKEN}": "set aside",
        f"11.orbax-checkpoint-tmp-jaxckpt-{TOKEN}": "under way",
        f"3.orbax-checkpoint-tmp-deleting-{TOKEN}": "being deleted",
        "5.jaxckpt-committed": "about to replace 5",
        "notes": "not part of the run",
    }
    for name in strays:
        (root / name).mkdir()
    (root / "12").write_text("a file")
    (root / names.lease(TOKEN)).write_text("{}")

    found = overview(root)

    assert [step.step for step in found.steps] == [5, 7]
    assert len(found.strays) == len(strays) + 1
    for name, words in strays.items():
        assert any(stray.startswith(f"{name}: ") and words in stray for stray in found.strays)
    assert "12: named like a step, but not a directory; a link is not followed" in found.strays


def test_a_step_under_another_name_is_told(root, caplog):
    """It is whole, and was saved under another number."""
    shutil.copytree(root / "5", root / "6")

    found = overview(root)

    assert [step.problem for step in found.steps] == [None] * 3
    assert any("was saved as 5" in stray for stray in found.strays)


def test_looking_changes_nothing_and_warns_of_nothing(root, caplog):
    """Neither file nor time; what is wrong is in the result, not in the log."""
    (root / "8").mkdir()
    before = {path: path.stat().st_mtime_ns for path in root.parent.rglob("*")}

    overview(root)

    assert {path: path.stat().st_mtime_ns for path in root.parent.rglob("*")} == before
    assert caplog.records == []


def test_a_root_that_may_not_be_written_is_shown(root):
    """Nothing is asked of it but to be read."""
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        steps = overview(root).steps
    finally:
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)

    assert [step.problem for step in steps] == [None, None]


def test_a_step_that_goes_meanwhile_is_left_out(root):
    """It was listed, and is gone when it is looked at."""
    index = StepIndex(LocalStorage(), str(root))
    listing = index.listing()
    assert look(index, listing, "7", 7).problem is None
    shutil.rmtree(root / "7")

    assert look(index, listing, "7", 7) is None


def test_a_run_that_is_written_meanwhile_shows_whole_steps_only(ram_path):
    """A step is there with all that belongs to it, or not at all."""
    keep = jaxckpt.KeepPolicy(last=2)
    seen = []
    deadline_s = time.monotonic() + 60
    with CheckpointManager(ram_path / "run", keep=keep) as manager:
        for step in range(40):
            manager.save(step, {"w": np.ones(100)}, metrics={"loss": step})
        while not (seen and seen[-1].step == 39) and time.monotonic() < deadline_s:
            seen += overview(ram_path / "run").steps

    assert seen[-1].step == 39
    assert {(step.problem, step.metrics.get("loss") == step.step) for step in seen} == {
        (None, True)
    }


def test_what_is_no_root_is_refused(root, ram_path):
    """A place where there is nothing, a file, a checkpoint."""
    (ram_path / "file").write_text("x")

    with pytest.raises(CheckpointNotFound, match="no such file"):
        overview(ram_path / "none")
    with pytest.raises(NotADirectoryError, match="is a file"):
        overview(ram_path / "file")
    with pytest.raises(ValueError, match=rf"is a checkpoint, not a run.*{root}\?"):
        overview(root / "5")


def test_an_empty_root_has_no_steps(ram_path):
    """Nor strays."""
    found = overview(ram_path)

    assert (found.steps, found.strays) == ((), ())


def test_a_link_to_a_root_is_followed(root, ram_path):
    """As a manager follows it."""
    (ram_path / "link").symlink_to(root)

    assert [step.step for step in overview(ram_path / "link").steps] == [5, 7]


def test_neither_jax_nor_tensorstore_is_imported(root):
    """In a process of its own."""
    code = (
        "import sys; from jaxckpt.pages.overview import overview; "
        f"steps = overview({str(root)!r}).steps; "
        "print(len(steps), {'jax', 'tensorstore', 'ml_dtypes'} & {*sys.modules})"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "2 set()\n"


def test_a_run_says_what_the_last_job_kept(tmp_path):
    """The fields of its policy, but for a function; a damaged or newer one says nothing."""
    policy = jaxckpt.KeepPolicy(last=2, best=1, metric="loss", when=lambda info: False)
    with jaxckpt.CheckpointManager(tmp_path / "run", keep=policy) as manager:
        manager.save(1, {"w": 1.0}, metrics={"loss": 0.5})

    recorded = overview(tmp_path / "run").keep

    assert recorded == jaxckpt.KeepPolicy(last=2, best=1, metric="loss")
    owner = tmp_path / "run" / names.OWNER
    owner.write_bytes(owner.read_bytes().replace(b'"last"', b'"late"'))
    assert overview(tmp_path / "run").keep is None


def test_the_command_line_leaves_the_policy_of_a_run_as_it_was(tmp_path):
    """A command that only cleans up has no policy of its own."""
    with jaxckpt.CheckpointManager(tmp_path / "run", keep=jaxckpt.KeepPolicy(last=2)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": 1.0})
            manager.wait_until_finished()

    with owned(*locate(tmp_path / "run")) as run:
        run.delete([1])

    assert overview(tmp_path / "run").keep == jaxckpt.KeepPolicy(last=2)


def test_a_step_of_a_store_that_goes_meanwhile_is_left_out():
    """Stores are listed once; a problem with that listing is looked at again."""
    url = f"memory://{uuid.uuid4()}"
    with CheckpointManager(url) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.ones(3)}).result()
    storage, root = locate(url)
    index = StepIndex(listed(storage, root, ()), root, quiet=True)
    listing = index.listing()
    storage.delete(f"{root}/1")
    storage.write(f"{root}/2/_jaxckpt.json", b"no record")

    assert look(index, listing, "1", 1) is None
    assert "damaged" in look(index, listing, "2", 2).problem
    assert [step.step for step in overview(url).steps] == [2]


def test_a_local_step_is_listed_and_read_once(root):
    """Each directory is listed once; the record, the metadata and the metrics are read."""
    calls = []
    storage, where = locate(root)
    watched = WatchedStorage(storage, lambda verb, path: calls.append((verb, path)))

    overview(PathIn(watched, where))
    looked = [path for _, path in calls if path.startswith(f"{where}/7")]
    calls.clear()
    StepIndex(watched, where).info(7)
    facts = [path for _, path in calls if path.startswith(f"{where}/7")]

    # It has two items more than a bare step, each with a directory.
    assert len(looked) <= 9
    assert len(set(looked)) == len(looked)
    assert len(facts) <= 5


@pytest.mark.parametrize(("slow_s", "most"), [(math.inf, 1), (-1.0, 8)])
def test_only_what_waits_is_looked_at_in_several_threads(limits, slow_s, most):
    """A file system that answers at once is asked by one; the results are in order."""
    limits(index_module, _SLOW_S=slow_s)
    begun = threading.Barrier(most)

    def look(n):
        begun.wait(60)
        return n, threading.get_ident()

    found = index_module.at_once(look, range(8), LocalStorage())

    assert [n for n, _ in found] == [*range(8)]
    assert len({thread for _, thread in found}) >= most
    assert ((0, threading.get_ident()) in found) == (most == 1)
