"""A run's root: names of steps, the right to write, and deletions while others read."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import OrderedDict
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxckpt
from jaxckpt import CheckpointNotFound, CorruptCheckpoint, SaveFailed
from jaxckpt._progress.meter import Meter
from jaxckpt._run import one_step
from jaxckpt._run.deletion import Deletion, check_folder
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import CHANGE_S, LEASE_S, Leases
from jaxckpt._run.leftovers import remove_unfinished
from jaxckpt._run.opening import Opening
from jaxckpt._run.owner import Ownership
from jaxckpt._save.job import SaveJob, SaveRequest
from jaxckpt.format import jsontext, names, run, step, typed_json
from jaxckpt.format.run import Doomed, Lease, Owner, StepNames
from jaxckpt.format.step import Record
from jaxckpt.multihost import Group, Single
from jaxckpt.storage import LocalStorage, MemoryStorage, listing
from jaxckpt.testing import CrashingStorage, FailingStorage, SimulatedCrash, WatchedStorage
from jaxckpt.testing._storage import MUTATING_VERBS
from tests.strategies import host_arrays
from tests.waiting import wait_until

LAWS = settings(deadline=None, derandomize=True, max_examples=100)
TOKEN = "0123456789abcdef"
VERBS = MUTATING_VERBS | {"read", "kind", "size", "entries", "hold"}

# --- format/run: names and small files -----------------------------------------------------------

numbers = st.integers(0, 10**18 - 1) | st.integers(0, 2000)
prefixes = st.sampled_from([None, "", "ckpt", "a_b", "_", "7", "step_1", "checkpoint.", "é\n"])
forms = st.builds(StepNames, prefix=prefixes, digits=st.none() | st.integers(1, 18))


@LAWS
@given(forms, numbers)
def test_a_step_is_found_by_its_name(form, number):
    """With every prefix and padding, and numbers that outgrow it."""
    assert form.step(form.of(number)) == number


@LAWS
@given(forms, st.text(st.sampled_from("0123_ackpt"), max_size=8))
@example(StepNames(digits=3), "0012")
@example(StepNames(prefix=""), "12")
@example(StepNames(), "٣")
@example(StepNames(), "9" * 19)
def test_a_name_that_is_not_given_to_a_step_is_none(form, name):
    """A step has one name."""
    number = form.step(name)

    assert number is None or form.of(number) == name


@LAWS
@given(forms, st.lists(numbers, min_size=1, max_size=8))
def test_how_steps_are_called_is_seen_from_them(form, steps):
    """All steps of a run are found, and none under another number."""
    entries = [form.of(number) for number in steps]

    [guess] = run.guess_names(entries, lambda _: True)

    assert [guess.step(entry) for entry in entries] == steps


entries_of_a_root = st.one_of(
    st.from_regex(r"[a-z_]{0,3}[0-9]{1,5}", fullmatch=True),
    st.sampled_from(["0", "00", "0001", "_12", "ckpt_7", "7.orbax-checkpoint-tmp-1", "metadata"]),
)


@LAWS
@given(st.lists(entries_of_a_root, min_size=1, max_size=6))
@example(["100", "0001"])
@example(["0099", "012"])
@example(["1", "2", "00"])
def test_a_stray_entry_hides_no_step(entries):
    """Whichever entry is the only step, it is found by the guess; strays do not count."""
    for only in filter(run.is_like_step, entries):
        [guess] = run.guess_names(entries, lambda entry, only=only: entry == only)
        assert guess.step(only) is not None


@LAWS
@given(st.lists(entries_of_a_root, max_size=6, unique=True))
def test_a_guess_is_the_one_that_finds_most_steps(entries):
    """Every other scheme that a step shows finds fewer; if none does, the guess is several."""
    like = [entry for entry in entries if run.is_like_step(entry)]
    finds = {
        shown: sum(shown.step(entry) is not None for entry in like)
        for [shown] in (run.guess_names([entry], lambda _: True) for entry in like)
    }

    guesses = run.guess_names(entries, lambda _: True)

    most = [naming for naming, count in finds.items() if count == max(finds.values())]
    assert guesses == most if len(most) < 2 else {*guesses} == {*finds}


def test_the_names_of_alike_steps_are_guessed_from_one():
    """Asking whether an entry is a step may be a request; strays are asked about too."""
    asked = []

    for entries in (
        map(str, range(1000)),
        (f"{n:03}" for n in range(1000)),
        ["00", "1", "2", "10"],
    ):
        assert len(run.guess_names(entries, lambda e: asked.append(e) or e != "00")) == 1

    assert asked == ["999", "999", "099", "10", "00"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prefix": 5}, TypeError),
        ({"prefix": "a/b"}, ValueError),
        ({"prefix": "a\\b"}, ValueError),
        ({"prefix": "a\0"}, ValueError),
        ({"prefix": "a.orbax-checkpoint-tmp"}, ValueError),
        ({"prefix": "a.jaxckpt-bad-"}, ValueError),
        ({"digits": 19}, ValueError),
    ],
)
def test_names_that_would_not_be_found_are_refused(fields, error):
    """Before anything is saved under them."""
    with pytest.raises(error, match="step"):
        StepNames(**fields)


texts = st.text(st.characters(codec="utf-8"), max_size=8)
maybe_texts = st.none() | texts
ints = st.integers(-(2**63), 2**63)
step_names = st.builds("{}{}".format, st.sampled_from(["", "ckpt_"]), st.integers(0, 2**53))


@LAWS
@given(
    st.builds(Owner, token=texts, host=texts, pid=ints, opened_ns=ints),
    st.builds(Lease, step=texts, expires_ns=ints),
    st.builds(Doomed, steps=st.lists(step_names, max_size=4), owner=texts, move_to=maybe_texts),
)
def test_small_files_read_back(owner, lease, doomed):
    """Owner, lease and doomed."""
    assert run.decode(run.Owner, run.encode(owner), file="f") == owner
    assert run.decode(run.Lease, run.encode(lease), file="f") == lease
    assert run.decode(run.Doomed, run.encode(doomed), file="f") == doomed


def test_no_name_in_a_record_of_deletions_leads_out_of_the_run():
    """What it names is deleted."""
    doomed = Doomed(steps=["../victim", "..", "run/7", "7"], owner="", move_to=None)

    assert run.decode(run.Doomed, run.encode(doomed), file="f").steps == ["7"]


json_values = st.recursive(
    st.none() | st.booleans() | ints | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(["token", "host", "pid", "opened_ns", "step", "steps", "expires_ns"])
hostile = st.one_of(
    st.binary(max_size=20),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(fields, json_values).map(lambda value: json.dumps(value).encode()),
)


@settings(LAWS, max_examples=300)
@given(hostile)
@example(b"[" * 100_000)
@example(b'{"steps": [1]}')
@example(b'{"step": "1", "expires_ns": true}')
@example(b'{"step": "1", "expires_ns": 1e999}')
@example(b"9" * 5000)
def test_small_files_that_are_no_such_files_are_corrupt(data):
    """CorruptCheckpoint that names the file, or a value of the right types."""
    for kind in (run.Owner, run.Lease, run.Doomed, run.Identity):
        assert file_named(partial(run.decode, kind), data) in (None, "the-file")


def file_named(decode, value):
    """The file that CorruptCheckpoint names; None if nothing is raised."""
    try:
        decode(value, file="the-file")
    except CorruptCheckpoint as error:
        return error.file
    return None


# --- format/values: states of data iterators -----------------------------------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(codec="utf-8") | st.sampled_from("\\ud$"), max_size=8),
    st.binary(max_size=8),
)
keys = st.one_of(
    texts,
    st.sampled_from(["$tuple", "$dict", "$bytes", "$int", "$array", "$scalar"]),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), texts),
    st.binary(max_size=3),
)
states = st.recursive(
    scalars | host_arrays(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a, b):
    """Equal in type and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    return a == b


@settings(LAWS, max_examples=500)
@given(states)
@example(-(10**4300 - 1))
@example([math.nan, "\\ud", "a\\uDead"])
@example({"$int": "5"})
@example({"$int": "5", "a": 1})
@example({1: 1, "1": 2})
@example(np.zeros((2, 0, 2**40), np.int8))
@example({np.int64(3): np.float32(1), np.float64(0.5): np.bool_(True)})
@example([ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3), np.array(7)])
def test_a_state_reads_back(state):
    """Every Python value and those of numpy, through the bytes of JSON, to type and every bit."""
    data = jsontext.dumps(typed_json.encode(state), allow_nan=True)

    assert same(typed_json.decode(jsontext.loads(data, file="f"), file="f"), state)


@LAWS
@given(states)
def test_json_is_what_json_gives_back(state):
    """`is_json` says so of nothing that would change."""
    if typed_json.is_json(state):
        assert same(jsontext.loads(jsontext.dumps(state, allow_nan=True), file="f"), state)


