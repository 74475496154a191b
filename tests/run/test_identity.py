"""Whose local steps are: runs that share a disk, disks that come back, runs that move."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import logging
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt._run.copies import Saved, astray
from jaxckpt.errors import SaveFailed, StepExists
from jaxckpt.format import step as step_format
from jaxckpt.testing import simulate
from tests.commandline import cli, said_json
from tests.run.test_tiers import store  # noqa: F401  # a fixture

LAST = KeepPolicy(last=2)
EACH = SavePolicy(every_steps=1)


@pytest.fixture
def train(tmp_path):
    """Saves steps of a run, each with its own value; returns where it began and its problems."""

    def run(name, steps, *, value=None, local="nvme", local_keep=LAST, durable=True, **options):
        tier = LocalTier(tmp_path / local, keep=local_keep) if local else None
        with CheckpointManager(tmp_path / name, local=tier, **options) as manager:
            state, start = manager.restore_or(lambda: {"of": "nobody"})
            for step in steps:
                handle = manager.save(step, {"of": value or f"{name} {step}"})
                handle.result()
                if durable:
                    handle.durable()
            return {"start": start, "from": state["of"], "problems": manager.problems}

    return run


def of(path):
    return jaxckpt.restore(path)["of"]


def steps_in(root):
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())


def guest(root):
    [found] = [path for path in root.iterdir() if path.name.startswith("run-")]
    return found


def lives(root, step):
    record = root / str(step) / "_jaxckpt.json"
    return json.loads(record.read_bytes().split(b"\n")[0])["run"]["starts"]


def as_before(root):
    """Makes the files of a root those that the release before wrote."""
    for path in root.rglob("_jaxckpt.run"):
        path.unlink()
    for path in root.rglob("_jaxckpt.json"):
        record = step_format.decode_record(path.read_bytes(), file=str(path))
        path.write_bytes(step_format.encode_record(dataclasses.replace(record, life=None)))


# --- another run -----------------------------------------------------------------------------


def test_a_new_run_does_not_take_the_steps_of_another(tmp_path, train):
    """Run A leaves steps in a local directory; run B, with its own directory, begins anew."""
    train("A", [1, 2, 3])

    said = train("B", [1, 2])

    assert said["from"] == "nobody"
    assert [of(tmp_path / "B" / str(n)) for n in (1, 2)] == ["B 1", "B 2"]
    assert [of(tmp_path / "nvme" / "3"), of(guest(tmp_path / "nvme") / "2")] == ["A 3", "B 2"]
    assert train("A", [4])["from"] == "A 3"
    assert train("B", [3])["from"] == "B 2"
    assert steps_in(tmp_path / "A") == [1, 2, 3, 4]
    assert steps_in(tmp_path / "B") == [1, 2, 3]


def test_a_run_with_steps_does_not_take_the_newer_ones_of_another(tmp_path, train):
    train("A", [1, 2, 3])
    train("C", [1, 2], local=None)

    said = train("C", [3], keep=KeepPolicy(last=1), local_keep=KeepPolicy(last=1))

    assert said["from"] == "C 2"
    assert of(tmp_path / "C" / "3") == "C 3"
    assert of(tmp_path / "nvme" / "3") == "A 3"
    with CheckpointManager(tmp_path / "C", local=tmp_path / "nvme", mode="r") as reader:
        assert reader.restore()["of"] == "C 3"
        assert reader.tiers["local"] == [3]


def test_it_is_said_once_whose_steps_are_in_the_way(tmp_path, train, caplog):
    """With the command that removes them; afterwards the run stays where its steps are."""
    train("A", [1, 2, 3])

    said = train("B", [1])

    nvme = tmp_path / "nvme"
    [problem] = said["problems"]
    assert f"another run, {tmp_path / 'A'}" in problem
    assert f"saves in {guest(nvme)}" in problem
    assert f"jaxckpt rm {nvme} 2 3" in problem
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [problem]
    assert cli("rm", nvme, "2", "3", "-y")[0] == 0
    assert train("B", [2]) == {"start": 1, "from": "B 1", "problems": []}


def test_a_step_of_a_crowded_disk_is_uploaded_from_its_own_place(tmp_path, train):
    """What a killed job left there is uploaded by the next one, and nothing of the other run."""
    train("A", [7])
    train("B", [1])
    with CheckpointManager(guest(tmp_path / "nvme")) as manager:
        manager.save(2, {"of": "B 2"})

    assert train("B", [])["from"] == "B 2"
    assert steps_in(tmp_path / "B") == [1, 2]


# --- the directory of the run ----------------------------------------------------------------


def test_a_run_that_was_moved_keeps_its_disk(tmp_path, train):
    train("A", [1, 2], durable=True)
    with CheckpointManager(tmp_path / "nvme") as manager:
        manager.save(3, {"of": "A 3"})
    (tmp_path / "A").rename(tmp_path / "renamed")

    said = train("renamed", [4])

    assert said == {"start": 3, "from": "A 3", "problems": []}
    assert steps_in(tmp_path / "nvme") == [3, 4]


def test_a_copy_of_a_run_does_not_take_the_steps_of_the_original(tmp_path, train):
    """`cp -r` copies the id too; as long as the original is there, the disk is its own."""
    train("A", [1, 2])
    shutil.copytree(tmp_path / "A", tmp_path / "copy")
    train("A", [3])

    said = train("copy", [3])

    assert said["from"] == "A 2"
    assert of(tmp_path / "copy" / "3") == "copy 3"
    assert train("A", [4])["from"] == "A 3"
    assert train("copy", [4])["from"] == "copy 3"
    shutil.rmtree(tmp_path / "A")
    assert train("copy", [5])["from"] == "copy 4"


def test_one_directory_under_two_names_is_one_run(tmp_path, train):
    train("A", [1])
    (tmp_path / "link").symlink_to(tmp_path / "A")

    assert train("link", [2]) == {"start": 1, "from": "A 1", "problems": []}
    assert train("A", [3]) == {"start": 2, "from": "link 2", "problems": []}


def test_a_lost_directory_is_filled_again_from_its_disk(tmp_path, train):
    train("A", [1, 2])
    shutil.rmtree(tmp_path / "A")
    with CheckpointManager(tmp_path / "A", local=tmp_path / "nvme") as manager:
        assert manager.restore()["of"] == "A 2"
        manager.wait_until_finished()
    assert steps_in(tmp_path / "A") == [2]
    assert train("B", [1])["from"] == "nobody"


def test_a_directory_that_is_away_is_known_by_its_url(tmp_path, train, store):  # noqa: F811
    """Of the runs on a disk, the one goes on that the disk names; another is not begun."""
    train("A", [1])
    train("run", [1, 2])
    store.away = OSError(errno.EIO, "away")
    with CheckpointManager(tmp_path / "run", local=tmp_path / "nvme") as manager:
        assert manager.restore()["of"] == "run 2"
        handle = manager.save(3, {"of": "run 3"})
        handle.result()
        store.away = None
        handle.durable()
    assert of(tmp_path / "run" / "3") == "run 3"
    shutil.rmtree(guest(tmp_path / "nvme"))
    store.away = OSError(errno.EIO, "away")
    with pytest.raises(OSError, match="away"):
        CheckpointManager(tmp_path / "run", local=tmp_path / "nvme")


def test_nothing_is_uploaded_over_what_another_job_did_meanwhile(
    tmp_path,
    train,
    store,  # noqa: F811
):
    """The directory was away when the job began, and has steps that the job did not go on from."""
    train("run", [1])
    shutil.copytree(tmp_path / "nvme", tmp_path / "stale")
    train("run", [2])
    store.away = OSError(errno.EIO, "away")
    with CheckpointManager(tmp_path / "run", local=tmp_path / "stale") as manager:
        assert manager.restore()["of"] == "run 1"
        handle = manager.save(3, {"of": "stale 3"})
        handle.result()
        store.away = None
        with pytest.raises(SaveFailed, match="step 2 there was saved by another job"):
            handle.durable()
    assert steps_in(tmp_path / "run") == [1, 2]


def test_a_directory_that_comes_back_may_be_of_another_run(tmp_path, train, store):  # noqa: F811
    """Somebody has begun a new run there."""
    train("run", [1])
    store.away = OSError(errno.EIO, "away")
    with CheckpointManager(tmp_path / "run", local=tmp_path / "nvme") as manager:
        shutil.rmtree(tmp_path / "run")
        with CheckpointManager(tmp_path / "other") as other:
            other.save(9, {"of": "other 9"})
        shutil.copytree(tmp_path / "other", tmp_path / "run")
        handle = manager.save(10, {"of": "run 10"})
        handle.result()
        store.away = None
        with pytest.raises(SaveFailed, match="another"):
            handle.durable()
    assert steps_in(tmp_path / "run") == [9]


def test_a_local_run_that_never_had_a_directory_gets_one(tmp_path, train):
    with CheckpointManager(tmp_path / "nvme") as manager:
        manager.save(1, {"of": "local 1"})

    assert train("A", [2])["from"] == "local 1"
    assert train("B", [1])["from"] == "nobody"


# --- older releases --------------------------------------------------------------------------


def test_a_disk_of_an_older_release_is_known_by_a_save_in_both_places(tmp_path, train):
    """A run begun by the release before goes on, and has an id from then on."""
    train("A", [1, 2])
    with CheckpointManager(tmp_path / "nvme", keep=KeepPolicy(last=2)) as manager:
        manager.save(3, {"of": "A 3"})
    as_before(tmp_path)

    assert train("A", [4], local_keep=KeepPolicy(last=2)) == {
        "start": 3,
        "from": "A 3",
        "problems": [],
    }
    ids = {json.loads((tmp_path / at / "_jaxckpt.run").read_bytes())["id"] for at in ("A", "nvme")}
    assert len(ids) == 1
    assert train("B", [1])["from"] == "nobody"


def test_a_disk_of_an_older_release_without_such_a_save_is_left_alone(tmp_path, train):
    """It may be another run's. The message has the command for the case that it is not."""
    train("A", [1, 2])
    train("B", [1], local=None)
    as_before(tmp_path)
    nvme = tmp_path / "nvme"

    [problem] = train("B", [2])["problems"]

    assert "If they are of this run, stop the job and: rm -r " in problem
    assert [of(tmp_path / "B" / "2"), of(nvme / "2")] == ["B 2", "A 2"]
    train("D", [1], local=None)
    as_before(tmp_path / "D")
    code, _, said = cli("upload", nvme, tmp_path / "D")
    assert code != 0
    assert "--step" in said
    assert cli("upload", nvme, tmp_path / "D", "--step", "2")[0] == 0
    assert train("D", [3])["from"] == "A 2"


