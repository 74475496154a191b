"""Broken metadata gives a typed error or a correct restore, whatever a file contains."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from jaxckpt.errors import CheckpointError
from jaxckpt.format import arrays, jsontext, msgpack, run, sharding, step, tree, typed_json
from tests.faults import metadata
from tests.faults.damage import Checkpoints, problems_of, trials_of


@pytest.fixture(scope="module")
def checkpoints(zygote, tmp_path_factory, run_processes):
    return Checkpoints(zygote, tmp_path_factory.mktemp("checkpoints"), run_processes)


@pytest.mark.parametrize("layout", ["plain", "sharded", "step"])
def test_changed_metadata_are_found(zygote, trial, checkpoints, ram_path, layout):
    """The record has their digests."""
    trials_of(zygote, trial, "13", metadata.stale, checkpoints(layout), ram_path / "x", 1, 40)


@pytest.mark.parametrize("layout", ["plain", "sharded", "step"])
def test_metadata_that_lie(zygote, trial, checkpoints, ram_path, layout):
    """With digests that fit: an error of ours, or what the metadata say, and no other outcome."""
    root = checkpoints(layout)

    said = trials_of(zygote, trial, "13", metadata.fitting, root, ram_path / "x", 1, 80)

    came = Counter(answer.get("came") for answer in said)
    assert came["CorruptCheckpoint"] > 3
    assert came["right"] > 0


def test_metadata_that_lie_to_careless_parsers(zygote, checkpoints, ram_path):
    """A control: without the checks of types other exceptions come, and the trials say so."""
    root = checkpoints("plain")

    problems = problems_of(zygote, metadata.fitting, root, ram_path / "x", 1, 60, plant=True)

    assert any("TypeError" in problem or "AttributeError" in problem for problem in problems)


def test_metadata_of_arrays_that_lie(zygote, trial, checkpoints, ram_path):
    """In the database of a checkpoint of ours: an error, or the right values."""
    root = checkpoints("plain")

    trials_of(zygote, trial, "13", metadata.in_database, root, ram_path / "x", 1, 40)


def test_small_files_of_a_run_that_lie(zygote, trial, checkpoints, ram_path):
    """Owner, doomed steps and leases: the run is read and written all the same."""
    root = checkpoints("step")

    trials_of(zygote, trial, "13", metadata.in_root, root, ram_path / "x", 1, 24)


_OF_OTHERS = {
    "old": [
        "orbax-0.1.0-flax-legacy",
        "orbax-0.1.0-pytree-aggregate",
        "orbax-0.3.5-pytree-default",
        "orbax-0.1.6-pytree-ocdbt",
    ],
    "new": [
        "orbax-0.12.4-pytree-default",
        "orbax-0.12.4-pytree-noocdbt",
        "orbax-0.12.4-pytree-zarr3",
        "orbax-0.12.4-pytree-zarr3-noocdbt",
        "orbax-0.12.4-prng-keys",
        "orbax-0.12.4-strings",
        "orbax-0.12.4-v1-save",
        "orbax-0.12.4-manager-composite",
    ],
}


@pytest.mark.parametrize("age", _OF_OTHERS)
def test_metadata_of_others_that_lie(zygote, trial, golden, ram_path, age):
    """Orbax's and Flax's checkpoints have no digests: a typed error, or the described values."""
    paths = [golden(name).path for name in _OF_OTHERS[age]]

    trials_of(zygote, trial, "13", metadata.of_others, paths, ram_path / "x", 1, 120)


# --- what hypothesis thinks of ---------------------------------------------------------------

# fmt: off
_WORDS = st.sampled_from([
    "tree_metadata", "key_metadata", "value_metadata", "key", "key_type", "value_type", "jaxckpt",
    "version", "tree", "type", "names", "children", "keys", "class", "aux", "kind", "shape",
    "dtype", "chunk", "inner", "impl", "key_shape", "as", "node", "use_zarr3", "use_ocdbt",
    "np.ndarray", "scalar", "value_metadata_tree", "category", "clazz", "entries", "data",
    "item_handlers", "custom_metadata", "init_timestamp_nsecs", "files", "bytes", "sha256",
    "sample", "writer", "token", "lineage", "steps", "step", "expires_ns", "host", "pid",
    "opened_ns", "array_metadatas", "array_metadata", "param_name", "ext_metadata",
    "random_key_impl", "zarr_format", "data_type", "chunk_grid", "configuration", "chunk_shape",
    "codecs", "name", "sharding_indexed", "crc32c", "endian", "index_codecs", "chunks",
    "fill_value", "sharding_type", "NamedSharding", "axis_names", "partition_spec", "device_mesh",
    "mesh", "$tuple", "$dict", "$bytes", "$int", "$array", "float32", "dict", "list", "jax.Array",
    "str",
])
# fmt: on
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=5),
    max_leaves=25,
)
_DATA = st.binary(max_size=60) | _JSON.map(lambda value: json.dumps(value).encode())


def _record(data, file):
    return step.decode_record(data + b"\n" + step.digest(data).encode() + b"\n", file=file)


def _array(data, file):
    for version in (2, 3):
        arrays.decode_metadata(data, version, leaf="x", file=file)
    return arrays.has_our_codecs(data, file=file)


def _text_in(data, file):
    return sharding.decode(json.dumps({"YQ==": data.decode(errors="replace")}).encode(), file=file)


PARSERS = {
    "tree": lambda data, file: tree.decode(data, file=file),
    "step": lambda data, file: step.decode(data, file=file),
    "record": _record,
    "strings": lambda data, file: step.decode_strings(data, file=file),
    "keys": lambda data, file: step.decode_key_impls(data, file=file),
    "sharding": _text_in,
    "array": _array,
    "values": lambda data, file: typed_json.decode(jsontext.loads(data, file=file), file=file),
    "owner": lambda data, file: run.decode(run.Owner, data, file=file),
    "doomed": lambda data, file: run.decode(run.Doomed, data, file=file),
    "lease": lambda data, file: run.decode(run.Lease, data, file=file),
    "msgpack": lambda data, file: msgpack.decode(data, file=file),
}


@pytest.mark.parametrize("parser", PARSERS)
def test_parsers_raise_nothing_else(trial, parser):
    """Any bytes, and any JSON made of the words of our files."""

    @seed(1)
    @settings(
        max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(_DATA)
    def check(data):
        with trial("13", f"{parser}: {data!r:.300}"):
            try:
                PARSERS[parser](data, "file")
            except CheckpointError as error:
                found = str(error)
            else:
                found = "of this file"
            assert "file" in found

    check()