@pytest.mark.parametrize(
    ("state", "read"),
    [
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")),
        (np.arange(6).reshape(2, 3).T, np.ascontiguousarray(np.arange(6).reshape(2, 3).T)),
        (bytearray(b"1"), b"1"),
        (OrderedDict(a=1), {"a": 1}),
    ],
)
def test_what_a_state_may_also_hold(state, read):
    """Arrays lose their byte order; dicts and bytes their class."""
    assert same(typed_json.decode(typed_json.encode(state), file="f"), read)


@pytest.mark.parametrize(
    "state",
    [object(), {1, 2}, 1j, np.array(["a"]), np.array([None]), np.datetime64("2020"), range(3)],
    ids=["object", "set", "complex", "texts", "objects", "date", "range"],
)
def test_what_a_state_may_not_hold(state):
    """TypeError or ValueError, when it is saved."""
    with pytest.raises((TypeError, ValueError)):
        typed_json.encode([state])


@settings(LAWS, max_examples=500)
@given(
    st.recursive(
        json_values,
        lambda inner: (
            st.dictionaries(
                st.sampled_from(["$tuple", "$dict", "$bytes", "$int", "$array", "$scalar"]),
                inner,
                max_size=1,
            )
            | st.tuples(
                st.sampled_from(["int8", "bool", "bfloat16", "int4", "object", "O", "void8"]),
                st.lists(st.integers(-1, 2**62), max_size=3),
                st.sampled_from(["", "AA==", "AAAA", "*"]),
            ).map(lambda array: {"$array": list(array)})
        ),
    )
)
@example({"$dict": [[[], 1]]})
@example({"$dict": [[{"$array": ["int8", [], "AA=="]}, 1]]})
@example({"$dict": [1]})
@example({"$int": "9" * 5000})
@example({"$int": 5})
@example({"$bytes": "é"})
@example({"$bytes": None})
@example({"$array": ["int8", [2**61, 2**61, 0], ""]})
@example({"$array": ["int8", [0] * 40, ""]})
@example({"$array": ["float32", [1], "AA=="]})
@example({"$array": [["int8"], [1], "AA=="]})
@example({"$scalar": ["float32", [], "AA=="]})
@example({"$dict": [[{"$scalar": ["int8", [1], "AA=="]}, 1]]})
def test_a_state_that_nobody_wrote_is_corrupt(value):
    """CorruptCheckpoint that names the file, or some value."""
    assert file_named(typed_json.decode, value) in (None, "the-file")


# --- which steps there are -----------------------------------------------------------------------


class Run:
    """A run as one job has it, which owns it if no other job does."""

    def __init__(self, storage, root, **fields):
        self.index = StepIndex(storage, root, **fields)
        self.leases = Leases(self.index)
        self.owner = Ownership(self.leases)
        self.owner.token = TOKEN
        self.deletion = Deletion(self.leases, self.owner)


class World:
    """A root in a storage; `run()` is what another job, or this one after a restart, sees of it."""

    def __init__(self, storage, root):
        self.storage, self.root = storage, root
        storage.make_dir(root)

    def run(self, storage=None, **fields):
        return Run(storage or self.storage, self.root, **fields)

    def write(self, path, data=b"1"):
        self.storage.make_dir(f"{self.root}/{path}".rpartition("/")[0])
        self.storage.write(f"{self.root}/{path}", data)

    def add(self, *entries, saved_as=""):
        """Makes directories that look like committed steps."""
        for entry in entries:
            facts = Record(writer="jaxckpt", token=TOKEN, files={}, lineage={}, name=saved_as)
            record = step.encode_record(facts)
            self.write(f"{entry}/{names.RECORD}", record)
            self.write(f"{entry}/state/data")
            self.write(f"{entry}/{names.COMMIT_MARKER}")

    def entries(self):
        """All that is there, but for the files of ours that stay."""
        try:
            found = self.storage.entries(self.root)
        except FileNotFoundError:
            found = []
        return {
            name for name in found if name not in (names.RUN, names.OWNER, names.LOCK, names.LEDGER)
        }

    def is_whole(self, entry):
        return all(
            self.storage.kind(f"{self.root}/{entry}/{file}") == "file"
            for file in (names.RECORD, names.COMMIT_MARKER, "state/data")
        )


@pytest.fixture
def disk(ram_path):
    return World(LocalStorage(), f"{ram_path}/run")


@pytest.fixture(params=["disk", "mounted bucket", "memory"])
def world(request, ram_path):
    """A file system, one without renames, and a store that has no empty directories either."""
    if request.param != "memory":
        return World(LocalStorage(atomic_rename=request.param == "disk"), f"{ram_path}/run")
    return World(MemoryStorage(), f"/{uuid.uuid4()}")


def test_a_step_that_is_deleted_while_it_is_looked_at_is_no_problem(world):
    world.add("1", "2", "3")

    def before(verb, path):
        if path.startswith(f"{world.root}/2"):
            world.storage.delete(f"{world.root}/2")

    reader = world.run(WatchedStorage(world.storage, before)).index

    assert reader.steps() == [1, 3]
    assert reader.problems == []


def test_a_guest_sets_no_step_aside_that_is_mended_while_it_takes_the_run_over(world):
    """By the job that owned it until then."""
    first = world.run()
    first.owner.open()
    world.add("4", "5")
    files = {"lost": step.FileFacts(size=1)}
    bad = Record(writer="jaxckpt", token=TOKEN, files=files, lineage={}, name="")
    world.write(f"5/{names.RECORD}", step.encode_record(bad))
    taking = []

    def before(verb, path):
        if taking and verb == "write" and path.endswith(names.OWNER):
            world.write("5/lost")
            world.write("5/metrics/metrics", b"{}")

    second = world.run(WatchedStorage(world.storage, before))
    second.owner.open()
    second.deletion.set_aside(5, "damaged", file=f"{world.root}/5/{names.RECORD}")
    taking.append(True)

    second.owner.join(5)

    assert world.run().index.steps() == [4, 5]


@pytest.mark.parametrize("mended", [False, True])
def test_a_guest_saves_a_damaged_step_anew(world, mended):
    """The job that holds the lock stands still; unless it has mended the step meanwhile."""
    first, second = world.run(), world.run()
    first.owner.open()
    world.add("4", "5")
    files = {"lost": step.FileFacts(size=1)}
    bad = Record(writer="jaxckpt", token=TOKEN, files=files, lineage={}, name="")
    world.write(f"5/{names.RECORD}", step.encode_record(bad))
    second.owner.open()
    assert second.owner.is_guest
    second.deletion.set_aside(5, "damaged", file=f"{world.root}/5/{names.RECORD}")
    assert second.index.steps() == [4, 5]
    if mended:
        world.write("5/lost")
        world.write("5/metrics/metrics", b"{}")
        with pytest.raises(SaveFailed, match="which has saved step 5"):
            second.owner.join(5)
        assert first.owner.check()
        return

    second.owner.join(5)

    assert world.run().index.steps() == [4]
    with pytest.raises(SaveFailed, match="opened for writing by another job"):
        first.owner.check()


def test_a_lease_lasts_as_long_as_its_reader(world, limits):
    """It is renewed; once the reader is done, it is gone."""
    world.add("1")
    reader = world.run()
    limits("jaxckpt._run.leases", LEASE_S=0.4)
    with reader.leases.protect(1):
        [file] = [name for name in reader.index.entries() if names.is_lease(name)]

        def expires_ns():
            data = world.storage.read(f"{world.root}/{file}", max_bytes=1000)
            return run.decode(run.Lease, data, file=file).expires_ns

        first_ns = expires_ns()
        wait_until(lambda: expires_ns() > first_ns)
    assert not any(map(names.is_lease, reader.index.entries()))


def test_a_step_is_leased_while_an_item_of_it_is_deleted(tmp_path):
    """No later job may delete it and save its number anew while this one stands still."""
    seen = []

    def look(verb, path):
        if verb == "delete" and path.endswith("/1/more"):
            seen.append(manager._directory.leases.leased(manager._index.entries()))

    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1}, items={"more": {"b": 2}}).result()
        manager._index.storage = WatchedStorage(LocalStorage(), look)
        manager.delete(1, item="more")
        assert not any(map(names.is_lease, manager._index.entries()))
    assert seen == [{"1"}]