def test_a_damaged_id_is_read_from_the_newest_step(tmp_path, train):
    train("A", [1])
    for place in ("A", "nvme"):
        file = tmp_path / place / "_jaxckpt.run"
        before = file.read_bytes()
        file.write_bytes(before[:-3])
        said = train("A", [])
        assert said["from"] == "A 1"
        assert json.loads(file.read_bytes()) == json.loads(before)


def flip(file):
    """Changes one digit of the id."""
    data = file.read_bytes()
    at = data.index(b'"id":"') + 6
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def damage(file, how):
    if how == "flip":
        flip(file)
    else:
        file.write_bytes(b"")
    if how == "gone":
        file.unlink()


def train_ahead(path, steps, disk="nvme", directory="A"):
    """Saves each step on a disk, and each fourth in the directory."""
    tier = LocalTier(path / disk, save=EACH, keep=LAST)
    save = SavePolicy(every_steps=4)
    with CheckpointManager(path / directory, local=tier, save=save, timeout_s=60) as manager:
        _, start = manager.restore_or(lambda: {"n": 0})
        for step in steps:
            manager.save(step, {"n": step}).result()
        return start, manager.problems


@pytest.mark.parametrize("place", ["A", "nvme"])
def test_a_wrong_digit_in_an_id_loses_no_local_step(tmp_path, place):
    train_ahead(tmp_path, range(1, 8))
    assert [steps_in(tmp_path / at) for at in ("A", "nvme")] == [[4], [6, 7]]
    ids = {file: file.read_bytes() for file in tmp_path.glob("*/_jaxckpt.run")}
    flip(tmp_path / place / "_jaxckpt.run")

    assert train_ahead(tmp_path, [8])[0] == 7
    assert {file: file.read_bytes() for file in ids} == ids


