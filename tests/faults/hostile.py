"""Makes malicious checkpoints, and checks how readers handle them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import shutil
import socket
import struct
import sys
from pathlib import Path

import numpy as np
from awscrt.checksums import crc32c

from tests.faults.damage import STEP, Reader, attempt, bits
from tests.faults.metadata import fit_record, limit_memory
from tests.storage.test_values import HARMFUL, fit, plant

_MOST_GROWTH = 256 << 20
_LARGE = (512 << 20) - 1  # as much as a file of JSON may have
TOKEN = "0123456789abcdef"


# --- what a case does to a run at `here`, with `outside` beside it ---------------------------
# Each returns None, or the path to read in place of the step.


def _header(here, **change):
    """Arrays as the oldest Orbax left them, one with another header."""
    path = here / "orbax"
    entries = {}
    for name in ("a", "b"):
        header = {
            "chunks": [16],
            "compressor": None,
            "dtype": "<f4",
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": [16],
            "zarr_format": 2,
        }
        header |= change if name == "a" else {}
        (path / name).mkdir(parents=True)
        (path / name / ".zarray").write_text(json.dumps(header))
        (path / name / "0").write_bytes(np.arange(16, dtype=np.float32).tobytes())
        entries[name] = _entry(name)
    (path / "_METADATA").write_text(json.dumps({"tree_metadata": entries, "use_zarr3": False}))
    return path


def _entry(*keys):
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }


def huge_shape(here, outside):
    return _header(here, shape=[1 << 20, 1 << 20], chunks=[4, 4])


def huge_dimension(here, outside):
    return _header(here, shape=[1 << 62], chunks=[16])


def huge_fill(here, outside):
    return _header(here, shape=[1 << 40], chunks=[16], fill_value=0)


def huge_chunks(here, outside):
    return _header(here, shape=[16, 16], chunks=[1 << 16, 1 << 16])


def huge_chunk(here, outside):
    return _header(here, chunks=[1 << 40])


def size_that_wraps(here, outside):
    return _header(here, shape=[1 << 32, 1 << 32, 1 << 2], chunks=[1, 1, 1])


def size_that_wraps_to_nothing(here, outside):
    return _header(here, shape=[1 << 21] * 3 + [2], chunks=[1, 1, 1, 1])


def many_chunks(here, outside):
    return _header(here, shape=[1 << 30], chunks=[1])


def zstd_bomb(here, outside):
    """128 KiB that become 4 GiB of zeros: blocks of a byte and how often."""
    path = _header(here, compressor={"id": "zstd", "level": 1})
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = ((1 << 17) << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    (path / "a" / "0").write_bytes(b"\x28\xb5\x2f\xfd\x00\x38" + block * 32767 + last)
    return path


def gzip_bomb(here, outside):
    """A megabyte that becomes one gigabyte."""
    import zlib

    path = _header(here, compressor={"id": "zlib", "level": 1})
    packer = zlib.compressobj(9)
    blocks = [packer.compress(bytes(1 << 20)) for _ in range(1 << 10)]
    (path / "a" / "0").write_bytes(b"".join(blocks) + packer.flush())
    return path


def ten_million_leaves(here, outside):
    """Each of them as short as can be."""
    path = _header(here)
    thousand = "".join(f',"%d{i:03}":{{}}' for i in range(1000))
    with (path / "_METADATA").open("w") as file:
        file.write('{"tree_metadata":{' + f'"a":{json.dumps(_entry("a"))}')
        for i in range(10_000):
            file.write(thousand.replace("%d", str(i)))
        file.write("}}")
    return path


def _text(name, text):
    def change(here, outside):
        (here / str(STEP) / name).write_text(text)
        fit_record(here / str(STEP))

    change.__name__ = f"{name} {text[:9]}"
    return change


def sparse(name, fits):
    """Half a gigabyte of nothing in place of a small file."""

    def change(here, outside):
        file = here / str(STEP) / name
        os.truncate(file, _LARGE)
        record = here / str(STEP) / "_jaxckpt.json"
        if fits:  # without reading it, which would take the memory here
            _change_record(record, lambda files: files[name].update(bytes=_LARGE))

    change.__name__ = f"half a gigabyte of {name}, {'recorded' if fits else 'not recorded'}"
    change.most = 2 * _LARGE + _MOST_GROWTH if fits else _MOST_GROWTH
    return change


def _change_record(file, change):
    from jaxckpt.format import step

    record = json.loads(file.read_bytes().splitlines()[0])
    change(record["files"])
    body = json.dumps(record).encode()
    file.write_bytes(body + b"\n" + step.digest(body).encode() + b"\n")


def harmful_tree(case):
    """The database of a share whose tree of nodes is not one."""

    def change(here, outside):
        path = here / str(STEP)
        plant(path / "state", case, 4)
        fit(path, share=[0, 2])

    change.__name__ = f"a tree with {case.__name__.replace('_', ' ')}"
    return change


def sparse_record(here, outside):
    os.truncate(here / str(STEP) / "_jaxckpt.json", _LARGE)


def sparse_of_others(here, outside):
    path = _header(here)
    os.truncate(path / "_METADATA", _LARGE)
    return path


sparse_of_others.most = 2 * _LARGE + _MOST_GROWTH


def item_name(name):
    """Orbax's file names an item that lies elsewhere."""

    def change(here, outside):
        file = here / str(STEP) / "_CHECKPOINT_METADATA"
        value = json.loads(file.read_text())
        value["item_handlers"] = {name.format(outside=outside): "x"}
        file.write_text(json.dumps(value))
        fit_record(here / str(STEP))

    change.__name__ = f"an item called {name!a}"
    return change