@pytest.mark.parametrize(
    ("entries", "naming", "steps", "next_name"),
    [
        ([], None, [], "7"),
        (["1", "12", "3"], None, [1, 3, 12], "7"),
        (["0"], None, [0], "7"),
        (["ckpt_1", "ckpt_10"], None, [1, 10], "ckpt_7"),
        (["_12"], None, [12], "_7"),
        (["a_b_3"], None, [3], "a_b_7"),
        (["0005", "0010"], None, [5, 10], "0007"),
        (["ckpt_0005"], None, [5], "ckpt_0007"),
        (["099", "100", "1000"], None, [99, 100, 1000], "007"),
        (["100"], None, [100], "7"),
        (["1", "2", "ckpt_2"], None, [1, 2], "7"),
        (["1", "ckpt_2", "ckpt_3"], None, [2, 3], "ckpt_7"),
        (["0005", "6", "7"], None, [6, 7], "7"),
        (["5", "0006", "0007"], None, [6, 7], "0007"),
        (["20240131_2359_5", "20240131_2359_6"], None, [5, 6], "20240131_2359_7"),
        (["1", "ckpt_2"], StepNames(prefix="ckpt"), [2], "ckpt_7"),
        (["0005", "6"], StepNames(digits=4), [5], "0007"),
        (["5"], StepNames(prefix="ckpt", digits=3), [], "ckpt_007"),
        (["20240131235959123456"], None, [], "7"),  # no step number: it is too long
    ],
)
def test_steps_of_every_name(world, entries, naming, steps, next_name):
    """They are found, and the next one is called as they are."""
    world.add(*entries)

    found = world.run(naming=naming)

    assert found.index.steps() == steps
    assert found.index.newest() == (steps[-1] if steps else None)
    assert found.index.path(7) == f"{world.root}/{next_name}"


@pytest.mark.parametrize(
    ("entries", "steps"),
    [(["1", "ckpt_2"], [1]), (["0005", "6"], [6]), (["0005", "ckpt_7", "8"], [8])],
)
def test_in_doubt_steps_have_plain_names(world, entries, steps):
    """Steps that were saved under names of several schemes are reported, and stop no job."""
    world.add(*entries)
    run = world.run()

    run.owner.open()

    assert run.index.steps() == steps
    assert run.index.path(7) == f"{world.root}/7"
    assert any("naming schemes" in problem for problem in run.index.problems)


@pytest.mark.parametrize(
    ("entries", "newest"),
    [
        (["ckpt_2", "other_9"], 9),
        (["20240131_2359_5", "20240131_2359_6", "20240201_1000_7"], 7),
    ],
)
def test_without_a_plain_name_a_writer_refuses_and_a_reader_follows_the_newest(
    world, entries, newest
):
    """With plain names, the run would look new to a writer; naming one scheme opens it."""
    world.add(*entries)
    before = world.storage.entries(world.root)

    with pytest.raises(ValueError, match=r"several naming schemes.*step_prefix"):
        world.run().owner.open()
    reader = world.run().index

    assert reader.newest() == newest
    assert any("naming schemes" in problem for problem in reader.problems)
    assert world.storage.entries(world.root) == before
    assert len(world.run(naming=StepNames(prefix="ckpt")).index.steps()) == ("ckpt_2" in entries)


@pytest.mark.parametrize("naming", [StepNames(), StepNames(prefix="step", digits=4)], ids=str)
@pytest.mark.parametrize("saved", [[100], [90, 100]], ids=str)
def test_a_copy_of_a_step_under_another_name_changes_no_name(world, naming, saved):
    """After `cp -r run/100 run/best_100`, jobs and readers find the steps that the run saved."""
    for number in saved:
        world.add(naming.of(number), saved_as=naming.of(number))
        world.add(f"best_{number}", saved_as=naming.of(number))
    world.add("best_80", saved_as=naming.of(80))
    writer, reader = world.run(), world.run()

    writer.owner.open()

    assert writer.index.steps() == reader.index.steps() == saved
    assert writer.index.path(110) == f"{world.root}/{naming.of(110)}"
    assert not any("naming schemes" in problem for problem in reader.index.problems)


@pytest.mark.parametrize("stray", ["00", "00/notes", "007_1/notes"])
def test_a_stray_directory_changes_no_name(world, stray):
    """Only directories that are steps tell how steps are named."""
    world.add("5", "9", "10", "12")
    world.write(f"{stray}/file")

    found = world.run()

    assert found.index.steps() == [5, 9, 10, 12]
    assert found.index.path(7) == f"{world.root}/7"


def test_what_is_no_committed_step_is_not_listed(disk):
    """Files, links, empty and foreign directories, saves under way, damaged and doomed ones."""
    disk.add("1", "2", "5")
    disk.storage.delete(f"{disk.root}/2/{names.COMMIT_MARKER}")
    disk.write("3")
    disk.storage.make_dir(f"{disk.root}/4")
    disk.write("6/notes")
    disk.add("7.orbax-checkpoint-tmp-jaxckpt-" + TOKEN, "8.jaxckpt-bad-0123", "8.jaxckpt-committed")
    disk.storage.make_dir(f"{disk.root}/_jaxckpt.lease-x")

    found = disk.run()

    assert found.index.steps() == [1, 5]
    assert [*found.index.listing().steps] == [1, 2, 3, 4, 5, 6]
    said = "\n".join(found.index.problems)
    assert all(
        f"{disk.root}/{entry} is not a committed step" in said for entry in ("2", "3", "4", "6")
    )


def test_steps_of_orbax_are_listed(world):
    """Each of its marks will do; a directory may hold nothing but an item, but not but a marker."""
    for number, mark in enumerate(
        ["_CHECKPOINT_METADATA", "commit_success.txt", "_METADATA", "checkpoint", "state/_METADATA"]
    ):
        world.write(f"{number}/{mark}", b"{}")
    world.write("1/w/.zarray", b"{}")
    world.write("5/commit_success.txt", b"")

    assert world.run().index.steps() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "files",
    [
        ["10/_METADATA", "20/_METADATA"],
        ["checkpoint_10/checkpoint", "checkpoint_20/checkpoint"],
        ["checkpoint_10", "checkpoint_20"],
        ["best/_METADATA", "best/_CHECKPOINT_METADATA", "last/_METADATA"],
        ["10/_jaxckpt.json", "10/commit_success.txt", "10/state/manifest.ocdbt", "best/_METADATA"],
        ["checkpoint/10/_METADATA"],
        ["logs/metrics", "logs/metadata"],
    ],
)
def test_a_run_inside_a_run_is_not_a_step(world, files):
    """Nor are a directory of checkpoints and one of JSON; asked for it, the error has its names."""
    world.add("exp_7")
    for file in files:
        world.write(f"exp_2603/{file}", b"{}")

    found = world.run()

    assert found.index.steps() == [7]
    inside = sorted({file.partition("/")[0] for file in files})
    says = f"no committed step 2603. {world.root}/exp_2603 is not one: it contains {inside[0]}"
    with pytest.raises(CheckpointNotFound, match=says):
        found.index.check_step(2603)


def test_the_error_about_remains_of_a_save_says_who_removes_them(world):
    """Where a save has a directory of its own, it is no save that left them."""
    world.write(f"7/{names.WRITER}")
    renames = world.storage.atomic_rename
    says = "incomplete" if renames else "the next one or `gc` removes it"
    with pytest.raises(CheckpointNotFound, match=says):
        world.run().index.check_step(7)


def test_a_root_that_is_not_there_has_no_steps(disk):
    """Nor has one that is a file; asking makes nothing."""
    for root in ("nothing", "file"):
        disk.write("file")
        found = Run(disk.storage, f"{disk.root}/{root}")

        assert (found.index.steps(), found.index.newest()) == ([], None)
        assert found.index.listing().steps == {}
        assert found.index.path(3) == f"{disk.root}/{root}/3"
        assert disk.entries() == {"file"}


def test_listing_looks_into_a_directory_once(disk):
    """Committed steps stay committed; other entries are checked again."""
    disk.add("1", "2")
    disk.storage.make_dir(f"{disk.root}/3")
    counting = FailingStorage(disk.storage, 10**9, OSError(errno.EIO, "no"), reads=True)
    found = disk.run(counting)
    assert found.index.steps() == [1, 2]
    before = len(counting.events)
    disk.add("3")

    assert found.index.steps() == [1, 2, 3]

    assert all(f"{disk.root}/{number}" not in counting.events[before:] for number in ("1/", "2/"))
    assert [event for event in counting.events[before:] if event.endswith(("/1", "/2"))] == []


def test_a_step_that_is_not_there_is_not_found(world):
    """The error says which are."""
    world.add(*map(str, range(20)))

    with pytest.raises(CheckpointNotFound, match=r"no committed step 77.* newest of 20: 12, 13"):
        world.run().index.check_step(77)


