"""The deletion of one item of a checkpoint, and what lies in one without being part of it."""

from __future__ import annotations

import contextlib
import posixpath
import secrets
from collections.abc import Iterable
from dataclasses import replace

from jaxckpt._disk.attempt import Check
from jaxckpt._disk.found import record_at
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.step import FileFacts, Record
from jaxckpt.storage import Storage

_OURS = (names.RECORD, names.WRITER, names.OWNER)
# A directory with one of these is a checkpoint or a run, complete or not.
_OF_OTHERS = frozenset({*_OURS, names.CHECKPOINT_METADATA, names.ORBAX_MARKER})


def nested(storage: Storage, path: str, files: Iterable[str]) -> str | None:
    """Returns a checkpoint or run that is stored inside a checkpoint without being part of it.

    Args:
        files: All files below the checkpoint, by path in it.
    """
    split = [posixpath.split(file) for file in files]
    found = {folder for folder, name in split if folder and name in _OF_OTHERS}
    if found and ("", names.RECORD) in split:  # its items may have such files, of other handlers
        with contextlib.suppress(FileNotFoundError, CorruptCheckpoint):
            found -= {posixpath.dirname(file) for file in record_at(storage, path).files}
    elif found:  # in early steps of Orbax, each item is a checkpoint
        items = {folder for folder in found if "/" not in folder}
        found -= {one for one in items if {(one, name) for name in _OURS}.isdisjoint(split)}
    return f"{path}/{min(found)}" if found else None


def remove_item(
    storage: Storage,
    path: str,
    record: Record,
    item: str,
    *,
    check: Check,
    held: contextlib.AbstractContextManager[object],
) -> None:
    """Deletes an item of a checkpoint, or finishes a deletion that was interrupted.

    In the files and the order of Orbax's v1; a crash after each line leaves:

    1. write `_CHECKPOINT_DELETION`                    a checkpoint without the item, for readers
    2. rewrite `_jaxckpt.json`: without its files,     the same
       and without the file of step 4
    3. remove the item's files                         the same
    4. rewrite `_CHECKPOINT_METADATA`                  the same
    5. rewrite `_jaxckpt.json` with that file          the same
    6. remove `_CHECKPOINT_DELETION`                   the same, with nothing left over

    Args:
        check: Raises if another job owns the run; called before each change.
        held: Keeps later jobs from using the number of the step anew, from the second line on.
    """
    file = f"{path}/{names.CHECKPOINT_METADATA}"
    before = storage.read(file, max_bytes=jsontext.MAX_BYTES)
    after = step.without_item(before, item, file=file)
    left = {name: facts for name, facts in record.files.items() if not name.startswith(f"{item}/")}
    left.pop(names.CHECKPOINT_METADATA, None)
    about = step.encode_deletion(item, token=secrets.token_hex(16), before=before, after=after)
    # Not `create`, of which a crash in a mounted bucket leaves a part: the step would look damaged.
    if is_new := storage.kind(f"{path}/{names.DELETION_RECORD}") is None:
        storage.write(f"{path}/{names.DELETION_RECORD}", about)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held)
            check()
        except BaseException:
            if is_new:
                storage.delete(f"{path}/{names.DELETION_RECORD}")
            raise
        storage.write(f"{path}/{names.RECORD}", step.encode_record(replace(record, files=left)))
        check()
        storage.delete(f"{path}/{item}")
        check()
        storage.write(file, after)
        left[names.CHECKPOINT_METADATA] = FileFacts.of(names.CHECKPOINT_METADATA, after)
        check()
        storage.write(f"{path}/{names.RECORD}", step.encode_record(replace(record, files=left)))
        storage.delete(f"{path}/{names.DELETION_RECORD}")
