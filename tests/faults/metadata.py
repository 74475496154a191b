"""Breaks metadata: changes JSON, bytes and database values, and checks how readers handle them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import time
from pathlib import Path

from jaxckpt.storage import kvstore
from tests.faults.damage import STEP, Reader, _everything, attempt, bits

_MEMORY_BYTES = 3 << 30


# --- the change of a file --------------------------------------------------------------------


class Pairs(list):
    """A JSON object as pairs of key and value, so that a key may occur twice."""


# fmt: off
_WILD = [
    None, True, False, 0, 1, -1, -5, 2**31, 2**62, 2**63, 10**30, 1.5, 1e300, float("nan"),
    float("inf"), -0.0, "", "x", "..", "../../x", "/etc/passwd", "a\0", "\ud800", "\u202e",
    "e\u0301", [], Pairs(), [[]], [0], [-1], [2**40], [2**31, 2**31], ["x"], [None],
    Pairs([("x", 1)]), "int4", "float64", "key<fry>", "array", "key", "empty", "str", "class",
    "tuple", "99" * 50,
]
# fmt: on


def mutated(text, dice):
    """The text of a JSON value in which one place, or two, is changed."""
    value = json.loads(text, object_pairs_hook=Pairs)
    for _ in range(dice.choice([1, 1, 1, 2])):
        holder = [value]
        node, at = dice.choice(list(_places(holder)))
        old = node[at][1] if isinstance(node, Pairs) else node[at]
        match dice.randrange(8):
            case 0 if node is not holder:
                del node[at]
            case 1 if isinstance(node, Pairs):  # the same key twice
                node.insert(dice.randrange(len(node) + 1), (node[at][0], dice.choice(_WILD)))
            case 1 if node is not holder:
                node.insert(at, old)
            case 2 if isinstance(node, Pairs):
                node[at] = (str(dice.choice([*_WILD, *(key for key, _ in node)])), old)
            case 3:  # what is elsewhere in the file
                other, there = dice.choice(list(_places(holder)))
                found = other[there][1] if isinstance(other, Pairs) else other[there]
                _put(node, at, copy.deepcopy(found))  # not itself: what holds it may be meant
            case 4:
                deep = old
                for _ in range(dice.choice([1, 3, 150, 210])):
                    deep = [deep] if dice.random() < 0.5 else Pairs([("a", deep)])
                _put(node, at, deep)
            case 5 if isinstance(old, str):
                _put(
                    node, at, old[: len(old) // 2] + dice.choice("ä\0\n/~.") + old[len(old) // 2 :]
                )
            case 5 if isinstance(old, int):
                _put(node, at, dice.choice([old + 1, old - 1, -old, old * 2**32]))
            case _:
                _put(node, at, dice.choice(_WILD))
        value = holder[0]
    try:
        return _text(value)
    except RecursionError:
        return text[:-1]


def _places(node):
    for i in range(len(node)):
        yield node, i
        child = node[i][1] if isinstance(node, Pairs) else node[i]
        if isinstance(child, list):
            yield from _places(child)


def _put(node, at, value):
    node[at] = (node[at][0], value) if isinstance(node, Pairs) else value


def _text(value):
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{_text(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)


def mutated_bytes(data, dice):
    """Some bytes changed, removed, doubled, cut off, in UTF-8 or not."""
    data = bytearray(data)
    at = dice.randrange(len(data) + 1)
    match dice.randrange(6):
        case 0:
            return bytes(data[:at])
        case 1:
            data[at:at] = dice.choice(
                [b"\xff", b"\xc3", b"\xe2\x82", b"\0", b'"', b"{", b"]", b",,"]
            )
        case 2:
            del data[at : at + dice.randrange(1, 9)]
        case 3:
            data[at:at] = data[at : at + dice.randrange(1, 200)]
        case 4:
            return data.decode(errors="replace").encode(dice.choice(["utf-16", "utf-32", "utf-7"]))
        case _:
            for _ in range(3):
                data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)


def changed(data, dice):
    """One change of either kind; JSON in a text within JSON is JSON too."""
    if dice.random() < 0.3:
        return mutated_bytes(data, dice)
    try:
        return mutated(data.decode(), dice).encode()
    except ValueError:
        return mutated_bytes(data, dice)


# --- what children do ------------------------------------------------------------------------


def limit_memory():
    """From here on the process can take so much more; says what it has."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def metadata_of(root):
    """The metadata files of a step of ours, the record last."""
    from jaxckpt.format import names

    step = Path(root, str(STEP))
    record = json.loads((step / names.RECORD).read_bytes().splitlines()[0])
    files = [name for name, facts in record["files"].items() if "sha256" in facts]
    return [name for name in files if (step / name).stat().st_size] + [names.RECORD]


