"""`Checkpointer`: the checkpoints of a training run, and their metadata."""

from __future__ import annotations

import contextlib
import datetime
import operator
import os
from dataclasses import dataclass
from typing import Any, final

from etils import epath

from jaxckpt import SaveFailed
from jaxckpt._run.facts import run_metadata
from jaxckpt._run.manager import saver_of
from jaxckpt.orbax import policies
from jaxckpt.orbax._run import Run, save_earlier
from jaxckpt.orbax.options import CheckpointManagerOptions
from jaxckpt.orbax.v1 import _loading, _metadata, _saving
from jaxckpt.orbax.v1._context import Context, get_context
from jaxckpt.orbax.v1._deletion import check_arguments
from jaxckpt.orbax.v1._saving import STATE, AsyncResponse, Done, SaveResponse, check_names, renamed
from jaxckpt.orbax.v1.training.errors import StepAlreadyExistsError, StepNotFoundError
from jaxckpt.types import StepInfo

_DEFAULT = policies.AnySavePolicy(
    [
        policies.InitialSavePolicy(),
        policies.ContinuousCheckpointingPolicy(),
        policies.PreemptionCheckpointingPolicy(),
    ]
)


@dataclass(kw_only=True)
class CheckpointMetadata(_metadata.CheckpointMetadata[Any]):
    """The metadata of a step."""

    step: int
    metrics: Any = None

    @property
    def time(self) -> datetime.datetime | None:
        """Returns when it was committed."""
        return self.commit_timestamp


@dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """The metadata of a run."""

    directory: epath.Path
    custom_metadata: Any = None