@pytest.mark.parametrize("kind", ["removed", "cut"])
def test_a_step_whose_files_are_not_all_there_is_not_whole(ram_path, caplog, kind):
    """Any of its files may be missing; data is not read. The problem is reported once."""
    root = str(ram_path / "run")
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, {"w": np.arange(70_000, dtype=np.float32), "s": "text"}, metrics={"x": 1})
    storage = LocalStorage()
    found = Run(storage, root)
    record = step.decode_record(
        storage.read(f"{root}/1/{names.RECORD}", max_bytes=1 << 20), file="f"
    )
    assert found.index.is_whole(1)

    for name in [*record.files, *([names.RECORD] if kind == "cut" else [])]:
        file = f"{root}/1/{name}"
        data = storage.read(file, max_bytes=1 << 30)
        storage.delete(file)
        if kind == "cut":
            storage.write(file, data[: len(data) // 2])
        again = Run(storage, root)
        caplog.clear()
        wanted = kind == "cut" and not data  # an empty file cannot be cut
        assert (again.index.is_whole(1), again.index.is_whole(1)) == (wanted, wanted), name
        assert len(caplog.records) == len(again.index.problems) == (not wanted)
        storage.write(file, data)

    assert Run(storage, root).index.is_whole(1)
    storage.delete(f"{root}/1/{names.COMMIT_MARKER}")
    assert not Run(storage, root).index.is_whole(1)


# --- who may write -------------------------------------------------------------------------------


def test_a_run_that_is_opened_again_belongs_to_the_new_job(world):
    """The old job can no longer commit, and its error names the new one."""
    first, second = world.run(), world.run()
    first.owner.open()
    first.owner.fence()
    first.owner.lock.release()

    second.owner.open()

    second.owner.fence()
    with pytest.raises(SaveFailed, match="another job"):
        first.owner.fence()
    assert first.owner.token != second.owner.token


def test_a_run_of_a_job_that_lives_is_not_taken_by_opening_it(world):
    """The first save takes it; until then nothing of the other is touched."""
    first, second = world.run(), world.run()
    first.owner.open()
    world.write("5.orbax-checkpoint-tmp-jaxckpt-" + TOKEN + "/f")

    second.owner.open()

    assert (second.owner.token, len(second.index.problems)) == ("", 1)
    assert "running job" in second.index.problems[0]
    first.owner.fence()
    assert world.entries() == {"5.orbax-checkpoint-tmp-jaxckpt-" + TOKEN}

    second.owner.fence()

    with pytest.raises(SaveFailed):
        first.owner.fence()
    second.owner.fence()
    assert world.entries() == set()


def test_a_job_that_takes_the_run_over_keeps_the_starts_that_wrote_to_the_disk(world):
    """Also after a first save of its own began, beside the other job."""
    first, second = world.run(), world.run()
    first.owner.open()
    first.owner.first = "a"
    first.owner.fence()
    second.owner.open()

    second.owner.first = "b"
    second.owner.fence()

    assert second.index.owner().first == "a b"


def test_a_job_that_was_opened_for_writing_ends_its_lock(world):
    """After `close`, also twice, the next one owns the run at once."""
    first = world.run()
    first.owner.open()
    first.owner.lock.release()
    first.owner.lock.release()

    second = world.run()
    second.owner.open()

    assert second.owner.token
    assert second.index.problems == []


@pytest.mark.parametrize("data", [b"", b"{", b'{"token": 5}', b"\xff" * 99])
def test_a_damaged_owner_is_written_anew(world, data):
    """By the next job that opens the run."""
    world.write(names.OWNER, data)

    found = world.run()
    found.owner.open()

    found.owner.fence()


def test_a_crash_while_a_run_is_taken_leaves_one_owner(disk):
    """Or none that can commit; the next job needs no help."""
    for after in itertools.count():
        first = disk.run()
        first.owner.open()
        first.owner.lock.release()
        disk.write("5.orbax-checkpoint-tmp-jaxckpt-" + TOKEN + "/f")
        storage = CrashingStorage(disk.storage, after)
        died = False
        try:
            disk.run(storage).owner.open()
        except SimulatedCrash:
            died = True

        again = disk.run()
        again.owner.open()
        again.owner.fence()
        again.owner.lock.release()
        assert disk.entries() == set()
        if not died:
            break
    assert after >= 3


@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_a_root_that_cannot_be_one(disk, kind):
    """A file, and a checkpoint itself: with the likely root."""
    if kind == "file":
        disk.write("root")
        with pytest.raises(NotADirectoryError, match="is a file"):
            Run(disk.storage, f"{disk.root}/root").owner.open()
    else:
        disk.add("5")
        with pytest.raises(ValueError, match=f"{disk.root}\\?"):
            Run(disk.storage, f"{disk.root}/5").owner.open()


def test_a_root_may_be_a_link(disk, ram_path):
    """To a directory."""
    (ram_path / "link").symlink_to(disk.root)
    disk.add("3")

    found = Run(disk.storage, f"{ram_path}/link")
    found.owner.open()

    assert found.index.steps() == [3]


def test_a_root_that_cannot_be_written_says_how_to_read_it(disk):
    """PermissionError that names mode="r", whether the root is there or not."""
    denied = OSError(errno.EACCES, "Permission denied")
    disk.storage.make_dir(f"{disk.root}/there")

    # Its making; where it is there, the first listing, its lock, its owner.
    for root, at in (("new", 0), ("there", 0), ("there", 1), ("there", 2)):
        storage = FailingStorage(disk.storage, at, denied, once=False, reads=root == "there")
        with pytest.raises(PermissionError, match="mode='r'"):
            Run(storage, f"{disk.root}/{root}").owner.open()


# --- what is cleared up --------------------------------------------------------------------------

OURS = {
    f"5.orbax-checkpoint-tmp-jaxckpt-{TOKEN}",
    f"ckpt_5.orbax-checkpoint-tmp-jaxckpt-{TOKEN}",
    f"4.orbax-checkpoint-tmp-deleting-{TOKEN}",
}
FOREIGN = {
    "7.orbax-checkpoint-tmp",
    "7.orbax-checkpoint-tmp-1700000000000000",
    f"7.orbax-checkpoint-tmp-jaxckpt-{TOKEN[:-1]}",
    "8.orbax-checkpoint-tmp-deleting-x",
    "9.jaxckpt-bad-0123",
    "notes.jaxckpt-committed",
    "notes",
    "metadata",
    "3",
}


def test_opening_clears_up_what_earlier_jobs_left(disk):
    """Saves that died, half-deleted steps, an interrupted replacement, leases that expired."""
    for entry in OURS | FOREIGN:
        disk.write(f"{entry}/f")
    disk.add("6.jaxckpt-committed", "1")
    disk.write(names.DOOMED, run.encode(Doomed(steps=["1"])))
    disk.write(names.lease("old"), run.encode(Lease(step="1", expires_ns=1)))
    disk.write(names.lease("bad"), b"{")
    there = run.encode(Lease(step="1", expires_ns=time.time_ns() + 10**12))
    disk.write(names.lease("new"), there)

    found = disk.run()
    found.owner.open()

    assert disk.entries() == {*FOREIGN, "1", "6", names.lease("new")}
    assert found.index.steps() == [1, 6]
    assert all(disk.storage.read(f"{disk.root}/{e}/f", max_bytes=9) == b"1" for e in FOREIGN)


def test_opening_removes_what_the_last_commit_left(disk):
    """A job died, or the power failed, between the commit and the removal of its file."""
    disk.add("1", "2")
    disk.write(f"2/{names.WRITER}")

    opened(disk)

    assert names.WRITER not in disk.storage.entries(f"{disk.root}/2")
    assert disk.run().index.steps() == [1, 2]


def test_opening_leaves_the_file_of_a_writer_that_lives(disk):
    """It is about to remove the file itself; in a bucket it looks once more whether it is there."""
    disk.add("1")
    disk.write(f"1/{names.WRITER}")
    held = disk.storage.hold(f"{disk.root}/1/{names.WRITER}")
    assert held is not None

    opened(disk)

    assert names.WRITER in disk.storage.entries(f"{disk.root}/1")
    held.release()


def opened(disk):
    """Opens the run as a manager does."""
    found = disk.run()
    opening = Opening(found.owner, found.deletion, Group.together(Single()))
    opening.open(None, saves=None)
    opening.end("the test is over")


def test_opening_finishes_a_replacement_that_was_interrupted(disk):
    """The new step takes the place of the old one."""
    disk.add("6")
    disk.write("6/old")
    disk.add("6.jaxckpt-committed")
    disk.write("6.jaxckpt-committed/new")

    disk.run().owner.open()

    assert disk.entries() == {"6"}
    assert "new" in disk.storage.entries(f"{disk.root}/6")
    assert "old" not in disk.storage.entries(f"{disk.root}/6")


def test_what_this_process_is_saving_is_not_cleared_up(disk):
    """A manager that takes a run over leaves the saves of `jaxckpt.save` beside it alone."""
    entry = f"5.orbax-checkpoint-tmp-jaxckpt-{TOKEN}"
    disk.write(f"{entry}/f")

    SaveJob(
        SaveRequest(
            storage=disk.storage,
            path=f"{disk.root}/5",
            items=[],
            group=Group.together(Single()),
            name="save",
            meter=Meter("save", f"{disk.root}/5"),
        )
    ).queue()
    disk.run().owner.open()

    assert disk.entries() == {entry}


def test_an_earlier_job_that_wakes_up_finds_its_work_gone(disk):
    """Although it lives, and holds its lock."""
    entry = f"5.orbax-checkpoint-tmp-jaxckpt-{TOKEN}"
    disk.write(f"{entry}/{names.WRITER}", TOKEN.encode())
    hold = disk.storage.hold(f"{disk.root}/{entry}/{names.WRITER}")

    disk.run().owner.open()

    assert disk.entries() == set()
    hold.release()


def test_what_cannot_be_cleared_up_is_said(disk):
    """And the run is opened all the same."""
    for entry in OURS:
        disk.write(f"{entry}/f")
    once = FailingStorage(disk.storage, 1, OSError(errno.EIO, "no"))
    found = disk.run(once)
    found.owner.open()
    assert "cannot be removed" in found.index.problems[0]
    found.owner.fence()


def test_an_owner_with_an_impossible_time_counts_as_damaged(world):
    """Also that of another job: it named no job that could be found."""
    world.write(
        names.OWNER, b'{"token": "x", "host": "h", "pid": 1, "opened_ns": 1%s}' % (b"0" * 40)
    )
    found = world.run()

    found.owner.open()
    found.owner.fence()

    assert "is too large" in found.index.problems[0]


parts = st.sampled_from(
    [
        "5",
        "ckpt",
        "_",
        ".orbax-checkpoint-tmp",
        "-jaxckpt-",
        "-deleting-",
        TOKEN,
        TOKEN[:15],
        ".jaxckpt-committed",
        ".jaxckpt-bad-",
        "_jaxckpt.le",
        "commit",
    ]
)


@settings(LAWS, max_examples=150)
@given(st.sets(st.lists(parts, min_size=1, max_size=4).map("".join), max_size=6))
def test_what_others_wrote_is_never_removed(tmp_path_factory, entries):
    """Neither by opening a run nor by deleting steps, however it is called."""
    disk = World(LocalStorage(), str(tmp_path_factory.mktemp("others") / "run"))
    for entry in entries:
        disk.write(f"{entry}/f")
    ours = {entry for entry in entries if names.ours_temporary(entry) is not None}
    disk.add("1", "2")

    found = disk.run(naming=StepNames())
    found.owner.open()
    found.deletion.delete([1, 5])
    found.owner.lock.release()

    assert disk.entries() == (entries - ours) | {"2"}


# --- what goes -----------------------------------------------------------------------------------


def test_a_step_is_deleted_and_nothing_is_left(world):
    """Its number is free, and the others stay."""
    world.add("1", "2", "3")
    found = world.run()
    assert found.index.steps() == [1, 2, 3]

    assert found.deletion.delete([1, 3]) == [1, 3]

    assert (found.index.steps(), world.run().index.steps()) == ([2], [2])
    assert world.entries() == {"2"}
    assert found.index.problems == []


def test_pinned_steps_and_those_of_others_stay(world):
    """They stay whatever a policy says; a manual delete may remove another program's step."""
    world.add("1", "2")
    world.write("3/_CHECKPOINT_METADATA", b"{}")
    found = world.run()
    one_step.pin(found.leases, 1)

    assert found.deletion.delete([1, 2, 3]) == [2]
    assert one_step.is_pinned(found.index, 1)
    assert "not written by jaxckpt" in found.index.problems[-1]
    assert found.deletion.delete([1, 3], asked_for=True) == [3]

    one_step.unpin(found.leases, 1)
    assert found.deletion.delete([1]) == [1]


def test_a_refused_pin_leaves_no_file(world):
    """A writer that has listed the step's files would not delete it."""
    world.add("1")
    found = world.run()
    world.write("_jaxckpt.doomed", run.encode(Doomed(steps=["1"])))

    with pytest.raises(CheckpointNotFound, match="can no longer be pinned"):
        one_step.pin(found.leases, 1)

    assert not one_step.is_pinned(found.index, 1)


def test_a_refused_pin_leaves_the_pin_that_was_there(world):
    """Whoever deletes the step by hand may fail, and then a policy must not delete it."""
    world.add("1")
    found = world.run()
    one_step.pin(found.leases, 1)
    world.write("_jaxckpt.doomed", run.encode(Doomed(steps=["1"])))

    with pytest.raises(CheckpointNotFound, match="can no longer be pinned"):
        one_step.pin(found.leases, 1)

    assert one_step.is_pinned(found.index, 1)


def test_a_step_of_orbax_stays_without_a_marker(world):
    """Older versions of Orbax, and copies of its steps, have none."""
    world.write("1/_CHECKPOINT_METADATA", b"{}")
    found = world.run()

    with found.leases.protect(1) as is_there:
        assert is_there
    one_step.pin(found.leases, 1)

    assert one_step.is_pinned(found.index, 1)


@pytest.mark.parametrize("root", ["/run", "gs://bucket/run"])
def test_a_step_in_a_store_stays_until_its_marker_goes(root):
    """A deletion removes that first. On Google Cloud Storage, Orbax writes one too."""
    world = World(MemoryStorage(), root)
    world.add("1")
    world.write("2/_CHECKPOINT_METADATA", b"{}")
    world.write(f"2/{names.COMMIT_MARKER}")
    world.write(f"3/{names.PINNED}")
    leases = world.run().leases
    assert [leases.is_staying(step) for step in "1234"] == [True, True, False, False]

    for number in "12":
        world.storage.delete(f"{root}/{number}/{names.COMMIT_MARKER}")

    needs_none = not root.startswith("gs://")
    assert [leases.is_staying(step) for step in "12"] == [False, needs_none]


def test_a_pin_that_is_written_late_keeps_no_step_that_is_gone(world):
    """In a store its file alone would look like a step, and its number could not be saved."""
    world.add("1")
    storage = WatchedStorage(world.storage, lambda verb, path: late(verb, path))

    def late(verb, path):
        if verb == "write" and path.endswith(names.PINNED):
            world.storage.delete(f"{world.root}/1")

    with pytest.raises(CheckpointNotFound, match="can no longer be pinned"):
        one_step.pin(world.run(storage).leases, 1)

    assert world.entries() == set()


def test_a_step_that_somebody_else_deleted_is_gone(world):
    """This is not a problem."""
    world.add("1", "2")
    found = world.run()
    assert found.index.steps() == [1, 2]
    world.storage.delete(f"{world.root}/1")

    found.deletion.delete([1])

    assert found.index.steps() == [2]
    assert not world.storage.kind(f"{world.root}/1")


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_of_a_deletion_leaves_whole_steps_or_none(world, torn):
    """After every change; the next job finishes it by itself."""
    for after in itertools.count():
        world.add("1", "2", "3")
        died = False
        try:
            world.run(CrashingStorage(world.storage, after, torn=torn)).deletion.delete([1, 2])
        except SimulatedCrash:
            died = True

        steps = world.run().index.steps()
        assert 3 in steps
        assert all(world.is_whole(number) for number in steps)
        again = world.run()
        again.owner.open()
        again.deletion.delete([1, 2])
        again.owner.lock.release()
        world.storage.delete(f"{world.root}/{names.OWNER}")
        left = {entry for entry in world.entries() if not entry.startswith(".jaxckpt-tmp-")}
        assert left <= ({"3"} if world.storage.atomic_rename else {"1", "2", "3"})
        assert world.run().index.steps() == [3]
        for entry in world.entries():
            world.storage.delete(f"{world.root}/{entry}")
        if not died:
            break
    assert after > 4


@pytest.mark.parametrize("reads", [False, True])
def test_an_error_at_any_verb_of_a_deletion_leaves_whole_steps_or_none(disk, reads):
    """It is reported, not raised; the next deletion ends it."""
    for at in itertools.count():
        disk.add("1", "2", "3")
        storage = FailingStorage(disk.storage, at, OSError(errno.EIO, "no"), reads=reads)
        found = disk.run(storage, naming=StepNames())

        gone = found.deletion.delete([1, 2])

        steps = disk.run().index.steps()
        assert {1, 2, 3} - set(steps) >= set(gone)
        assert all(disk.is_whole(number) for number in steps)
        if storage.failed and gone != [1, 2]:
            assert found.index.problems
        disk.run(naming=StepNames()).deletion.delete([1, 2])
        assert disk.run().index.steps() == [3]
        assert disk.entries() <= {"3", names.DOOMED}
        if not storage.failed:
            break
    assert at > 4


def test_a_leftover_that_cannot_go_stops_no_deletion(disk):
    """Such as one with an immutable file: the others go, and it is reported once."""

    class Stuck(LocalStorage):
        def delete(self, path):
            if os.path.basename(path).startswith("1."):
                raise PermissionError(errno.EPERM, "Operation not permitted", f"{path}/state/data")
            super().delete(path)

    disk.add("1", "2", "3", "4", names.deleting("0", TOKEN))
    found = disk.run(Stuck())

    assert found.deletion.delete([1]) == [1]  # no longer a step, but its files are still there
    assert found.deletion.delete([2]) == [2]
    assert found.deletion.delete([3]) == [3]

    [stuck] = disk.entries() - {"4"}
    assert names.ours_temporary(stuck) == "1"
    said = [problem for problem in found.index.problems if "cannot be removed" in problem]
    assert len(said) == 1
    assert f"{stuck}/state/data" in said[0]
    assert disk.run().deletion.delete([]) == []
    assert disk.entries() == {"4"}


def test_two_threads_of_a_job_delete_one_after_the_other(world):
    """`doomed` shows all that is being deleted: `pin` and the next owner look there."""
    world.add("1", "2", "3")
    other, named = [], []

    def begin_another(verb, path):
        if verb in ("rename", "delete") and path.startswith(f"{world.root}/1") and not other:
            other.append(threading.Thread(target=found.deletion.delete, args=([2],)))
            other[0].start()
            other[0].join(0.3)
            named.extend(found.leases.doomed().steps)

    found = world.run(WatchedStorage(world.storage, begin_another))
    found.deletion.delete([1])
    other[0].join(60)

    assert named == ["1"]
    assert world.entries() == {"3"}


# --- deletions of a job that has lost the run ----------------------------------------------------


@pytest.mark.parametrize("how", ["delete", "move", "set aside"])
def test_a_step_that_a_new_owner_saved_again_is_put_back(disk, how):
    """It has the number of a step that the job before was about to rename."""

    class Standing(LocalStorage):
        def rename(self, src, dst):
            if src.endswith("/2"):
                again = disk.run()
                again.owner.open()
                again.owner.lock.release()
                again.deletion.delete([2])
                disk.add("2")
                disk.write("2/again")
            super().rename(src, dst)

    disk.add("1", "2", "3")
    first = moving(disk, Standing()) if how == "move" else disk.run(Standing())
    first.owner.open()
    first.owner.lock.release()

    if how == "set aside":
        first.deletion.set_aside(2, "why")
    else:
        assert first.deletion.delete([2, 1]) == []

    assert disk.is_whole("2")
    assert "again" in disk.storage.entries(f"{disk.root}/2")
    assert "opened for writing by another job" in first.index.problems[-1]


def test_a_job_that_has_lost_the_run_changes_no_step(world):
    """It neither sets one aside nor deletes an item; what it announced, a new owner has deleted."""
    world.add("1", "2", "3")
    first, second = world.run(), world.run()
    first.owner.open()
    first.owner.lock.release()
    world.write(names.DOOMED, run.encode(Doomed(steps=["1", "9"], owner=first.owner.token)))

    second.owner.open()

    assert second.index.steps() == [2, 3]
    first.deletion.set_aside(2, "why")
    assert "is damaged and is skipped: why. It stays there" in first.index.problems[-1]
    assert first.deletion.delete([2]) == []
    assert "deletes no more steps" in first.index.problems[-1]
    for call in (
        first.owner.check,
        lambda: remove_unfinished(first.leases, [2], first.owner.check),
    ):
        with pytest.raises(SaveFailed, match="opened for writing by another job"):
            call()
    assert world.entries() == {"2", "3"}


def test_what_another_job_has_announced_is_not_deleted(world):
    """Only what the owner before was deleting: a job that wakes up later announces in vain."""
    world.add("1", "2", "3")
    for doomed in (Doomed(steps=["1"], owner="0" * 16), Doomed(steps=["1"])):
        world.write(names.DOOMED, run.encode(doomed))
        found = world.run()
        found.owner.open()
        found.owner.lock.release()

        assert world.entries() == {"1", "2", "3"}


def test_a_deletion_that_failed_is_not_finished_by_another_job(disk):
    """Its step may have been saved again before that job takes the run over."""

    class Stuck(LocalStorage):
        def delete(self, path):
            if path.endswith(names.DOOMED):
                raise OSError(errno.EIO, "Input/output error", path)
            super().delete(path)

    disk.add("1", "2")
    first = disk.run(Stuck())
    first.owner.open()
    first.owner.lock.release()
    assert first.deletion.delete([2]) == [2]
    disk.add("2")

    disk.run().owner.open()

    assert disk.entries() == {"1", "2"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_saved_again_after_a_deletion_that_failed_stays(world, error):
    """Whatever the deletion had done by then, and also for readers."""
    for n in itertools.count(1):
        calls, interrupts = itertools.count(1), []

        def before(verb, path, calls=calls, interrupts=interrupts, n=n):
            if interrupts and next(calls) == n:
                raise error

        world.storage.delete(world.root)
        world.add("1", "2")
        first = world.run(WatchedStorage(world.storage, before))
        first.owner.open()
        interrupts.append(True)
        with contextlib.suppress(error):
            first.deletion.delete([2])
        interrupts.clear()
        world.add("2")
        first.owner.fence(2)

        assert first.leases.is_staying("2")
        first.owner.lock.release()
        later = world.run()
        later.owner.open()
        later.owner.lock.release()
        assert later.index.steps() == [1, 2]
        if next(calls) < n:
            break


# --- moving instead ------------------------------------------------------------------------------


def moving(world, storage=None):
    """A job whose deletions move steps."""
    found = world.run(storage, naming=StepNames())
    found.deletion = Deletion(found.leases, found.owner, move_to="bin")
    return found


def moved(disk):
    """The names of the steps that were moved, all of them whole."""
    there = listing(disk.storage, f"{disk.root}/bin") or ()
    steps = [name for name in there if names.ours_temporary(name) is None]
    assert all(disk.is_whole(f"bin/{name}") for name in steps)
    return steps


def test_a_step_is_moved_as_it_is(disk):
    """A name that is taken there gets a number; pinned steps and those of others stay."""
    disk.add("1", "2", "3")
    disk.write("4/_CHECKPOINT_METADATA", b"{}")
    found = moving(disk)
    check_folder(found.index, found.deletion.folder)
    one_step.pin(found.leases, 3)

    assert found.deletion.delete([1, 2, 3, 4]) == [1, 2]
    for _ in range(2):
        disk.add("1")
        assert found.deletion.delete([1]) == [1]

    assert moved(disk) == ["1", "1-1", "1-2", "2"]
    assert disk.entries() == {"3", "4", "bin"}
    assert found.index.steps() == [3, 4]


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_of_a_move_leaves_each_step_whole(disk, torn):
    """In the run or in the directory, and in one of them only."""
    for after in itertools.count():
        disk.add("1", "2", "3")
        died = False
        try:
            found = moving(disk, CrashingStorage(disk.storage, after, torn=torn))
            check_folder(found.index, found.deletion.folder)
            found.deletion.delete([1, 2])
        except SimulatedCrash:
            died = True

        steps = [str(number) for number in disk.run().index.steps()]
        assert sorted([*steps, *moved(disk)]) == ["1", "2", "3"]
        assert all(disk.is_whole(name) for name in steps)
        again = moving(disk)
        again.owner.open()
        again.deletion.delete([1, 2])
        again.owner.lock.release()
        disk.storage.delete(f"{disk.root}/{names.OWNER}")
        assert {e for e in disk.entries() if not e.startswith(".jaxckpt-tmp-")} == {"3", "bin"}
        for entry in disk.entries():
            disk.storage.delete(f"{disk.root}/{entry}")
        if not died:
            break
    assert after > 6


@pytest.mark.parametrize("reads", [False, True])
def test_an_error_at_any_verb_of_a_move_leaves_each_step_whole(disk, reads):
    """It is reported, not raised; the next deletion ends it."""
    for at in itertools.count():
        disk.add("1", "2", "3")
        storage = FailingStorage(disk.storage, at, OSError(errno.EXDEV, "no"), reads=reads)
        found = moving(disk, storage)

        gone = found.deletion.delete([1, 2])

        steps = [str(number) for number in disk.run().index.steps()]
        assert sorted([*steps, *moved(disk)]) == ["1", "2", "3"]
        assert {*map(str, gone)} <= {*moved(disk)}
        assert found.index.problems or gone == [1, 2] or not storage.failed
        moving(disk).deletion.delete([1, 2])
        assert moved(disk) == ["1", "2"]
        for entry in disk.entries():
            disk.storage.delete(f"{disk.root}/{entry}")
        if not storage.failed:
            break
    assert at > 4


def test_a_directory_to_which_no_step_can_be_renamed_is_refused(disk, tmp_path):
    """On another file system, or where steps and files of the run are; nothing is lost."""
    disk.add("1")
    other = tmp_path / "bin"
    there = {f"{disk.root}/1/bin": "name of a step", disk.root: "name of a step"}
    if os.stat(tmp_path).st_dev != os.stat(disk.root).st_dev:
        there[str(other)] = f"{other} is on another file system than {disk.root}"

    for folder, said in there.items():
        with pytest.raises(ValueError, match=said):
            check_folder(disk.run().index, folder)
    storage = FailingStorage(disk.storage, 3, OSError(errno.EXDEV, "Invalid cross-device link"))
    with pytest.raises(ValueError, match="on another file system"):
        check_folder(disk.run(storage).index, f"{disk.root}/bin")

    assert disk.is_whole("1")
    assert disk.entries() == {"1", "bin"}


def test_a_store_without_renames_moves_no_step():
    """It is said before there is a step to move."""
    world = World(MemoryStorage(), f"/{uuid.uuid4()}")

    with pytest.raises(ValueError, match="cannot rename directories"):
        check_folder(world.run().index, f"{world.root}/bin")


# --- readers and writers at once -----------------------------------------------------------------


class Lockstep:
    """Two threads whose storage calls alternate in a given order."""

    def __init__(self):
        self._go = [threading.Semaphore(0), threading.Semaphore(0)]
        self._there = [threading.Semaphore(0), threading.Semaphore(0)]
        self._ended = [False, False]
        self.errors = [None, None]
        self.calls = [0, 0]

    def storage(self, index, inner):
        return Stepped(inner, lambda: self._pause(index))

    def _pause(self, index):
        if self._ended[index]:
            return
        self.calls[index] += 1
        self._there[index].release()
        assert self._go[index].acquire(timeout=30)

    def run(self, actions, order):
        """Lets the threads make one call at a time, in this order; then runs each to its end."""
        threads = [
            threading.Thread(target=self._act, args=pair, name=f"actor-{pair[0]}")
            for pair in enumerate(actions)
        ]
        for thread in threads:
            thread.start()
        for there in self._there:
            assert there.acquire(timeout=30)
        for index in itertools.chain(order, itertools.repeat(0)):
            index = 1 - index if self._ended[index] else index
            if self._ended[index]:
                break
            self._go[index].release()
            assert self._there[index].acquire(timeout=30)
        for thread in threads:
            thread.join(30)

    def _act(self, index, act):
        try:
            act()
        except Exception as error:  # the top of a thread
            self.errors[index] = error
        self._ended[index] = True
        self._there[index].release()


class Stepped:
    """A storage that calls `before()` before every verb."""

    def __init__(self, inner, before):
        self._inner, self._before = inner, before
        self.scheme, self.atomic_rename = inner.scheme, inner.atomic_rename
        self.hard_links, self.server_copies = inner.hard_links, inner.server_copies
        self.parallel_writes = False

    def __getattr__(self, verb):
        def call(*args, **kwargs):
            if verb in VERBS:
                self._before()
            return getattr(self._inner, verb)(*args, **kwargs)

        return call


def interleavings(world, make_actions, check, *, some):
    """Runs two actions in every order of their calls of the storage, or in so many at random.

    Args:
        make_actions: Of two storages, what the two do.
        check: Is called after each, with the errors of the two.
        some: How many; None: all.
    """
    alone = Lockstep()
    world.add("1", "2")
    alone.run(
        make_actions(alone.storage(0, world.storage), alone.storage(1, world.storage)), [0] * 99
    )
    check(alone.errors)
    count = sum(alone.calls) + 2
    places = itertools.combinations(range(count), min(alone.calls) + 1)
    first = 0 if alone.calls[0] <= alone.calls[1] else 1
    orders = [
        [first if i in chosen else 1 - first for i in range(count)] for chosen in map(set, places)
    ]
    if some is not None:
        orders = random.Random(1).sample(orders, min(some, len(orders)))
    for order in orders:
        for entry in world.entries():
            world.storage.delete(f"{world.root}/{entry}")
        world.add("1", "2")
        both = Lockstep()
        both.run(
            make_actions(both.storage(0, world.storage), both.storage(1, world.storage)), order
        )
        check(both.errors)


SOME = [pytest.param(150, id="some"), pytest.param(None, marks=pytest.mark.slow, id="all")]


@pytest.mark.parametrize("some", SOME)
def test_no_step_goes_while_a_reader_that_was_told_it_is_there_holds_it(world, some):
    """In whatever order the calls of a writer that deletes and a reader that leases come."""
    told = []

    def actions(reading, writing):
        told.clear()

        def read():
            lease = world.run(reading).leases.protect(1)
            told.append(lease.__enter__())
            told.append(lease)

        def delete():
            told.insert(0, world.run(writing, naming=StepNames()).deletion.delete([1]))

        return [read, delete]

    outcomes = set()

    def check(errors):
        assert errors == [None, None]
        there = told[-2]
        gone = next(found for found in told if isinstance(found, list))
        assert world.is_whole("1") or not there
        assert world.is_whole("1") == (gone == [])
        outcomes.add((there, gone == []))
        told[-1].__exit__(None, None, None)
        assert not any(map(names.is_lease, world.entries()))

    interleavings(world, actions, check, some=some)

    assert {(True, True), (False, False)} <= outcomes


def test_a_step_that_was_pinned_stays(disk):
    """In whatever order: a pin that did not fail keeps it."""
    found = []

    def actions(pinning, writing):
        found.clear()
        return [
            lambda: found.append(one_step.pin(disk.run(pinning, naming=StepNames()).leases, 1)),
            lambda: disk.run(writing, naming=StepNames()).deletion.delete([1]),
        ]

    def check(errors):
        assert errors[1] is None
        assert errors[0] is None or isinstance(errors[0], FileNotFoundError)
        assert errors[0] is not None or disk.is_whole("1")

    interleavings(disk, actions, check, some=400)


def test_a_list_of_a_store_that_comes_late_hides_no_pin():
    """Another thread asked for it earlier; a deletion has listed the run since."""
    listed, answer = threading.Event(), threading.Event()

    class Store(MemoryStorage):
        parallel_writes = True

        def files(self, path, *, in_one=False):
            found = super().files(path)
            if threading.current_thread() is late:
                listed.set()
                assert answer.wait(30)
            return found

    world = World(MemoryStorage(), f"/{uuid.uuid4()}")
    world.add("1")
    index = world.run(Store(), naming=StepNames()).index
    late = threading.Thread(target=index.entries)
    late.start()
    assert listed.wait(30)
    world.write(f"1/{names.PINNED}")
    index.entries()
    answer.set()
    late.join(30)

    assert names.PINNED in index.files("1")


def test_an_interrupt_at_the_end_of_a_lease_leaves_none(disk, limits):
    """Ctrl-C comes while the reader waits for the thread that was just renewing the lease."""
    disk.add("1")
    reader, renews, ends = threading.current_thread(), threading.Event(), threading.Event()

    def waits():
        frame, names_of = sys._current_frames()[reader.ident], set()
        while frame is not None:
            names_of.add(frame.f_code.co_name)
            frame = frame.f_back
        return "join" in names_of

    def before(verb, path):
        if threading.current_thread() is not reader:
            renews.set()
            assert ends.wait(60)
            wait_until(waits)
            signal.pthread_kill(reader.ident, signal.SIGINT)
            raise OSError(errno.EIO, "away", path)  # and it is not written again

    limits("jaxckpt._run.leases", LEASE_S=0.04)
    found = disk.run(WatchedStorage(disk.storage, before))
    stack = contextlib.ExitStack()
    stack.enter_context(found.leases.protect(1))
    assert renews.wait(60)
    # A program that a shell starts in the background ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    ends.set()
    try:
        with pytest.raises(KeyboardInterrupt):
            stack.close()
    finally:
        signal.signal(signal.SIGINT, handler)

    assert not any(map(names.is_lease, found.index.entries()))


@pytest.mark.parametrize("changes", [False, True])
def test_an_interrupt_as_a_lease_is_written_leaves_none(disk, changes):
    """Ctrl-C comes when the file is there, which the deletion of an item would wait for."""
    disk.add("1")

    def before(verb, path):
        if verb == "write":
            disk.storage.write(path, b"a lease")
            raise KeyboardInterrupt

    found = disk.run(WatchedStorage(disk.storage, before))
    before_it = {*found.index.entries()}
    with pytest.raises(KeyboardInterrupt), found.leases.protect(1, changes=changes):
        pass

    assert {*found.index.entries()} == before_it


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_the_end_of_a_forked_child_leaves_the_lease_of_its_parent(disk):
    """As by sys.exit, or by an error, within a loop of `watch`."""
    disk.add("1")
    found = disk.run()
    with contextlib.ExitStack() as stack:
        stack.enter_context(found.leases.protect(1))
        if not (child := os.fork()):
            try:
                stack.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)

        assert any(map(names.is_lease, found.index.entries()))
    assert not any(map(names.is_lease, found.index.entries()))


def test_a_reader_that_holds_a_step_may_lease_it_again(disk):
    """Also while a writer, that does not know of the lease yet, has named it as doomed."""
    disk.add("1", "2")
    reader = disk.run()
    with reader.leases.protect(1) as there:
        disk.write(names.DOOMED, run.encode(Doomed(steps=["1"])))

        with reader.leases.protect(1) as again, disk.run().leases.protect(1) as other:
            assert (there, again, other) == (True, True, False)
            reader.index.check_step(1)

    with reader.leases.protect(1) as there:
        assert not there


@pytest.mark.parametrize("days", [1 / 12, -2, 400])
def test_a_lease_holds_when_the_clock_of_the_writer_jumps(disk, monkeypatch, days):
    """A reader goes on reading, whatever time it suddenly is here."""
    disk.add("1")
    found = disk.run()
    real = time.time_ns

    with found.leases.protect(1):
        monkeypatch.setattr(time, "time_ns", lambda: real() + int(days * 86_400e9))

        assert found.leases.leased(disk.entries()) == {"1"}


def test_a_lease_keeps_a_step_until_it_expires(world):
    """Leases of dead readers expire and go; a file that is none keeps nothing."""
    world.add("1", "2", "3")
    now_ns = time.time_ns()
    world.write(names.lease("a"), run.encode(Lease(step="1", expires_ns=now_ns + 10**12)))
    world.write(names.lease("b"), run.encode(Lease(step="2", expires_ns=now_ns - 1)))
    world.write(names.lease("c"), b'{"step": 3}')
    found = world.run()

    assert found.deletion.delete([1, 2, 3]) == [2, 3]
    assert one_step.why_not_deleted(found.leases, 1) == "a reader holds it"
    assert [*filter(names.is_lease, world.entries())] == [names.lease("a")]
    assert any("treated as missing" in problem for problem in found.index.problems)


def test_a_lease_says_how_long(world):
    """An hour from when it was taken; it is gone when the reader is done, or raises."""
    world.add("1")
    before_ns = time.time_ns()
    found = world.run()

    def read():
        with found.leases.protect(1):
            (entry,) = filter(names.is_lease, world.entries())
            data = world.storage.read(f"{world.root}/{entry}", max_bytes=999)
            lease = run.decode(run.Lease, data, file=entry)
            assert lease.step == "1"
            assert before_ns <= lease.expires_ns - int(LEASE_S * 1e9) <= time.time_ns()
            raise KeyError

    with pytest.raises(KeyError):
        read()

    assert world.entries() == {"1"}


def test_a_step_that_is_being_changed_is_not_set_aside(world):
    """Its number would be free, and what `heal` writes late would spoil the next step of it."""
    world.add("1", "2")
    found = world.run()
    with found.leases.protect(2):  # a reader has no use for a damaged step
        found.deletion.set_aside(2, "why", file=f"{world.root}/2/{names.RECORD}")
    with found.leases.protect(1, changes=True):
        found.deletion.set_aside(1, "why", file=f"{world.root}/1/{names.RECORD}")

    assert found.index.steps() == [1]
    assert "a command or job mends it" in found.index.problems[-1]
    found.leases.check_unchanged("1")


def test_a_command_that_was_killed_keeps_its_step_for_minutes_only(world):
    """A job that starts again cannot save under this number, or a lower one, until then."""
    world.add("1")
    found = world.run()
    with found.leases.protect(1, changes=True):
        (entry,) = (one for one in world.entries() if names.is_lease(one, changes=True))
        lease = found.leases.read(entry)
    assert lease.expires_ns - time.time_ns() <= CHANGE_S * 1e9 < LEASE_S * 1e9 / 10

    for left_s in (1, -1):
        expires_ns = time.time_ns() + left_s * 10**9
        world.write(entry, run.encode(Lease(step="1", expires_ns=expires_ns)))
        with pytest.raises(SaveFailed, match=entry) if left_s > 0 else contextlib.nullcontext():
            found.leases.check_unchanged("1")


def test_no_lease_stays_after_an_error(disk):
    """Nor its thread, which would renew it as long as the process lives."""
    disk.add("1")

    def fail(verb, path):
        if (verb, path) == ("kind", f"{disk.root}/1"):
            raise OSError(errno.EIO, "no", path)

    with (
        pytest.raises(OSError, match="no"),
        disk.run(WatchedStorage(disk.storage, fail)).leases.protect(1),
    ):
        pass

    assert disk.entries() == {"1"}
    assert not any("_renew" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("kept", ["global", "traceback"])
def test_a_program_that_ends_while_it_reads_ends_its_lease(disk, kept):
    """Its generator lives until the interpreter takes the modules apart."""
    disk.add("1")
    code = (
        "from jaxckpt._run.index import StepIndex; from jaxckpt._run.leases import Leases\n"
        "from jaxckpt.storage import locate\n"
        "def read():\n"
        f"    reads = Leases(StepIndex(*locate({disk.root!r}))).protect(1)\n"
        "    reads.__enter__(); print('reading', flush=True); return reads, 1 / fails\n"
        f"fails = {kept != 'traceback'}; reads = read()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)

    assert done.stdout == "reading\n"
    assert ("ZeroDivisionError" in done.stderr) == (kept == "traceback")
    assert "Exception ignored" not in done.stderr
    assert disk.entries() == {"1"}


def test_a_lease_that_cannot_be_read_keeps_all(disk):
    """Rather than delete what somebody may read."""
    disk.add("1", "2")
    with disk.run().leases.protect(1) as there:
        assert there
        for at in itertools.count():
            storage = FailingStorage(disk.storage, at, OSError(errno.EIO, "no"), reads=True)
            disk.run(storage, naming=StepNames()).deletion.delete([1])
            assert disk.is_whole("1")
            if not storage.failed:
                break
    assert at >= 5


def test_where_nothing_can_be_written_readers_have_no_lease(disk):
    """They see the existing steps, which may vanish."""
    disk.add("1")
    storage = FailingStorage(disk.storage, 0, OSError(errno.EROFS, "read-only"), once=False)

    with disk.run(storage).leases.protect(1) as there, disk.run(storage).leases.protect(2) as other:
        assert (there, other) == (True, False)

    assert disk.entries() == {"1"}


def test_a_step_that_is_about_to_go_is_not_found(world):
    """By a reader who could not hold it."""
    world.add("1")
    world.write(names.DOOMED, run.encode(Doomed(steps=["1"])))
    reader = world.run()

    with reader.leases.protect(1) as there:
        assert not there


def test_a_reader_restores_no_step_that_is_about_to_go(ram_path):
    """Though it is still there: its files may go at any moment."""
    with jaxckpt.CheckpointManager(ram_path / "run") as manager:
        manager.save(1, {"n": 1})
    doomed = ram_path / "run" / names.DOOMED
    doomed.write_bytes(run.encode(Doomed(steps=["1"])))

    with jaxckpt.CheckpointManager(ram_path / "run", mode="r") as reader:
        with pytest.raises(CheckpointNotFound, match="being deleted"):
            reader.restore(step=1)
        doomed.unlink()
        assert reader.restore(step=1) == {"n": 1}


# --- setting aside -------------------------------------------------------------------------------


def test_a_damaged_step_is_set_aside(world):
    """It no longer counts as a step, nothing is deleted, and it is reported, also by later runs."""
    world.add("1", "2")
    found = world.run()
    assert found.index.steps() == [1, 2]

    found.deletion.set_aside(2, "its chunk is torn")

    assert (found.index.steps(), world.run().index.steps()) == ([1], [1])
    assert "was set aside" in found.index.problems[-1]
    assert "its chunk is torn" in found.index.problems[-1]
    (aside,) = world.entries() - {"1"}
    assert names.is_set_aside(aside)
    assert world.is_whole(aside)
    again = world.run()
    again.owner.open()
    again.index.note_strays(again.index.listing())
    assert again.index.problems == [
        f"{world.root}/{aside}: a damaged step that was set aside earlier"
    ]
    assert world.entries() == {"1", aside}


def test_what_cannot_be_set_aside_is_reported_and_stays(world):
    """Steps of other programs; and all of a step of which a file cannot be renamed or copied."""
    world.write("1/_CHECKPOINT_METADATA", b"{}")
    world.add("2")
    found = world.run()

    found.deletion.set_aside(1, "why")
    assert "is skipped: why" in found.index.problems[-1]

    for number in itertools.count():
        storage = FailingStorage(world.storage, number, OSError(errno.EIO, "broken"))
        found = world.run(storage)
        found.deletion.set_aside(2, "why")
        if "was set aside" in found.index.problems[-1]:
            break
        assert "cannot be set aside" in found.index.problems[-1]
        if world.is_whole("2"):
            continue
        # The copy was whole, so the step was being removed: the next owner goes on.
        *_, aside = (entry for entry in world.entries() if names.is_set_aside(entry))
        assert world.is_whole(aside)
        owner = world.run().owner
        owner.open()
        owner.lock.release()
        world.storage.delete(f"{world.root}/{names.OWNER}")
        assert {entry for entry in world.entries() if not names.is_set_aside(entry)} == {"1"}
        world.add("2")
    assert number >= 1


def test_strays_are_noted(disk):
    """Each once, by what it is; what belongs to a run is not one."""
    disk.add("1")
    disk.write("2")
    disk.write("notes.txt")
    disk.storage.make_dir(f"{disk.root}/3.orbax-checkpoint-tmp-99")
    disk.write("metadata/f")
    found = disk.run()
    found.owner.open()

    found.index.note_strays(found.index.listing())

    problems = found.index.problems
    said = {problem.removeprefix(f"{disk.root}/").split(": ")[0]: problem for problem in problems}
    assert set(said) == {"2", "notes.txt", "3.orbax-checkpoint-tmp-99"}
    assert "not a directory" in said["2"]
    assert "another writer" in said["3.orbax-checkpoint-tmp-99"]
    assert "left alone" in said["notes.txt"]
