"""The commands that change a run: what they delete, what they leave, and when they refuse."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import time

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointManager, SaveFailed
from jaxckpt.cli._keep import plan
from jaxckpt.cli._owned import owned, run_at
from jaxckpt.format import names, run
from jaxckpt.pages.overview import overview
from jaxckpt.storage import LocalStorage
from tests.commandline import cli, on_terminal, said_json
from tests.golden.fixture import golden_names

TOKEN = "0123456789abcdef"


@pytest.fixture
def root(ram_path):
    """A run of steps 100 to 600; the loss of 200 is the smallest."""
    root = ram_path / "run"
    with CheckpointManager(root) as manager:
        for step in range(100, 700, 100):
            loss = 0.1 if step == 200 else 1.0
            manager.save(step, {"w": np.full(1000, step)}, metrics={"loss": loss})
    return root


def steps_of(root):
    return [step.step for step in overview(root).steps]


def flip(folder):
    """Damages a byte in the middle of the largest file."""
    data = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def content(root):
    """All files by name, to see that nothing was changed."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- pin ------------------------------------------------------------------------------------------


def test_pin_and_unpin(root):
    """By the numbers of steps, or by the path of one."""
    assert cli("pin", root, 100, 300)[:2] == (0, f"pinned 2 steps of {root}: 100, 300\n")
    assert said_json("pin", root / "500") == (0, {"path": str(root), "pinned": [500]})
    assert cli("unpin", root / "100")[0] == 0

    assert [step.step for step in overview(root).steps if step.pinned] == [300, 500]


def test_a_pin_holds_beside_a_job_that_lives(root):
    """The job continues to save, and leaves the pinned step."""
    with CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=1)) as manager:
        code, _, _ = cli("pin", root, 100)
        manager.save(700, {"w": 1})

    assert code == 0
    assert steps_of(root) == [100, 700]


def test_of_several_steps_all_are_pinned_or_none(root):
    """One that is not there is an error that says which are."""
    code, _, err = cli("pin", root, 100, 150)

    assert code == 2
    assert "has no committed step 150" in err
    assert not any(step.pinned for step in overview(root).steps)


def test_a_root_without_a_step_is_not_enough(root):
    """For `rm` least of all."""
    for command in ("pin", "unpin", "rm"):
        code, _, err = cli(command, root)

        assert code == 2
        assert "Name the steps" in err
    assert len(steps_of(root)) == 6


# --- rm -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["rm", "pin"])
def test_a_run_inside_the_run_is_not_a_step(ram_path, command):
    """By its number and by its path; the error says what is inside, and all of it stays."""
    root = ram_path / "run"
    for step in ("10", "20"):
        (root / "exp_2603" / step).mkdir(parents=True)
        (root / "exp_2603" / step / "_METADATA").write_text("{}")
    with CheckpointManager(root, step_prefix="exp") as manager:
        manager.save(7, {"w": 1})
    before = content(root)

    for where in ([root, 2603], [root / "exp_2603"]):
        code, _, err = cli(command, *where)
        assert code == 2
        assert f"{root}/exp_2603 is not one: it contains 10, 20" in err
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == [7]
        with pytest.raises(jaxckpt.CheckpointNotFound, match="it contains 10, 20"):
            manager.delete(2603)
        with pytest.raises(jaxckpt.CheckpointNotFound, match="it contains 10, 20"):
            manager.restore(step=2603)

    assert content(root).keys() >= before.keys()


def test_rm_deletes_what_it_says(root):
    """And only with a yes."""
    dry, shown, _ = cli("rm", root, 100, 600, "--dry-run")
    unanswered, _, err = cli("rm", root, 100, 600)
    assert (dry, unanswered) == (0, 2)
    assert "the newest step" in shown
    assert "Delete 2 steps" in err
    assert len(steps_of(root)) == 6

    code, out, _ = cli("rm", root, 100, 600, "--yes")
    facts = said_json("rm", root / "200", "--yes")

    assert code == 0
    assert out.endswith(f"deleted 2 steps of {root}: 100, 600\n")
    assert facts == (
        0,
        {
            "path": str(root),
            "dry_run": False,
            "delete": [200],
            "deleted": [200],
            "moved_to": None,
        },
    )
    assert steps_of(root) == [300, 400, 500]


