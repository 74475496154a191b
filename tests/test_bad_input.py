"""Bad input gives a typed error that says where, wanted, got, and what to do."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    SaveFailed,
    StepExists,
    TreeMismatch,
    UnsupportedFormat,
)
from jaxckpt.format import names, ocdbt, safetensors, step, tree

LAWS = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def sample_tree():
    """A leaf of each kind, in a container of each kind, small and large enough for every layout."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    big = jax.device_put(
        np.arange(8 * 32768, dtype=np.float32).reshape(8, -1), NamedSharding(mesh, P("x", "y"))
    )
    return {
        "sharded": big,
        "tuple": (jnp.arange(6.0).reshape(2, 3), [np.arange(300), None]),
        "int keys": {0: 1, 7: {(1, "a"): 2.5}},
        "state": optax.ScaleByAdamState(jnp.zeros((), jnp.int32), {}, optax.EmptyState()),
        "key": jax.random.split(jax.random.key(0), 3),
        "text": "some text",
        "bytes": b"\0\1",
        "big int": 2**80,
        "flag": True,
        "int4": jnp.arange(4, dtype=jnp.int4),
        "uint4": jnp.arange(4, dtype=jnp.uint4),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint with a leaf of each kind; not to be changed."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    jaxckpt.save(path, sample_tree(), custom_metadata={"note": [1, {"a": None}]})
    return path


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(saved, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def listing(path):
    """Every file below a directory with its bytes, links and special files by their kind."""
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() else p.lstat().st_mode
        for p in sorted(Path(path).rglob("*"))
    }


def rewrite_record(path, **changes):
    """Makes the record fit the files as they are now, so that they are parsed and not refused."""
    file = path / names.RECORD
    record = json.loads(file.read_bytes().splitlines()[0]) | changes
    for name, facts in record["files"].items():
        if (path / name).is_file():
            data = (path / name).read_bytes()
            facts["bytes"] = len(data)
            if "sha256" in facts:
                facts["sha256"] = step.digest(data)
    body = json.dumps(record).encode()
    file.write_bytes(body + b"\n" + step.digest(body).encode() + b"\n")


def use(path):
    """Everything that a reader does."""
    assert str(jaxckpt.open(path))
    jaxckpt.verify(path)
    return jaxckpt.restore(path)


def attempt(path, what=use):
    """Runs the call; any error must be one of ours, with a useful message."""
    try:
        return what(path)
    except CheckpointError as error:
        found = error
    assert len(str(found)) > 20
    return found


# --- paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [jaxckpt.restore, jaxckpt.open, jaxckpt.verify])
def test_a_path_with_nothing(tmp_path, verb):
    """CheckpointNotFound, which is a FileNotFoundError, with what lies beside it."""
    jaxckpt.save(tmp_path / "step_7", 1)

    with pytest.raises(CheckpointNotFound, match=r"step_8.*step_7") as caught:
        verb(tmp_path / "step_8")

    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("verb", [jaxckpt.restore, jaxckpt.open, jaxckpt.verify])
@pytest.mark.parametrize("what", ["empty", "foreign", "deep", "nonsense file", "text file", "fifo"])
def test_a_path_that_is_no_checkpoint(tmp_path, verb, what):
    """A typed error that says what was found; nothing changes."""
    path = tmp_path / "x"
    match what:
        case "empty":
            path.mkdir()
        case "foreign":
            path.mkdir()
            (path / "readme.md").write_text("x")
        case "deep":
            (path / "a" / "b").mkdir(parents=True)
        case "nonsense file":
            path.write_bytes(b"\x00\xff" * 50)
        case "text file":
            path.write_text("hello")
        case "fifo":
            os.mkfifo(path)
    before = listing(tmp_path)

    with pytest.raises(CheckpointError, match=str(path)):
        verb(path)

    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        names.COMMIT_MARKER,
        names.RECORD,
        names.CHECKPOINT_METADATA,
        "state",
        f"state/{names.TREE_METADATA}",
        f"state/{names.OCDBT_MANIFEST}",
        "state/d",
        f"state/{names.STRINGS}",
        f"state/{names.SHARDING}",
    ],
)
def test_a_checkpoint_that_lacks_a_part(damaged, name):
    """Each missing file or directory is an error that names it; what is not needed is reported."""
    target = damaged / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    before = listing(damaged)

    got = attempt(damaged, jaxckpt.restore)
    report = attempt(damaged, jaxckpt.verify)

    assert isinstance(got, CheckpointError)
    if name == names.COMMIT_MARKER:
        assert isinstance(report, CheckpointNotFound)
    else:
        assert isinstance(report, CheckpointError) or not report.ok
    assert Path(name).name in str(got)
    assert listing(damaged) == before


