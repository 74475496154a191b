"""Every file of a checkpoint reads back as it was written; TensorStore agrees on the bytes."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt._disk.checksums import starts_of
from jaxckpt.errors import CorruptCheckpoint, UnsupportedFormat
from jaxckpt.format import arrays, jsontext, names, run, sharding, step, tree
from jaxckpt.format.arrays import STORABLE_DTYPES, dtype_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.step import FileFacts, Record, StepMetadata
from jaxckpt.format.tree import Leaf, StoredArray
from tests.strategies import random_bits

LAWS = settings(deadline=None, derandomize=True, max_examples=100)

texts = st.text(st.characters(codec="utf-8"), max_size=6)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@LAWS
@given(json_values)
def test_json_reads_back(value):
    """Any JSON value."""
    assert jsontext.loads(jsontext.dumps(value), file="f") == value


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b" ", b"{", b"\xff", b"[" * 201 + b"]" * 201, b"[" * 10**6, b'"\\ud800"'),
        *(b"9" * 5000, b"\0" * 100, b"\xef\xbb\xbf{}", "[1]".encode("utf-16-le")),
    ],
    ids=lambda data: f"{len(data)}:{data[:8]!a}",
)
def test_bad_json_names_its_file(data):
    """CorruptCheckpoint with the file, whatever Python's parser makes of it."""
    with pytest.raises(CorruptCheckpoint, match="the-file") as caught:
        jsontext.loads(data, file="the-file")

    assert caught.value.file == "the-file"


def test_json_of_too_many_parts_is_neither_parsed_nor_written(limits):
    """Each takes far more memory than its bytes; what strings hold does not count."""
    limits(jsontext, _MAX_DENSE=10)
    text = ['a "quoted" {{{{[[[[', "\\", "{" * 200]

    assert jsontext.loads(jsontext.dumps([*text, [], {}]), file="f") == [*text, [], {}]
    with pytest.raises(CorruptCheckpoint, match="objects and lists"):
        jsontext.loads(b"[" + b"[]," * 200 + b"0]", file="f")
    with pytest.raises(ValueError, match="objects and lists"):
        jsontext.dumps([*text, *([],) * 200])


@LAWS
@given(st.text('[]{}"\\x', max_size=6), st.integers(198, 203))
def test_brackets_in_strings_do_not_nest(text, depth):
    """However many there are, and whatever is escaped beside them."""
    value: object = text
    for n in range(depth):
        value = {text: value} if n % 2 else [text, value, text]
    data = json.dumps(value).encode()

    if depth <= jsontext.MAX_DEPTH:
        assert jsontext.loads(data, file="f") == value
        assert jsontext.loads(jsontext.dumps(value), file="f") == value
        return
    with pytest.raises(CorruptCheckpoint, match="nested deeper than 200 levels"):
        jsontext.loads(data, file="f")
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        jsontext.dumps(value)


@pytest.mark.parametrize(
    ("shape", "chunk", "inner", "problem"),
    [
        ((1 << 36,), (1 << 33,), None, None),
        ((0,), (1,), None, None),
        ((), (), None, None),
        ((1 << 20,), (1,), None, None),
        ((1 << 14, 1 << 14), (1 << 14, 1 << 14), (16, 16), None),
        ((1 << 22,), (1,), None, "chunks, the limit is"),
        ((1 << 33,), (1 << 36,), (1 << 12,), None),
        ((16,), (1 << 40,), (1 << 10,), "chunks, the limit is"),
        ((16,), (1 << 32,), None, "bytes per chunk, the limit"),
        ((1 << 40,), (1 << 40,), None, "bytes per chunk, the limit"),
    ],
)
def test_arrays_of_others_have_limits(shape, chunk, inner, problem):
    """Arrays that no program saves, and that TensorStore has too little memory for, are refused."""
    stored = StoredArray(shape=shape, dtype="float32", chunk_shape=chunk, inner_shape=inner)

    if problem is None:
        arrays.check_foreign(stored, leaf="w", file="f")
        return
    with pytest.raises(CorruptCheckpoint, match=f"leaf w: .*{problem}") as caught:
        arrays.check_foreign(stored, leaf="w", file="f")
    assert (caught.value.leaf, caught.value.file) == ("w", "f")