def leaf_name(*keys):
    def change(here, outside):
        path = _header(here)
        file = path / "_METADATA"
        value = json.loads(file.read_text())
        value["tree_metadata"]["x"] = _entry(*(key.format(outside=outside) for key in keys))
        file.write_text(json.dumps(value))
        return path

    change.__name__ = f"a leaf called {keys!a}"
    return change


def recorded_name(name):
    def change(here, outside):
        _change_record(
            here / str(STEP) / "_jaxckpt.json",
            lambda files: files.update({name.format(outside=outside): {"bytes": 64, "sample": ""}}),
        )

    change.__name__ = f"the record lists {name!a}"
    return change


def reference(to):
    """A database whose nodes refer to a file elsewhere, which is there; their checksums fit."""

    def change(here, outside):
        import tensorstore as ts

        from jaxckpt.storage._arrays import context

        path = _header(here)
        tree = {"tree_metadata": {"a": _entry("a")}, "use_zarr3": False, "use_ocdbt": True}
        (path / "_METADATA").write_text(json.dumps(tree))
        target = to.format(outside=outside) + "0" * 32
        prefix = "q" * (len(target) - 32)
        spec = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{path}/"},
            "config": {"compression": None, "max_inline_value_bytes": 0},
            "value_data_prefix": prefix,
        }
        store = ts.KvStore.open(spec, context=context()).result()
        with ts.Transaction(atomic=True) as transaction:
            for name in (".zarray", "0"):
                value = (path / "a" / name).read_bytes()
                store.with_transaction(transaction)[f"a/{name}"] = value
        shutil.rmtree(path / "a")
        [stored] = path.glob("q*")
        os.makedirs(os.path.dirname(path / target), exist_ok=True)
        stored.rename(os.path.normpath(path / target))
        found = 0
        for file in [path / "manifest.ocdbt", *(path / "d").iterdir()]:
            pattern = prefix.encode() + rb"(?s:.{32})"
            data, n = re.subn(pattern, lambda _: target.encode(), file.read_bytes())
            found += n
            crc = crc32c(data[:-4])
            file.write_bytes(data[:-4] + struct.pack("<I", crc))
        assert found == 1, "the reference was not found"
        return path

    change.__name__ = f"a reference to {to}"
    return change


# --- links, FIFOs and sockets ----------------------------------------------------------------


