"""The call of a handler: its args, what it stores, what it restores.

A handler below `Ours` gives jaxckpt the values, and jaxckpt writes them. Any other handler, such
as Grain's, writes into a temporary directory, whose files are stored.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import contextvars
import json
import os
import posixpath
import stat
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import jax
from etils import epath

from jaxckpt import SaveFailed, SaveHandle, StepExists, save
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.found import Found, record_at
from jaxckpt._run.items import take_metrics
from jaxckpt._save.snapshot import FileItem, Finished, SaveItem, take_tree
from jaxckpt._save.snapshot import Items as Several
from jaxckpt.format import names, step
from jaxckpt.multihost import Group, Processes
from jaxckpt.orbax import args
from jaxckpt.storage import LocalStorage, Storage, locate, real
from jaxckpt.storage._large import pieces


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An item to store, as a tree or as files by their paths in the item."""

    tree: Any = None
    custom_metadata: Any = None  # JSON to store with the tree
    files: Mapping[str, bytes] | None = None
    handler: str  # the name in the checkpoint

    def __call__(self, name: str, processes: Processes) -> SaveItem:
        """Copies this process's share to the host."""
        if (files := self.files) is not None:
            return FileItem(name=name, common=lambda: files, handler=self.handler, kind="common")
        _check_global(self.tree)
        item = take_tree(name, self.tree, processes, copy=True)
        item.handler = self.handler
        if self.custom_metadata is not None:
            # A copy: other saves share the plan.
            item.tree = replace(item.tree, custom_metadata=self.custom_metadata)
        return item


def _check_global(tree: Any) -> None:
    """Raises ValueError for jax arrays that each process has for itself: they may differ."""
    pairs = jax.tree_util.tree_leaves_with_path(tree) if jax.process_count() > 1 else []
    arrays = [(keys, leaf) for keys, leaf in pairs if isinstance(leaf, jax.Array)]
    if local := [jax.tree_util.keystr(k) for k, x in arrays if x.is_fully_addressable]:
        raise ValueError(
            f"Cannot serialize host local jax.Array in multi-host setting: {', '.join(local)}. "
            "Make it global, by utils.fully_replicated_host_local_array_to_global_array, or a "
            "numpy array, of which process 0 writes its own."
        )


_MOST_PART_BYTES: Final = 256 << 20
_MOST_TWICE_BYTES: Final = 16 << 20  # of a file that is read here and by a program's handler
_MOST_NESTED: Final = 4  # directories from an item up to its checkpoint


@dataclass(slots=True, kw_only=True)
class FolderItem(FileItem):
    """An item whose files a handler has written to a temporary directory in each process.

    Process 0 copies its files in pieces; to a bucket, one by one. Files that only other processes
    have go through its memory, up to a size.
    """

    source: tempfile.TemporaryDirectory[str]
    end: Callable[[], None]  # ends the handler's work in the background
    facts: dict[str, step.FileFacts] = field(default_factory=dict)  # of the copied files
    others: dict[str, bytes | None] = field(default_factory=dict)  # not of process 0; None if large

    def write(self, storage: Storage, work: Any, group: Group) -> None:
        """Waits for the handler and copies its files."""
        with self.source as root:
            self.end()
            for file, path in files_in(root).items():
                if group.job.index != 0:
                    is_small = path.stat().st_size <= _MOST_PART_BYTES
                    self.others[file] = path.read_bytes() if is_small else None
                else:
                    target = posixpath.join(work.path, self.name, file)
                    storage.make_dir(posixpath.dirname(target))
                    self.facts[file] = _copy(path, storage, target)

    def part(self) -> bytes | None:
        """Returns this process's files, unless process 0 has copied them."""
        files = {
            name: None if data is None else base64.b64encode(data).decode()
            for name, data in self.others.items()
        }
        return json.dumps(files).encode() if files else None

    def finish(
        self, storage: Storage, work: Any, processes: Processes, parts: Mapping[int, bytes]
    ) -> Finished:
        """Returns the files of all processes that are not there, and facts about the others."""
        files = {name: text for part in parts.values() for name, text in json.loads(part).items()}
        lacked = {name: text for name, text in files.items() if name not in self.facts}
        if large := [name for name, text in lacked.items() if text is None]:
            raise ValueError(
                f"item {self.name!r}: {', '.join(sorted(large))}: a file that process 0 does not "
                f"write has at most {_MOST_PART_BYTES} bytes. Write it in process 0, or in parts."
            )
        self.mine = {name: base64.b64decode(text) for name, text in lacked.items()}
        return FileItem.finish(self, storage, work, processes, {})[0], self.facts