def test_json_that_is_too_large_is_not_parsed(limits):
    """The limit comes before the parser."""
    limits(jsontext, MAX_BYTES=10)

    with pytest.raises(CorruptCheckpoint, match="the limit is 10"):
        jsontext.loads(b"[" + b" " * 20 + b"]", file="f")


@LAWS
@given(
    st.dictionaries(texts.filter(bool), texts, max_size=3)
    | st.builds(lambda text: {"": text}, texts.filter(bool)),  # of a flat checkpoint
    st.none() | st.integers(0, 2**62),
    st.dictionaries(texts, json_values, max_size=3),
)
def test_step_metadata_reads_back(handlers, time_ns, custom):
    """`_CHECKPOINT_METADATA`."""
    facts = StepMetadata(
        handlers=handlers, init_ns=time_ns, commit_ns=time_ns, custom_metadata=custom
    )

    assert step.decode(step.encode(facts), file="f") == facts


file_names = st.sampled_from(["a", "state/_METADATA", "state/d/0f", "state/ocdbt.process_0/d/1"])


@LAWS
@given(
    st.dictionaries(
        file_names,
        st.builds(FileFacts, size=st.integers(0, 2**50), sha256=st.none() | st.just("0" * 64)),
    )
)
def test_a_record_reads_back_and_guards_itself(files):
    """`_jaxckpt.json`; with any one byte of it changed it is refused."""
    record = Record(writer="jaxckpt 1", token="t", files=files, lineage={"from": ["x"]})
    data = step.encode_record(record)

    assert step.decode_record(data, file="f") == record
    for i in range(0, len(data) - 1, 7):
        with pytest.raises(CorruptCheckpoint):
            step.decode_record(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], file="f")


starts = st.tuples(texts, st.none() | st.integers(0, 2**59))


@LAWS
@given(texts, st.lists(starts, max_size=40), texts)
def test_a_life_reads_back(name, begun, url):
    """In a record, and the id of the run in its own file."""
    life = step.Life(run=name)
    for start, before in begun:
        life = life.begun(start, before)
    record = Record(writer="jaxckpt 1", token="t", files={}, life=life)
    identity = run.Identity(id=name, directory=url)

    assert life.starts == tuple(begun)
    assert step.decode_record(step.encode_record(record), file="f") == record
    assert run.decode(run.Identity, run.encode(identity), file="f") == identity


def test_a_flipped_bit_makes_no_other_id_and_no_other_directory():
    identity = run.Identity(id=step.digest(b"")[:32], directory="file:///run")
    data = run.encode(identity)
    for i, bit in itertools.product(range(len(data)), range(8)):
        with contextlib.suppress(CorruptCheckpoint):
            flipped = data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :]
            assert run.decode(run.Identity, flipped, file="f") == identity
    older = b'{"id":"' + identity.id.encode() + b'"}'
    assert run.decode(run.Identity, older, file="f").id == identity.id


@pytest.mark.parametrize("bad", [[], {"id": 3}, {"id": "x", "starts": [["a"]]}, {"starts": []}])
def test_a_life_of_another_shape_is_refused(bad):
    body = jsontext.dumps(
        {"version": 1, "writer": "w", "token": "t", "lineage": {}, "files": {}, "run": bad}
    )
    with pytest.raises(CorruptCheckpoint):
        step.decode_record(body + b"\n" + step.digest(body).encode(), file="f")


@LAWS
@given(st.dictionaries(texts.filter(lambda t: "/" not in t), texts, max_size=5))
def test_strings_read_back(strings):
    """`_strings.json`."""
    found = step.decode_strings(step.encode_strings(strings), file="f")

    assert {name: step.find_string(found, name, file="f") for name in strings} == strings


def test_strings_that_hide_each_other_are_refused():
    """A JSON pointer reaches only one of them."""
    for pair in ({"a": "x", "a/b": "y"}, {"a/b": "y", "a": "x"}):
        with pytest.raises(ValueError, match="another str leaf"):
            step.encode_strings(pair)
    with pytest.raises(CorruptCheckpoint, match="missing"):
        step.find_string({}, "a", file="f")


