"""Damages the files of checkpoints in every layout that we write, and reads them back.

The trials run in forked children, many in each, so that a crash or a hang is one more failure. A
child reports each trial before it starts, and then its result; `trials_of` counts them.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from tests.faults.zygote import say

STEP = 5
LAYOUTS = ("plain", "sharded", "inner", "tiny", "nodes", "files", "alike", "step")
# Nobody reads it: that it is there is what counts.
_MARKER = "commit_success.txt"
_MOST_S = 20


# --- the test's side -------------------------------------------------------------------------


class Checkpoints:
    """Makes a run of one step of a layout, once for each seed. Not to be changed."""

    def __init__(self, zygote, folder, run_processes):
        self._zygote, self._folder, self._run_processes = zygote, folder, run_processes
        self._made = {}

    def __call__(self, layout, seed=1):
        if (layout, seed) not in self._made:
            root = self._folder / f"{layout}-{seed}"
            if layout == "processes":
                root.mkdir()
                self._run_processes(f"{__file__}:save_in_two", count=2, args=[root, seed])
            else:
                assert self._zygote.run(build, root, layout, seed) == {"done": True}
            self._made[layout, seed] = root
        return self._made[layout, seed]


def trials_of(zygote, trial, row, function, *args, **kwargs):
    """Counts what a child tries; returns what it said of each. Its death is a failure."""
    zygote.start(function, *args, **kwargs)
    begun, said = "nothing yet", []
    while "status" not in (answer := zygote.answer()):
        begun = answer["tried"]
        if "problem" not in answer:
            continue
        with trial(row, begun):
            assert answer["problem"] is None, answer["problem"]
        said.append(answer)
    with trial(row, f"the child that tried {begun}") if answer["status"] else _nothing():
        assert answer["status"] == 0, zygote.errors()[-3000:]
    return said


class _nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def problems_of(zygote, function, *args, **kwargs):
    """For controls: what is wrong in the words of a child."""
    zygote.start(function, *args, **kwargs)
    said, status = zygote.answers()
    assert status == 0
    return [answer["problem"] for answer in said if answer.get("problem")]


# --- the child's side: trials ----------------------------------------------------------------


def attempt(what, check, **more):
    """One trial: says that it begins, and then what is wrong, or None.

    Args:
        check: Raises AssertionError if something is wrong, or returns more to say.
    """
    say(tried=what)
    signal.alarm(_MOST_S)  # a hang ends the child
    problem = None
    try:
        more |= check() or {}
    except AssertionError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:2000]}"
    signal.alarm(0)
    say(tried=what, problem=problem, **more)


def bits(tree):
    """Everything about a tree that must not change: containers, types, dtypes, shapes, bits."""
    import jax

    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return str(treedef), {jax.tree_util.keystr(path): _leaf_bits(leaf) for path, leaf in leaves}


def _leaf_bits(leaf):
    import jax

    if isinstance(leaf, jax.Array):
        impl = ""
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            impl, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        return "jax", impl, leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()
    if isinstance(leaf, np.ndarray | np.generic):
        return type(leaf).__name__, "", leaf.dtype.name, leaf.shape, leaf.tobytes()
    return type(leaf).__name__, repr(leaf)


class Reader:
    """Reads one step in several ways, and compares with how it was when it was good."""

    def __init__(self, root):
        import jax

        import jaxckpt

        self.root, self.path = str(root), f"{root}/{STEP}"
        tree = jaxckpt.restore(self.path)
        self.leaves = sorted(
            "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in keys)
            for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
        )
        self.like = jax.tree.map(_shape_of, tree)
        self.good = {way: bits(read()) for way, read in self.ways().items()}
        assert jaxckpt.verify(self.path).ok

    def ways(self, at=None):
        import jaxckpt

        path, root = at or self.path, os.path.dirname(at or self.path)
        ways = {
            "restore": lambda: jaxckpt.restore(path),
            "like": lambda: jaxckpt.restore(path, self.like),
            "everything": lambda: _everything(root),
        }
        for leaf in self.leaves[:: max(1, len(self.leaves) // 4)]:
            ways[f"only {leaf}"] = lambda leaf=leaf: jaxckpt.restore(path, only=leaf)
        return ways

    def check(self, at, ways, *, file, must_find=True, good=None):
        """Reads what was damaged.

        Args:
            at: Where it is now.
            ways: Some of `self.ways()`.
            file: That was damaged.
            must_find: Whether `verify` must.
            good: What is right, if not what was there.
        """
        import jaxckpt

        right = True
        for way in ways:
            try:
                got = bits(self.ways(at)[way]())
            except jaxckpt.CheckpointError as error:
                right = False
                _check_named(error, file, way)
            else:
                assert got == (good or self.good)[way], f"{way}: another value, in silence"
        try:
            report = jaxckpt.verify(at)
        except jaxckpt.CheckpointError as error:
            _check_named(error, file, "verify")
            return {"harmless": False}
        assert not (report.ok and not right), "restore fails, verify finds nothing"
        assert not (report.ok and must_find), "verify finds nothing"
        assert report.ok or any(p.file or p.leaf for p in report.problems), report
        return {"harmless": report.ok}


def _shape_of(leaf):
    import jax

    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _everything(root):
    """All items of the step, through a manager that reads."""
    import jaxckpt

    with jaxckpt.CheckpointManager(root, mode="r") as manager:
        found = manager.restore_items(step=STEP)
        return found | {"the metrics": manager.metrics(STEP)}


def _check_named(error, file, way):
    named = getattr(error, "leaf", None) or getattr(error, "file", None)
    # Without its marker there is no such step, and a manager says just that.
    named = named or os.path.basename(file) in str(error) or os.path.basename(file) == _MARKER
    assert named, f"{way}: names nothing: {error}"


# --- layouts ---------------------------------------------------------------------------------


def build(folder, layout, seed):
    """Makes a run of one step, in one layout; says where."""
    from jaxckpt.format import arrays, ocdbt

    if layout == "inner":
        arrays.MAX_UNIT_BYTES = 1 << 14
    if layout == "nodes":
        ocdbt.MAX_NODE_BYTES = 8000
    if layout in ("files", "alike"):  # one leaf in each, or three
        ocdbt.DATA_FILE_BYTES = 1 << 13 if layout == "files" else 500_000
    root = Path(folder)
    root.mkdir()
    save_step(root, layout, seed)
    Reader(root)
    say(done=True)


def save_step(root, layout, seed):
    import jaxckpt

    if layout != "step":
        jaxckpt.save(f"{root}/{STEP}", tree(layout, seed), custom_metadata={"seed": seed})
        return
    items = {
        "data": _Batches(seed),
        "config": {"lr": 0.1, "seed": seed},
        "blob": b"\0\1" * 50 + bytes([seed]),
        "ema": tree("plain", seed + 1),
    }
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(STEP, tree("plain", seed), items=items, metrics={"loss": seed + 0.5})


class _Batches:
    def __init__(self, taken):
        self.taken = taken

    def get_state(self):
        return {"taken": self.taken, "of": (1, b"bytes", np.arange(4))}

    def set_state(self, state):
        self.taken = state["taken"]


def tree(layout, seed):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    if layout == "plain":
        return {
            "large": normal(70_000),
            "small": rng.integers(0, 99, 99),
            "half": jnp.asarray(normal(40, 50), jnp.bfloat16),
            "packed": jnp.asarray(rng.integers(-8, 7, 4000), jnp.int4),
            "key": jax.random.split(jax.random.key(seed), 3),
            "text": f"seed {seed}",
            "rest": [seed, (0.5 + seed, None), b"bytes" + bytes([seed]), 2**80 + seed],
        }
    if layout in ("sharded", "inner"):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
        specs = {"both": P("x", "y"), "one": P("x"), "replicated": P(), "other": P(None, "y")}
        return {
            name: jax.device_put(normal(32, 512), NamedSharding(mesh, spec))
            for name, spec in specs.items()
        }
    if layout == "tiny":
        return {f"{i:03}": normal(1 + i % 60) for i in range(120)}
    if layout == "nodes":
        return {f"{i:03}": normal(1 + i % 60) for i in range(150)} | {"a": normal(3000)}
    if layout == "alike":  # large, and all but equal, as the states of an optimiser may be
        leaves = {name: np.zeros(50_000, np.float32) for name in "abcdef"}
        for name in "abde":
            leaves[name][11_000] = seed + ord(name)
        return leaves
    assert layout == "files"
    return {f"leaf {i}": normal(3000) for i in range(8)} | {"seed": seed}


def save_in_two(me, root, seed):
    """Saves in each of two processes; run by `tests.multiprocess`."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxckpt

    del me
    rng = np.random.default_rng(seed)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))

    def put(values, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    values = {f"w{i}": put(rng.standard_normal((32, 256), np.float32), "x", "y") for i in range(3)}
    small = {f"s{i}": put(rng.standard_normal((8, 9), np.float32), "x") for i in range(6)}
    jaxckpt.save(f"{root}/{STEP}", {**values, **small, "n": seed, "text": f"seed {seed}"})


# --- flips -----------------------------------------------------------------------------------


def files_of(root):
    return sorted(file for file in Path(root, str(STEP)).rglob("*") if file.is_file())


def flip(file, offset, bit):
    with open(file, "r+b") as stream:
        stream.seek(offset)
        [byte] = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))