def special(name, kind):
    """Puts something else in the place of a regular file or a directory."""

    def change(here, outside):
        place = here / name.format(step=STEP)
        if "*" in name:
            place = sorted(here.glob(name.format(step=STEP)))[0]
        if kind == "link":  # to what was there, which lies outside now, with the right bytes
            target = outside / "moved"
            if place.exists():
                shutil.move(place, target)
            else:
                target.mkdir()
                (target / "canary").write_text("precious")
            place.symlink_to(target)
            return
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(place)
        elif kind == "device":
            os.mknod(place, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: it never ends
        else:
            with socket.socket(socket.AF_UNIX) as server:
                folder = os.open(place.parent, os.O_RDONLY)
                server.bind(f"/proc/self/fd/{folder}/{place.name}")
                os.close(folder)

    change.__name__ = f"{name} is a {kind}"
    return change


_PLACES = (
    "{step}",
    "{step}/state",
    "{step}/_CHECKPOINT_METADATA",
    "{step}/_jaxckpt.json",
    "{step}/commit_success.txt",
    "{step}/state/_METADATA",
    "{step}/state/_sharding",
    "{step}/state/_strings.json",
    "{step}/state/array_metadatas",
    "{step}/state/manifest.ocdbt",
    "{step}/state/d",
    "{step}/state/d/*",
    "{step}/config/metadata",
    "{step}/data/process_0-of-1.json",
    "{step}/metrics/metrics",
    "{step}/_jaxckpt.pinned",
    "_jaxckpt.run",
    "_jaxckpt.owner",
    "_jaxckpt.lock",
    "_jaxckpt.ledger",
    "_jaxckpt.doomed",
    f"_jaxckpt.lease-{TOKEN}",
    f"6.orbax-checkpoint-tmp-jaxckpt-{TOKEN}",
    f"6.orbax-checkpoint-tmp-deleting-{TOKEN}",
    "6.jaxckpt-committed",
    "6",
)
LINKS = [special(name, "link") for name in _PLACES]
FIFOS = [special(name, "fifo") for name in _PLACES]
OTHERS = [special(name, "socket") for name in _PLACES[2:12:3]]
DEVICES = [special(name, "device") for name in _PLACES]
SIZES = [
    huge_shape,
    huge_dimension,
    huge_fill,
    huge_chunks,
    huge_chunk,
    size_that_wraps,
    size_that_wraps_to_nothing,
    many_chunks,
    zstd_bomb,
    gzip_bomb,
    ten_million_leaves,
    *(
        _text(name, text)
        for name in ("state/_METADATA", "state/_sharding", "state/_strings.json")
        for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 1_000_000, '{"a":1e999999}')
    ),
    *(sparse(name, fits) for name in ("state/_METADATA", "metrics/metrics") for fits in (0, 1)),
    sparse_record,
    sparse_of_others,
    *(harmful_tree(case) for case in HARMFUL),
]
NAMES = [
    *(item_name(name) for name in ("../../outside/good", "{outside}/good", "a\0b", "")),
    *(
        leaf_name(*keys)
        for keys in (
            ["../../outside/array"],
            ["{outside}/array"],
            ["..", "..", "outside", "array"],
            ["b/../../../outside/array"],
            ["b\0"],
            ["%2e%2e/outside/array"],
        )
    ),
    *(
        recorded_name(name)
        for name in ("../../outside/canary", "{outside}/canary", "a\0", "a/../b")
    ),
    *(reference(to) for to in ("../../outside/", "{outside}/", "d/../../../outside/", "inside/")),
]
CASES = {"links": LINKS, "fifos": FIFOS, "others": OTHERS, "sizes": SIZES, "names": NAMES}
CASES["devices"] = DEVICES


# --- what children do ------------------------------------------------------------------------


def names_of(which):
    return [case.__name__ for case in CASES[which]]


def try_case(root, work, which, n):
    """One case: a typed error, or a restore that is right, in so much memory; nothing outside."""
    attempt(names_of(which)[n], lambda: _try(Reader(root), Path(work), CASES[which][n]))


def _try(reader, work, case):
    import jaxckpt

    here, outside = Path(shutil.copytree(reader.root, work / "run")), work / "outside"
    outside.mkdir()
    _header(outside).rename(outside / "good")
    shutil.copytree(outside / "good" / "a", outside / "array")
    (outside / "array" / "0").write_bytes(b"outside!" * 8)
    (outside / "canary").write_bytes(b"outside!" * 8)
    path = str(case(here, outside) or here / str(STEP))
    for place in outside.rglob("*"):
        if place.is_file() and not place.is_symlink():
            os.utime(place, (0, place.stat().st_mtime))
    kept = _untouched(outside)
    opened = []
    sys.addaudithook(lambda event, args: _note(opened, event, args, str(outside)))
    limit_memory()
    before = _peak_bytes()
    follows = path == str(here / str(STEP)) and os.path.islink(path)  # a user's link to a step
    calls = [
        lambda: jaxckpt.restore(path),
        lambda: str(jaxckpt.open(path)),
        lambda: f"verified: {jaxckpt.verify(path).ok}",
    ]
    if path == str(here / str(STEP)):
        calls += [lambda: _manage(here, "r"), lambda: _manage(here, "w")]
    came = [_came(call, reader, path) for call in calls]
    grown = _peak_bytes() - before
    assert grown < getattr(case, "most", _MOST_GROWTH), f"{grown >> 20} MiB more memory: {came}"
    if not follows:
        assert not opened, f"opened {opened[:3]}: {came}"
        assert _untouched(outside) == kept, f"changed or read outside: {came}"
    return {"came": came}