@LAWS
@given(
    st.dictionaries(
        texts,
        st.tuples(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.none() | st.just("fry")),
        max_size=4,
    )
)
def test_key_implementations_read_back(facts):
    """`array_metadatas/process_0`."""
    data = step.encode_array_metadatas(facts)

    assert step.decode_key_impls(data, file="f") == {n: i for n, (_, i) in facts.items() if i}


@st.composite
def saved_shardings(draw):
    if draw(st.booleans()):
        return SavedSharding(device=draw(texts))
    axes = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    sizes = tuple(draw(st.integers(1, 3)) for _ in axes)
    free = draw(st.permutations(axes))
    spec = []
    for _ in range(draw(st.integers(0, 3))):
        take = draw(st.integers(0, len(free)))
        spec.append(None if not take else free[0] if take == 1 else tuple(free[:take]))
        free = free[take:]
    return SavedSharding(
        axis_names=tuple(axes),
        axis_sizes=sizes,
        spec=tuple(spec),
        axis_types=("Auto",) * len(axes),
        device_ids=tuple(range(int(np.prod(sizes)))),
    )


@LAWS
@given(st.dictionaries(texts, saved_shardings(), max_size=4))
def test_shardings_read_back(shardings):
    """`_sharding`."""
    assert sharding.decode(sharding.encode(shardings), file="f") == shardings


def test_the_devices_of_a_large_mesh_are_stored_once():
    """10,000 leaves on 4,096 devices read back, and their meshes take less than 2 MB."""
    mesh = {"axis_names": ("a", "b"), "axis_sizes": (512, 8), "axis_types": ("Auto", "Auto")}
    forth, back = tuple(range(4096)), tuple(range(4095, -1, -1))
    specs = [("a",), ("b",), ("a", "b"), (None, ("a", "b"))]
    kinds = [  # leaves of one kind share it, as in a save
        SavedSharding(**mesh, spec=spec, device_ids=ids) for spec in specs for ids in (forth, back)
    ]
    many = {f"params.layer_{i}.weight": kinds[i % 8] for i in range(10_000)}

    data = sharding.encode(many)
    nowhere = [replace(kind, device_ids=()) for kind in kinds]
    bare = sharding.encode({name: nowhere[i % 8] for i, name in enumerate(many)})

    read = sharding.decode(data, file="f")
    assert read == many
    assert len({id(one.device_ids) for one in read.values()}) == 2  # whatever the file has
    one = "params.layer_3.weight"
    assert sharding.decode(data, file="f", only=one) == {one: many[one]}
    assert len(data) - len(bare) < 2 << 20
    assert json.loads(data).keys() - json.loads(bare).keys() == {"*"}


def test_the_devices_of_very_many_meshes_are_left_out():
    """The file stays small if each leaf has its own order of thousands of devices."""
    mesh = {"axis_names": ("a",), "axis_sizes": (4096,), "spec": ("a",)}
    ids = tuple(range(4096))
    many = {f"{i}": SavedSharding(**mesh, device_ids=ids[i:] + ids[:i]) for i in range(400)}

    data = sharding.encode(many)

    read = sharding.decode(data, file="f")
    assert read == {
        name: many[name] if i < 64 else SavedSharding(**mesh) for i, name in enumerate(read)
    }
    assert len(data) < 2 << 20


def a_tree(keys, data):
    """A tree of arrays, whole or in chunks and inner chunks."""
    leaves = []
    for key in keys:
        dtype = data.draw(st.sampled_from(sorted(STORABLE_DTYPES)))
        shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
        chunk = data.draw(st.sampled_from([tuple(max(1, n) for n in shape), (2,) * len(shape)]))
        inner = data.draw(st.sampled_from([None, (1,) * len(shape)]))
        stored = StoredArray(shape=shape, dtype=dtype, chunk_shape=chunk, inner_shape=inner)
        kind = data.draw(st.sampled_from(["array", "numpy"]))
        leaves.append(
            Leaf(
                path=(key,),
                key_types=(tree.NAMED,),
                kind=kind,
                dtype=dtype,
                shape=shape,
                stored=stored,
            )
        )
    root = tree.Node(type="dict", names=tuple(keys), children=(None,) * len(keys))
    return tree.Tree(leaves=tuple(leaves), root=root, typed=True, uses_ocdbt=True)