@pytest.mark.parametrize("place", ["A", "nvme"])
def test_a_wrong_digit_without_a_digest_advises_to_remove_nothing(tmp_path, place):
    """The id of an earlier release has none. The command in the message brings the steps back."""
    train_ahead(tmp_path, range(1, 8))
    for file in tmp_path.glob("*/_jaxckpt.run"):
        about = json.loads(file.read_bytes())
        del about["check"]
        file.write_text(json.dumps(about, separators=(",", ":")))
    flip(tmp_path / place / "_jaxckpt.run")

    start, problems = train_ahead(tmp_path, [])
    assert start == 4
    [problem] = [one for one in problems if "another run" in one]
    assert f"another run of {tmp_path / 'A'}, or _jaxckpt.run is damaged there or here" in problem
    assert "jaxckpt rm" not in problem
    subprocess.run(problem.partition("stop the job and: ")[2], shell=True, check=True)
    assert train_ahead(tmp_path, [8])[0] == 7


def test_a_digest_of_the_id_alone_is_read(tmp_path):
    """As it was before it had the URL, too."""
    train_ahead(tmp_path, range(1, 8))
    for file in tmp_path.glob("*/_jaxckpt.run"):
        about = json.loads(file.read_bytes())
        about["check"] = hashlib.sha256(ascii(about["id"]).encode()).hexdigest()[:16]
        file.write_text(json.dumps(about, separators=(",", ":")))

    assert train_ahead(tmp_path, [8]) == (7, [])