def _copy(path: Path, storage: Storage, target: str) -> step.FileFacts:
    """Copies a file, and returns the facts about it."""
    size = path.stat().st_size
    read = partial(pieces, LocalStorage(), f"{path}", size)
    commit_of(storage, target).add(target, read())
    return step.FileFacts(size=size, sha256=step.digest_of(read()))


class _Private:
    """An item in directories with permissions of their own."""

    def __init__(self, take: Taker, mode: int, name: str, processes: Processes) -> None:
        self._item, self._mode = take(name, processes), mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def write(self, storage: Storage, work: Any, group: Group) -> None:
        for path in (work.path, posixpath.join(work.path, self._item.name).rstrip("/")):
            make_dir(storage, path, self._mode, is_new=True)
        self._item.write(storage, work, group)


def several(items: Items, mode: int | None) -> Several:
    """Returns items to save, and the permissions of their directories."""
    take: Any = items if mode is None else {n: partial(_Private, t, mode) for n, t in items.items()}
    return Several(take)


def with_metrics(items: Several, metrics: Any) -> Several:
    """Returns items with metrics beside them."""
    beside = {names.METRICS_ITEM: lambda *_: take_metrics(metrics, lambda _: None)}
    return Several({**items.take, **beside}) if metrics else items


def make_dir(storage: Storage, path: str, mode: int | None, *, is_new: bool = False) -> None:
    """Makes a directory; in a file system, with permissions that the umask may reduce.

    Args:
        is_new: Whether an existing directory gets these permissions too.
    """
    is_new = is_new or storage.kind(path) is None
    storage.make_dir(path)
    if is_new and mode is not None and storage.scheme == "file":
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & (mode | 0o7000))  # after the umask


# Files that make a directory a checkpoint. A handler may save with another into its own directory.
_OF_CHECKPOINTS = (names.COMMIT_MARKER, names.RECORD, names.CHECKPOINT_METADATA, names.WRITER)
Taker = Callable[[str, Processes], SaveItem]
Items = Mapping[str, Taker]  # by path in the item, "" for the item itself


class CheckpointHandler(abc.ABC):
    """Stores and restores objects of one kind; a program's own handlers are below it."""

    @abc.abstractmethod
    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        """Writes an object into a directory that exists."""

    @abc.abstractmethod
    def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> Any:
        """Returns the object in a directory."""

    def metadata(self, directory: epath.Path) -> Any:
        """Describes the object in a directory."""
        raise NotImplementedError(f"{type(self).__name__} has no metadata")

    def finalize(self, directory: epath.Path) -> None:  # noqa: B027  # may be left out
        """Ends a save, before it is committed."""

    def close(self) -> None:  # noqa: B027  # may be left out
        """Releases what the handler holds."""

    @classmethod
    def typestr(cls) -> str:
        """Returns the name by which a checkpoint refers to the handler."""
        return f"{cls.__module__}.{cls.__qualname__}"


class Future(Protocol):
    """Stands for the rest of an asynchronous save of a handler."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end."""
        ...


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler with a save in the background; jaxckpt copies the files once it has ended."""

    @abc.abstractmethod
    async def async_save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> Any:
        """Begins to write an object into a directory; returns futures, or None."""


class Ours(AsyncCheckpointHandler):
    """A handler whose items jaxckpt writes."""

    _MODULE: str  # in which Orbax has the class

    def _stored(self, given: Any) -> Items:
        """Returns what to store for args."""
        raise NotImplementedError

    def _restored(self, path: str, given: Any) -> Any:
        """Returns the object at a path for args."""
        raise NotImplementedError

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes an object into a directory, replacing a checkpoint there."""
        items = Several(self._stored(made(type(self).__mro__, "save", args, kwargs)))
        try:
            save(directory, items, item=None, overwrite=True)
        except StepExists:  # another handler writes there too
            with tempfile.TemporaryDirectory() as folder:
                save(f"{folder}/item", items, item=None)
                for name, path in files_in(f"{folder}/item").items():
                    file = epath.Path(directory) / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(path.read_bytes())

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes an object into a directory, and returns nothing to wait for."""
        self.save(directory, *args, **kwargs)
        return []

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the object in a directory."""
        given = made(type(self).__mro__, "restore", args, kwargs)
        return self._restored(os.fspath(directory), given)

    @classmethod
    def typestr(cls) -> str:
        """Returns Orbax's name, so that Orbax can read the item."""
        if cls.__module__ != f"{__package__}.handlers":
            return super().typestr()
        return f"orbax.checkpoint._src.handlers.{cls._MODULE}.{cls.__qualname__}"


