"""The manager of a run."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxckpt import StepExists
from jaxckpt._run.facts import run_metadata
from jaxckpt._run.index import StepIndex
from jaxckpt._run.manager import saver_of
from jaxckpt.format import names
from jaxckpt.orbax import _handling, args, handlers, metadata, options, policies
from jaxckpt.orbax._run import Run, save_earlier, signals
from jaxckpt.orbax.checkpointers import Checkpointer, Closing
from jaxckpt.orbax.handlers import *  # noqa: F403  # programs import them from here, too
from jaxckpt.orbax.metadata import RootMetadata as RootMetadata
from jaxckpt.orbax.metadata import StepMetadata as StepMetadata
from jaxckpt.orbax.options import AsyncOptions as AsyncOptions
from jaxckpt.orbax.options import CheckpointManagerOptions as CheckpointManagerOptions
from jaxckpt.orbax.options import FileOptions as FileOptions
from jaxckpt.orbax.options import MultiprocessingOptions as MultiprocessingOptions
from jaxckpt.orbax.policies import CheckpointInfo as CheckpointInfo
from jaxckpt.orbax.step import index_of

DEFAULT_ITEM_NAME: Final = names.DEFAULT_ITEM
METRIC_ITEM_NAME: Final = names.METRICS_ITEM
METADATA_ITEM_NAME: Final = names.ROOT_METADATA
RESERVED_ITEM_NAMES: Final[list[str]] = []


class StepAlreadyExistsError(StepExists, ValueError):
    """The run has this step, and `force` is set."""


class AbstractCheckpointManager(Closing):
    """The base of managers."""


class CheckpointManager(Run, AbstractCheckpointManager):
    """Saves and restores the steps of a run.

    Args:
        directory: The root of the run.
        checkpointers: A checkpointer, or one for each item (the old style).
        options: When to save and what to keep.
        metadata: JSON to store with the run.
        item_names, item_handlers, handler_registry: The items and their handlers; if none is given,
            the args of a save decide.
        logger: Is refused.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: Any = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        options = options or CheckpointManagerOptions()
        _check_options(options, logger)
        told = (checkpointers, item_names, item_handlers, handler_registry)
        self._handler, self._is_default = _handler(*told)
        self._is_async = options.enable_async_checkpointing
        if checkpointers is not None:
            many = isinstance(checkpointers, Mapping)
            of_items = checkpointers.values() if many else [checkpointers]
            self._is_async = any(one._is_async for one in of_items)
        self._metadata = dict(metadata or {}) if options.save_root_metadata else {}
        more = {"run_metadata": self._metadata or None, "item": DEFAULT_ITEM_NAME}
        super().__init__(directory, options, **more)
        if self._metadata and not options.read_only:
            self._open()

    # --- the run -----------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> list[policies.CheckpointInfo]:
        """Returns the steps, for programs whose manager is a subclass of this class."""
        return policies.infos(self._steps.infos())

    def all_steps(self, read: bool = False) -> list[int]:
        """Returns the steps in order, including steps being saved.

        Args:
            read: Whether to look at the directory again.
        """
        if read:
            self.reload()
        return list(self._steps.numbers)

    def latest_step(self) -> int | None:
        """Returns the newest step, or None."""
        return self._steps.newest

    def best_step(self) -> int | None:
        """Returns the step that `best_fn` ranks first; without it, the newest."""
        if (best := self._options.best_fn) is None:
            return self.latest_step()
        is_min = self._options.best_mode == "min"
        infos, unread = self._steps.infos(), self._index.unknown
        infos = [self._index.read_info(i.step) if i.step in unread else i for i in infos]
        known = [info for info in infos if info.metrics]  # sorted as by Orbax, also text and NaN
        ranked = sorted(known, key=lambda info: best(info.metrics), reverse=is_min)
        return ranked[-1].step if ranked else None

    # --- saving ------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Returns whether `save` would save a step; never one that is not above the newest."""
        return not self._options.read_only and self._is_due(operator.index(step))

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Mapping[str, Any] | None = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves a step if it is due.

        Args:
            step: Its number.
            items, save_kwargs: Objects, and arguments for their handlers, by item (the old style).
            metrics: Numbers by name, for `best_fn`.
            force: Whether to save even if the step is not due.
            args: What to save: args, or a Composite of args by item.
            custom_metadata: JSON to store with the step.

        Returns:
            Whether it is being saved. The previous step is committed by then.

        Raises:
            Any error of the previous save; this step is not saved then.
            ValueError: the run has the step, and `force` is set.
        """
        if items is None and args is None:
            raise ValueError("Must provide `args` for `save`.")
        step = operator.index(step)
        args = self._checked(items, args, is_default=not isinstance(_ours(args), _Composite))
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        if step in self._steps.numbers:
            raise StepAlreadyExistsError(f"Checkpoint for step {step} already exists.")
        saver_of(self._open()).worker.finish()  # `save` below raises the errors, in every process
        given = self._composite("save", items, save_kwargs, args)
        ranks = (self._options.best_fn, self._options.preservation_policy) != (None, None)
        metrics = metrics if ranks and not self._options.prevent_write_metrics else None
        stored = _handling.several(_handling.store(self._handler, given), self._mode)
        with _handling.as_raised():  # an earlier save may have failed
            if self._steps.numbers and step < self._steps.numbers[-1]:
                handle = save_earlier(self, step, stored, metrics, custom_metadata)
                with self._reloading():  # at once, since no worker has it to wait for
                    handle.result()
            else:
                more = {"force": bool(force), "custom_metadata": custom_metadata}
                handle = self._save(step, stored, metrics, **more)
        if handle is not None and not self._is_async:
            self.wait_until_finished()
        return handle is not None

    def _checked(self, items: Any, args: Any, *, is_default: bool) -> Any:
        if _is_args(items):
            raise ValueError(
                "Found an instance of `CheckpointArgs` provided for `items`; make sure to specify "
                "the argument keyword (e.g. `args=args`)."
            )
        if self._is_default is None:
            self._is_default = is_default
        args = _ours(args)
        if args is not None and not _is_args(args):
            raise ValueError(f"Expected args of type `CheckpointArgs`; found {type(args)}.")
        if args is not None and isinstance(args, _Composite) == self._is_default:
            wanted = "another type" if self._is_default else "type `Composite`"
            many = "a single object" if self._is_default else "multiple checkpointable objects"
            raise ValueError(
                f"Must provide `args` of {wanted} when dealing with {many}. Found {type(args)}."
            )
        return args

    def _composite(self, verb: str, items: Any, kwargs: Any, args: Any) -> Any:
        """Returns the args of a call by item, made of `items` in the old style."""
        if args is not None:
            return _Composite(**{DEFAULT_ITEM_NAME: args}) if self._is_default else args
        if self._is_default:
            items = {} if items is None else {DEFAULT_ITEM_NAME: items}
            kwargs = {} if kwargs is None else {DEFAULT_ITEM_NAME: kwargs}
        items, kwargs = items or {}, kwargs or {}
        made = {}
        for name in {**items, **kwargs}:
            handler = self._handler.handler_of(name, None)
            given = (items.get(name),)
            made[name] = _handling.made_for(handler, verb, given, kwargs.get(name) or {})
        return _Composite(**made)

    # --- restoring ---------------------------------------------------------------------------

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Mapping[str, Any] | None = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restores a step.

        Args:
            step: Its number; if None, the newest.
            items, restore_kwargs: Targets, and arguments for handlers, by item (the old style).
            directory: Another run to restore from.
            args: What to restore: args, or a Composite of args by item; if None, everything.

        Returns:
            The object; or, if there are several items, a Composite of them.

        Raises:
            FileNotFoundError: the step does not exist.
            KeyError: the step lacks the item.
        """
        index = self._index if directory is None else index_of(directory, self._names)
        if step is None:
            step = index.newest() if directory is not None else self.latest_step()
        if step is None:
            raise FileNotFoundError(f"No steps found in {directory or self.directory}.")
        self._wait_for(step)
        path = index.check_step(operator.index(step))
        args = self._checked(items, args, is_default=self._has_default(index, path))
        given = self._composite("restore", items, restore_kwargs, args)
        return self._single(_handling.load(self._handler, path, given))

    def _has_default(self, index: StepIndex, path: str) -> bool:
        return index.storage.kind(f"{path}/{DEFAULT_ITEM_NAME}") is not None

    def _single(self, found: Any) -> Any:
        if not self._is_default:
            return found
        if DEFAULT_ITEM_NAME not in found:
            raise ValueError(f"Unable to retrieve default item: the step has {[*found]}.")
        return found[DEFAULT_ITEM_NAME]

    def metrics(self, step: int) -> Any:
        """Returns the metrics of a step, or None."""
        self._wait_for(step := operator.index(step))
        return dict(self._index.read_info(step).metrics) or None

    def item_metadata(self, step: int) -> Any:
        """Returns the metadata of the item of a step, or a Composite of them."""
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """Returns the metadata of a step, or of the run if no step is given."""
        if step is None:
            found = run_metadata(self._index) or dict(self._metadata)
            return metadata.RootMetadata(custom_metadata=found)
        self._wait_for(step := operator.index(step))
        path = self._index.check_step(step)
        if self._is_default is None:
            self._is_default = self._has_default(self._index, path)
        found = self._handler.metadata(path)
        found.item_metadata = self._single(found.item_metadata)
        found.metrics = self.metrics(step) or {}
        return found

    # --- waiting and deleting ----------------------------------------------------------------

    wait_until_finished, check_for_errors = Run._finish, Run._raise_errors

    def reached_preemption(self, step: int) -> bool:
        """Returns whether the job is being stopped and should end at this step."""
        signals.asked = True  # the program ends by itself
        return not self._options.read_only and self._open().reached_preemption(step)

    def delete(self, step: int) -> None:
        """Deletes a step; FileNotFoundError if there is none."""
        if not self._options.read_only:
            self._delete(step)

    def close(self) -> None:
        """Waits for the saves under way, and closes the handlers."""
        try:
            self._close()
        finally:
            self._handler.close()


