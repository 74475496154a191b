"""Checkpointers: one checkpoint, saved by a handler."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Self

from etils import epath

from jaxckpt import SaveHandle, StepExists, save_async
from jaxckpt.multihost import current, lead
from jaxckpt.orbax import _handling, handlers, metadata, options, policies
from jaxckpt.storage import locate


class DestinationExists(StepExists, ValueError):
    """The directory exists, and `force` is not set."""


class Closing:
    """Closes itself at the end of its `with`."""

    def close(self) -> None:
        """Ends the work under way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AbstractCheckpointer(Closing):
    """The base of checkpointers."""


class Checkpointer(AbstractCheckpointer):
    """Saves and restores with a handler; returns when a save is committed."""

    _is_async = False

    def __init__(self, handler: Any, **tuning: Any) -> None:
        options.check(**tuning)
        files = tuning.get("file_options") or options.FileOptions()
        self._mode: int | None = files.path_permission_mode
        self._handler = handlers.as_ours(handler)
        self._timeout_s: float | None = None
        self._on_commit: Any = None
        self._saving: SaveHandle | None = None

    @property
    def handler(self) -> Any:
        """Returns the handler."""
        return self._handler

    def save(
        self,
        directory: str | os.PathLike[str],
        *given: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Saves to a directory, and waits until it is committed unless in the background.

        Args:
            directory: The checkpoint.
            given, named: Args, or the arguments of the handler's args.
            force: Whether to replace a checkpoint.
            custom_metadata: JSON to store with the checkpoint.

        Raises:
            ValueError: the directory exists.
        """
        self._wait()
        storage, where = locate(directory)
        # Process 0 looks for all: after all have come, and before it begins to write.
        name, look = f"Checkpointer {where}", lambda: storage.kind(where) is not None
        is_there = lead(current(), name, look, where=where, meets=True)
        if is_there and not force:
            raise DestinationExists(f"Destination {directory} already exists.")
        if is_there and storage.atomic_rename:
            policies.warn_once(
                "force=True: jaxckpt replaces a checkpoint once the new one is complete; Orbax "
                "deletes the old one before it writes. See docs/orbax.md."
            )
        made = _handling.made_for(self._handler, "save", given, named)
        items = _handling.store(self._handler, made)
        flat: Any = {"item": None} if "" in items else {}
        overwrite = force and (True if storage.atomic_rename else "delete_first")
        several: Any = _handling.several(items, self._mode)
        more: Any = {"overwrite": overwrite, "custom_metadata": custom_metadata}
        try:
            self._saving = save_async(directory, several, **more, **flat)
        except StepExists as error:
            raise DestinationExists(f"{error}") from error
        _handling.on_commit(self._saving, self._on_commit)
        if not self._is_async:
            self._wait()

    def _wait(self) -> None:
        if self._saving is None:
            return
        try:
            with _handling.as_raised():
                self._saving.result(self._timeout_s)
        finally:
            self._saving = None if self._saving.done() else self._saving

    def restore(self, directory: str | os.PathLike[str], *given: Any, **named: Any) -> Any:
        """Restores from a directory; takes args, or the arguments of the handler's args.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
        """
        self._wait()
        storage, where = locate(directory)
        if storage.kind(where) is None:
            raise FileNotFoundError(f"Checkpoint at {directory} not found.")
        given = _handling.made_for(self._handler, "restore", given, named)
        return _handling.load(self._handler, os.fspath(directory), given)

    def metadata(self, directory: str | os.PathLike[str]) -> Any:
        """Describes a checkpoint, without reading its arrays; says nothing if there is none."""
        if isinstance(self._handler, handlers.CompositeCheckpointHandler):
            return self._handler.metadata(directory)
        try:
            item = self._handler.metadata(epath.Path(directory))
        except (FileNotFoundError, NotImplementedError, ValueError, TypeError):
            item = None
        with contextlib.suppress(FileNotFoundError):
            found = metadata.of_step(metadata.found_at(directory), item)
            found.item_handlers = _handling.typestr(self._handler)
            return found
        return metadata.StepMetadata()

    def structure(self, directory: str | os.PathLike[str]) -> Any:
        """Is not supported."""
        raise NotImplementedError("structure: use metadata(path).item_metadata.tree")

    def close(self) -> None:
        """Waits for a save under way."""
        self._wait()
        self._handler.close()


class AsyncCheckpointer(Checkpointer):
    """Saves in the background: `save` returns when the values may be donated or changed."""

    _is_async = True

    def __init__(self, handler: Any, timeout_secs: int | None = None, **tuning: Any) -> None:
        given = tuning.pop("async_options", None) or options.AsyncOptions()
        super().__init__(handler, **tuning)
        self._timeout_s = timeout_secs or given.timeout_secs
        self._on_commit = given.post_finalization_callback

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended."""
        if self._saving is not None and self._saving.done():
            self._wait()

    def wait_until_finished(self) -> None:
        """Waits until the save is committed, and raises its error."""
        self._wait()


class StandardCheckpointer(AsyncCheckpointer):
    """Saves trees of arrays in the background; no args are needed."""

    def __init__(self, *, use_ocdbt: bool = True, **tuning: Any) -> None:
        super().__init__(handlers.StandardCheckpointHandler(use_ocdbt=use_ocdbt), **tuning)

    def save(self, directory: str | os.PathLike[str], state: Any, **options: Any) -> None:
        """Starts to save a tree."""
        super().save(directory, state, **options)

    def restore(self, directory: str | os.PathLike[str], target: Any = None, **options: Any) -> Any:
        """Restores a tree, with the types of the target."""
        return super().restore(directory, target, **options)


class PyTreeCheckpointer(Checkpointer):
    """Saves and restores trees; no args are needed."""

    def __init__(self, primary_host: int | None = 0, use_ocdbt: bool = True, **tuning: Any) -> None:
        handler = handlers.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, **tuning)
        super().__init__(handler, primary_host=primary_host)