def test_a_half_written_checkpoint_is_not_there(tmp_path):
    """A name that a save uses on the way is refused, and the good step beside it is named."""
    jaxckpt.save(tmp_path / "7", 1)
    shutil.copytree(tmp_path / "7", tmp_path / names.temporary("8", "ab"))

    with pytest.raises(CheckpointNotFound, match="never committed"):
        jaxckpt.restore(tmp_path / names.temporary("8", "ab"))
    with pytest.raises(CheckpointNotFound, match="8"):
        jaxckpt.restore(tmp_path / "8")
    assert jaxckpt.restore(tmp_path) == 1


@pytest.mark.parametrize("file", ["record", "tree"])
def test_a_newer_format_says_so(damaged, file):
    """UnsupportedFormat, a ValueError, which asks to upgrade."""
    if file == "record":
        rewrite_record(damaged, version=99)
    else:
        metadata = damaged / "state" / names.TREE_METADATA
        value = json.loads(metadata.read_text())
        value["jaxckpt"]["version"] = 99
        metadata.write_text(json.dumps(value))
        rewrite_record(damaged)

    with pytest.raises(UnsupportedFormat, match=r"(?s)newer.*[Uu]pgrade") as caught:
        jaxckpt.restore(damaged)

    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("url", ["hdfs://host/x", "https://host/x"])
def test_some_urls_have_no_storage(url):
    """UnsupportedFormat with what to do instead, from every entry point."""
    for verb in (jaxckpt.restore, jaxckpt.open, jaxckpt.verify, lambda p: jaxckpt.save(p, 1)):
        with pytest.raises(UnsupportedFormat, match="has no storage"):
            verb(url)


# --- a target that does not fit --------------------------------------------------------------


def test_every_difference_is_listed_at_once(tmp_path):
    """Leaf, wanted, saved: for shapes, kinds, dtypes that do not cast, missing and extra leaves."""
    jaxckpt.save(
        tmp_path / "x",
        {
            "fits": np.zeros(2, np.float32),
            "shape": np.zeros((2, 3), np.float32),
            "text": "a",
            "number": 1.5,
            "complex": np.zeros(1, np.complex64),
            "gone": 1,
            "key": jax.random.key(0),
        },
    )
    like = {
        "fits": np.zeros(2, np.float32),
        "shape": np.zeros((3, 2), np.float32),
        "text": 1,
        "number": 3,
        "complex": np.zeros(1, np.float32),
        "new": 2,
        "key": jax.random.key(0, impl="rbg"),
    }

    with pytest.raises(TreeMismatch) as caught:
        jaxckpt.restore(tmp_path / "x", like)

    found = {d.leaf: (d.wanted, d.saved) for d in caught.value.differences}
    assert set(found) == {"shape", "text", "number", "complex", "new", "gone", "key"}
    assert found["shape"] == ("float32[3,2]", "float32[2,3]")
    assert found["new"] == ("int", None)
    assert found["gone"] == (None, "int")
    for leaf in found:
        assert leaf in str(caught.value)
    assert "skip=" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_shardings_that_do_not_divide_are_all_named(tmp_path, mesh):
    """TreeMismatch before anything is read, with each leaf, its shape, and what to do."""
    jaxckpt.save(tmp_path / "x", {"a": np.zeros((6, 4)), "b": np.zeros(8), "c": np.zeros((3, 2))})

    with pytest.raises(TreeMismatch, match="divide") as caught:
        jaxckpt.restore(
            tmp_path / "x",
            {
                "a": jax.ShapeDtypeStruct((6, 4), np.float64, sharding=NamedSharding(mesh, P("x"))),
                "b": jax.ShapeDtypeStruct((8,), np.float64, sharding=NamedSharding(mesh, P("x"))),
                "c": jax.ShapeDtypeStruct((3, 2), np.float64),
            },
            shardings={"c": NamedSharding(mesh, P(("x", "y")))},
        )

    assert {d.leaf for d in caught.value.differences} == {"a", "c"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"missing": "x"}, ValueError),
        ({"extra": "keep"}, ValueError),
        ({"dtype": "no such dtype"}, TypeError),
        ({"shardings": P("x")}, TypeError),
        ({"shardings": {"a": 5}}, TypeError),
        ({"shardings": lambda path, shape, dtype: "x"}, TypeError),
        ({"only": 5}, TypeError),
        ({"like": {"a": {1, 2}}}, TypeError),
        ({"like": {"a": object()}}, TypeError),
        ({"item": "nope"}, CheckpointNotFound),
        ({"unknown": 1}, TypeError),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_wrong_arguments_are_built_in_errors(tmp_path, options, error):
    """TypeError and ValueError, raised before anything is read."""
    jaxckpt.save(tmp_path / "x", {"a": jnp.zeros(2)})

    with pytest.raises(error):
        jaxckpt.restore(tmp_path / "x", **options)