def flips(root, work, seed, count, blind=False):
    """Flips one bit, reads in two ways, and flips it back; half by bytes, half by file.

    Args:
        blind: A control: the readers do not look at checksums of chunks.
    """
    reader, dice = Reader(root), random.Random(seed)
    if blind:
        _make_blind()
    root = shutil.copytree(root, work)
    files = [file for file in files_of(root) if file.stat().st_size]
    sizes = [file.stat().st_size for file in files]
    unread = _unread(root)
    for n in range(count):
        [file] = dice.choices(files, sizes) if n % 2 else [dice.choice(files)]
        offset, bit = dice.randrange(file.stat().st_size), dice.randrange(8)
        name = str(file.relative_to(root))
        ways = [dice.choice(("restore", "everything")), dice.choice([*reader.ways()])]

        def check(file=file, offset=offset, name=name, ways=ways):
            said = reader.check(f"{root}/{STEP}", ways, file=str(file), must_find=False)
            assert not said["harmless"] or unread(name, offset), "verify finds nothing"
            return said

        flip(file, offset, bit)
        attempt(f"bit {bit} of byte {offset} of {name}, {ways}", check)
        flip(file, offset, bit)


def orbax_flips(root, work, seed, count):
    """Flips bits of values, and has Orbax read them: an error must mention the checksum.

    In a child, since after the first error Orbax leaves reads behind that fail later.
    """
    import orbax.checkpoint as ocp

    from jaxckpt.format.ocdbt import Place
    from jaxckpt.storage import locate
    from jaxckpt.storage._values import find_values

    state = Path(shutil.copytree(root, work), str(STEP), "state")
    storage, where = locate(state)
    found = find_values(storage, where).values()
    places = [place for place in found if isinstance(place, Place)]
    restore, dice = ocp.PyTreeCheckpointer().restore, random.Random(seed)
    good = bits(restore(state))
    for _ in range(count):
        [place] = dice.choices(places, [place.size for place in places])
        offset, bit = place.offset + dice.randrange(place.size), dice.randrange(8)

        def check():
            try:
                restore(state)
            except Exception:
                told = traceback.format_exc()
            else:
                told = "another value, in silence"
            assert "Digest mismatch" in told, told

        flip(state / place.file, offset, bit)
        attempt(f"Orbax, bit {bit} of byte {offset} of {place.file}", check)
        flip(state / place.file, offset, bit)
    assert bits(restore(state)) == good


