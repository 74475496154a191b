"""Several real processes save and restore through the drop-in; Orbax reads what they wrote."""

from __future__ import annotations

import json
import os
import tempfile

import jax
import numpy as np
import orbax.checkpoint as theirs
import pytest

import jaxckpt
import jaxckpt.orbax as ocp
from jaxckpt._disk.attempt import Work
from jaxckpt.format.step import FileFacts
from jaxckpt.multihost import Single
from jaxckpt.orbax._handling import FolderItem
from jaxckpt.storage import LocalStorage
from tests.workers.manages import values_at

pytestmark = [pytest.mark.multihost, pytest.mark.filterwarnings("ignore")]


def assert_orbax_reads(path, step):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    args = theirs.ArrayRestoreArgs(sharding=sharding)
    wanted = values_at(step)
    found = theirs.PyTreeCheckpointer().restore(path, restore_args=dict.fromkeys(wanted, args))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_processes_share_a_run_of_v0(run_processes, tmp_path):
    """All of them get the same answers, and each its own shards."""
    done = run_processes("drop_in:v0", count=2, args=[tmp_path])

    assert done[0].result == done[1].result
    assert done[0].result == [[True] * 4, [[2, 3], 3, {"n": 3}], [3]]
    assert_orbax_reads(tmp_path / "run" / "3" / "state", 3)
    assert_orbax_reads(tmp_path / "flat", 6)


def test_processes_share_checkpoints_of_v1(run_processes, tmp_path):
    """Trees, items and a run."""
    done = run_processes("drop_in:v1", count=2, args=[tmp_path])

    assert done[0].result == done[1].result == [[2, 3], {"n": 3}, False]
    for path, step in ((tmp_path / "b", 2), (tmp_path / "run" / "3", 3)):
        assert_orbax_reads(path / "state", step)


def test_process_0_may_clear_a_run_before_all_open_it(run_processes, tmp_path):
    """As with Orbax, no process lists the steps before process 0 has made its call."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"n": 3}))

    done = run_processes("drop_in:clears_run", count=2, args=[tmp_path], timeout_s=100)

    assert [one.result for one in done] == [[None, True, [1]]] * 2


def test_process_0_may_remove_a_checkpoint_before_all_save_it(run_processes, tmp_path):
    """As with Orbax, no process looks at the directory before process 0 has made its call."""
    (tmp_path / "a").mkdir()

    done = run_processes("drop_in:clears_checkpoint", count=2, args=[tmp_path], timeout_s=100)

    assert [one.result for one in done] == [True, True]


def test_process_0_lists_the_steps_for_readers_that_ask_for_it(run_processes, tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"n": 1}))

    done = run_processes("drop_in:reads_late", count=2, args=[tmp_path], timeout_s=100)

    assert [one.result for one in done] == [[1, [1, 2]]] * 2


def test_processes_that_wait_for_steps_get_the_same(start_processes, tmp_path):
    """Process 0 looks for all, as with Orbax; a step that comes right after changes nothing."""
    save = ocp.PyTreeCheckpointer().save
    save(tmp_path / "1", {"n": 1})
    job = start_processes("drop_in:evaluates", count=2, args=[tmp_path], timeout_s=100)
    job.wait_for(0, "found")
    save(tmp_path / "2", {"n": 2})

    job.release("step 2")

    assert [one.result for one in job.wait()] == [[1, 2]] * 2


def test_a_wait_for_a_step_may_last_longer_than_a_round(run_processes, tmp_path):
    done = run_processes("drop_in:waits_long", count=2, args=[tmp_path], timeout_s=100)

    assert [one.result for one in done] == [5, 5]


def test_processes_that_do_not_close_their_managers_leave_steps_only(run_processes, tmp_path):
    """All of their saves are committed before."""
    run_processes("drop_in:leaves_open", count=2, args=[tmp_path], fresh=True, timeout_s=100)

    for run in ("v0", "v1"):
        assert sorted(os.listdir(tmp_path / run)) == ["1", "2"]
        assert jaxckpt.verify(tmp_path / run).ok


def test_a_jax_array_that_each_process_has_for_itself_is_refused(run_processes, tmp_path):
    """As by Orbax: the values of the others would be lost. Of a numpy array, process 0 writes."""
    done = run_processes("drop_in:local_arrays", count=2, args=[tmp_path])

    refused = "Cannot serialize host local jax.Array in multi-host setting"
    assert [one.result for one in done] == [[[refused] * 3, [1, 1]]] * 2
    assert not (tmp_path / "a").exists()


def test_files_of_a_handler_in_every_process(run_processes, tmp_path):
    """Each process finds those of all; of one name, those of process 0. A failure ends one save."""
    done = run_processes("drop_in:files", count=3, args=[tmp_path])

    missing = f"Checkpoint does not exist: {tmp_path}/none"
    for one in done:
        found, failure, *others = one.result
        assert found == ["0", "10", "11", "12"]
        assert failure == ("RuntimeError" if one.index == 1 else "ProcessesDisagree")
        assert others == [[1, 3], missing, False]


def test_a_large_file_that_process_0_lacks_fails_the_save(tmp_path):
    """It would not fit into the memory of process 0; a copy of a file there is not needed."""
    item = FolderItem(name="data", source=tempfile.TemporaryDirectory(), end=lambda: None)
    item.facts = {"there": FileFacts(size=1, sha256=None)}
    parts = {1: json.dumps({"there": None, "alone": None}).encode()}

    with item.source, pytest.raises(ValueError, match=r"'data': alone: .* Write it in process 0"):
        item.finish(LocalStorage(), Work(f"{tmp_path}", ""), Single(), parts)