@pytest.mark.parametrize("how", ["flip", "empty", "gone"])
def test_a_damaged_id_gives_the_steps_of_a_disk_to_no_new_run(tmp_path, how):
    train_ahead(tmp_path, range(1, 8))
    damage(tmp_path / "nvme" / "_jaxckpt.run", how)

    start, [problem] = train_ahead(tmp_path, [1], directory="B")
    assert start == 0
    assert "6, 7 are steps of another run" in problem
    assert ("If they are of this run, stop the job" in problem) == (how != "flip")
    assert train_ahead(tmp_path, [8]) == (7, [])
    assert train_ahead(tmp_path, [], directory="B")[0] == 1


@pytest.mark.parametrize("how", ["flip", "empty", "gone"])
def test_a_damaged_id_beside_shares_gives_them_to_no_new_run(tmp_path, how):
    def job(processes, steps, directory):
        return train_ahead(tmp_path, steps, f"host{processes.index}", directory)[0]

    simulate(2, functools.partial(job, steps=range(1, 8), directory="A"), timeout_s=60)
    damage(tmp_path / "host0" / "_jaxckpt.run", how)

    new = functools.partial(job, steps=[1], directory="B")
    assert simulate(2, new, timeout_s=60) == [0, 0]
    again = functools.partial(job, steps=[8], directory="A")
    assert simulate(2, again, timeout_s=60) == [7, 7]


def test_a_copy_of_a_run_does_not_take_its_steps_by_a_damaged_id(tmp_path):
    """The digest in the file shows that the URL of the original is right."""
    train_ahead(tmp_path, range(1, 8))
    flip(tmp_path / "nvme" / "_jaxckpt.run")
    shutil.copytree(tmp_path / "A", tmp_path / "copy")

    assert train_ahead(tmp_path, [], directory="copy")[0] == 4
    assert train_ahead(tmp_path, [8]) == (7, [])


def test_steps_of_a_lost_directory_and_a_lost_id_can_be_brought_back(tmp_path):
    train_ahead(tmp_path, range(1, 8))
    (tmp_path / "nvme" / "_jaxckpt.run").unlink()
    shutil.rmtree(tmp_path / "A")

    start, [problem] = train_ahead(tmp_path, [])
    assert start == 0
    subprocess.run(problem.partition("stop the job and: ")[2], shell=True, check=True)
    assert train_ahead(tmp_path, [8])[0] == 7


@pytest.mark.parametrize("how", ["flip", "empty", "gone"])
def test_a_damaged_id_beside_shares_is_read_from_a_share(tmp_path, how):
    """What several processes save on a disk lies below the file with the id."""

    def job(processes, steps):
        return train_ahead(tmp_path, steps, f"host{processes.index}")

    simulate(2, functools.partial(job, steps=range(1, 8)), timeout_s=60)
    files = [tmp_path / f"host{rank}" / "_jaxckpt.run" for rank in (0, 1)]
    ids = [file.read_bytes() for file in files]
    for file in files:
        damage(file, how)

    assert simulate(2, functools.partial(job, steps=[8]), timeout_s=60) == [(7, [])] * 2
    assert [file.read_bytes() for file in files] == ids


# --- earlier lives of one run ----------------------------------------------------------------


