"""The files at the top of a checkpoint: Orbax's `_CHECKPOINT_METADATA`, and our own record.

The record, `_jaxckpt.json`, has two lines. The first is JSON:

    {"version": 1, "writer": "jaxckpt 0.1.0", "token": ..., "name": "1000", "lineage": ...,
     "phases": {"snapshot": 0.01, "write": 1.2, ...}, "item": "model",
     "share": [1, 4], "run": {"id": ..., "starts": [["5f0c...", null], ["a9d2...", 800]]},
     "differences": ["leaf params/w has other bits on device 3 than on devices 0, 1, 2"],
     "files": {"state/_METADATA": {"bytes": 1234, "sha256": ...},
               "metrics/metrics": {"bytes": 13, "sha256": ..., "text": "{\\"loss\\": 0.5}"},
               "state/d/5c1f...": {"bytes": 99}}}

The second is the SHA-256 of the first, in hex. The record lists every file of the checkpoint except
itself and `commit_success.txt`; "item" is the main item, left out if it is "state"; if no item has
this name, several trees were saved and none is the main one. "share" is the index of a process and
their number, if the checkpoint has only the shards that this process held. "run" is present if it
is a step of a run; see `Life`. "differences" is present if replicas of a shard differed, of which
the step has one. Data files lack a SHA-256: each chunk carries a checksum, and a file with a
SHA-256 lists the checksums of all chunks. "text" repeats a small file that describes the step, so
that a list of steps reads one file of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jaxckpt.errors import UnsupportedFormat, damaged, lfs_problem
from jaxckpt.format import jsontext, names
from jaxckpt.format.jsontext import expect, given, maybe_expect

VERSION: Final = 1
MAX_STARTS: Final = 256  # of a run that are listed in a step, in 8 kB
CUT: Final = ("", 1 << 62)  # in such a list, where starts are left out; newer than any step
_UNMARKED: Final = 32  # an earlier release listed as many, and did not mark that it left out others
# The limit of `_jaxckpt.json`. Each process writes a few files, with about 120 bytes here for each.
MAX_RECORD_BYTES: Final = 256 << 20
_REPEATED: Final = (names.CHECKPOINT_METADATA, f"{names.METRICS_ITEM}/{names.METRICS_FILE}")
_MOST_REPEATED_BYTES: Final = 16_000

# Handler strings accepted by every entry point of Orbax, v0 and v1.
PYTREE_HANDLER: Final = (
    "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
)
JSON_HANDLER: Final = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """The contents of `_CHECKPOINT_METADATA`. Times are wall clock, ns since 1970."""

    # Orbax's handler by item name, "" if the checkpoint is the item.
    handlers: Mapping[str, str] = field(default_factory=dict)
    init_ns: int | None = None
    commit_ns: int | None = None
    custom_metadata: Mapping[str, Any] | None = None  # the caller's JSON

    def is_by(self, handler: str, item: str) -> bool:
        """Returns whether Orbax's handler of this name wrote an item, by any release's path."""
        return self.handlers.get(item, "").endswith(f".{handler}")


def encode(step: StepMetadata) -> bytes:
    """Encodes `_CHECKPOINT_METADATA`. Orbax refuses further keys."""
    return jsontext.dumps(
        {
            # A flat checkpoint has one string here.
            "item_handlers": step.handlers.get("") or dict(step.handlers),
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": step.init_ns,
            "commit_timestamp_nsecs": step.commit_ns,
            "custom_metadata": dict(step.custom_metadata or {}),
        }
    )


def decode(data: bytes, *, file: str) -> StepMetadata:
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    handlers = top.get("item_handlers")
    if isinstance(handlers, str):
        handlers = {"": handlers}
    times = [top.get("init_timestamp_nsecs"), top.get("commit_timestamp_nsecs")]
    init_ns, commit_ns = (maybe_expect(one, int, "a timestamp", file=file) for one in times)
    custom = top.get("custom_metadata")
    return StepMetadata(
        handlers={k: str(v) for k, v in handlers.items()} if isinstance(handlers, dict) else {},
        init_ns=init_ns,
        commit_ns=commit_ns,
        custom_metadata=maybe_expect(custom, dict, "custom_metadata", file=file),
    )


def without_item(data: bytes, item: str, *, file: str) -> bytes:
    """Returns the bytes of `_CHECKPOINT_METADATA` without an item, and otherwise as it was."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    handlers = expect(top.get("item_handlers") or {}, dict, "'item_handlers'", file=file)
    left = {name: handler for name, handler in handlers.items() if name != item}
    return jsontext.dumps({**top, "item_handlers": left}, allow_nan=True)


def encode_deletion(item: str, *, token: str, before: bytes, after: bytes) -> bytes:
    """Encodes `_CHECKPOINT_DELETION`.

    Args:
        token: 32 hex digits.
        before, after: `_CHECKPOINT_METADATA` with and without the item, which Orbax compares.
    """
    said = {"operation_id": token, "checkpointable_name": item, "destination": None}
    said |= {"original_metadata": json.loads(before), "updated_metadata": json.loads(after)}
    return jsontext.dumps(said, allow_nan=True)