@LAWS
@given(st.lists(texts, min_size=1, max_size=5, unique=True), st.data())
def test_a_tree_reads_back(keys, data):
    """`_METADATA`: paths, kinds, dtypes, shapes, chunks, containers."""
    whole = a_tree(keys, data)

    assert tree.decode(tree.encode(whole), file="f") == whole


@LAWS
@given(st.lists(texts, min_size=1, max_size=5, unique=True), st.data())
def test_one_leaf_is_decoded_as_in_the_whole_tree(keys, data):
    """With the number of chunks before it, on which the place of its checksums depends."""
    whole = a_tree(keys, data)
    n = data.draw(st.integers(0, len(keys) - 1))
    wanted = whole.leaves[n]

    found = tree.decode_leaf(tree.encode(whole), wanted.path, file="f")

    if keys[n].endswith("/"):  # its keys are those of the version
        assert found is None
        return
    assert found is not None
    assert found[0].leaves == (wanted,)
    assert found[1] == [*starts_of(leaf.stored for leaf in whole.leaves)][n]
    assert (found[0].uses_ocdbt, found[0].zarr_version) == (True, 3)


EDITS = {
    "no such key": lambda data: data.replace(b"('b',)", b"('c',)"),
    "plain files": lambda data: data.replace(b'"use_ocdbt":true', b'"use_ocdbt":false'),
    "bad chunks before": lambda data: data.replace(b'"chunk":[4]', b'"chunk":[4,4]'),
    "another path": lambda data: data.replace(b'{"key":"b"', b'{"key":"d"'),
    "no array": lambda data: data.replace(b'"shape":[9],', b""),
    "cut": lambda data: data[: data.index(b"('b',)") + 40],
    "deep": lambda data: data.replace(b'"key_metadata":[{"key":"b"', b"[" * 50_000),
    "other spaces": lambda data: json.dumps(json.loads(data)).encode(),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_leaf_that_is_not_found_alone_takes_the_whole_tree(name):
    """Whatever is not as we write it is left to `decode` and its limits, or is refused."""
    stored = [StoredArray(shape=(9,), dtype="int8", chunk_shape=c) for c in ((4,), (9,))]
    leaves = [
        Leaf(path=(key,), key_types=(2,), kind="numpy", dtype="int8", shape=(9,), stored=one)
        for key, one in zip("ab", stored, strict=True)
    ]
    root = tree.Node(type="dict", names=("a", "b"), children=(None, None))
    whole = tree.Tree(leaves=tuple(leaves), root=root, typed=True, uses_ocdbt=True)
    data = tree.encode(whole)
    assert tree.decode_leaf(data, ("b",), file="f") is not None
    edited = EDITS[name](data)
    assert edited != data

    try:
        found = tree.decode_leaf(edited, ("b",), file="f")
    except CorruptCheckpoint:
        found = None
    assert found is None


def test_shardings_of_orbax_0_4_0_have_plain_names():
    """A name is a key as it is, or a JSON pointer; base64 counts where it can."""
    one = SavedSharding(device="cpu:0")
    text = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"})
    leaves = ["params.w", "mlp/linear.w", "dw=="]  # the last is base64 of "w"
    plain = json.dumps({"params.w": text, "mlp": {"linear.w": text}, "other": text}).encode()
    encoded = sharding.encode({"w": one, "dw==": one})

    assert sharding.decode(plain, file="f", plain=leaves) == {"params.w": one, "mlp/linear.w": one}
    assert sharding.decode(encoded, file="f", plain=leaves) == {"w": one, "dw==": one}
    for names_of_leaves in ((), ["another"]):
        with pytest.raises(CorruptCheckpoint, match="f: the keys are not names of leaves"):
            sharding.decode(plain, file="f", plain=names_of_leaves)


@LAWS
@given(st.dictionaries(texts, saved_shardings(), min_size=1, max_size=4), st.data())
def test_one_sharding_is_decoded_as_with_all(shardings, data):
    """Also that of a leaf which is not there."""
    name = data.draw(st.sampled_from(sorted(shardings)) | texts)

    found = sharding.decode(sharding.encode(shardings), file="f", only=name)

    assert found.get(name) == shardings.get(name)


def test_a_newer_tree_is_refused():
    """It says to upgrade."""
    data = json.dumps({"tree_metadata": {"x": {}}, "jaxckpt": {"version": 4}}).encode()

    with pytest.raises(UnsupportedFormat, match="Upgrade"):
        tree.decode(data, file="f")


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", sorted(STORABLE_DTYPES))
def test_chunk_bytes_are_those_of_tensorstore(tmp_path, name, shape):
    """`encode_chunk` and TensorStore's zarr3 with crc32c write the same bytes, and read them."""
    import tensorstore as ts

    values = random_bits(shape, dtype_of(name), 3)
    stored = StoredArray(shape=shape, dtype=name, chunk_shape=tuple(max(1, n) for n in shape))
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/"},
        "metadata": arrays.zarr3_metadata(stored),
        "store_data_equal_to_fill_value": True,
    }
    array = ts.open(spec, create=True).result()
    array.write(values).result()
    key = arrays.chunk_key((0,) * len(shape))

    if values.size:
        written = (tmp_path / key).read_bytes()
        assert written == arrays.encode_chunk(values)
        body, crc = written[: -arrays.CRC_BYTES], written[-arrays.CRC_BYTES :]
        assert body == values.tobytes()
        assert arrays.checksum(np.frombuffer(body, np.uint8)) == int.from_bytes(crc, "little")
        (tmp_path / key).write_bytes(arrays.encode_chunk(values[::-1] if shape else values))
        again = np.asarray(ts.open(spec | {"open": True}).result().read().result())
        assert again.tobytes() == (values[::-1] if shape else values).tobytes()
    described = arrays.decode_metadata(
        (tmp_path / arrays.metadata_key(3)).read_bytes(), 3, leaf="l", file="f"
    )
    assert described == stored