def test_a_path_must_be_a_path(tmp_path):
    """None, numbers, bytes, empty text and NUL are refused by name."""
    for path, error in [
        (None, TypeError),
        (5, TypeError),
        (b"x", TypeError),
        ("", ValueError),
        ("a\0b", ValueError),
    ]:
        for verb in (jaxckpt.restore, jaxckpt.open, jaxckpt.verify, lambda p: jaxckpt.save(p, 1)):
            with pytest.raises(error):
                verb(path)


def test_keeping_what_was_not_saved_needs_values(tmp_path):
    """missing='keep' with a ShapeDtypeStruct names every leaf without a value."""
    jaxckpt.save(tmp_path / "x", {"a": np.zeros(2)})
    spec = jax.ShapeDtypeStruct((1,), np.float32)

    with pytest.raises(TypeError, match=r"(?s)new/0.*new/1"):
        jaxckpt.restore(tmp_path / "x", {"a": np.zeros(2), "new": [spec, spec]}, missing="keep")


# --- saves that cannot be --------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        *({"a": {1}}, {"a": np.zeros(1)}, [1, 2], "x", {1: b""}, {"a": "\ud800"}),
        *({1: "a", "1": "b"}, {"a": [{None: 1, "null": 2}]}),
    ],
    ids=str,
)
def test_custom_metadata_must_be_json(tmp_path, metadata):
    """TypeError before anything is written."""
    with pytest.raises(TypeError, match="custom_metadata"):
        jaxckpt.save(tmp_path / "x", 1, custom_metadata=metadata)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, overwrite):
    """A file, a link, a foreign directory: StepExists with what was found. An empty one may be."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "precious").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dir")
    before = listing(tmp_path)

    for name in ("file", "dir", "link", *(() if overwrite else ("empty",))):
        with pytest.raises(StepExists, match=name) as caught:
            jaxckpt.save(tmp_path / name, 1, overwrite=overwrite)
        assert isinstance(caught.value, FileExistsError)

    assert listing(tmp_path) == before


def test_a_directory_that_cannot_be_written(tmp_path):
    """`SaveFailed`, with its cause, if the parent is not a directory or refuses the write."""
    (tmp_path / "file").write_text("x")

    for path in (tmp_path / "file" / "x", "/proc/jaxckpt/x"):
        with pytest.raises(SaveFailed, match=str(path)) as caught:
            jaxckpt.save(path, 1)
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives its rights up, so it must have some")
def test_a_read_only_directory(tmp_path):
    """Without the right to write: SaveFailed. Without that to read: PermissionError, named."""
    jaxckpt.save(tmp_path / "secret", 1)
    secret = tmp_path / "secret" / "state" / names.TREE_METADATA
    script = f"""
import os
import jaxckpt
jaxckpt.restore({str(tmp_path / "secret")!r})
jaxckpt.save({str(tmp_path / "warm")!r}, 1)
os.chmod({str(secret)!r}, 0)
os.setegid(65534); os.seteuid(65534)
for what, *arguments in (
    (jaxckpt.save, {str(tmp_path / "x")!r}, 1),
    (jaxckpt.restore, {str(tmp_path / "secret")!r}),
):
    try:
        what(*arguments)
    except (jaxckpt.CheckpointError, PermissionError) as error:
        print(type(error).__name__, error)
