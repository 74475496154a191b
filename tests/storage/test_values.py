"""The values of a database are found by its tree, whoever wrote it; a bad tree is refused soon."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._disk.data_files import DataFiles
from jaxckpt.errors import CheckpointError, CorruptCheckpoint
from jaxckpt.format import names, ocdbt, step
from jaxckpt.storage import LocalStorage
from jaxckpt.storage._values import find_values, read_place
from jaxckpt.testing import simulate

STORAGE = LocalStorage()
RNG = np.random.default_rng(0)


def read(folder):
    """Returns the values that are found, by key."""
    found = find_values(STORAGE, str(folder))
    return {
        key: value if isinstance(value, bytes) else read_place(STORAGE, str(folder), value)
        for key, value in found.items()
    }


def read_by_tensorstore(folder):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    return {key.decode(): store[key] for key in store.list().result()}


def write(folder, values):
    """Writes a database of ours."""
    folder.mkdir(parents=True)
    files = DataFiles(STORAGE, str(folder))
    for key, value in values.items():
        files.put(key, value)
    (folder / names.OCDBT_MANIFEST).write_bytes(files.write().manifest)


def merge_as_older_releases(folder, databases):
    """Merges databases by TensorStore, which compresses nodes and manifest."""
    context = ts.Context()
    base = {"driver": "file", "path": f"{folder}/"}
    config = {"max_inline_value_bytes": 4096, "max_decoded_node_bytes": 2000}
    target = {"driver": "ocdbt", "base": base, "config": config, "assume_config": True}
    with ts.Transaction(atomic=True) as transaction:
        store = ts.KvStore.open(target, context=context).result().with_transaction(transaction)
        for name in databases:
            base = {"driver": "file", "path": f"{folder}/{name}/"}
            child = ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()
            child.experimental_copy_range_to(store).result()


def some_values(process, count=300):
    """Half of the values are small enough to lie in nodes."""
    sizes = [5000, 60]
    return {f"leaf_{n:04}/c/{process}": RNG.bytes(sizes[n % 2]) for n in range(count)}


DATABASES = ["ocdbt.process_0", "ocdbt.process_1.0123456789abcdef"]


@pytest.fixture
def children(ram_path):
    """Databases of two processes, and the values of both."""
    values = [some_values(process) for process in range(2)]
    for name, some in zip(DATABASES, values, strict=True):
        write(ram_path / name, some)
    return ram_path, values[0] | values[1]


def test_a_merge_of_older_releases_is_read(children):
    """TensorStore made and compressed it, on two levels."""
    folder, values = children

    merge_as_older_releases(folder, DATABASES)

    assert ocdbt.is_compressed((folder / names.OCDBT_MANIFEST).read_bytes())
    assert read(folder) == values


def divide_as_older_releases(item, count):
    """Gives each process of a checkpoint the database that it had in older releases."""
    places = find_values(STORAGE, str(item))
    inline = {key: value for key, value in places.items() if isinstance(value, bytes)}
    files = sorted({value.file for value in places.values() if not isinstance(value, bytes)})
    for n in range(count):
        folder = item / f"ocdbt.process_{n}"
        (folder / "d").mkdir(parents=True)
        mine = {k: v for k, v in places.items() if k not in inline and v.file in files[n::count]}
        nodes, manifest = ocdbt.encode_database(mine | (inline if n == 0 else {}), FILE)
        (folder / FILE).write_bytes(nodes)
        (folder / names.OCDBT_MANIFEST).write_bytes(manifest)
        for file in files[n::count]:
            (item / file).rename(folder / file)
    for file in [*(item / "d").iterdir(), item / names.OCDBT_MANIFEST]:
        file.unlink()
    return [f"ocdbt.process_{n}" for n in range(count)]


def test_a_checkpoint_of_an_older_release_is_restored_and_verified(ram_path, mesh):
    """Of two processes."""
    tree = {f"leaf_{n:03}": RNG.random(30 + 900 * (n % 2)) for n in range(60)}
    shards = jax.device_put(RNG.random((512, 64), np.float32), NamedSharding(mesh, P("x", "y")))
    tree["shards"] = shards
    simulate(2, lambda _: jaxckpt.save(ram_path / "a", tree), timeout_s=60)
    item = ram_path / "a" / "state"
    merge_as_older_releases(item, divide_as_older_releases(item, 2))
    fit(ram_path / "a")

    got = jaxckpt.restore(ram_path / "a", as_numpy=True)

    assert all(np.array_equal(got[name], values) for name, values in tree.items())
    assert jaxckpt.verify(ram_path / "a").ok


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}])
def test_what_tensorstore_writes_is_found(ram_path, compression):
    """In several versions, and on several levels."""
    config = {"compression": compression, "max_decoded_node_bytes": 500}
    config["max_inline_value_bytes"] = 50
    base = {"driver": "file", "path": f"{ram_path}/"}
    spec = {"driver": "ocdbt", "base": base, "config": config, "assume_config": True}
    store = ts.KvStore.open(spec).result()
    values = {f"{'key' * (n % 7)}{n}": RNG.bytes(n) for n in range(150)}
    for some in (50, 150):
        with ts.Transaction(atomic=True) as transaction:
            for key in [*values][:some]:
                store.with_transaction(transaction)[key] = values[key]

    assert read(ram_path) == values


def test_too_many_keys_are_not_looked_through(children):
    folder, _ = children
    path = str(folder / DATABASES[0])

    assert find_values(STORAGE, path, max_keys=299) is None
    assert len(find_values(STORAGE, path, max_keys=300)) == 300


# --- trees that are made to harm -------------------------------------------------------------

FILE = "d/" + "e" * 32


class Tree:
    """Makes a tree with fitting checksums, whatever is in it."""

    def __init__(self):
        self.data = bytearray()

    def leaf(self, values):
        [node] = ocdbt._leaves(sorted((k.encode(), v) for k, v in values.items()), self.data)
        return node

    def above(self, height, below):
        """Adds a node above others, which may be any."""
        named = [node._replace(first=b"%06d" % n) for n, node in enumerate(below)]
        [node] = ocdbt._above(named, height, FILE, 0, self.data)
        return node

    def manifest(self, root, height, keys):
        _, manifest = ocdbt.encode_database({"a": b""}, FILE)
        body = manifest[ocdbt._HEAD.size : -4]
        numbers = [0, root.offset, root.size, keys, root.tree_bytes, root.value_bytes]
        start = body[: body.index(FILE.encode()) + len(FILE)] + bytes([1, 1, height])
        return ocdbt._framed(ocdbt._MANIFEST, start + ocdbt._varints(numbers) + bytes(9))


def many_paths(most):
    """Each of 40 nodes refers twice to the next."""
    tree = Tree()
    node = tree.leaf({"k": b"v"})
    for height in range(1, 40):
        node = tree.above(height, [node, node])
    return tree, node, 39, most


def a_cycle(most):
    """A node that refers to itself."""
    tree = Tree()
    node = ocdbt._Node(b"", 0, 100, 1, 1, 0)
    while True:
        tree.data.clear()
        if (found := tree.above(1, [node])).size == node.size:
            return tree, node, 1, most
        node = found


def nodes_in_nodes(most):
    """Each node is a value in the next one."""
    tree, nodes = Tree(), []
    for n in range(300):
        inner = bytes(tree.data)
        tree.data.clear()
        outer = tree.leaf({f"{n:03}": inner})
        at = tree.data.index(inner) if inner else 0
        nodes = [*(node._replace(offset=node.offset + at) for node in nodes), outer]
    return tree, tree.above(1, nodes), 1, most


def many_huge_nodes(most):
    """Each is said to have 64 MiB."""
    tree, size = Tree(), 64 << 20
    nodes = [ocdbt._Node(b"", n * size, size, 1, size, 0) for n in range(2000)]
    return tree, tree.above(1, nodes), 1, most


def more_keys_than_stated(most):
    tree = Tree()
    return tree, tree.leaf({f"{n}": b"" for n in range(1000)}), 0, 3


def fewer_keys_than_stated(most):
    tree = Tree()
    return tree, tree.leaf({"k": b""}), 0, most


def another_height(most):
    tree = Tree()
    return tree, tree.leaf({"k": b""}), 3, 1


HARMFUL = [
    many_paths,
    a_cycle,
    nodes_in_nodes,
    many_huge_nodes,
    more_keys_than_stated,
    fewer_keys_than_stated,
    another_height,
]


def plant(item, case, most):
    """Replaces the database of an item."""
    tree, root, height, keys = case(most)
    (item / FILE).parent.mkdir(exist_ok=True)
    (item / FILE).write_bytes(tree.data)
    (item / names.OCDBT_MANIFEST).write_bytes(tree.manifest(root, height, keys))


def fit(path, **changes):
    """Makes the record fit the files as they are."""
    file = path / names.RECORD
    record = json.loads(file.read_bytes().splitlines()[0]) | changes
    everything = [f for f in path.rglob("*") if f.is_file() and f.name not in (names.RECORD,)]
    for name in [*record["files"]]:
        if not (path / name).exists():
            del record["files"][name]
    for found in everything:
        name = str(found.relative_to(path))
        if name in record["files"] or names.is_data_file(name):
            facts = record["files"].setdefault(name, {})
            facts["bytes"] = found.stat().st_size
            facts.pop("sample", None)
            if "sha256" in facts:
                facts["sha256"] = step.digest(found.read_bytes())
    body = json.dumps(record).encode()
    file.write_bytes(body + b"\n" + step.digest(body).encode() + b"\n")


@pytest.mark.parametrize("case", HARMFUL)
def test_a_harmful_tree_is_refused(ram_path, case):
    """By an error that names the file, after each node was read once at most."""
    plant(ram_path, case, 1 << 40)
    reads = []

    class Counted(LocalStorage):
        def read_into(self, path, offset, buffers):
            reads.append(offset)
            super().read_into(path, offset, buffers)

    with pytest.raises(ValueError, match=str(ram_path)):
        find_values(Counted(), str(ram_path))

    assert len(reads) == len({*reads}) <= 200


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("case", HARMFUL)
def test_a_checkpoint_with_a_harmful_tree_is_damaged(ram_path, case, share):
    """Restoring and verifying end, whether or not it says that it is a share of one process."""
    jaxckpt.save(ram_path / "a", {"w": np.arange(3000.0), "b": np.arange(3)})
    plant(ram_path / "a" / "state", case, 4)
    fit(ram_path / "a", **({"share": [0, 2]} if share else {}))

    with pytest.raises(CheckpointError) as caught:
        jaxckpt.restore(ram_path / "a")
    assert share or isinstance(caught.value, CorruptCheckpoint)
    assert not jaxckpt.verify(ram_path / "a").ok


# --- memory ----------------------------------------------------------------------------------


def print_growth(folder, rounds):
    """Prints the bytes that a round of restores takes for ever, on average, after a few rounds."""
    tree = {f"leaf_{n:04}": np.full(10, n, np.float32) for n in range(2000)}
    jaxckpt.save(f"{folder}/1", tree)
    simulate(2, lambda _: jaxckpt.save(f"{folder}/2", tree), timeout_s=60)
    sizes = []
    for n in range(3 + rounds):
        sizes = [*sizes, _resident_bytes()] if n == 3 else sizes
        jaxckpt.restore(f"{folder}/1", as_numpy=True)
        jaxckpt.restore(f"{folder}/2", as_numpy=True)
    print((_resident_bytes() - sizes[0]) / rounds)


def _resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap does not count
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_restoring_leaks_nothing(ram_path):
    """Less than 100 kB for 2,000 leaves of one process, and as many of two, in each round.

    It was 5 MB: TensorStore never frees what `ts.ocdbt.dump` returns.
    """
    command = [sys.executable, "-m", "tests.storage.test_values", str(ram_path), "12"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)

    assert float(done.stdout) < 100_000


if __name__ == "__main__":
    print_growth(sys.argv[1], int(sys.argv[2]))