def test_inner_chunks_are_those_of_tensorstore(tmp_path):
    """TensorStore makes the inner chunks that `zarr3_metadata` describes."""
    import tensorstore as ts

    stored = StoredArray(shape=(8, 6), dtype="float32", chunk_shape=(4, 6), inner_shape=(2, 6))
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/"},
            "metadata": arrays.zarr3_metadata(stored),
        },
        create=True,
    ).result()

    assert array.chunk_layout.read_chunk.shape == (2, 6)
    assert array.chunk_layout.write_chunk.shape == (4, 6)
    data = (tmp_path / "zarr.json").read_bytes()
    assert arrays.decode_metadata(data, 3, leaf="l", file="f") == stored


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "x"},
        {"shape": [-1]},
        {"shape": [2**63]},
        {"shape": [1.5]},
        {"data_type": "r8"},
        {"data_type": 5},
        {"chunk_grid": None},
        {"chunk_grid": {}},
        {"codecs": 1},
        {"shape": [2, 2]},
    ],
    ids=str,
)
def test_array_metadata_that_lies(change):
    """CorruptCheckpoint with leaf and file."""
    stored = StoredArray(shape=(4,), dtype="int8", chunk_shape=(4,))
    data = json.dumps(arrays.zarr3_metadata(stored) | change).encode()

    with pytest.raises(CorruptCheckpoint, match="the-leaf"):
        arrays.decode_metadata(data, 3, leaf="the-leaf", file="f")


def test_temporary_names_are_those_that_orbax_ignores():
    """Names distinguish temporaries that jaxckpt builds or deletes from committed checkpoints."""
    assert names.is_temporary(names.temporary("7", "ab" * 8))
    assert names.is_temporary(names.deleting("7", "ab" * 8))
    assert names.is_ours_temporary(names.temporary("7", "ab" * 8), "7")
    assert not names.is_ours_temporary(names.temporary("7", "mine"), "7")
    assert not names.is_ours_temporary(names.temporary("17", "ab" * 8), "7")
    assert not names.is_temporary(names.replacement("7"))