def test_rm_and_gc_move_steps_as_the_policy_of_the_run_does(root):
    """They say so in the question, and `rm` of a step there deletes it."""
    with CheckpointManager(root, keep=jaxckpt.KeepPolicy(move_to="bin")):
        pass

    unanswered, _, err = cli("rm", root, 100)
    _, out, _ = cli("rm", root, 100, "--yes")
    facts = said_json("gc", root, "--last", 3, "--yes")[1]

    assert (unanswered, f"Move 1 step of {root} to {root}/bin?" in err) == (2, True)
    assert out.endswith(f"moved 1 step of {root} to {root}/bin: 100\n")
    assert (facts["deleted"], facts["moved_to"]) == ([200, 300], f"{root}/bin")
    assert (steps_of(root), steps_of(root / "bin")) == ([400, 500, 600], [100, 200, 300])
    assert cli("rm", root / "bin" / "200", "--yes")[0] == 0
    assert steps_of(root / "bin") == [100, 300]


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 5), ("n\n", 2, 6), ("\n", 2, 6)])
def test_on_a_terminal_rm_asks(root, answer, code, left):
    """No is the default."""
    ended, seen = on_terminal("rm", root, "100", answer=answer)

    assert "Delete 1 step of" in seen
    assert ended == code
    assert ("Nothing was done." in seen) == (code == 2)
    assert len(steps_of(root)) == left


@pytest.mark.parametrize("damage", ["a field of a newer release", "half a file"])
@pytest.mark.parametrize("command", [("rm", "100"), ("gc", "--last", "1")])
def test_rm_and_gc_refuse_if_they_cannot_read_the_policy_of_the_run(root, command, damage):
    """It may say to move steps, and they would delete them for good."""
    with CheckpointManager(root, keep=jaxckpt.KeepPolicy(move_to="bin")):
        pass
    file = root / names.OWNER
    facts = json.loads(file.read_bytes())
    facts["keep"]["every_hours"] = 5
    text = json.dumps(facts)
    file.write_text(text if damage.startswith("a field") else text[:40])
    before = content(root)

    code, _, err = cli(command[0], root, *command[1:], "--yes")

    assert code == 2
    assert f"{file}: expected" in err
    assert "CheckpointManager(..., keep=...)" in err
    assert content(root) == before
    assert overview(root).keep is None  # which only shows the run


def test_rm_refuses_a_pinned_step(root):
    """And with it the others."""
    cli("pin", root, 100)

    code, _, err = cli("rm", root, 100, 200, "--yes")

    assert code == 2
    assert f"jaxckpt unpin {root} 100" in err
    assert len(steps_of(root)) == 6


def test_a_printed_command_can_be_pasted_into_a_shell(root):
    """Also one with a path that has a space or a quote."""
    spaced = root.parent / "my user's runs" / "a"
    spaced.parent.mkdir()
    root.rename(spaced)
    cli("pin", spaced, 100)

    _, _, refused = cli("rm", spaced, 100, "--yes")
    program, *words = shlex.split(refused.partition("run: ")[2])
    flip(spaced / "300" / "state")
    _, advice, _ = cli("scrub", spaced, "--dry-run")

    assert (program, cli(*words)[0]) == ("jaxckpt", 0)
    assert f"jaxckpt heal {shlex.quote(str(spaced))} OTHER" in advice
    assert cli("rm", spaced, 100, "--yes")[0] == 0


@pytest.mark.parametrize("verb", ["convert", "import"])
def test_a_step_that_is_being_read_is_not_replaced(tmp_path, verb):
    root, other = tmp_path / "run", tmp_path / "other"
    with CheckpointManager(root) as manager:
        manager.save(100, {"w": np.ones(3)})
    jaxckpt.save(other, {"w": np.zeros(3)})
    if verb == "import":
        other = jaxckpt.export_safetensors(other, tmp_path / "m.safetensors")
    before = content(root / "100")

    with run_at(LocalStorage(), str(root)).leases.protect(100):
        code, _, err = cli(verb, other, root / "100", "--overwrite", "--yes")

    assert (code, "100 is not replaced: a reader holds it" in err) == (2, True)
    assert content(root / "100") == before
    assert cli(verb, other, root / "100", "--overwrite", "--yes")[0] == 0
    assert jaxckpt.restore(root / "100")["w"][0] == 0