def decode_deletion(data: bytes, *, file: str) -> str:
    """Decodes `_CHECKPOINT_DELETION`: the name of the item whose deletion has begun."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    name = expect(top.get("checkpointable_name"), str, "'checkpointable_name'", file=file)
    if "/" in name or name in ("", ".", ".."):
        raise damaged(file, f"invalid item name {name!r}")
    return name


def decode_key_facts(data: bytes, *, file: str) -> bool:
    """Returns whether Orbax's random key item is a jax key (typed or legacy), not numpy's."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    return top.get("typed") is True or top.get("legacy") is True


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """A file's size in bytes and, for a metadata file, its SHA-256."""

    size: int
    sha256: str | None = None
    text: str | None = field(default=None, compare=False)  # the file itself; see the module

    @classmethod
    def of(cls, file: str, data: bytes) -> FileFacts:
        """Returns the facts about a metadata file."""
        repeats = file in _REPEATED and len(data) <= _MOST_REPEATED_BYTES
        text = data.decode() if repeats else None
        return cls(size=len(data), sha256=digest(data), text=text)

    def encoded(self) -> dict[str, Any]:
        return given({"bytes": self.size, "sha256": self.sha256, "text": self.text})


Starts = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Lists the starts of a run up to a step, each with the step from which the run went on.

    Names of parent steps would not do: retention deletes the links of the chain.
    """

    run: str  # the id of the run
    # The last start saved the step. Of more than MAX_STARTS, `CUT` replaces those after the first.
    starts: Starts = ()

    def begun(self, start: str, step: int | None) -> Life:
        """Returns the life that begins with a further start, from `step` or anew."""
        whole = (*self.starts, (start, step))
        cut = (whole[0], CUT, *whole[2 - MAX_STARTS :])
        return Life(run=self.run, starts=cut if len(whole) > MAX_STARTS else whole)

    def encoded(self) -> dict[str, Any]:
        return {"id": self.run, "starts": self.starts, "bound": MAX_STARTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The contents of `_jaxckpt.json`."""

    # The commit sets the first four.
    writer: str = ""  # program and version
    token: str = ""  # unique to the attempt that wrote the checkpoint
    files: Mapping[str, FileFacts] = field(default_factory=dict)  # by path inside the checkpoint
    name: str = ""  # the directory name it was saved under; "" if an earlier jaxckpt wrote it
    lineage: Mapping[str, Any] = field(default_factory=dict)  # the source of copied values
    phases: Mapping[str, float] = field(default_factory=dict)  # see `jaxckpt.types.Timing`
    item: str = names.STATE_ITEM  # the item to restore by default; "" if the tree is flat
    share: tuple[int, int] | None = None  # the process whose shards it has, and their number
    life: Life | None = None  # None if it is not a step of a run, or an older release saved it
    differences: tuple[str, ...] = ()  # between replicas of the values, found when they were saved
    digest: str = field(default="", compare=False)  # of the file, once read

    @property
    def saved_ns(self) -> int:
        """Returns when the checkpoint was saved, or 0 if the record does not repeat that."""
        file = names.CHECKPOINT_METADATA
        text = file in self.files and self.files[file].text
        return (decode(text.encode(), file=file).commit_ns if text else None) or 0


def as_text(path: str) -> str:
    """Returns a path with the numbers of the bytes that are not UTF-8."""
    return path.encode(errors="backslashreplace").decode()


def encode_record(record: Record) -> bytes:
    body = jsontext.dumps(
        {
            "version": VERSION,
            "writer": record.writer,
            "token": record.token,
            "name": as_text(record.name),
            "lineage": {k: as_text(v) if type(v) is str else v for k, v in record.lineage.items()},
            "phases": {name: round(seconds, 6) for name, seconds in record.phases.items()},
            **({} if record.item == names.STATE_ITEM else {"item": record.item}),
            **({} if record.share is None else {"share": record.share}),
            **({} if record.life is None else {"run": record.life.encoded()}),
            **({"differences": record.differences} if record.differences else {}),
            "files": {path: facts.encoded() for path, facts in record.files.items()},
        }
    )
    return body + b"\n" + digest(body).encode() + b"\n"