def test_a_disk_that_comes_back_is_older_than_what_the_run_did_since(tmp_path, train, caplog):
    """Its steps have higher numbers, but the run went on elsewhere from an older one."""
    nine = KeepPolicy(last=9)
    train("A", [1, 2], local_keep=nine)
    nvme = LocalTier(tmp_path / "nvme", keep=nine)
    with CheckpointManager(
        tmp_path / "A", local=nvme, save=jaxckpt.SavePolicy(every_steps=100)
    ) as manager:
        for step in (5, 6):
            manager.save(step, {"of": f"first life {step}"}, force=True).result()
    for step in (5, 6):  # which had not been uploaded when the host was lost
        shutil.rmtree(tmp_path / "A" / str(step), ignore_errors=True)
    train("A", [3, 4], local="elsewhere", value="second life")

    with CheckpointManager(tmp_path / "A", local=tmp_path / "nvme", mode="r") as reader:
        assert reader.restore()["of"] == "second life"
        assert reader.latest_step() == 4
    caplog.clear()
    with CheckpointManager(tmp_path / "A", local=nvme) as manager:
        assert manager.all_steps() == [1, 2, 3, 4]
        assert manager.restore()["of"] == "second life"
        [warning] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
        assert "steps [5, 6] are of an earlier life of this run" in warning
        assert f"To keep one: jaxckpt fork {tmp_path / 'nvme' / '6'} NEW" in warning
        assert of(tmp_path / "nvme" / "6") == "first life 6"  # until the next save
        manager.save(5, {"of": "third life"}).durable()
        assert manager.restore()["of"] == "third life"
    assert steps_in(tmp_path / "nvme") == [1, 2, 5]
    assert of(tmp_path / "nvme" / "5") == "third life"
    assert [before for _, before in lives(tmp_path / "A", 5)][-2:] == [2, 4]


def test_a_restart_that_goes_back_begins_a_life(tmp_path, train):
    """A step that was set aside as damaged does not come back from another disk."""
    with CheckpointManager(tmp_path / "A", local=tmp_path / "nvme") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"of": step}).durable()
        manager.wait_until_finished()
    shutil.copytree(tmp_path / "nvme", tmp_path / "old disk")
    with CheckpointManager(tmp_path / "A", local=tmp_path / "nvme") as manager:
        manager.delete(3)
        manager.save(3, {"of": "again"}).durable()
        assert [before for _, before in lives(tmp_path / "A", 3)] == [None, 2]

    with CheckpointManager(tmp_path / "A", local=tmp_path / "old disk") as manager:
        assert manager.restore()["of"] == "again"


def test_steps_saved_while_the_directory_is_away_are_of_the_run(tmp_path, train, store):  # noqa: F811
    """A new host restores from there, then it is away: its local steps go on from that step."""
    train("run", [1])
    policies = {"save": SavePolicy(every_steps=9), "local": LocalTier(tmp_path / "new", save=EACH)}
    with CheckpointManager(tmp_path / "run", **policies) as manager:
        assert manager.restore()["of"] == "run 1"
        store.away = OSError(errno.EIO, "away")
        manager.save(2, {"of": "new 2"}).result()
        store.away = None

    assert lives(tmp_path / "new", 2)[0] == lives(tmp_path / "run", 1)[0]
    assert train("run", [3], local="new")["from"] == "new 2"


def test_steps_below_the_newest_of_a_directory_that_was_away_are_reported(tmp_path, train, store):  # noqa: F811
    """The disk was put back to an older state meanwhile; the job went on from there."""
    train("run", [10, 20])
    shutil.copytree(tmp_path / "nvme", tmp_path / "older")
    train("run", [30])
    store.away = OSError(errno.EIO, "away")
    with CheckpointManager(tmp_path / "run", local=tmp_path / "older") as manager:
        assert manager.restore()["of"] == "run 20"
        handles = [manager.save(step, {"of": f"older {step}"}) for step in (25, 27)]
        handles[-1].result()
        store.away = None
        for handle in handles:
            with pytest.raises(SaveFailed, match="step 30 there was saved by another job"):
                handle.durable()
    shutil.copytree(tmp_path / "older", tmp_path / "old")

    said = train("run", [], local="old")
    assert said["from"] == "run 30"
    [problem] = said["problems"]
    assert f"{tmp_path / 'old'}: steps [25, 27] are of an earlier life of this run" in problem
    assert f"jaxckpt fork {tmp_path / 'old' / '27'} NEW" in problem
    train("run", [35], local="old")
    assert {25, 27}.isdisjoint(steps_in(tmp_path / "old"))


