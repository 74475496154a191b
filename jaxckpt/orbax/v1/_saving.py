"""`save` and its relatives: one checkpoint, of one tree or of several items."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from jaxckpt import SaveHandle, StepExists
from jaxckpt import save_async as start_checkpoint
from jaxckpt._save.snapshot import Items
from jaxckpt.format import names
from jaxckpt.orbax._handling import as_raised, on_commit, several
from jaxckpt.orbax.policies import warn_once
from jaxckpt.orbax.v1 import handlers
from jaxckpt.orbax.v1._context import get_context

STATE = names.STATE_ITEM
AUTO = "AUTO"
RESERVED = frozenset({names.METRICS_ITEM, AUTO, names.DELETION_RECORD})
PathLike = str | os.PathLike[str]


class AsyncResponse(Protocol):
    """Work in the background."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result."""
        ...

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Calls a function with the result, unless the work fails."""
        ...


class Done(AsyncResponse):
    """Work that was done at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result."""
        return self._value

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Calls a function with the result."""
        callback(self._value)


class SaveResponse(AsyncResponse):
    """A save in the background; calls `wait` after its commit, or `failed`."""

    def __init__(
        self,
        handle: SaveHandle,
        value: Any = None,
        wait: Callable[[], object] = lambda: None,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        self.handle, self._value, self._wait, self._failed = handle, value, wait, failed

    def result(self, timeout: float | None = None) -> Any:
        """Waits until the checkpoint is committed; raises the error of the save."""
        try:
            with translated():
                self.handle.result(timeout)
        except BaseException:
            if self.handle.done():
                self._failed()
            raise
        self._wait()
        return self._value

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Calls a function once the checkpoint is committed."""
        on_commit(self.handle, lambda: callback(self._value))


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises ValueError where a checkpoint exists, and the errors of handlers, as Orbax does."""
    try:
        with as_raised():
            yield
    except StepExists as error:
        raise ValueError(f"Destination already exists: {error}") from error


def check_names(checkpointables: Any, *, argument: str, may_be_empty: bool = False) -> None:
    """Raises ValueError unless these are items by name."""
    if not isinstance(checkpointables, dict) or not (checkpointables or may_be_empty):
        raise ValueError(f"`{argument}` must be a dict of items by name, got {checkpointables!r}")
    if reserved := checkpointables.keys() & {*RESERVED, ""}:
        raise ValueError(f"Provided reserved checkpointable keys: {reserved}.")


def items(checkpointables: Mapping[str, Any]) -> Items:
    """Returns what to save: each item by its handler."""
    check_names(checkpointables, argument="checkpointables")
    context = get_context()
    context.check()
    if context.checkpoint_layout.value == "safetensors":
        raise NotImplementedError("save a checkpoint, and then use jaxckpt.export_safetensors")
    for name in checkpointables:
        names.check_item(name)
    registry = context.checkpointables.registry
    takes = {n: handlers.for_save(registry, one, n) for n, one in checkpointables.items()}
    return several(takes, context.file.path_permission_mode)


def save(path: PathLike, state: Any, *, checkpointable_name: str = STATE, **options: Any) -> None:
    """Saves a tree, with the options of `save_checkpointables_async`.

    Raises:
        ValueError: there is something at `path`, or a leaf cannot be stored.
    """
    save_checkpointables(path, named(checkpointable_name, state), **options)


def save_async(
    path: PathLike, state: Any, *, checkpointable_name: str = STATE, **options: Any
) -> AsyncResponse:
    """Saves a tree in the background."""
    return save_checkpointables_async(path, named(checkpointable_name, state), **options)


def named(name: str, state: Any) -> dict[str, Any]:
    """Returns a tree as the only item."""
    handlers.check_tree(state)
    return {name: state}


def save_checkpointables(path: PathLike, checkpointables: dict[str, Any], **options: Any) -> None:
    """Saves several items as one checkpoint, with the options of `save_checkpointables_async`."""
    save_checkpointables_async(path, checkpointables, **options).result()


def save_checkpointables_async(
    path: PathLike,
    checkpointables: dict[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse:
    """Saves several items as one checkpoint in the background."""
    with translated():
        more: Any = {"overwrite": replaces(overwrite), "custom_metadata": custom_metadata}
        response = SaveResponse(start_checkpoint(path, items(checkpointables), **more))
    on_commit(response.handle, get_context().asynchronous.post_finalization_callback)
    return response


def replaces(overwrite: bool) -> bool:
    """Returns whether to replace a checkpoint; warns once of the difference from Orbax."""
    if overwrite:
        warn_once(
            "overwrite=True replaces a checkpoint once the new one is complete, and no other "
            "directory; Orbax deletes whatever is there first"
        )
    return overwrite


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under its old name, which warns."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        text = f"Use `{function.__name__}` instead."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return call


save_pytree, save_pytree_async = renamed(save), renamed(save_async)