def decode_record(data: bytes, *, file: str) -> Record:
    body, _, rest = data.partition(b"\n")
    if digest(body).encode() != rest.strip():
        raise damaged(file, lfs_problem(data) or "damaged: SHA-256 mismatch")
    top = expect(jsontext.loads(body, file=file), dict, "the file", file=file)
    version = expect(top.get("version"), int, "'version'", file=file)
    if version > VERSION:
        raise UnsupportedFormat(
            f"{file}: written by a newer jaxckpt (record version {version}, this release reads up "
            f"to {VERSION}). Upgrade jaxckpt to read it."
        )
    share = expect(top.get("share", [0, 1]), list, "'share'", file=file)
    if len(share) != 2 or not all(type(n) is int for n in share) or not 0 <= share[0] < share[1]:
        raise damaged(file, f"'share' is {share!r}")
    files = {}
    for path, facts in expect(top.get("files"), dict, "'files'", file=file).items():
        entry = expect(facts, dict, path, file=file)
        if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")) or "\0" in path:
            raise damaged(file, f"invalid file path {path!r}")
        files[path] = FileFacts(
            size=expect(entry.get("bytes"), int, f"{path}: 'bytes'", file=file),
            sha256=maybe_expect(entry.get("sha256"), str, f"{path}: 'sha256'", file=file),
            text=maybe_expect(entry.get("text"), str, f"{path}: 'text'", file=file),
        )
    return Record(
        writer=expect(top.get("writer"), str, "'writer'", file=file),
        token=expect(top.get("token"), str, "'token'", file=file),
        files=files,
        name=expect(top.get("name", ""), str, "'name'", file=file),
        lineage=expect(top.get("lineage", {}), dict, "'lineage'", file=file),
        phases={
            name: expect(seconds, float, "a phase", file=file)
            for name, seconds in expect(top.get("phases", {}), dict, "'phases'", file=file).items()
        },
        item=expect(top.get("item", names.STATE_ITEM), str, "'item'", file=file),
        share=(share[0], share[1]) if "share" in top else None,
        life=_life(top["run"], file=file) if "run" in top else None,
        differences=tuple(
            expect(one, str, "a difference", file=file)
            for one in expect(top.get("differences", []), list, "'differences'", file=file)
        ),
        digest=digest(data),
    )


def _life(value: Any, *, file: str) -> Life:
    top = expect(value, dict, "'run'", file=file)
    starts = expect(top.get("starts"), list, "'starts'", file=file)
    for one in starts:
        is_pair = isinstance(one, list) and len(one) == 2 and isinstance(one[0], str)
        if not is_pair or type(one[1]) not in (int, type(None)):
            raise damaged(file, f"'starts' has {one!r}")
    if "bound" not in top and len(starts) >= _UNMARKED:
        starts.insert(1, CUT)
    return Life(run=expect(top.get("id"), str, "'id'", file=file), starts=tuple(map(tuple, starts)))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


# --- _strings.json and array_metadatas -------------------------------------------------------


def encode_strings(strings: Mapping[str, str]) -> bytes:
    """Encodes `_strings.json`: Orbax finds a leaf at the JSON pointer `/` + its name.

    Raises:
        ValueError: one name is a parent of another (`a`, `a/b`).
    """
    top: dict[str, Any] = {}
    for name, text in strings.items():
        *parents, last = name.split("/")
        node = top
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"str leaf {name!r} is below another str leaf")
        if last in node:
            raise ValueError(f"str leaf {name!r} is above another str leaf")
        node[last] = text
    return jsontext.dumps(top)


def decode_strings(data: bytes, *, file: str) -> Mapping[str, Any]:
    """Decodes `_strings.json`; look up names with `find_string`."""
    return expect(jsontext.loads(data, file=file), dict, "the file", file=file)


def find_string(strings: Mapping[str, Any], name: str, *, file: str) -> str:
    """Returns the text of the leaf `name`, found by JSON pointer or as one key."""
    text = jsontext.find(strings, name)
    if not isinstance(text, str):
        raise damaged(file, f"the text of leaf {name} is missing", leaf=name)
    return text


def encode_array_metadatas(arrays: Mapping[str, tuple[tuple[int, ...], str | None]]) -> bytes:
    """Encodes `array_metadatas/process_0`: chunk shape and PRNG implementation by name."""
    return jsontext.dumps(
        {
            "array_metadatas": [
                {
                    "array_metadata": {
                        "param_name": name,
                        "write_shape": chunk_shape,
                        "chunk_shape": chunk_shape,
                        "ext_metadata": {"random_key_impl": impl} if impl else None,
                    }
                }
                for name, (chunk_shape, impl) in arrays.items()
            ]
        }
    )


def decode_key_impls(data: bytes, *, file: str) -> dict[str, str]:
    """Returns the PRNG implementation of each typed key in one `array_metadatas` file."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    impls = {}
    for entry in expect(top.get("array_metadatas"), list, "'array_metadatas'", file=file):
        array = expect(entry, dict, "an entry", file=file).get("array_metadata")
        fields = expect(array, dict, "'array_metadata'", file=file)
        ext = fields.get("ext_metadata")
        impl = ext.get("random_key_impl") if isinstance(ext, dict) else None
        if isinstance(impl, str):
            impls[expect(fields.get("param_name"), str, "'param_name'", file=file)] = impl
    return impls
