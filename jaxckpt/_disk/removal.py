"""Removes a checkpoint or an item, and the remains of interrupted saves and deletions.

To delete: rename to `...-deleting-...`, then remove the files. A crash leaves a name that no reader
takes for a checkpoint, and the next writer finishes the job.

A `check` raises if another writer has taken over. It is called at the last moment: after a rename,
which is undone then, or before the first request that deletes something.

To delete one item of a checkpoint, in the files and the order of Orbax's v1:

    1. write `_CHECKPOINT_DELETION`                    a checkpoint without the item, for readers
    2. rewrite `_jaxckpt.json`: without its files,     the same
       and without the file of step 4
    3. remove the item's files                         the same
    4. rewrite `_CHECKPOINT_METADATA`                  the same
    5. rewrite `_jaxckpt.json` with that file          the same
    6. remove `_CHECKPOINT_DELETION`                   the same, with nothing left over

Without an atomic rename (object stores), a deletion removes `commit_success.txt` first, and last
the files by which the next writer recognizes the remains. All writers share the directory there. So
a deletion first takes `_jaxckpt.writing`, and then looks whether there is a commit; and a writer
checks after its commit that this file is still its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import posixpath
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from jaxckpt.errors import CorruptCheckpoint, SaveFailed
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.step import FileFacts, Record
from jaxckpt.storage import Entry, Storage, beside, listing

_logger = logging.getLogger("jaxckpt")

# Files that are in every directory of ours, from the first moment to the last. By them the next
# writer recognizes the remains of a deletion, which deletes them last, in this order.
_OURS = (names.RECORD, names.WRITER)
# A directory with one of these is a checkpoint or a run, complete or not.
_OF_OTHERS = frozenset({*_OURS, names.OWNER, names.CHECKPOINT_METADATA, names.ORBAX_MARKER})
Check = Callable[[], object]  # see the module

_LEFT_ALONE = "left alone: another writer is saving there"


def recover(
    storage: Storage,
    path: str,
    around: Mapping[str, Entry],
    *,
    spare: str | None = None,
    fence: Callable[[], None] | None = None,
) -> dict[str, Entry] | None:
    """Finishes or removes a save, a replacement or a deletion of `path` that a crash interrupted.

    Args:
        around: The listing of the directory that `path` is in.
        spare: Paths with this text are left alone; see `Work.spare`.
        fence: Raises unless only this writer may write here. If given, the work of live writers
            is removed too.

    Returns:
        A new listing; None if the directory is gone.
    """
    parent, name = posixpath.split(path)
    if not storage.atomic_rename:
        if files_left(storage, path) is not None:
            _clear(storage, path, spare, fence)
        return listing(storage, parent)
    replacement = names.replacement(name)
    if replacement in around and _is_whole(storage, beside(path, replacement)):
        warn(path, "finishing an interrupted replacement")
        put_in_place(storage, path, beside(path, replacement))
        around = storage.entries(parent)
    for entry in around:
        if names.is_ours_temporary(entry, name) and f"{parent}/{entry}" != spare:
            if fence is not None:
                remove_work(storage, f"{parent}/{entry}")
            else:
                _remove_leftover(storage, f"{parent}/{entry}")
    return listing(storage, parent)


def _clear(
    storage: Storage, path: str, spare: str | None, fence: Callable[[], None] | None
) -> None:
    """Removes a leftover where nothing can be renamed."""
    files = storage.files(path)
    if spare is not None and all(spare in file for file in files):
        return
    if fence is not None:
        fence()
    with taken(storage, path, by_force=fence is not None) as is_ours:
        if not is_ours:
            warn(path, _LEFT_ALONE)
        elif storage.kind(f"{path}/{names.COMMIT_MARKER}") is None:
            if files:
                warn(path, "removing the remains of an interrupted save or deletion")
            delete(storage, path, spare)
        else:  # since it was listed
            storage.delete_files([f"{path}/{names.WRITER}"])


@contextlib.contextmanager
def taken(storage: Storage, path: str, *, by_force: bool) -> Iterator[bool]:
    """Takes the file by which the writers of a shared directory exclude each other.

    Args:
        by_force: Takes it from a live writer too, which can then no longer commit.

    Yields:
        Whether it was taken.
    """
    writer, mine = f"{path}/{names.WRITER}", secrets.token_hex(8).encode()
    hold, is_ours = None, by_force
    try:
        hold = storage.claim(writer, mine) or storage.hold(writer, mine)
        if hold is None and by_force:
            storage.write(writer, b"taken by " + mine)  # which its writer finds
            hold = storage.hold(writer, mine)
    except io.UnsupportedOperation:  # left alone, it would block this name for ever
        storage.write(writer, mine)
        is_ours = True
    try:
        yield is_ours or hold is not None
    finally:
        if hold is not None:
            hold.release()


def _remove_leftover(storage: Storage, path: str) -> None:
    """Removes a temporary directory of ours unless its writer lives."""
    with contextlib.suppress(FileNotFoundError):  # its writer, or another, was quicker
        if _may_be_written(storage, path):
            return
        warn(path, "removing the remains of an interrupted save or deletion")
        discard(storage, path)


def _may_be_written(storage: Storage, path: str) -> bool:
    writer = f"{path}/{names.WRITER}"
    if storage.kind(writer) != "file":
        return False
    try:
        hold = storage.hold(writer)
    except io.UnsupportedOperation:
        warn(
            path,
            "left alone: this storage has no file locks, so its writer may be alive. Remove it if "
            "no job is saving there.",
        )
        return True
    if hold is None:
        warn(path, _LEFT_ALONE)
        return True
    hold.release()
    return False


def files_left(storage: Storage, path: str) -> list[str] | None:
    """Returns the files that a save or a deletion left at `path`, on a storage without renames.

    Returns None if other files are there, such as a committed checkpoint.
    """
    files = storage.files(path)
    # Before process 0 begins, others may have written; and a writer that dies while it tries out
    # the store leaves no more than a temporary file, which is not in `files`.
    is_ours = not files.keys().isdisjoint(_OURS) or all(map(names.is_of_attempt, files))
    return [*files] if names.COMMIT_MARKER not in files and is_ours else None


def remove_left(storage: Storage, path: str, files: Sequence[str]) -> bool:
    """Removes these files of `files_left`; returns False if their writer may be alive."""
    with taken(storage, path, by_force=False) as is_ours:
        if not is_ours:
            return False
        if storage.kind(f"{path}/{names.COMMIT_MARKER}") is None:  # else committed meanwhile
            warn(path, "removing the remains of an interrupted save or deletion")
            _delete_files(storage, path, [file for file in files if file != names.WRITER])
        if storage.files(path).keys() <= {names.WRITER}:
            storage.delete(path)  # also unfinished files
        else:
            storage.delete_files([f"{path}/{names.WRITER}"])
    return True


def _is_whole(storage: Storage, path: str) -> bool:
    return all(
        storage.kind(f"{path}/{name}") == "file" for name in (names.RECORD, names.COMMIT_MARKER)
    )


def put_in_place(storage: Storage, path: str, replacement: str) -> str | None:
    """Does steps 8b and 8c; returns the new place of the checkpoint that was at `path`, if any."""
    doomed = None
    if storage.kind(path) is not None:
        doomed = beside(path, names.deleting(posixpath.basename(path), secrets.token_hex(8)))
        storage.rename(path, doomed)
    storage.rename(replacement, path)
    return doomed


def remove_writer(storage: Storage, path: str) -> None:
    """Removes the writer's file from a committed checkpoint, where a crash left it."""
    with contextlib.suppress(io.UnsupportedOperation):
        # A writer that lives looks for it once more, and removes it itself.
        if (hold := storage.hold(f"{path}/{names.WRITER}")) is not None:
            storage.delete_files([f"{path}/{names.WRITER}"])
            hold.release()