"""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )

    assert done.stdout.startswith("SaveFailed"), done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stderr
    assert str(tmp_path / "secret") in done.stdout.splitlines()[1]
    assert sorted(os.listdir(tmp_path)) == ["secret", "warm"]


# --- metadata that lies ----------------------------------------------------------------------

OURS = [
    names.CHECKPOINT_METADATA,
    f"state/{names.TREE_METADATA}",
    f"state/{names.SHARDING}",
    f"state/{names.STRINGS}",
]
NONSENSE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"0",
    b'"x"',
    b"\xff\xfe",
    b"{}" * 2,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 100_000,
    b"1e999",
    b"NaN",
    b'{"a": "\\ud800"}',
    b'{"tree_metadata": {}}',
    b'{"tree_metadata": []}',
]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("data", NONSENSE, ids=lambda data: f"{data[:24]!a}")
def test_metadata_of_the_wrong_shape(damaged, name, data):
    """Truncated, empty, wrong-typed, deep and huge JSON in any file is CorruptCheckpoint."""
    (damaged / name).write_bytes(data)
    rewrite_record(damaged)

    got = attempt(damaged)

    harmless = name.endswith((names.CHECKPOINT_METADATA, names.STRINGS, names.SHARDING))
    assert isinstance(got, CorruptCheckpoint) or harmless
    if isinstance(got, CorruptCheckpoint):
        assert Path(name).name in str(got)
        assert isinstance(got, OSError)


@pytest.mark.parametrize("name", [*OURS, names.RECORD])
def test_every_truncation_is_found(saved, damaged, name):
    """Cut anywhere, a metadata file is CorruptCheckpoint that names it: its digest differs."""
    whole = (saved / name).read_bytes()
    for size in sorted({0, 1, 2, len(whole) // 2, len(whole) - 66, len(whole) - 2, len(whole) - 1}):
        if name == names.RECORD and size == len(whole) - 1:
            continue  # only the last line's end
        (damaged / name).write_bytes(whole[: max(0, size)])

        with pytest.raises(CorruptCheckpoint, match=Path(name).name):
            jaxckpt.restore(damaged)


WILD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**40,
    2**60,
    2**63,
    10**30,
    1.5,
    float("nan"),
    "",
    "x",
    "..",
    "../../x",
    "/etc/passwd",
    "\ud800",
    "a\0",
    [],
    {},
    [[]],
    [0],
    [2**40],
    [2**31, 2**31],
    ["x"],
    {"tuple": 5},
    {"x": 1},
    "int4",
    "uint8",
    "float64",
    "key<fry>",
    "array",
    "key",
    "empty",
    "ellipsis",
    "absent",
    "class",
    "tuple",
]


def spots(value, path=()):
    """Every place in a JSON value."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from spots(child, (*path, key))


def mutated(value, rng):
    """A copy in which one place, or two, is replaced, removed, doubled, or swapped with another."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 2])):
        places = list(spots(value))
        *parents, last = rng.choice(places[1:] or [()]) or (None,)
        if last is None:
            return rng.choice(WILD)
        node = value
        for key in parents:
            node = node[key]
        match rng.randrange(5):
            case 0 if isinstance(node, dict):
                del node[last]
            case 0 | 1 if isinstance(node, list):
                if rng.random() < 0.5:
                    node.pop(last)
                else:
                    node.append(copy.deepcopy(node[last]))
            case 1 if isinstance(node, dict):
                node[str(rng.choice(WILD))] = node.pop(last)
            case 2:
                other = value
                for key in rng.choice(places):
                    try:
                        other = other[key]
                    except (KeyError, IndexError, TypeError):
                        break
                node[last] = copy.deepcopy(other)
            case _:
                node[last] = rng.choice(WILD)
    return value


def mutate_file(path, name, rng):
    """Changes one metadata file, its own JSON or that in its texts, and makes the record fit."""
    file = path / name
    if name == names.RECORD:
        body = mutated(json.loads(file.read_bytes().splitlines()[0]), rng)
        data = json.dumps(body).encode()
        file.write_bytes(data + b"\n" + step.digest(data).encode() + b"\n")
        return
    value = json.loads(file.read_text())
    if name.endswith(names.SHARDING) and rng.random() < 0.7:
        key = rng.choice(list(value))
        value[key] = json.dumps(mutated(json.loads(value[key]), rng))
    else:
        value = mutated(value, rng)
    file.write_text(json.dumps(value))
    rewrite_record(path)


@pytest.mark.faults
@pytest.mark.parametrize("name", [*OURS, names.RECORD])
@pytest.mark.parametrize("seed", range(6))
def test_lying_metadata_gives_typed_errors(saved, tmp_path, name, seed):
    """Ten changes each of the parsed JSON: a checkpoint error or a restore, and nothing else."""
    for i in range(10):
        path = tmp_path / f"{i}"
        shutil.copytree(saved, path)
        rng = random.Random(f"{name} {seed} {i}")
        mutate_file(path, name, rng)

        attempt(path)

        shutil.rmtree(path)


@pytest.mark.slow
@settings(LAWS, max_examples=3000)
@given(name=st.sampled_from([*OURS, names.RECORD]), seed=st.integers(0, 2**64))
def test_lying_metadata_gives_typed_errors_at_length(saved, tmp_path, name, seed):
    """The same, 3,000 times."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        path = Path(shutil.copytree(saved, f"{folder}/x"))
        mutate_file(path, name, random.Random(seed))

        attempt(path)