def fit_record(path):
    """Makes the record fit the files as they are, so that they are parsed and not refused."""
    from jaxckpt.format import names, step

    file = path / names.RECORD
    record = json.loads(file.read_bytes().splitlines()[0])
    for name in [name for name in record["files"] if not (path / name).is_file()]:
        del record["files"][name]
    data = [file for file in path.glob("*/**/d/*") if file.is_file()]
    for name in {*record["files"], *(str(file.relative_to(path)) for file in data)}:
        found = (path / name).read_bytes()
        facts = record["files"].setdefault(name, {})
        facts["bytes"] = len(found)
        facts.pop("sample", None)
        if "sha256" in facts:
            facts["sha256"] = step.digest(found)
    body = json.dumps(record).encode()
    file.write_bytes(body + b"\n" + step.digest(body).encode() + b"\n")


def use(path, root=None, like=None):
    """Everything that a reader does; returns what `restore` gives."""
    import jaxckpt

    results = []
    for verb in (jaxckpt.restore, lambda p: jaxckpt.restore(p, like), jaxckpt.verify, _show):
        with _typed(results):
            results.append(verb(path))
    if root is not None:
        keep = jaxckpt.KeepPolicy(best=1, metric="loss")
        with _typed(results), jaxckpt.CheckpointManager(root, mode="r", keep=keep) as manager:
            for call in (
                manager.all_steps,
                manager.latest_step,
                manager.best_step,
                lambda: manager.metrics(STEP),
                lambda: manager.restore_items(step=STEP),
                lambda: manager.custom_metadata(STEP),
                lambda: str(manager.metadata(STEP)),
                manager.restore,
            ):
                with _typed(results):
                    call()
    return results[0]


def _show(path):
    import jaxckpt

    return str(jaxckpt.open(path))


@contextlib.contextmanager
def _typed(results):
    """Accepts only our own errors with a useful message; any other exception propagates."""
    import jaxckpt

    try:
        yield
    except (jaxckpt.CheckpointError, ValueError) as error:
        results.append(error)
        # Not about the checkpoint: nothing in it has the metric by which to choose.
        fine = isinstance(error, jaxckpt.CheckpointError) or "KeepPolicy" in str(error)
        if not fine:
            raise
        if len(str(error)) < 20:
            raise AssertionError(f"tells nothing: {error!r}") from error


def stale(root, work, seed, count):
    """Changes a metadata file under a record that knows its digest: found, or not read."""
    reader, dice, files = Reader(root), random.Random(seed), metadata_of(root)
    limit_memory()
    root = shutil.copytree(root, work)
    for n in range(count):
        file = Path(root, str(STEP), files[n % len(files)])
        good = file.read_bytes()
        bad = changed(good, dice)
        if bad == good or bad == good[:-1]:  # the end of the record's last line
            bad = bad[:-5]
        file.write_bytes(bad)
        what = f"{files[n % len(files)]} {_between(good, bad)}"
        attempt(
            what,
            lambda file=file: reader.check(f"{root}/{STEP}", reader.ways(), file=str(file)),
        )
        file.write_bytes(good)


def _between(good, bad):
    """Where two texts differ first, and how."""
    at = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), len(bad))
    return f"at {at}: {good[at : at + 30]!r} -> {bad[at : at + 60]!r}"