def test_no_step_is_saved_as_one_of_no_life(tmp_path, train, store):  # noqa: F811
    """Nothing tells how the run got to the step before, so a later start would not count on it."""
    train("run", [1])
    policies = {"save": SavePolicy(every_steps=9), "local": LocalTier(tmp_path / "new", save=EACH)}
    with CheckpointManager(tmp_path / "run", **policies) as manager:
        store.away = OSError(errno.EIO, "away")
        with pytest.raises(SaveFailed, match="away"):
            manager.save(2, {"of": "new 2"}).result()
        store.away = None
        manager.save(3, {"of": "new 3"}).result()

    assert train("run", [4], local="new")["from"] == "new 3"


def test_the_list_of_starts_is_bounded(tmp_path, limits):
    limits(step_format, MAX_STARTS=9)
    for step in range(12):
        with CheckpointManager(tmp_path, keep=KeepPolicy(last=2)) as manager:
            manager.save(step, {"w": 1})
    found = lives(tmp_path, step)
    assert len(found) == 9
    assert found[-1][1] == step - 1


# --- commands --------------------------------------------------------------------------------


def test_upload_refuses_the_steps_of_another_run(tmp_path, train):
    train("A", [1, 2])
    train("B", [1])

    code, _, said = cli("upload", tmp_path / "nvme", tmp_path / "B")

    assert code != 0
    assert "another run" in said
    assert steps_in(tmp_path / "B") == [1]
    assert cli("upload", guest(tmp_path / "nvme"), tmp_path / "B")[0] == 0
    assert cli("upload", tmp_path / "nvme", tmp_path / "new")[0] == 0
    assert train("new", [3])["from"] == "A 2"


def test_upload_leaves_steps_of_an_earlier_life(tmp_path, train):
    train("A", [1])
    with CheckpointManager(tmp_path / "nvme") as manager:
        manager.save(5, {"of": "first life 5"})
    train("A", [2], local="elsewhere")

    assert cli("upload", tmp_path / "nvme", tmp_path / "A")[0] == 0

    assert steps_in(tmp_path / "A") == [1, 2]


def test_commands_show_the_local_steps_of_the_run_itself(tmp_path, train):
    train("A", [1, 2, 3])
    train("B", [1])

    shown = [said_json("ls", tmp_path / run, "--local", tmp_path / "nvme")[1] for run in "AB"]

    assert [[one["step"] for one in found["steps"]] for found in shown] == [[1, 2, 3], [1]]
    assert shown[1]["steps"][0]["places"] == ["local", "durable"]
    found = said_json("verify", tmp_path / "B", "--local", tmp_path / "nvme")[1]
    assert found["local"][0]["path"] == f"{guest(tmp_path / 'nvme')}/1"


def test_heal_refuses_the_steps_of_another_run(tmp_path, train):
    train("A", [1])
    train("B", [1])
    code, _, said = cli("heal", tmp_path / "nvme", tmp_path / "B")
    assert code != 0
    assert "another run" in said
    assert cli("heal", tmp_path / "nvme", tmp_path / "A")[0] == 0


def test_a_fork_is_another_run(tmp_path, train):
    train("A", [1, 2])

    jaxckpt.fork(tmp_path / "A" / "1", tmp_path / "tuned")

    assert train("tuned", [2])["from"] == "A 1"
    assert train("A", [3])["from"] == "A 2"
    with pytest.raises(StepExists):
        jaxckpt.fork(tmp_path / "A" / "1", tmp_path / "tuned")


# --- what is decided -------------------------------------------------------------------------


@st.composite
def histories(draw):
    """Steps that a run saved in several lives, each with the starts before it."""
    saved = []
    for life in range(draw(st.integers(1, 5))):
        before = draw(st.sampled_from([None, *saved])) if saved else None
        step = -1 if before is None else before.step
        starts = () if before is None else before.starts
        starts = (*starts, (str(life), None if before is None else step))
        for _ in range(draw(st.integers(1, 3))):
            step += draw(st.integers(1, 2))
            saved.append(Saved(step, starts))
    return saved