# --- metadata that points elsewhere ----------------------------------------------------------


def test_arrays_beside_a_file_of_flax_may_not_be_a_link(tmp_path):
    """They would be read from elsewhere."""
    jaxckpt.save(tmp_path / "secret", {"w": np.ones(2)})
    file = tmp_path / "run" / "checkpoint_1"
    file.parent.mkdir()
    file.write_bytes(serialization.msgpack_serialize({"w": np.ones(2)}))
    jaxckpt.restore(file)
    Path(f"{file}_gda").symlink_to(tmp_path / "secret")

    with pytest.raises(CorruptCheckpoint, match="checkpoint_1_gda"):
        jaxckpt.restore(file)


def test_no_tree_is_so_deep_that_its_paths_fill_the_memory():
    """Each leaf refers to all containers above it."""
    deep = {
        "key_metadata": [{"key": "a", "key_type": 2}] * 300,
        "value_metadata": {"value_type": "np.ndarray"},
    }
    with pytest.raises(CorruptCheckpoint, match="256 keys or less"):
        tree.decode(json.dumps({"tree_metadata": {"a": deep}}).encode(), file="f")
    text = {".".join("a" * 300): {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    with pytest.raises(UnsupportedFormat, match="more than 256 dots"):
        safetensors.decode_header(json.dumps(text).encode(), 1000, file="f")


CLASSES = [
    ("os", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("antigravity", "fly"),
    ("optax", "__class__"),
    ("optax._src.base", "sys.modules"),
    ("optaxevil", "x"),
    ("optax._src.no_such", "x"),
    ("flax.core", "..x"),
    ("", ""),
    ("flax.nnx", "Module"),
    ("optax", "GradientTransformation"),
    ("chex", "dataclass"),
]


@pytest.mark.parametrize("cls", CLASSES, ids=".".join)
def test_no_class_is_run_because_a_file_names_it(damaged, cls):
    """A name off the list, or of something else than a node, gives a plain container."""
    file = damaged / "state" / names.TREE_METADATA
    value = json.loads(file.read_text())
    at = value["jaxckpt"]["tree"]["names"].index("state")
    node = value["jaxckpt"]["tree"]["children"][at]
    assert node["class"][1] == "ScaleByAdamState"
    node["class"] = cls
    node["aux"] = ["tuple", "touch /tmp/jaxckpt-was-here"]
    file.write_text(json.dumps(value))
    rewrite_record(damaged)
    modules = set(sys.modules)

    got = jaxckpt.restore(damaged)

    assert type(got["state"]) is dict
    assert set(got["state"]) == {"count", "mu", "nu"}
    assert not {"antigravity", "optaxevil"} & (set(sys.modules) - modules)
    assert not Path("/tmp/jaxckpt-was-here").exists()


@pytest.mark.parametrize(
    "name",
    [
        names.RECORD,
        names.CHECKPOINT_METADATA,
        "state",
        f"state/{names.TREE_METADATA}",
        f"state/{names.OCDBT_MANIFEST}",
        f"state/{names.OCDBT_DATA}",
        f"state/{names.SHARDING}",
        "a data file",
    ],
)
@pytest.mark.parametrize("kind", ["link", "fifo", "dangling", "loop"])
def test_links_and_special_files_inside_are_refused(damaged, name, kind):
    """A link is not followed, even to the right bytes; a FIFO is not waited for."""
    if name == "a data file":
        name = str(next((damaged / "state" / names.OCDBT_DATA).iterdir()).relative_to(damaged))
    elsewhere = damaged.parent / "elsewhere"
    (damaged / name).rename(elsewhere)
    match kind:
        case "link":
            (damaged / name).symlink_to(elsewhere)
        case "fifo":
            os.mkfifo(damaged / name)
        case "dangling":
            (damaged / name).symlink_to("nowhere")
        case "loop":
            (damaged / name).symlink_to(damaged / name)
    before = listing(damaged.parent)

    for verb in (jaxckpt.restore, jaxckpt.open):
        got = attempt(damaged, verb)
        assert isinstance(got, CorruptCheckpoint), got
    report = attempt(damaged, jaxckpt.verify)

    assert isinstance(report, CheckpointError) or not report.ok
    assert listing(damaged.parent) == before


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "a/../../b", "", "./x", "a//b", "nul\0"]
)
def test_a_record_that_points_outside_is_refused(damaged, path):
    """Nothing outside the checkpoint is looked at, whatever the record lists."""
    record = json.loads((damaged / names.RECORD).read_bytes().splitlines()[0])
    rewrite_record(damaged, files=record["files"] | {path: {"bytes": 3}})

    for verb in (jaxckpt.restore, jaxckpt.open):
        with pytest.raises(CorruptCheckpoint, match=names.RECORD):
            verb(damaged)
    assert not jaxckpt.verify(damaged).ok


@pytest.mark.parametrize(
    "shape",
    [
        [2**40],
        [2**60],
        [2**31, 2**31],
        [2**20] * 3,
        [0, 2**61, 2**61],
        [1] * 40,
        [-1],
        [1.5],
        [True],
        [10**30],
    ],
    ids=lambda shape: str(shape)[:24],
)
@pytest.mark.parametrize("leaf", ["sharded", "int4", "tuple/1/0", "bytes", "key"])
def test_a_shape_that_the_data_cannot_have_is_refused_before_allocation(damaged, leaf, shape):
    """Sizes are compared with what is stored; no memory is taken on the word of a file."""
    file = damaged / "state" / names.TREE_METADATA
    value = json.loads(file.read_text())
    entry = next(
        e
        for e in value["tree_metadata"].values()
        if "/".join(k["key"] for k in e["key_metadata"]) == leaf
    )["value_metadata"]
    ours = entry["jaxckpt"]
    for chunk in (shape, [1] * len(shape)):
        ours |= {"shape": shape, "chunk": chunk}
        ours |= {"key_shape": shape[:-1]} if leaf == "key" else {}
        file.write_text(json.dumps(value))
        rewrite_record(damaged)
        tracemalloc.start()

        got = attempt(damaged)

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert isinstance(got, CorruptCheckpoint)
        assert names.TREE_METADATA in str(got)
        assert peak < 64 << 20


@pytest.mark.parametrize("chunk", [[9, 8], [2**40, 2**40]], ids=str)
def test_chunks_larger_than_their_array_are_damage(tmp_path, chunk):
    """So that a run falls back to the step before."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, {"a": np.full((8, 8), number, np.float32)})
    file = tmp_path / "2" / "state" / names.TREE_METADATA
    value = json.loads(file.read_text())
    [entry] = value["tree_metadata"].values()
    entry["value_metadata"]["jaxckpt"] |= {"chunk": chunk, "inner": [1, 1]}
    file.write_text(json.dumps(value))
    (file.parent / names.CHUNK_SUMS).write_bytes(bytes(4 * 64))  # one for each inner chunk
    rewrite_record(tmp_path / "2")

    with pytest.raises(CorruptCheckpoint, match="larger than the array"):
        jaxckpt.restore(tmp_path / "2")
    assert jaxckpt.restore(tmp_path)["a"][0, 0] == 1


# --- what Orbax wrote, and lies --------------------------------------------------------------


def plain_arrays(path):
    """A checkpoint as the oldest Orbax left them: one directory of zarr v2 for each leaf."""
    for name in ("a", "b.c", "d"):
        (path / name).mkdir(parents=True)
        header = {
            "chunks": [4],
            "compressor": None,
            "dtype": "<f4",
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": [4],
            "zarr_format": 2,
        }
        (path / name / ".zarray").write_text(json.dumps(header))
        (path / name / "0").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    entries = {
        repr(parts): {
            "key_metadata": [{"key": part, "key_type": 2} for part in parts],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for parts in [("a",), ("b", "c"), ("d",)]
    }
    (path / "_METADATA").write_text(json.dumps({"tree_metadata": entries, "use_zarr3": False}))
    return path


def test_plain_arrays_are_read(tmp_path):
    """The control of the tests below."""
    got = jaxckpt.restore(plain_arrays(tmp_path / "x"))

    assert np.array_equal(got["b"]["c"], np.arange(4, dtype=np.float32))


@pytest.mark.parametrize("key", ["../outside", "..", "/etc", "x/../../outside", "\0"])
def test_names_that_lead_outside_are_refused(tmp_path, key):
    """In plain files a leaf's name is a path; it must stay inside."""
    path = plain_arrays(tmp_path / "x")
    shutil.copytree(path / "a", tmp_path / "outside")
    value = json.loads((path / "_METADATA").read_text())
    value["tree_metadata"]["x"] = {
        "key_metadata": [{"key": key, "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    (path / "_METADATA").write_text(json.dumps(value))

    got = attempt(path)

    assert isinstance(got, CorruptCheckpoint)


@pytest.mark.parametrize("name", ["a", "a/0", "a/.zarray"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_links_among_plain_arrays_are_refused(tmp_path, name, kind):
    """A chunk or a header that is a link or a FIFO is an error, never followed or waited for."""
    path = plain_arrays(tmp_path / "x")
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path / name)

    got = attempt(path, jaxckpt.restore)

    assert isinstance(got, CorruptCheckpoint)
    assert "link" in str(got)


def test_a_link_above_a_plain_array_is_refused(tmp_path):
    """A name with `/` in it: none of its directories may be a link."""
    path = plain_arrays(tmp_path / "x")
    (tmp_path / "outside").mkdir()
    shutil.move(path / "a", tmp_path / "outside" / "a")
    (path / "via").symlink_to(tmp_path / "outside")
    text = (path / "_METADATA").read_text().replace('"key": "a"', '"key": "via/a"')
    (path / "_METADATA").write_text(text)

    got = attempt(path, jaxckpt.restore)

    assert isinstance(got, CorruptCheckpoint)


@pytest.mark.parametrize("key", [[], [""]], ids=["no keys", "an empty key"])
@pytest.mark.parametrize("name", ["0", "0/0"])
def test_links_below_an_array_without_a_name_are_refused(tmp_path, key, name):
    """Its chunks lie in directories beside the tree itself."""
    path = plain_arrays(tmp_path / "x")
    header = json.loads((path / "a" / ".zarray").read_text())
    header |= {"shape": [1, 4], "chunks": [1, 4], "dimension_separator": "/"}
    (path / ".zarray").write_text(json.dumps(header))
    (path / "0").mkdir()
    (path / "a" / "0").rename(path / "0" / "0")
    for folder in ("a", "b.c", "d"):
        shutil.rmtree(path / folder)
    entry = {
        "key_metadata": [{"key": one, "key_type": 2} for one in key],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    (path / "_METADATA").write_text(
        json.dumps({"tree_metadata": {str(tuple(key)): entry}, "use_zarr3": False})
    )
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CorruptCheckpoint, match="is a link"):
        jaxckpt.restore(path)


def database(path, file):
    """The plain arrays in a database, where all of their chunks are at the start of one file."""
    values = {}
    for header in plain_arrays(path).glob("*/.zarray"):
        values[f"{header.parent.name}/.zarray"] = header.read_bytes()
        values[f"{header.parent.name}/0"] = ocdbt.Place(file, 0, 16)
        shutil.rmtree(header.parent)
    nodes, manifest = ocdbt.encode_database(values, f"d/{1:032x}")
    (path / file).parent.mkdir(parents=True)
    (path / "d").mkdir(exist_ok=True)
    (path / "d" / f"{1:032x}").write_bytes(nodes)
    (path / names.OCDBT_MANIFEST).write_bytes(manifest)
    tree = json.loads((path / "_METADATA").read_text()) | {"use_ocdbt": True}
    (path / "_METADATA").write_text(json.dumps(tree))
    return path


@pytest.mark.parametrize("file", ["x/l", "d/x/l", "array_metadatas/l"])
def test_a_database_of_other_files_is_read(tmp_path, file):
    """The control of the test below."""
    path = database(tmp_path / "x", file)
    (path / file).write_bytes(np.arange(4, dtype=np.float32).tobytes())

    got = jaxckpt.restore(path)

    assert np.array_equal(got["a"], np.arange(4, dtype=np.float32))


@pytest.mark.parametrize("file", ["x/l", "d/x/l", "array_metadatas/l"])
def test_links_in_any_directory_of_a_database_are_refused(tmp_path, file):
    """TensorStore would follow them."""
    path = database(tmp_path / "x", file)
    (tmp_path / "elsewhere").write_bytes(bytes(16))
    (path / file).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CorruptCheckpoint, match="is a link or a special file"):
        jaxckpt.restore(path)


@pytest.mark.parametrize("file", ["x/l", "d/x/l", "array_metadatas/l"])
def test_a_fifo_in_any_directory_of_a_database_is_refused(tmp_path, file):
    """TensorStore would wait for it; here it need not, so that the test ends."""
    path = database(tmp_path / "x", file)
    os.mkfifo(path / file)
    writer = os.open(path / file, os.O_RDWR)

    try:
        with pytest.raises(CorruptCheckpoint, match="is a link or a special file"):
            jaxckpt.restore(path)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**40], "chunks": [2**30]},
        {"shape": [2**40]},
        {"shape": [2**62]},
        {"shape": [2**28], "chunks": [1]},
        {"shape": [2**40], "chunks": [2**40]},
        {"chunks": [2**40]},
        {"chunks": [0]},
        {"dtype": "|O"},
        {"dtype": "<M8[s]"},
        {"shape": "x"},
        {"chunks": [4, 4]},
        {"order": "Z"},
        {"compressor": {"id": "exec"}},
        {"dtype": [["a", "<f4"]]},
    ],
    ids=str,
)
def test_plain_headers_that_lie(tmp_path, change):
    """A header of zarr that is wrong is CorruptCheckpoint and names the leaf."""
    path = plain_arrays(tmp_path / "x")
    header = json.loads((path / "a" / ".zarray").read_text())
    (path / "a" / ".zarray").write_text(json.dumps(header | change))

    # Orbax's arrays may be compressed, or nothing but fill: sizes on disk prove nothing.
    is_possible = change == {"shape": [2**40], "chunks": [2**30]}
    wanted = MemoryError if is_possible else CorruptCheckpoint
    with pytest.raises(wanted, match=r"leaf a\b|: a: "):
        jaxckpt.restore(path)