def orbax_alone(path):
    """Says whether a flipped bit of what Orbax wrote changes what it restores."""
    import orbax.checkpoint as ocp

    wanted = np.random.default_rng(0).standard_normal(40_000, np.float32)
    ocp.PyTreeCheckpointer().save(path, {"w": wanted})
    [file] = [file for file in Path(path).rglob("d/*") if file.stat().st_size > 100_000]
    flip(file, 90_000, 3)
    got = ocp.PyTreeCheckpointer().restore(path)["w"]
    say(same=np.array_equal(got, wanted))


def _unread(root):
    """Returns the bytes that no reader reads: markers, and in the data of one of several processes
    everything but values, since the merged database does not use the nodes."""
    from jaxckpt.format import names

    record = Path(root, str(STEP), names.RECORD)
    last = record.stat().st_size - 1  # the end of its last line

    def unread(name, offset):
        return name.endswith(f"/{_MARKER}") or (
            name == str(record.relative_to(root)) and offset == last
        )

    return unread


def _make_blind():
    from jaxckpt._disk import chunks as _chunks

    class Fits(int):
        def __eq__(self, other):
            return True

        def __ne__(self, other):
            return False

        __hash__ = int.__hash__

    _chunks.checksum = lambda data: Fits()


# --- files -----------------------------------------------------------------------------------