def fitting(root, work, seed, count, plant=None):
    """Changes a metadata file, and the record with it: a typed error or any tree.

    Args:
        plant: A control: an exception of another kind, as a parser without checks would raise.
    """
    reader, dice = Reader(root), random.Random(seed)
    if plant:
        _plant()
    files = metadata_of(root)
    limit_memory()
    for n in range(count):
        here, name = Path(shutil.copytree(root, f"{work}-{n}")), files[n % len(files)]
        path = here / str(STEP)
        file = path / name
        good = file.read_bytes()
        if name == files[-1]:
            _change_record(file, dice)
        else:
            file.write_bytes(_changed_inside(good, name, dice))
            fit_record(path)
        bad = file.read_bytes()

        def check(path=path, here=here, name=name):
            got = use(str(path), str(here), reader.like)
            return {"came": _came(got, reader, name)}

        attempt(f"{name} {_between(good, bad)}", check)
        shutil.rmtree(here)


def _came(got, reader, name):
    """How a restore ended. Where the file says nothing of values, these must be the right ones."""
    if isinstance(got, Exception):
        return type(got).__name__
    found = bits(got)[1]
    wanted = reader.good["restore"][1]
    right = found == wanted
    assert right or name.endswith(("_METADATA", "_strings.json")), "another value"
    return "right" if right else "another tree"


def _changed_inside(data, name, dice):
    """As `changed`, but sometimes of the JSON that a text in the JSON holds."""
    if name.endswith("_sharding") and dice.random() < 0.7:
        with contextlib.suppress(ValueError):
            value = json.loads(data)
            key = dice.choice(list(value))
            value[key] = mutated(value[key], dice)
            return json.dumps(value).encode()
    return changed(data, dice)


def _change_record(file, dice):
    from jaxckpt.format import step

    body = changed(file.read_bytes().splitlines()[0], dice).replace(b"\n", b" ")
    file.write_bytes(body + b"\n" + step.digest(body).encode() + b"\n")


def _plant():
    from jaxckpt.format import jsontext

    def expect(value, kind, what, *, file):
        return value

    for module in ("tree", "step", "arrays", "sharding"):
        exec_in = __import__(f"jaxckpt.format.{module}", fromlist=["expect"])
        exec_in.expect = expect
    jsontext.expect = expect


def in_database(root, work, seed, count):
    """Changes the metadata of an array in the database, and the record with it."""
    from jaxckpt.storage import _arrays, locate

    reader, dice = Reader(root), random.Random(seed)
    for n in range(count):
        here = Path(shutil.copytree(root, f"{work}-{n}"))
        path = here / str(STEP)
        _, where = locate(path / "state")
        keys = _arrays.Reader(kvstore(where), database=True).keys()
        key = dice.choice([key for key in keys if key.endswith("zarr.json")])
        what = change_value(kvstore(where), key, dice)
        fit_record(path)

        def check(path=path, here=here):
            got = use(str(path), str(here), reader.like)
            if not isinstance(got, Exception):
                assert bits(got) == reader.good["restore"], "another value"
            return {"came": type(got).__name__ if isinstance(got, Exception) else "right"}

        attempt(f"{key} {what}", check)
        shutil.rmtree(here)


def change_value(kvstore, key, dice):
    """Changes one value of an OCDBT database; says how."""
    import tensorstore as ts

    from jaxckpt.storage._arrays import context

    store = ts.KvStore.open({"driver": "ocdbt", "base": kvstore}, context=context()).result()
    good = store.read(key).result().value
    bad = changed(good, dice)
    store.write(key, bad).result()
    return _between(good, bad)


