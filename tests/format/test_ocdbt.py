"""The database that we encode is the one that TensorStore reads, and that we decode."""

import tempfile
import tracemalloc
from itertools import groupby
from pathlib import Path

import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.format import ocdbt
from jaxckpt.format.ocdbt import Foreign, Place, decode_manifest, decode_node, encode_database

# Of this database, and of others in directories inside its own.
FILES = [
    f"{folder}d/{n:032x}"
    for n, folder in enumerate(["", "ocdbt.process_0/", f"ocdbt.process_12.{7:016x}/", ""])
]
NODES = "d/" + "e" * 32

keys = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=12)
values = st.one_of(
    st.binary(max_size=20),
    st.builds(Place, st.sampled_from(FILES), st.integers(0, 500), st.integers(0, 500)),
)


def read(database):
    """Returns what TensorStore finds, and the manifest as it shows it."""
    data, manifest = encode_database(database, NODES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for n, name in enumerate(FILES):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(bytes(i * (n + 3) % 251 for i in range(1000)))
        (path / NODES).write_bytes(data)
        (path / "manifest.ocdbt").write_bytes(manifest)
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
        shown = ts.ocdbt.dump(store.base).result()
        return {key: store[key] for key in store.list().result()}, shown["versions"]


def wanted(value):
    if isinstance(value, bytes):
        return value
    n = FILES.index(value.file)
    return bytes(i * (n + 3) % 251 for i in range(value.offset, value.offset + value.size))


@pytest.mark.parametrize("node_bytes", [60, 1_000_000])
@settings(deadline=None, max_examples=60)
@given(database=st.dictionaries(keys, values, min_size=1, max_size=40))
def test_tensorstore_reads_what_is_encoded(node_bytes, database):
    """In one node, and in many on several levels."""
    before, ocdbt.MAX_NODE_BYTES = ocdbt.MAX_NODE_BYTES, node_bytes
    try:
        found, versions = read(database)
    finally:
        ocdbt.MAX_NODE_BYTES = before

    assert found == {key.encode(): wanted(value) for key, value in database.items()}
    [version] = versions
    statistics = version["root"]["statistics"]
    assert statistics["num_keys"] == len(database)
    size = sum(value.size for value in database.values() if isinstance(value, Place))
    assert statistics["num_indirect_value_bytes"] == size
    assert (version["root_height"] > 0) == (node_bytes == 60 and len(database) > 2) or True


def test_large_numbers_take_several_bytes():
    """Offsets beyond 4 GiB; the file is too short for that, which is another matter."""
    place = Place(FILES[0], 5 << 32, 300)
    data, manifest = encode_database({"a": place}, NODES)
    assert len(manifest) < 200
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "d").mkdir()
        (Path(folder) / NODES).write_bytes(data)
        (Path(folder) / "manifest.ocdbt").write_bytes(manifest)
        base = ts.KvStore.open(f"file://{folder}/").result()
        [version] = ts.ocdbt.dump(base).result()["versions"]
        [entry] = ts.ocdbt.dump(base, version["root"]["location"]).result()["entries"]
    assert entry["indirect_value"] == f"value::{FILES[0]}:{5 << 32}:300"


# --- decoding --------------------------------------------------------------------------------


def found_in(data, manifest, folder=""):
    """Returns what is decoded."""
    root = decode_manifest(manifest)
    place = root.place._replace(file=folder + root.place.file)
    nodes, found = [(place, b"", root.height)], {}
    while nodes:
        (file, offset, size), prefix, height = nodes.pop()
        assert file == folder + NODES
        node = decode_node(data[offset : offset + size], folder, prefix)
        assert node.height == height
        if height:
            nodes += [(at, key, height - 1) for key, at in zip(node.keys, node.values, strict=True)]
        else:
            found |= {key.decode(): v for key, v in zip(node.keys, node.values, strict=True)}
    assert len(found) == root.keys
    return found


@pytest.mark.parametrize("node_bytes", [60, 1_000_000])
@settings(deadline=None, max_examples=60)
@given(database=st.dictionaries(keys, values, min_size=1, max_size=40))
def test_what_is_encoded_is_decoded(node_bytes, database):
    """In one node, and in many on several levels; also from the directory above."""
    before, ocdbt.MAX_NODE_BYTES = ocdbt.MAX_NODE_BYTES, node_bytes
    try:
        encoded = encode_database(database, NODES)
    finally:
        ocdbt.MAX_NODE_BYTES = before

    assert found_in(*encoded) == database
    if all(isinstance(v, bytes) or v.file.startswith("d/") for v in database.values()):
        above = found_in(*encoded, "ocdbt.process_3/")
        assert above == {
            key: v if isinstance(v, bytes) else v._replace(file=f"ocdbt.process_3/{v.file}")
            for key, v in database.items()
        }


# A node is given by its fields: numbers as varints, bytes as they are.
FILE = FILES[0].encode()
ONE_FILE = [1, len(FILE), 0, FILE]
NONE = [0]