@pytest.mark.parametrize("kind", ["link", "fifo", "dir"])
def test_only_a_regular_file_commits(tmp_path, kind):
    """A step whose marker is anything else is not there, for a restore and for a manager."""
    jaxckpt.save(tmp_path / "1", {"a": 1})
    jaxckpt.save(tmp_path / "2", {"a": 2})
    marker = tmp_path / "2" / names.COMMIT_MARKER
    marker.rename(tmp_path / "marker")
    {"link": lambda p: p.symlink_to(tmp_path / "marker"), "fifo": os.mkfifo, "dir": Path.mkdir}[
        kind
    ](marker)

    with pytest.raises(CheckpointNotFound, match=names.COMMIT_MARKER):
        jaxckpt.restore(tmp_path / "2")
    assert jaxckpt.restore(tmp_path) == {"a": 1}
    with jaxckpt.CheckpointManager(tmp_path, mode="r") as manager:
        assert manager.all_steps() == [1]


def test_names_cannot_command_a_terminal(tmp_path):
    """Control characters are shown by their codes, in a listing and in an error."""
    jaxckpt.save(tmp_path / "x", {"\x1b[2Jé\u202e": np.zeros(2)})

    shown = repr(jaxckpt.open(tmp_path / "x"))
    with pytest.raises(TreeMismatch) as caught:
        jaxckpt.restore(tmp_path / "x", {"a": np.zeros(2)})

    for text in (shown, str(caught.value)):
        assert r"\x1b[2Jé\u202e" in text
        assert "\x1b" not in text