def _manage(root, mode):
    """Everything that a manager does at the start of a job."""
    import jaxckpt

    with jaxckpt.CheckpointManager(root, mode=mode) as manager:
        manager.all_steps()
        manager.latest_step()
        if mode == "r":
            return manager.restore_items(step=STEP)
        manager.save(7, {"w": 1}).result()
        manager.delete(7)
    return None


def _came(call, reader, path):
    """The type of an error of ours; anything else is none that a reader may raise."""
    import jaxckpt

    try:
        got = call()
    except (jaxckpt.CheckpointError, MemoryError) as error:
        # Not the error itself: that and this call would refer to each other.
        text, kind = str(error), type(error)
    else:
        text, kind = "", None
    if kind is not None:
        assert len(text) > 20, f"tells nothing: {kind} {text}"
        # An array that is nothing but fill is as large as its metadata say.
        assert issubclass(kind, jaxckpt.CheckpointError) or "leaf" in text, f"{kind} {text}"
        return kind.__name__
    if isinstance(got, dict) and path.endswith(f"/{STEP}") and "large" in got:
        jax_bits = reader.good["restore"][1]
        assert {k: v[-1] for k, v in bits(got)[1].items()} == {
            k: v[-1] for k, v in jax_bits.items()
        }, "another value"
    assert "outside!" not in repr(got), "a value from outside"
    return got if isinstance(got, str) and len(got) < 20 else "a value"


def _note(opened, event, args, outside):
    place = args[0] if args else None
    if event not in ("open", "os.remove", "os.rename", "os.listdir", "os.scandir", "os.truncate"):
        return
    if isinstance(place, str):
        if event in ("os.remove", "os.rename"):  # of a link, not of what it leads to
            place = os.path.dirname(place)
        if os.path.realpath(place).startswith(outside):
            opened.append((event, place))


_FORBIDDEN = (
    "pickle.find_class",
    "marshal.load",
    "marshal.loads",
    "exec",
    "compile",
    "import",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "socket.connect",
)


def run_nothing(kinds, work, seed, plant=False):
    """Reads checkpoints of each kind, good ones and damaged ones: no code of theirs is run.

    Args:
        kinds: The name and the place of one of each.
        plant: A control: reading one runs something.
    """
    from tests.faults.metadata import _is_metadata, changed, use

    dice, events, armed = random.Random(seed), [], []
    sys.addaudithook(
        lambda event, args: armed and event in _FORBIDDEN and events.append((event, str(args)[:99]))
    )
    for name, place in kinds.items():
        roots = (place, os.path.dirname(place))
        _read(use, *roots)  # what jax, TensorStore and we import when first used
        for how in ("good", "changed", "cut"):
            here = Path(work, f"{name}-{how}")
            copied = shutil.copytree(roots[1], here) / os.path.basename(place)
            below = [copied] if copied.is_file() else sorted(copied.rglob("*"))
            files = [file for file in below if _is_metadata(file)] or below[:1]
            file = dice.choice(files)
            if how == "changed":
                file.write_bytes(changed(file.read_bytes(), dice))
            elif how == "cut":
                os.truncate(file, file.stat().st_size // 2)
            events.clear()

            def check(copied=copied, here=here):
                armed.append(True)
                _read(use, copied, here)
                if plant:
                    pickle.loads(pickle.dumps(shutil.rmtree))
                armed.clear()
                assert not events, f"ran {events[:5]}"

            attempt(f"{name}, {how}", check)
            shutil.rmtree(here)


def _read(use, path, root):
    import jaxckpt

    use(str(path))
    if os.path.isdir(path) and os.path.basename(path).isdigit():
        with contextlib.suppress(jaxckpt.CheckpointError):
            _manage(root, "r")


def _untouched(outside):
    """Returns the files outside, and whether any was read, by its time of access."""
    found = {}
    for place in sorted(outside.rglob("*")):
        status = place.lstat()
        if place.is_file() and not place.is_symlink() and status.st_atime_ns >= 10**15:
            found[str(place)] = (status.st_size, status.st_mtime_ns, "read")
        else:
            found[str(place)] = (status.st_size, status.st_mtime_ns, "not read")
    return found


def _peak_bytes():
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    ]
    return int(line.split()[1]) << 10