def framed(fields, magic=ocdbt._NODE):
    """Returns a node or a manifest with a fitting header and checksum."""
    parts = groupby(fields, lambda field: isinstance(field, bytes))
    data = [b"".join(some) if is_bytes else ocdbt._varints([*some]) for is_bytes, some in parts]
    return ocdbt._framed(magic, b"".join(data))


def leaf(*fields, files=NONE):
    return framed([b"\0", *files, *fields])


def above(*fields):
    return framed([b"\1", *ONE_FILE, *fields])


def long_keys(count):
    """A leaf whose keys of 1402 bytes differ in the last two, and so take few."""
    lengths = ocdbt._varints([*[1400] * (count - 1), 1402, *[2] * (count - 1)])
    rests = b"".join(n.to_bytes(2, "big") for n in range(count))
    return leaf(count, lengths, b"k" * 1400, rests, bytes(count), bytes(count))


GOOD = {
    "an inline value": leaf(1, 1, b"k", 2, b"\0", b"vv"),
    "a value in a file": leaf(1, 1, b"k", 7, b"\1", 0, 5, files=ONE_FILE),
    "two keys": leaf(2, 1, 2, 1, b"kab", 0, 1, b"\0\0", b"v"),
    "two nodes below": above(2, 0, 1, 1, 1, 0, b"ab", 0, 0, 0, 90, 90, 80, 1, 1, 9, 9, 0, 0),
}
BAD = {
    "nothing": b"",
    "a header alone": ocdbt._framed(ocdbt._NODE, b""),
    "a manifest": framed([b"\0", 0, 1, 1, b"k", 0, b"\0"], ocdbt._MANIFEST),
    "another checksum": GOOD["two keys"][:-1] + b"\0",
    "more than its length": GOOD["two keys"] + b"\0",
    "no keys": leaf(0),
    "a cut number": leaf(1, 1, b"k", b"\x80"),
    "a number that never ends": leaf(1, 1, b"k", b"\x80" * 5000 + b"\0", b"\0"),
    "a number of ten bytes": leaf(1, 1, b"k", b"\xff" * 9 + b"\1", b"\0"),
    "many keys": leaf(1 << 59, 1, b"k", 2, b"\0", b"vv"),
    "a long key": leaf(1, 1 << 59, b"k", 2, b"\0", b"vv"),
    "long keys that wrap": leaf(3, 0, 0, *[(1 << 59) + 1] * 3, b"k", 0, 0, 0, b"\0\0\0"),
    "a long value": leaf(1, 1, b"k", 1 << 59, b"\0", b"vv"),
    "values that wrap": leaf(
        17, *[0] * 16, *[1] * 17, b"abcdefghijklmnopq", *[1 << 60] * 16, 3, bytes(17), b"vvv"
    ),
    "a huge value": leaf(1, 1, b"k", 1 << 61, b"\1", 0, 5, files=ONE_FILE),
    "a huge offset": leaf(1, 1, b"k", 7, b"\1", 0, 1 << 61, files=ONE_FILE),
    "a file that is not listed": leaf(1, 1, b"k", 7, b"\1", 1, 5, files=ONE_FILE),
    "no file": leaf(1, 1, b"k", 7, b"\1", 0, 5),
    "another kind of value": leaf(1, 1, b"k", 2, b"\2", b"vv"),
    "more at the end": leaf(1, 1, b"k", 2, b"\0", b"vv", b"w"),
    "less at the end": leaf(1, 1, b"k", 2, b"\0", b"v"),
    "keys out of order": leaf(2, 0, 1, 1, b"ba", 0, 1, b"\0\0", b"v"),
    "a key twice": leaf(2, 1, 1, 0, b"a", 0, 1, b"\0\0", b"v"),
    "more shared than there is": leaf(2, 2, 1, 1, b"ab", 0, 1, b"\0\0", b"v"),
    "more common than the key": above(1, 1, 2, b"a", 0, 0, 90, 1, 9, 0),
    "keys of gigabytes": leaf(
        60_001, *range(60_000), *[1] * 60_001, b"k" * 60_001, *[0] * 60_001, bytes(60_001)
    ),
    "long keys for 200 times its bytes": long_keys(15_000),
    "a name of a file that is no text": leaf(1, 1, b"k", 2, b"\0", b"vv", files=[1, 1, 0, b"\xff"]),
}
FOREIGN = {
    "a file elsewhere": [1, 37, 0, b"../" + FILE],
    "a file at the root": [1, 35, 0, b"/" + FILE],
    "a file of another name": [1, 3, 0, b"d/x"],
    "a file in the wrong directory": [1, 34, 2, FILE],
    "a directory that is none of ours": [1, 44, 10, b"ocdbt.mine/" + FILE[1:]],
}


@pytest.mark.parametrize("name", GOOD)
def test_good_nodes_are_decoded(name):
    """A control of the tests below."""
    node = decode_node(GOOD[name], "", b"p/")

    assert all(key.startswith(b"p/") for key in node.keys)
    assert len(node.keys) == len(node.values)