_Composite, _is_args, _ours = args.Composite, args.is_args, args.as_ours


def _check_options(given: Any, logger: Any) -> None:
    options.check(logger=logger, manager_options=given)
    if given.prevent_write_metrics and given.best_fn is not None and given.max_to_keep is not None:
        raise NotImplementedError("prevent_write_metrics: `best_fn` ranks the metrics on disk")


def _handler(
    checkpointers: Any, item_names: Any, item_handlers: Any, registry: Any
) -> tuple[handlers.CompositeCheckpointHandler, bool | None]:
    """Returns the handler of a step, and whether it has a single item (None if not known yet)."""
    found = checkpointers if checkpointers is not None else item_handlers
    single = found is not None and not isinstance(found, Mapping)
    is_named_twice = item_names and (checkpointers or registry or single)
    if is_named_twice or sum(map(bool, (checkpointers, registry, item_handlers))) > 1:
        raise ValueError(
            "`checkpointers`, `handler_registry`, `item_handlers` and `item_names` are mutually "
            "exclusive, unless `item_handlers` is a dict"
        )
    by_name: dict[str, Any] = {DEFAULT_ITEM_NAME: found} if single else dict(found or {})
    if checkpointers is not None:
        for name, one in by_name.items():
            if not isinstance(one, Checkpointer):
                raise ValueError(f"{name} in `checkpointers` is not a Checkpointer: {one!r}")
            by_name[name] = one.handler
    composite = handlers.CompositeCheckpointHandler(
        *(item_names or ()), handler_registry=registry, **by_name
    )
    composite.declare(METRIC_ITEM_NAME, handlers.JsonCheckpointHandler(METRIC_ITEM_NAME))
    return composite, (None if found is None and item_names is None else single)