def of_others(samples, work, seed, count):
    """Changes metadata of what Orbax and Flax wrote, which has no digests.

    Args:
        samples: Where their checkpoints are.
    """
    import jaxckpt

    dice = random.Random(seed)
    good = {sample: bits(jaxckpt.restore(sample)) for sample in samples}
    like = {sample: jaxckpt.restore(sample, as_numpy=True) for sample in samples}
    limit_memory()
    for n in range(count):
        sample = samples[n % len(samples)]
        here = Path(shutil.copytree(sample, f"{work}-{n}")) if os.path.isdir(sample) else None
        if here is None:
            here = Path(shutil.copy(sample, f"{work}-{n}"))
        files = [here] if here.is_file() else [f for f in here.rglob("*") if _is_metadata(f)]
        databases = [file.parent for file in here.rglob("manifest.ocdbt")]
        if databases and dice.random() < 0.3:
            what = _change_array(dice.choice(databases), dice)
        else:
            file = dice.choice(files)
            old = file.read_bytes()
            bad = changed(old, dice) if old else b"x"
            file.write_bytes(bad)
            what = f"{file.relative_to(here)} {_between(old, bad)}"

        def check(here=here, sample=sample):
            got = _use_foreign(str(here), like[sample])
            if isinstance(got, Exception):
                return {"came": type(got).__name__}
            return {"came": "right" if bits(got) == good[sample] else "another tree"}

        attempt(f"{Path(sample).parent.name}: {what}", check)
        shutil.rmtree(here) if here.is_dir() else here.unlink()


def _use_foreign(path, like):
    try:
        return use(path, None, like)
    except MemoryError as error:
        # An array of nothing but fill may be as large as its metadata say: no host has the memory.
        if "leaf" not in str(error):
            raise
        return error


def _is_metadata(file):
    names = ("_METADATA", "_sharding", "_strings.json", "_CHECKPOINT_METADATA", "checkpoint")
    names += (".zarray", "zarr.json", "metadata", "metrics", "commit_success.txt")
    is_tree = file.name.startswith("checkpoint")  # the files of Flax have a number behind it
    return file.is_file() and (
        is_tree or file.name in names or file.parent.name == "array_metadatas"
    )


def _change_array(database, dice):
    from jaxckpt.storage import _arrays, locate

    _, where = locate(database)
    keys = _arrays.Reader(kvstore(where), database=True).keys()
    headers = [key for key in keys if key.endswith((".zarray", "zarr.json"))]
    if not headers:
        return "nothing"
    key = dice.choice(headers)
    return f"{key} {change_value(kvstore(where), key, dice)}"


def in_root(root, work, seed, count):
    """Changes the small files of a run's root: a manager that writes must continue or say why."""
    import jaxckpt
    from jaxckpt.format import ledger, names, run

    dice = random.Random(seed)
    wanted = bits(_everything(root))
    owner = run.Owner(token="0" * 16, host="elsewhere", pid=1, opened_ns=time.time_ns())
    lease = run.Lease(step=str(STEP), expires_ns=time.time_ns() + 10**12)
    texts = {
        names.RUN: run.encode(run.Identity(id="0" * 32, directory="elsewhere")),
        names.OWNER: run.encode(owner),
        names.DOOMED: run.encode(run.Doomed(steps=["4", "9"], owner="a", move_to="b")),
        names.lease("0" * 16): run.encode(lease),
        names.LEDGER: ledger.encode_ledger([ledger.Start(start="0" * 16, saves=3, reached=9)] * 3),
    }
    limit_memory()
    for n in range(count):
        here = Path(shutil.copytree(root, f"{work}-{n}"))
        for name, data in texts.items():
            (here / name).write_bytes(data)
        name = list(texts)[n % len(texts)]
        bad = changed(texts[name], dice)
        (here / name).write_bytes(bad)

        def check(here=here):
            for mode in ("r", "w"):
                with jaxckpt.CheckpointManager(here, mode=mode) as manager:
                    assert manager.all_steps() == [STEP]
                    assert manager.latest_step() == STEP
                    assert bits(manager.restore_items(step=STEP)) is not None
                    if mode == "w":
                        manager.save(STEP + 1, {"w": 1}).result()
                        assert manager.all_steps() == [STEP, STEP + 1]
                        manager.delete(STEP + 1)
            assert bits(_everything(here)) == wanted, "another value"

        attempt(f"{name} {_between(texts[name], bad)}", check)
        shutil.rmtree(here)