def test_rm_leaves_a_step_that_is_being_read(root):
    """The others go; the error says what stayed and why."""
    reader = run_at(LocalStorage(), str(root)).leases
    with reader.protect(100):
        code, _, err = cli("rm", root, 100, 200, "--yes")

    assert code == 2
    assert "deleted 200. Not deleted: step 100: a reader holds it" in err
    assert steps_of(root) == [100, 300, 400, 500, 600]


@pytest.mark.parametrize("name", golden_names("0.11.25-manager-prefix-padded"))
def test_rm_deletes_steps_of_orbax(golden, ram_path, name):
    """Since the user names them; they may be called by their directory."""
    root = ram_path / "run"
    shutil.copytree(golden(name).path, root)
    steps = overview(root).steps

    code, shown, _ = cli("rm", steps[0].path, "--yes")

    assert code == 0
    assert "not written by jaxckpt" in shown
    assert steps_of(root) == [step.step for step in steps[1:]]


@pytest.mark.parametrize("command", ["pin", "rm"])
def test_an_item_named_with_digits_is_not_a_step(tmp_path, command):
    """Nothing is written into the step that has it."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, {"w": 1}, items={"5": {"w": np.ones(2)}})
    before = content(tmp_path)

    code, _, err = cli(command, tmp_path / "run" / "7" / "5", *(["--yes"] * (command == "rm")))

    assert (code, "is a checkpoint, not a run" in err) == (2, True)
    assert content(tmp_path) == before


# --- a run that has a job -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [["rm", "100"], ["gc", "--last", "1"], ["scrub"]], ids=lambda argv: argv[0]
)
def test_a_run_of_a_job_that_lives_is_left_to_it(root, argv):
    """Nothing changes, and the job continues."""
    flip(root / "300" / "state")
    command, *options = argv
    with CheckpointManager(root) as manager:
        before = content(root)

        code, _, err = cli(command, root, *options, "--yes")

        assert code == 2
        assert "is in use by a running job: process" in err
        assert content(root) == before
        manager.save(700, {"w": 1})

    assert steps_of(root)[-1] == 700


@pytest.mark.parametrize("command", ["rm", "scrub"])
def test_a_job_that_is_just_deleting_is_not_called_dead(root, command):
    flip(root / "300" / "state")
    with CheckpointManager(root):
        owner = run.decode(run.Owner, (root / names.OWNER).read_bytes(), file="owner")
        doomed = run.Doomed(steps=["100"], owner=owner.token)
        (root / names.DOOMED).write_bytes(run.encode(doomed))

        code, _, err = cli(command, root, *[200] * (command == "rm"), "--yes")

        assert (code, "in use by a running job" in err, "died" in err) == (2, True, False)
        (root / names.DOOMED).unlink()


def test_a_job_that_opened_a_run_while_it_was_cleared_up_owns_it_with_its_save(root):
    """It found the lock taken; from its first save on it has the lock, and is left alone."""
    with owned(LocalStorage(), str(root)):
        manager = CheckpointManager(root)
    manager.save(700, {"w": 1})
    manager.wait_until_finished()

    code, _, err = cli("rm", root, 100, "--yes")

    assert code == 2
    assert "running job" in err
    manager.save(800, {"w": 1})
    manager.close()
    assert steps_of(root)[-2:] == [700, 800]


class WithoutLocks:
    """The file system, as one that has no locks."""

    def __getattr__(self, name):
        return getattr(LocalStorage(), name)

    def hold(self, path, data=None):
        raise io.UnsupportedOperation(95, f"no locks: {path}")


def test_where_there_are_no_locks_it_refuses(root):
    """Unless the user says that no job writes there."""
    before = content(root)

    with (
        pytest.raises(SaveFailed, match=r"cannot be detected.* pass --no-job"),
        owned(WithoutLocks(), str(root)),
    ):
        pass
    assert content(root) == before
    with owned(WithoutLocks(), str(root), no_job=True) as run:
        run.delete([100])

    assert steps_of(root)[0] == 200


def test_a_run_that_may_not_be_written_is_an_error(root):
    """In words; nothing changes."""
    (root / names.LOCK).unlink()
    (root / names.LOCK).mkdir()

    code, _, err = cli("rm", root, 100, "--yes")

    assert code == 2
    assert err.startswith("error: ")
    assert len(steps_of(root)) == 6


# --- gc -------------------------------------------------------------------------------------------


def test_gc_says_why_steps_stay_and_deletes_the_others(root):
    """The same plan in words, as JSON, and in what it does."""
    cli("pin", root, 100)
    rules = ("--last", 2, "--every-steps", 400, "--best", 1, "--metric", "loss")

    dry, out, note = cli("gc", root, *rules, "--dry-run")
    _, planned = said_json("gc", root, *rules, "--dry-run")
    last = "Without -n, gc reads the newer steps that stay; if one is bad, all stay.\n"
    assert (note, out.endswith(last)) == ("", True)
    assert dry == 0
    rows = [re.split("  +", line) for line in out.splitlines()[1:7]]
    assert [(row[1], row[-1]) for row in rows] == [
        ("keep", "pinned, loss=1"),
        ("keep", "best 1 by loss, loss=0.1"),
        ("delete", "loss=1"),
        ("keep", "every 400 steps, loss=1"),
        ("keep", "last 2, loss=1"),
        ("keep", "newest, last 2, loss=1"),
    ]
    assert (planned["delete"], planned["deleted"], planned["dry_run"]) == ([300], [], True)
    assert planned["keep"][4] == {"step": 600, "why": ["newest", "last 2"]}
    assert len(steps_of(root)) == 6
    code, out, _ = cli("gc", root, *rules, "--yes")

    assert code == 0
    assert out.endswith(f"deleted 1 step of {root}: 300\n")
    assert steps_of(root) == [100, 200, 400, 500, 600]


def test_gc_asks_first(root):
    """Without a terminal it shows the plan and does nothing."""
    code, out, err = cli("gc", root, "--last", 1)

    assert code == 2
    assert "5 of 6 steps to delete" in out
    assert "Delete 5 steps" in err
    assert on_terminal("gc", root, "--last", "5", answer="y\n")[0] == 0
    assert len(steps_of(root)) == 5


def test_gc_with_nothing_to_delete_asks_nothing(root):
    """And is good."""
    assert cli("gc", root, "--last", 6)[0] == 0


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--metric", "loss"],
        ["--last", "1", "--metric", "loss"],
        ["--best", "1"],
        ["--last", "0"],
        ["--newer-than", "soon"],
        ["--last", "1", "--mode", "good"],
        ["--last", "1", "--mode", "max"],
    ],
    ids=" ".join,
)
def test_gc_without_a_rule_that_can_be_followed_is_refused(root, options):
    """Before anything is looked at."""
    code, out, _ = cli("gc", root, *options, "--yes")

    assert (code, out) == (2, "")
    assert len(steps_of(root)) == 6


def test_gc_by_a_metric_that_no_step_has_is_refused(root):
    """The error lists the metrics there are; nothing is deleted."""
    for options in (["--best", 3], ["--best", 3, "--last", 1]):
        code, out, err = cli("gc", root, *options, "--metric", "typo", "--yes")

        assert (code, out) == (2, "")
        assert "no step has a number 'typo' in its metrics, which are loss" in err
    assert len(steps_of(root)) == 6


@pytest.mark.parametrize(("age", "left"), [("1h", 6), ("2 w", 6), ("0.0001s", 1)])
def test_gc_keeps_what_is_new(root, age, left):
    """Ages have units."""
    assert cli("gc", root, "--newer-than", age, "--yes")[0] == 0

    assert len(steps_of(root)) == left


def test_gc_counts_and_deletes_whole_steps_of_jaxckpt_only(root, golden):
    """A damaged step is none of the last, and what others wrote stays."""
    (root / "600" / names.COMMIT_MARKER).unlink()
    found = overview(root)
    orbax = overview(golden("orbax-0.11.25-manager-default").path)

    planned = plan(found, jaxckpt.KeepPolicy(last=2), now_s=time.time())
    of_orbax = plan(orbax, jaxckpt.KeepPolicy(last=1), now_s=time.time())

    assert planned.delete == (100, 200, 300)
    assert planned.keep[600] == ("incomplete: see `jaxckpt scrub` and `heal`",)
    assert planned.keep[500] == ("newest", "last 2")
    assert of_orbax.delete == ()
    assert all("not written by jaxckpt" in why for why in of_orbax.keep.values())


def test_gc_deletes_nothing_while_a_step_that_stays_is_damaged(root):
    """It reads them first, unless told not to; older steps that stay do not matter."""
    flip(root / "600" / "state")
    cli("pin", root, 100)
    flip(root / "100" / "state")

    code, _, err = cli("gc", root, "--last", 1, "--yes")
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("  step ")]
    assert re.fullmatch(r"  step 600: state/d/[0-9a-f]{8}…, leaf w", line)
    assert err.startswith(f"error: {root}: nothing was deleted, because steps that would stay")
    assert f"\nSet damaged steps aside: jaxckpt scrub {root}\n" in err
    assert len(steps_of(root)) == 6

    assert cli("gc", root, "--last", 5, "--yes")[0] == 0  # nothing goes
    assert cli("gc", root, "--last", 3, "--no-verify", "--yes")[0] == 0
    assert steps_of(root) == [100, 400, 500, 600]
    assert cli("scrub", root, "--yes")[0] == 1
    assert cli("gc", root, "--last", 1, "--yes")[0] == 0
    assert steps_of(root) == [500]


def test_gc_leaves_a_step_that_is_being_read(root):
    """And says so; the next gc may delete it."""
    reader = run_at(LocalStorage(), str(root)).leases
    with reader.protect(300):
        code, found = said_json("gc", root, "--last", 1, "--yes")

    assert code == 0
    assert found["not_deleted"] == [{"step": 300, "why": "a reader holds it"}]
    assert steps_of(root) == [300, 600]


def test_gc_clears_up_what_an_interrupted_save_left(root):
    """As each job does that opens the run."""
    (root / f"700.orbax-checkpoint-tmp-jaxckpt-{TOKEN}").mkdir()

    cli("gc", root, "--last", 5, "--yes")

    assert overview(root).strays == ()
    assert len(steps_of(root)) == 5


def test_gc_finishes_a_deletion_that_was_interrupted(root):
    """Also if it has nothing to delete itself."""
    (root / "100").rename(root / f"100.orbax-checkpoint-tmp-deleting-{TOKEN}")
    (root / names.DOOMED).write_bytes(run.encode(run.Doomed(steps=["100"])))

    assert cli("gc", root, "--last", 9, "--yes")[0] == 0

    assert overview(root).strays == ()
    assert steps_of(root) == [200, 300, 400, 500, 600]


def test_only_a_command_that_lists_them_deletes_the_steps_of_an_interrupted_deletion(root):
    """The next job deletes them; but not a command that was asked for other things."""
    owner = run.decode(run.Owner, (root / names.OWNER).read_bytes(), file="owner")
    doomed = run.Doomed(steps=["100", "200"], owner=owner.token)
    (root / names.DOOMED).write_bytes(run.encode(doomed))
    shutil.copytree(root, root.parent / "other")
    flip(root / "300")

    for command in (["rm", root, 500, "--yes"], ["heal", root, root.parent / "other"]):
        code, _, err = cli(*command)
        assert code == 2
        assert f"jaxckpt rm {root} 100 200" in err
    assert cli("scrub", root, "--yes")[0] == 2
    assert steps_of(root) == [100, 200, 300, 400, 500, 600]
    out = cli("gc", root, "--last", 9, "--no-verify", "--yes")[1]

    assert "2 of 6 steps to delete" in out
    assert f"deleted 2 steps of {root}: 100, 200" in out
    assert steps_of(root) == [300, 400, 500, 600]


def test_rm_of_an_item_goes_on_where_it_was_interrupted(root):
    """The steps that have lost the item already are named."""
    with CheckpointManager(root) as manager:
        for step in (700, 800):
            manager.save(step, {"w": 1}, items={"ema": {"w": 2}})
    assert cli("rm", root, 700, "--item", "ema", "--yes")[0] == 0

    code, out, err = cli("rm", root, 700, 800, "--item", "ema", "--yes")

    assert code == 0
    assert out.endswith(f"deleted item 'ema' of 1 step of {root}: 800\n")
    assert "700 has no item 'ema'" in err
    assert cli("rm", root, 700, 800, "--item", "ema", "--yes")[0] == 2


def test_what_is_left_of_a_deleted_step_is_told(root):
    """A run in a step keeps that; so nothing is called done that is not."""
    with CheckpointManager(root.parent / "inside") as manager:
        manager.save(1, {"w": 1})
    (root.parent / "inside").rename(root / "100" / "inside")

    code, out, err = cli("gc", root, "--last", 5, "--yes")

    assert code == 1
    assert f"{root}/100 is not deleted: it contains {root}/100/inside" in err
    assert "deleted" not in out


# --- scrub ----------------------------------------------------------------------------------------


def test_scrub_of_a_good_run_changes_nothing(root):
    """Exit code 0; it asks nothing."""
    before = content(root)

    code, out, _ = cli("scrub", root)

    assert code == 0
    assert out.count("good") == 6
    assert content(root) == before


def test_scrub_sets_damaged_steps_aside(root):
    """With a yes; exit code 1 says that there was damage."""
    flip(root / "300" / "state")
    (root / "600" / names.COMMIT_MARKER).unlink()
    before = content(root)

    dry, out, _ = cli("scrub", root, "--dry-run")
    unanswered, _, err = cli("scrub", root)
    assert (dry, unanswered) == (1, 2)
    assert out.count("BAD") == 2
    assert "Set aside 2 steps" in err
    assert content(root) == before
    code, found = said_json("scrub", root, "--yes")

    assert code == 1
    assert found["set_aside"] == [300, 600]
    assert [step["step"] for step in found["steps"] if not step["ok"]] == [300, 600]
    assert steps_of(root) == [100, 200, 400, 500]
    assert cli("scrub", root)[0] == 0


def test_scrub_says_what_works_once_a_step_is_set_aside(root):
    """Such a step cannot be verified or mended; a copy of it can be uploaded."""
    copy = root.parent / "copy"
    shutil.copytree(root, copy)
    flip(root / "300" / "state")

    code, out, _ = cli("scrub", root, "--yes")
    program, *words = shlex.split(out.splitlines()[-1].partition("place: ")[2])
    mended = cli(*(copy if word == "OTHER" else word for word in words))

    assert (code, program, words[0]) == (1, "jaxckpt", "upload")
    assert "jaxckpt verify" not in out
    assert "jaxckpt heal" not in out
    assert mended[0] == 0
    assert 300 in steps_of(root)


def test_scrub_leaves_a_run_in_which_no_step_is_whole(root):
    """It must not look like a new one."""
    for step in steps_of(root):
        flip(root / str(step) / "state")
    before = content(root)

    code, _, err = cli("scrub", root, "--yes")
    _, advice, _ = cli("scrub", root, "--dry-run")

    assert code == 1
    assert "jaxckpt heal" in advice
    assert "aside" not in advice
    assert "No step is intact" in err
    assert content(root) == before


def test_a_checkpoint_is_no_run(root):
    """The error says so, and nothing changes."""
    before = content(root)

    for argv in (["scrub"], ["gc", "--last", "1"], ["rm", "1"]):
        code, _, err = cli(argv[0], root / "100", *argv[1:], "--yes")

        assert code == 2
        assert "is a checkpoint, not a run" in err
    assert content(root) == before


def test_json_is_all_that_is_on_stdout(root):
    """Also of commands that ask and warn."""
    flip(root / "300" / "state")

    for argv in (["scrub"], ["gc", "--last", "3"], ["rm", "500"]):
        _, out, _ = cli(argv[0], root, *argv[1:], "--yes", "--json")

        assert json.loads(out)["path"] == str(root)