@pytest.mark.parametrize("name", BAD)
def test_bad_nodes_are_refused(name):
    """As damaged, in little memory."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"it|number|text|checksum|value|decode"):
        decode_node(BAD[name], "", b"")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100_000 + 200 * len(BAD[name])


def test_a_node_of_more_keys_than_its_tree_is_refused():
    """Before one is made."""
    node = long_keys(10_000)
    assert len(decode_node(node, "", b"", most=10_000).keys) == 10_000

    tracemalloc.start()
    with pytest.raises(ValueError, match="10000 entries, more than the tree has keys"):
        decode_node(node, "", b"", most=9999)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 4 << 20  # the keys have 14 MB


def test_a_long_prefix_counts_for_each_key():
    """Nodes above could make one of megabytes, for thousands of keys."""
    keys = [b"%04d" % n for n in range(2000)]
    node = leaf(len(keys), *[0] * 1999, *[4] * 2000, b"".join(keys), *[0] * 2000, bytes(2000))
    assert decode_node(node, "", b"p").keys[5] == b"p0005"

    with pytest.raises(ValueError, match="too long"):
        decode_node(node, "", b"p" * 10_000)


@pytest.mark.parametrize("name", FOREIGN)
def test_names_that_are_not_ours_are_left_to_tensorstore(name):
    with pytest.raises(Foreign):
        decode_node(leaf(1, 1, b"k", 2, b"\0", b"vv", files=FOREIGN[name]), "", b"")


@pytest.mark.parametrize("at", [16, 23])
def test_other_manifests_are_left_to_tensorstore(at):
    """Those of several files, and of nodes that are compressed in another way."""
    _, manifest = encode_database({"a": b""}, NODES)
    body = bytearray(manifest[ocdbt._HEAD.size : -4])
    body[at] = 2

    with pytest.raises(Foreign):
        decode_manifest(ocdbt._framed(ocdbt._MANIFEST, bytes(body)))


def test_a_manifest_that_is_cut_is_refused():
    """Anywhere before the number of keys, with a fitting checksum."""
    _, manifest = encode_database({"a": b""}, NODES)
    body = manifest[ocdbt._HEAD.size : -4]

    for n in range(len(body) - 12):
        with pytest.raises(ValueError, match=r"it ends early|too large"):
            decode_manifest(ocdbt._framed(ocdbt._MANIFEST, body[:n]))


changes = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=12)), max_size=4
)


def changed(body, edits):
    for at, cut, new in edits:
        body = body[:at] + new + body[at + cut :]
    return body


@pytest.mark.parametrize("height", [0, 1])
@settings(deadline=None, max_examples=150)
@given(database=st.dictionaries(keys, values, min_size=1, max_size=8), edits=changes)
def test_a_changed_node_is_decoded_or_refused(height, database, edits):
    """With a fitting checksum: by a typed error, or to as many keys as values, in order."""
    data, manifest = encode_database(database, NODES)
    if height:
        data = b"".join(above_one(data))
    node = ocdbt._framed(ocdbt._NODE, changed(data[ocdbt._HEAD.size : -4], edits))
    described = ocdbt._framed(ocdbt._MANIFEST, changed(manifest[ocdbt._HEAD.size : -4], edits))

    try:
        root = decode_manifest(described)
        assert root.place.file.endswith("d/" + root.place.file[-32:])
    except (ValueError, Foreign):
        pass
    try:
        decoded = decode_node(node, "", b"p")
    except (ValueError, Foreign):
        return
    assert len(decoded.keys) == len(decoded.values) > 0
    assert all(key.startswith(b"p") for key in decoded.keys)
    for value in decoded.values:
        if isinstance(value, Place):
            assert ocdbt._FILE.fullmatch(value.file)
            assert min(value.offset, value.size) >= 0


short = st.text(st.sampled_from("ab/"), max_size=6)


@pytest.mark.parametrize("node_bytes", [60, 1_000_000])
@settings(deadline=None, max_examples=150)
@given(
    database=st.dictionaries(short | keys, values, min_size=1, max_size=40),
    absent=st.lists(short | keys, max_size=4),
    data=st.data(),
)
def test_some_keys_are_found_as_if_all_were_decoded(node_bytes, database, absent, data):
    """In leaves, and in the nodes above on the way to them; whether or not a key exists."""
    some = data.draw(st.lists(st.sampled_from(sorted(database)), max_size=4))
    asked = sorted(key.encode() for key in {*some, *absent})
    before, ocdbt.MAX_NODE_BYTES = ocdbt.MAX_NODE_BYTES, node_bytes
    try:
        nodes, manifest = encode_database(database, NODES)
    finally:
        ocdbt.MAX_NODE_BYTES = before
    level, found = [decode_manifest(manifest).place], {}

    while level:
        decoded = [decode_node(nodes[p.offset :][: p.size], "", b"", asked) for p in level]
        level = [place for node in decoded if node.height for place in node.values]
        for node in decoded:
            if not node.height:
                found |= zip([key.decode() for key in node.keys], node.values, strict=True)

    assert found == {key: database[key] for key in {*some, *absent} & database.keys()}


def above_one(data):
    """Yields a node above one that was encoded."""
    below = ocdbt._Node(b"k", 0, len(data), 1, len(data), 0)
    nodes = bytearray()
    [_] = ocdbt._above([below], 1, NODES, 0, nodes)
    yield bytes(nodes)
