"""Fuzzes all parsers: `make fuzz`, or with atheris installed

    python -m tests.faults.fuzz -max_total_time=600 CORPUS

The first byte chooses the parser. Anything but a value or a `CheckpointError` stops it, and the
input is kept in a file. The corpus starts with the files that one save writes.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["jaxckpt.format"]):
    import jaxckpt
    from jaxckpt.format import (
        arrays,
        jsontext,
        ledger,
        msgpack,
        ocdbt,
        run,
        sharding,
        step,
        tree,
        typed_json,
    )

import numpy as np

FILE = "file"
PARSERS: list[tuple[str, Callable[[bytes], Any]]] = [
    ("_jaxckpt.json", lambda data: step.decode_record(signed(data), file=FILE)),
    ("_CHECKPOINT_METADATA", lambda data: step.decode(data, file=FILE)),
    ("_METADATA", lambda data: tree.decode(data, file=FILE)),
    ("_sharding", lambda data: sharding.decode(data, file=FILE)),
    ("_strings.json", lambda data: step.decode_strings(data, file=FILE)),
    ("process_0", lambda data: step.decode_key_impls(data, file=FILE)),
    ("_jaxckpt.run", lambda data: run.decode(run.Identity, data, file=FILE)),
    ("_jaxckpt.owner", lambda data: run.decode(run.Owner, data, file=FILE)),
    ("_jaxckpt.doomed", lambda data: run.decode(run.Doomed, data, file=FILE)),
    ("_jaxckpt.lease", lambda data: run.decode(run.Lease, data, file=FILE)),
    ("_jaxckpt.ledger", ledger.decode_ledger),
    ("zarr.json", lambda data: described(data, 3)),
    (".zarray", lambda data: described(data, 2)),
    ("msgpack", lambda data: msgpack.decode(data, file=FILE)),
    ("_CHECKPOINT_DELETION", lambda data: step.decode_deletion(data, file=FILE)),
    ("key", lambda data: step.decode_key_facts(data, file=FILE)),
    ("value", lambda data: typed_json.decode(jsontext.loads(data, file=FILE), file=FILE)),
    ("manifest.ocdbt", lambda data: of_database(ocdbt._MANIFEST, data)),
    ("nodes", lambda data: of_database(ocdbt._NODE, data)),
    ("nodes", lambda data: of_database(ocdbt._NODE, data, [b"a", b"b", b"ba"])),
    ("_METADATA", lambda data: tree.decode_leaf(data, ("w",), file=FILE)),
    ("_sharding", lambda data: sharding.decode(data, file=FILE, only="w")),
]


def signed(data: bytes) -> bytes:
    """With the digest that the record would have: else nothing behind it would be reached."""
    body = data.partition(b"\n")[0]
    return body + b"\n" + step.digest(body).encode() + b"\n"


def of_database(magic: bytes, data: bytes, wanted: Sequence[bytes] | None = None) -> None:
    """With the header and the checksum of a file whose body it is."""
    with contextlib.suppress(ValueError, ocdbt.Foreign):
        framed = ocdbt._framed(magic, data[ocdbt._HEAD.size : -4])
        if magic == ocdbt._MANIFEST:
            ocdbt.decode_manifest(framed)
        else:
            ocdbt.decode_node(framed, "", b"", wanted)


def described(data: bytes, version: int) -> None:
    stored = arrays.decode_metadata(data, version, leaf="leaf", file=FILE)
    arrays.check_foreign(stored, leaf="leaf", file=FILE)
    if version == 3:
        arrays.has_our_codecs(data, file=FILE)


def try_one(data: bytes) -> None:
    if data:
        with contextlib.suppress(jaxckpt.CheckpointError):
            PARSERS[data[0] % len(PARSERS)][1](data[1:])


def seed(corpus: Path) -> None:
    """Files of a save, for the parsers that read files of their names; a word for the others."""
    with tempfile.TemporaryDirectory() as folder:
        with jaxckpt.CheckpointManager(f"{folder}/run") as manager:
            state = {"w": np.arange(3.0), "n": 1, "text": "ä", "list": [None, (), {}]}
            manager.save(1, state, items={"config": {"a": [1, 2.5]}}, metrics={"loss": 1.0})
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        for n, (name, _) in enumerate(PARSERS):
            found = [file.read_bytes() for file in files if file.name.startswith(name)]
            if name == "nodes":
                values = {"a": b"1", "b": ocdbt.Place(f"d/{'0' * 32}", 5, 9)}
                found = [ocdbt.encode_database(values, "d/")[0]]
            for i, data in enumerate([*found, b"{}"]):
                (corpus / f"seed-{n}-{i}").write_bytes(bytes([n]) + data)


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for corpus in folders:
        corpus.mkdir(parents=True, exist_ok=True)
        seed(corpus)
    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()