def _no_check() -> None:
    """Lets a caller without a run change the directory."""


def remove(
    storage: Storage,
    path: str,
    *,
    by_force: bool = True,
    check: Check = _no_check,
) -> None:
    """Deletes a checkpoint; after a crash in the middle no reader takes the rest for one.

    Args:
        by_force: Whether to delete even if another writer holds the directory that all share.

    Raises:
        SaveFailed: another writer holds it.
    """
    if storage.atomic_rename:
        discard(storage, path, check=check)
        return
    with taken(storage, path, by_force=by_force) as is_ours:
        if not is_ours:
            raise SaveFailed(f"{path}: another writer is saving or deleting there; not changed")
        try:
            check()
        except BaseException:
            storage.delete_files([f"{path}/{names.WRITER}"])
            raise
        storage.delete_files([f"{path}/{names.COMMIT_MARKER}"])
        delete(storage, path)


def nested(storage: Storage, path: str, files: Iterable[str]) -> str | None:
    """Returns a checkpoint or run that is stored inside a checkpoint without being part of it.

    Args:
        files: All files below the checkpoint, by path in it.
    """
    split = [posixpath.split(file) for file in files]
    found = {folder for folder, name in split if folder and name in _OF_OTHERS}
    if (
        found and ("", names.RECORD) in split
    ):  # whose items may have such files, from other handlers
        with contextlib.suppress(FileNotFoundError, CorruptCheckpoint):
            file = f"{path}/{names.RECORD}"
            data = storage.read(file, max_bytes=step.MAX_RECORD_BYTES)
            found -= {posixpath.dirname(one) for one in step.decode_record(data, file=file).files}
    elif found:  # in early steps of Orbax, each item is a checkpoint
        found -= {
            f
            for f in found
            if "/" not in f and {(f, n) for n in (*_OURS, names.OWNER)}.isdisjoint(split)
        }
    return f"{path}/{min(found)}" if found else None