def came_from(step, later, saved):
    """By walking back from a step to the one before it."""
    while later is not None:
        if later == step:
            return True
        own = [one for one in saved if one.starts == later.starts and one.step < later.step]
        parent = later.starts[-1][1]
        older = [
            one for one in saved if one.starts == later.starts[:-1] and one.step == parent
        ] or [
            one
            for n in range(len(later.starts) - 1)
            for one in saved
            if one.starts == later.starts[:n] and one.step == parent
        ]
        later = max(own, default=next(iter(older), None))
    return False


@given(histories(), st.data())
def test_lineage_is_what_walking_back_finds(saved, data):
    """A step led to another exactly if the run has come from there."""
    a, b = (data.draw(st.sampled_from(saved)) for _ in range(2))
    if a.step <= b.step or a.starts != b.starts:
        assert a.led_to(b) == came_from(a, b, saved)


def chain(count, *, life=None, of="start"):
    """Steps 0, 1, ... of a run whose job started anew before each."""
    saved, life = [], life or step_format.Life(run="")
    for n in range(count):
        before = saved[-1].step if saved else None
        life = life.begun(f"{of} {n}", before)
        saved.append(Saved(n, life.starts))
    return saved


def test_a_run_of_many_starts_goes_on_from_its_newest_step():
    """However many starts ago the last upload was, the local steps came after it."""
    saved = chain(3 * step_format.MAX_STARTS)
    *_, before, last = saved

    assert len(last.starts) == step_format.MAX_STARTS
    for durable in saved:
        assert astray([before, last], durable) == []
        assert durable.led_to(last)
        assert last.led_to(durable) == (durable == last)


def as_listed_before(saved):
    """As a release recorded it that listed the first start and the last 31, without a mark."""
    starts = [*saved.starts[:1], *saved.starts[1:][-31:]]
    body = {"version": 1, "writer": "jaxckpt 0.1.0", "token": "t", "lineage": {}, "files": {}}
    data = json.dumps(body | {"run": {"id": "r", "starts": starts}}).encode()
    data += b"\n" + hashlib.sha256(data).hexdigest().encode() + b"\n"
    return Saved.of(saved.step, step_format.decode_record(data, file="f").life)


def test_a_release_that_listed_fewer_starts_hides_no_step():
    """Its steps stay when the run goes on: a start that it left out is not of an earlier life."""
    saved = [as_listed_before(one) for one in chain(50)]
    life = step_format.Life(run="r", starts=saved[-1].starts)

    for n in range(300):
        life = life.begun(f"since {n}", 49 + n)
        now = Saved(50 + n, life.starts)
        assert astray([saved[10], saved[40], now], None) == []


def test_many_starts_hide_no_other_life():
    """What the run did elsewhere since wins over a disk that comes back, as after few starts."""
    saved = chain(2 * step_format.MAX_STARTS)
    last, from_step = saved[-1], saved[-5]
    life = step_format.Life(run="", starts=from_step.starts).begun("elsewhere", from_step.step)

    assert astray([last], Saved(from_step.step + 1, life.starts)) == [last.step]
    assert astray([last], chain(2, of="anew")[-1]) == [last.step]
    assert astray([from_step], Saved(from_step.step + 1, life.starts)) == []


def test_of_two_branches_the_one_saved_last_counts():
    """Whichever has higher numbers; but a branch in the directory stays the run."""
    first, second = (("a", None), ("b", 4)), (("a", None), ("c", 4))
    long, short = Saved(7, first, saved_ns=1), Saved(6, second, saved_ns=2)

    for local in ([long, short], [short, long]):
        assert astray(local, None) == [7]
        assert astray(local, Saved(5, first)) == [6]


@given(histories(), st.data())
def test_no_step_is_left_from_which_the_run_went_on(saved, data):
    """What stays on a disk is of one life: each step led to the newest, or the durable one did."""
    local = data.draw(st.lists(st.sampled_from(saved), unique_by=lambda one: one.step))
    durable = data.draw(st.sampled_from([None, *saved]))

    gone = astray(local, durable)

    stay = [one for one in local if one.step not in gone]
    newest = max([*stay, *([durable] if durable else [])], key=lambda one: one.step, default=None)
    assert {*gone} <= {one.step for one in local}
    if durable is not None:
        assert all(one.step not in gone for one in stay if one.led_to(durable))
        assert all(one.led_to(durable) or durable.start in dict(one.starts) for one in stay)
    if newest in stay:
        assert all(one.led_to(newest) for one in stay if one.start == newest.start)