@final
class Checkpointer(Run):
    """Saves and loads the steps of a run.

    Args:
        directory: The root of the run.
        context: The options of all calls that are not in the `with` of another context.
        save_decision_policy: When to save; by default, whenever the previous save has ended.
        preservation_policy: Which steps stay; by default, all. The newest always does.
        step_name_format: How the directories of steps are named.
        custom_metadata: JSON to store with the run.
        cleanup_tmp_directories, lightweight_initialize, logger: No effect: the first save removes
            leftovers, opening reads no step, and the log of jaxckpt has every save.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        context: Context | None = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        self._context = Context(context or get_context())
        options = CheckpointManagerOptions(
            save_decision_policy=save_decision_policy or _DEFAULT,
            preservation_policy=preservation_policy or policies.PreserveAll(),
            step_name_format=step_name_format,
            todelete_subdir=self._context.deletion.gcs_deletion_options.todelete_full_path,
            async_options=self._context.asynchronous,
            file_options=self._context.file,
        )
        super().__init__(directory, options, run_metadata=custom_metadata)
        if custom_metadata:
            self._open()

    # --- the steps -------------------------------------------------------------------------------

    @property
    def latest(self) -> CheckpointMetadata | None:
        """Returns the newest step, or None."""
        newest = self._steps.newest
        return None if newest is None else self._described(self._steps.info(newest))

    @property
    def checkpoints(self) -> list[CheckpointMetadata]:
        """Returns the steps in order."""
        return [self._described(info) for info in self._steps.infos()]

    def _described(self, info: StepInfo) -> CheckpointMetadata:
        return CheckpointMetadata(
            epath.Path(self._path(info.step)),
            step=info.step,
            metadata=None,
            metrics=dict(info.metrics) or None,
            commit_timestamp_nsecs=int(info.saved_s * 1e9),
        )

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, os.path.basename(self._index.path(step)))

    def _existing(self, step: Any) -> int:
        """Returns the number of an existing step; the newest for None."""
        number = getattr(step, "step", step)
        number, steps = self._steps.newest if number is None else number, self._steps.numbers
        if number not in steps:
            raise StepNotFoundError(f"{self.directory} has no step {number}; it has {steps}")
        self._wait_for(number)
        return number

    # --- saving ----------------------------------------------------------------------------------

    def should_save(self, step: Any) -> bool:
        """Returns whether `save` would save a step; never one that is not above the newest."""
        return self._is_due(getattr(step, "step", step))

    def save(self, step: int, state: Any, **options: Any) -> bool:
        """Saves a tree if it is due, and returns whether it was; the options of `save_async`."""
        response = self.save_async(step, state, **options)
        return response is not None and response.result()

    def save_checkpointables(
        self, step: int, checkpointables: dict[str, Any], **options: Any
    ) -> bool:
        """Saves items if they are due, and returns whether they were."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and response.result()

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> AsyncResponse | None:
        """Saves a tree in the background if it is due, or returns None."""
        named = _saving.named(checkpointable_name, state)
        return self.save_checkpointables_async(step, named, **options)

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse | None:
        """Saves items in the background if they are due, or returns None.

        When it returns, the previous step is committed.

        Args:
            step: Its number.
            checkpointables: The items by name.
            force: Whether to save even if the step is not due.
            overwrite: Whether to replace the step if it is there.
            metrics: Numbers by name, for policies.
            custom_metadata: JSON to store with the step.

        Raises:
            Any error of the previous save; this step is not saved then.
            StepAlreadyExistsError: the step is there, and `overwrite` is False.
        """
        check_names(checkpointables, argument="checkpointables")
        step, steps = operator.index(step), self._steps.numbers
        if step in steps and not overwrite:
            raise StepAlreadyExistsError(f"Step {step} already exists in {self.directory}.")
        if steps and step < steps[-1] and step not in steps and not force:
            return None
        with get_context(self._context):
            items = _saving.items(checkpointables)
        if steps and step <= steps[-1]:
            self.wait()
            given, replaces = (step, items, metrics, custom_metadata), step in steps
            handle = save_earlier(self, *given, overwrite=_saving.replaces(replaces))
            return SaveResponse(handle, value=True, failed=self.reload)
        if self._is_due(step, force=force):
            saver_of(self._open()).worker.finish()  # `_save` raises the errors, in every process
        more = {"force": force, "custom_metadata": custom_metadata}
        handle = self._save(step, items, metrics or None, **more)
        if handle is None:
            return None
        return SaveResponse(handle, value=True, wait=self._finish, failed=self.reload)

    def cancel(self, step: Any = None) -> None:
        """Ends the save under way without a commit, and deletes a step."""
        for handle in self._steps.saves:
            handle.cancel()
            with contextlib.suppress(SaveFailed):
                handle.result()
        self.reload()
        if step is not None:
            self.delete(step, missing_ok=True)

    # --- loading ---------------------------------------------------------------------------------

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE
    ) -> Any:
        """Loads the tree of a step, the newest by default; see `jaxckpt.orbax.v1.load`.

        Raises:
            StepNotFoundError: the step does not exist; it is a FileNotFoundError.
            KeyError: the step lacks the tree.
        """
        _loading.check_target(abstract_state)
        name = checkpointable_name
        return self.load_checkpointables(step, {name: abstract_state})[name]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        """Loads items of a step, the newest by default; all of them if none is named."""
        with get_context(self._context):
            path = self._path(self._existing(step))
            return _loading.load_checkpointables(path, abstract_checkpointables)

    def load_async(self, *_: Any, **__: Any) -> AsyncResponse:
        """Is not there in Orbax either."""
        raise NotImplementedError("use load, or jaxckpt.CheckpointManager.restore")

    load_checkpointables_async = load_async

    def metadata(self, step: Any = None) -> CheckpointMetadata:
        """Returns the metadata of the tree of a step, the newest by default."""
        return self._with_step(step, _metadata.metadata)

    def checkpointables_metadata(self, step: Any = None) -> CheckpointMetadata:
        """Returns the metadata of the items of a step, the newest by default."""
        return self._with_step(step, _metadata.checkpointables_metadata)

    def _with_step(self, step: Any, describe: Any) -> CheckpointMetadata:
        path = self._path(number := self._existing(step))
        metrics = dict(self._steps.info(number).metrics) or None
        return CheckpointMetadata(step=number, metrics=metrics, **vars(describe(path)))

    def root_metadata(self) -> RootMetadata:
        """Returns the metadata of the run."""
        return RootMetadata(directory=self.directory, custom_metadata=run_metadata(self._index))

    # --- deleting, waiting -----------------------------------------------------------------------

    def delete(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Deletes a step, or one item of it, and returns whether it was there.

        Raises:
            StepNotFoundError: the step does not exist; it is a FileNotFoundError.
            FileNotFoundError: the step lacks the item.
            ValueError: the item is the main one.
        """
        number = getattr(step, "step", step)
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"step must be an int, got {step!r}")
        if number < 0:
            raise ValueError(f"step must not be negative, got {number}")
        check_arguments(checkpointable_name, missing_ok)
        self.wait()
        try:
            self._delete(self._existing(number), checkpointable_name)
        except FileNotFoundError:
            if not missing_ok:
                raise
            return False
        return True

    def delete_async(self, step: Any, **options: Any) -> AsyncResponse:
        """Deletes at once, and returns a response that is done."""
        return Done(self.delete(step, **options))

    def wait(self) -> None:
        """Waits until all saves have ended."""
        for handle in self._steps.saves[-1:]:  # errors of earlier saves have been raised
            SaveResponse(handle, failed=self.reload).result()
        self._finish()

    def close(self) -> None:
        """Waits until all saves have ended, and gives the run back; a later save takes it again."""
        try:
            self.wait()
        finally:
            self._close()

    save_pytree, save_pytree_async = renamed(save), renamed(save_async)
    load_pytree, load_pytree_async = renamed(load), renamed(load_async)
    pytree_metadata = renamed(metadata)