def take_away(storage: Storage, path: str, to: str, *, check: Check = _no_check) -> None:
    """Renames a checkpoint; gives it its name back if `check` raises then."""
    storage.rename(path, to)
    try:
        check()
    except BaseException:
        with contextlib.suppress(OSError):  # another writer removed it, or has saved there
            storage.rename(to, path)
        raise


def move_aside(storage: Storage, path: str, aside: str, *, check: Check = _no_check) -> None:
    """Gives a checkpoint a name under which nothing restores it.

    Without a rename, copies it and removes it once the copy is whole; an error leaves it there.
    """
    if storage.atomic_rename:
        take_away(storage, path, aside, check=check)
        return

    def copy(file: str) -> None:
        storage.make_dir(posixpath.dirname(f"{aside}/{file}"))
        storage.link(f"{path}/{file}", f"{aside}/{file}")

    try:
        storage.together([partial(copy, file) for file in storage.files(path)])
    except BaseException:
        with contextlib.suppress(OSError):
            storage.delete(aside)
        raise
    try:
        remove(storage, path, check=check)
    except SaveFailed:  # nothing is removed
        storage.delete(aside)
        raise


def remove_work(storage: Storage, path: str) -> None:
    """Removes the temporary directory of another writer, who can then no longer commit."""
    with contextlib.suppress(FileNotFoundError):  # the other writer was quicker
        discard(storage, path)


def discard_work(storage: Storage, work: str, mark: str) -> None:
    """Removes the files that other processes wrote for an attempt that did not begin. Never raises.

    Args:
        work, mark: See `Work`.
    """
    try:
        if mark:
            written = [f"{work}/{file}" for file in storage.files(work) if mark in file]
            storage.delete_files(written)
        else:
            storage.delete(work)
    except OSError as error:
        warn(work, f"the remains of a failed save cannot be removed: {error}")


def remove_item(
    storage: Storage,
    path: str,
    record: Record,
    item: str,
    *,
    check: Check = _no_check,
) -> None:
    """Deletes an item of a checkpoint, or finishes a deletion that was interrupted."""
    file = f"{path}/{names.CHECKPOINT_METADATA}"
    before = storage.read(file, max_bytes=jsontext.MAX_BYTES)
    after = step.without_item(before, item, file=file)
    left = {name: facts for name, facts in record.files.items() if not name.startswith(f"{item}/")}
    left.pop(names.CHECKPOINT_METADATA, None)
    about = step.encode_deletion(item, token=secrets.token_hex(16), before=before, after=after)
    is_new = storage.create(f"{path}/{names.DELETION_RECORD}", about)
    try:
        check()
    except BaseException:
        if is_new:
            storage.delete(f"{path}/{names.DELETION_RECORD}")
        raise
    storage.write(f"{path}/{names.RECORD}", step.encode_record(replace(record, files=left)))
    storage.delete(f"{path}/{item}")
    storage.write(file, after)
    left[names.CHECKPOINT_METADATA] = FileFacts(size=len(after), sha256=step.digest(after))
    storage.write(f"{path}/{names.RECORD}", step.encode_record(replace(record, files=left)))
    storage.delete(f"{path}/{names.DELETION_RECORD}")


def discard(storage: Storage, path: str, *, check: Check = _no_check) -> None:
    if storage.atomic_rename:
        # Rename even if another writer is about to delete it: that writer may undo its rename.
        doomed = beside(path, names.deleting(posixpath.basename(path), secrets.token_hex(8)))
        take_away(storage, path, doomed, check=check)
        path = doomed
    delete(storage, path)


def delete(storage: Storage, path: str, spare: str | None = None) -> None:
    if storage.atomic_rename:
        storage.delete(path)
        return
    files = storage.files(path)
    if spare is not None:
        _delete_files(storage, path, [file for file in files if spare not in file])
    else:
        _delete_files(storage, path, [file for file in files if file != names.WRITER])
        storage.delete(path)  # the lock comes last, with unfinished files


def _delete_files(storage: Storage, path: str, files: Sequence[str]) -> None:
    storage.delete_files([f"{path}/{file}" for file in files if file not in _OURS])
    for file in _OURS:
        if file in files:
            storage.delete_files([f"{path}/{file}"])


def warn(path: str, text: str) -> None:
    """Logs a warning about a save."""
    _logger.warning("%s: %s", path, text)