def cuts(root, work, seed, count):
    """Truncates, lengthens, empties, removes or replaces by a directory one file; reads."""
    reader, dice = Reader(root), random.Random(seed)
    names = [str(file.relative_to(root)) for file in files_of(root)]
    hows = ["cut"] * 3 + ["longer", "empty", "gone", "directory"]
    for n in range(count):
        here = Path(shutil.copytree(root, f"{work}-{n}"))
        file, how = here / dice.choice(names), hows[n % len(hows)]
        size = file.stat().st_size
        if how in ("cut", "empty") and not size:
            how = "gone"
        match how:
            case "cut":
                cut = dice.randrange(size)
                os.truncate(file, cut)
                how = f"cut at {cut} of {size}"
            case "longer":
                with file.open("ab") as stream:
                    stream.write(dice.randbytes(dice.choice([1, 7, 4096])))
            case "empty":
                os.truncate(file, 0)
            case "gone":
                file.unlink()
            case "directory":
                file.unlink()
                file.mkdir()
        _read_changed(reader, here, file, f"{file.relative_to(here)} {how}")


def _contents(place):
    """The bytes of a file, or of all files in a directory by name."""
    if place.is_file():
        return place.read_bytes()
    files = [file for file in place.rglob("*") if file.is_file()]
    return {str(file.relative_to(place)): file.read_bytes() for file in files}


def _read_changed(reader, here, file, what, good=None):
    must_find = file.name != _MARKER and not what.endswith(_last_byte(reader))

    def check():
        ways, where = reader.ways(), f"{here}/{STEP}"
        return reader.check(where, ways, file=str(file), must_find=must_find, good=good)

    attempt(what, check)
    shutil.rmtree(here)


def _last_byte(reader):
    size = os.path.getsize(f"{reader.path}/_jaxckpt.json")
    return f"_jaxckpt.json cut at {size - 1} of {size}"


def swaps(root, other, work, seed, count, blind=False):
    """Swaps files, copies one over another, within a checkpoint and from another like it.

    Args:
        other: A run whose step has the same structure and other values.
        count: Of what is done with data files, and with others, in each way, at most.
        blind: A control: the readers do not ask if a chunk is the one that was written.
    """
    reader, others_reader = Reader(root), Reader(other)
    if blind:
        from jaxckpt._disk import native as _native

        _native._read_sums = lambda *of: None
    names = [str(file.relative_to(root)) for file in files_of(root)]
    others = [str(file.relative_to(other)) for file in files_of(other)]
    sizes = {name: os.path.getsize(f"{root}/{name}") for name in names}
    sizes_there = {name: os.path.getsize(f"{other}/{name}") for name in others}
    edits = [("swap", a, b) for a, b in itertools.combinations(names, 2)]
    edits += [("copy", a, b) for a, b in itertools.permutations(names, 2) if sizes[a] == sizes[b]]
    edits += [("foreign", a, b) for a in others for b in names if sizes_there[a] == sizes[b]]
    edits += [("foreign", a, a) for a in others if a in sizes and sizes_there[a] != sizes[a]]
    folders = sorted(
        str(folder.relative_to(root)) for folder in Path(root).rglob("*") if folder.is_dir()
    )
    edits += [("rest", a, a) for a in names if a in others and not a.endswith(_MARKER)]
    edits += [("folder", a, a) for a in folders if a != str(STEP) and Path(other, a).is_dir()]
    inside = [folder for folder in folders if folder != str(STEP)]
    edits += [
        ("swap", a, b)
        for a, b in itertools.combinations(inside, 2)
        if not b.startswith(f"{a}/") and not a.startswith(f"{b}/")
    ]
    done = Counter()
    random.Random(seed).shuffle(edits)
    for n, (how, a, b) in enumerate(edits):
        source, target = Path(root if how in ("swap", "copy") else other, a), Path(root, b)
        kind = how, target.is_dir(), "/d/" in a and "/d/" in b
        if done[kind] == count or _contents(source) == _contents(target):
            continue
        done[kind] += 1
        here = Path(shutil.copytree(root, f"{work}-{n}"))
        match how:
            case "swap":
                (here / a).rename(here / "between")
                (here / b).rename(here / a)
                (here / "between").rename(here / b)
            case "copy" | "foreign":
                shutil.copy(source, here / b)
            case "folder":
                shutil.rmtree(here / a)
                shutil.copytree(source, here / a)
            case "rest":  # all is of the other one but this
                shutil.rmtree(here)
                shutil.copytree(other, here)
                shutil.copy(target, here / a)
        # What is whole of another checkpoint may be read as that: it has a record of its own.
        good = others_reader.good if how == "rest" else None
        _read_changed(reader, here, here / b, f"{how} {a} {b}", good)