def on_commit(handle: SaveHandle, call: Callable[[], object] | None) -> None:
    """Calls a function, if there is one, once a save is committed."""
    if call is not None:
        handle.on_end(lambda ended: call() if ended.timing else None)


@contextlib.contextmanager
def as_raised() -> Iterator[None]:
    """Raises the error of a handler itself instead of a SaveFailed."""
    try:
        yield
    except SaveFailed as error:
        if error.__cause__ is None or isinstance(error.__cause__, OSError):
            raise
        error.__cause__.add_note(f"{error}")
        raise error.__cause__ from None


# --- one call --------------------------------------------------------------------------------


@dataclass
class Loose(args.CheckpointArgs):
    """The arguments of a handler without args of its own."""

    positional: tuple[Any, ...]
    named: Mapping[str, Any]


def made_for(handler: Any, verb: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Returns the args of a call, or its arguments for a handler that lacks args of its own."""
    classes = type(handler).__mro__ if _is_plain(handler, verb) else (type(handler),)
    return made(classes, verb, given, named)


def made(classes: Iterable[type], verb: str, given: Any, named: Mapping[str, Any]) -> Any:
    """Returns the args among the arguments of a call, or args made by the first class with args."""
    for one in (*given, *named.values()):
        if args.is_args(one):
            return args.as_ours(one)
    for cls in filter(args.has_registered_args, classes):
        return args.get_registered_args_cls(cls)[verb == "restore"](*given, **named)
    return Loose(given, named)


def store(handler: Any, given: Any) -> Items:
    """Returns the values that a handler stores for args.

    A handler that is not of this module writes into a temporary directory, and so does one whose
    class overrides how it saves. The handler's work in the background ends before the commit.
    """
    if _is_plain(handler, "save") and _is_plain(handler, "async_save"):
        return handler._stored(given)

    def take(name: str, processes: Processes) -> FolderItem:
        folder = tempfile.TemporaryDirectory(prefix="jaxckpt-")
        directory = epath.Path(folder.name)
        is_async = hasattr(handler, "async_save")
        try:
            rest = _call(handler.async_save if is_async else handler.save, directory, given)
            futures = jax.tree.leaves(run(rest) if is_async else None)
        except BaseException:
            folder.cleanup()
            raise

        def end() -> None:
            for future in futures:
                future.result()
            handler.finalize(directory)

        return FolderItem(name=name, source=folder, end=end, handler=typestr(handler))

    return {"": take}


def run(work: Coroutine[Any, Any, Any], runner: asyncio.Runner | None = None) -> Any:
    """Runs a coroutine to its end, also where an event loop runs already, as in notebooks.

    Args:
        runner: Has the loop to run it in, so that a later call can go on with what it returns.
    """
    call: Callable[..., Any] = asyncio.run if runner is None else runner.run
    if asyncio._get_running_loop() is None:
        return call(work)
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, "jaxckpt-orbax") as thread:
        return thread.submit(context.run, call, work).result()


def files_in(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Returns the files below a directory, by path in it."""
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file() and path.name not in _OF_CHECKPOINTS
    }


def _is_plain(handler: Any, verb: str) -> bool:
    is_ours = isinstance(handler, Ours)
    return is_ours and getattr(type(handler), verb) is getattr(Ours, verb)


def _call(verb: Callable[..., Any], directory: epath.Path, given: Any) -> Any:
    if isinstance(given, Loose):
        return verb(directory, *given.positional, **given.named)
    return verb(directory, args=given)


def load(handler: Any, path: str, given: Any) -> Any:
    """Returns the object that a handler restores from a path for args."""
    if _is_plain(handler, "restore"):
        return handler._restored(path, given)
    check_files(path)
    return _call(handler.restore, epath.Path(path), given)


def recorded(path: str) -> tuple[Found, str]:
    """Returns the checkpoint around an item, as far as a record has its files, and the item."""
    storage, folder = locate(path)
    folder = top = real(storage, folder)
    for _ in range(_MOST_NESTED):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return Found(storage=storage, path=top, record=record_at(storage, top)), folder
        top = posixpath.dirname(top)
    return Found(storage=storage, path=folder), folder


def check_files(path: str) -> None:
    """Raises CorruptCheckpoint if a small file that a handler will read is not as recorded."""
    found, folder = recorded(path)
    for name, facts in found.recorded(folder).items():
        if facts.sha256 is not None and facts.size <= _MOST_TWICE_BYTES:
            found.read(folder, name)


def typestr(handler: Any) -> str:
    """Returns the name by which a checkpoint refers to a handler."""
    cls = handler if isinstance(handler, type) else type(handler)
    return (
        handler.typestr() if hasattr(handler, "typestr") else f"{cls.__module__}.{cls.__qualname__}"
    )
