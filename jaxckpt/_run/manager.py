"""`CheckpointManager`: saves and restores the steps of a run. A save goes through

caller    decide, by rules that every process applies alike        schedule
caller    copy the values to the host                              snapshot
          ------- save returns; training continues -------
thread    write, meet, commit                                      handle
thread    delete the steps that the policy does not keep           retention, deletion
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, final

from jaxckpt._core import notebook
from jaxckpt._core.cast import floating
from jaxckpt._core.check import as_step, check_type, explained, zstd_level
from jaxckpt._core.threads import MOST_S
from jaxckpt._disk.find import read_step
from jaxckpt._disk.pace import Pace
from jaxckpt._inspect import open as inspection
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import as_restored
from jaxckpt._run.by_hand import ByHand
from jaxckpt._run.config import (
    MANAGER,
    LocalTier,
    check_arguments,
    check_arguments_alike,
    manager_arguments,
    naming_of,
    suggest,
)
from jaxckpt._run.facts import run_metadata
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import watch
from jaxckpt._run.ledger import failure
from jaxckpt._run.opening import FORKED
from jaxckpt._run.readings import ItemsReading, StateReading, request_of, shapes_of
from jaxckpt._run.resume import NeverWhole, Resume
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.root import DURABLE, LOCAL, Root
from jaxckpt._run.saver import SaveOptions, Saver
from jaxckpt._run.schedule import SavePolicy
from jaxckpt._run.taking import Given
from jaxckpt._run.tiers import Tiers
from jaxckpt._save.handle import SaveHandle
from jaxckpt._save.save import check_metadata
from jaxckpt.format import names
from jaxckpt.multihost import Group, current, raise_first, text_of
from jaxckpt.types import Decision, OnProgress, Timing, VerifyReport

_Reading = StateReading | ItemsReading


@final
class CheckpointManager:
    """Saves the steps of a training run, deletes old steps and resumes from the newest.

    All processes of a job must make the same calls in the same order. Every method first raises
    errors from background work: each once in each thread that calls, until the thread that called
    `save` has raised it. Close the manager or use it in a
    `with`. A program that ends without closing it waits for the saves under way, up to `timeout_s`;
    it reports on stderr the saves that failed and, with exit status 1, those not finished by then.

    Attributes:
        directory: The root of the run.
        restored_step: The step restored last, or None.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, jaxckpt
        >>> folder = tempfile.TemporaryDirectory()
        >>> init = jax.jit(lambda: {"w": jnp.zeros(3)})
        >>> with jaxckpt.CheckpointManager(
        ...     f"{folder.name}/run",
        ...     save=jaxckpt.SavePolicy(every_steps=2),
        ...     keep=jaxckpt.KeepPolicy(last=2),
        ... ) as manager:
        ...     state, start = manager.restore_or(init)
        ...     for step in range(start, 10):
        ...         state = jax.tree.map(lambda x: x + 1, state)
        ...         _ = manager.save(step + 1, state)
        >>> with jaxckpt.CheckpointManager(f"{folder.name}/run") as manager:
        ...     print(manager.all_steps(), manager.restore_or(init)[1])
        [8, 10] 10
        >>> folder.cleanup()
    """

    @explained(MANAGER, suggest)
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save: SavePolicy = SavePolicy(),  # noqa: B008  # frozen
        keep: KeepPolicy = KeepPolicy(),  # noqa: B008
        mode: Literal["w", "r"] = "w",
        budget_bytes: int = 1 << 30,
        timeout_s: float = 1200.0,
        step_prefix: str | None = None,
        step_digits: int | None = None,
        on_progress: OnProgress | None = None,
        on_commit: Callable[[Timing], None] | None = None,
        run_metadata: Mapping[str, Any] | None = None,
        item: str = names.STATE_ITEM,
        compression: str | None = None,
        incremental: Literal["auto", False] = "auto",
        local: str | os.PathLike[str] | LocalTier | None = None,
        notice: Callable[[], float | None] | None = None,
    ) -> None:
        """Opens a run without reading a checkpoint.

        Args:
            directory: The root, created if missing. Files of other programs are left alone.
            save: Decides which calls of `save` save.
            keep: Decides which steps stay after a save.
            mode: "w" to save, in one job at a time: opening takes the run over from a dead job, the
                first save also from a running one, unless that has saved more steps by then. "r" to
                read, in any number of jobs; only leases are written.
            budget_bytes: Host memory for the values of a save under way and of the next one; if
                they exceed it, that waits. For restores, see `jaxckpt.restore`.
            timeout_s: Limit for each wait for another process or an earlier save.
            step_prefix, step_digits: Name step directories `[<prefix>_]<step>`, padded with zeros.
                If both are None, names follow the scheme of most existing steps.
            on_progress: Called during each save and restore; see `jaxckpt.save`.
            on_commit: Called with the `Timing` of each commit, in the background thread of every
                process; it cannot wait for saves (RuntimeError). The next call of the manager
                raises its errors.
            run_metadata: JSON to store with the run when it has none yet, where Orbax reads it.
            item: Name of the state in each step to save, and the first choice in others: "default"
                is what a manager of Orbax without item names restores.
            compression: "zstd", or "zstd:3" for level 3, compresses the arrays of each step; see
                `jaxckpt.save`.
            incremental: "auto" makes a step share the files of arrays that have not changed since
                the last step but one, by hard links, if `keep` always keeps two steps; in a bucket,
                the store copies files of the last step. Each file is read back before its first and
                each tenth reference; in a bucket, only before each tenth, and at most 256 MiB after
                a save. If False, each step is written as a whole.
            local: A directory on a disk of each host, or a `LocalTier` with its options. Steps are
                saved there first, and uploaded to `directory` in the background.
            notice: Returns in how many seconds this host ends, or None; asked every second in the
                background. An answer acts like SIGTERM, see `SavePolicy.on_preemption`.
                `jaxckpt.integrations.notices` has notices of cloud providers.

        Raises:
            NotADirectoryError, PermissionError: `directory` or `local` cannot hold a run.
            StepExists: `directory` or `local` lies inside a checkpoint.
            ProcessesDisagree: the directories or policies of the processes differ.
        """
        check_arguments(given := {**locals()})
        zstd = None if compression is None else zstd_level(MANAGER, compression)
        metadata = run_metadata and check_metadata(run_metadata, "run_metadata")
        naming, near = None, LocalTier(local) if isinstance(local, str | os.PathLike) else local
        if step_prefix is not None or step_digits is not None:
            naming = naming_of(step_prefix, step_digits)
        self.budget_bytes, self.timeout_s = budget_bytes, timeout_s
        self.mode, self.keep = mode, keep
        self.restored_step: int | None = None
        limits: Any = {"budget_bytes": budget_bytes, "timeout_s": timeout_s}
        self._item, self._request = item, partial(request_of, on_progress=on_progress, **limits)
        self._processes, writes = current().within(timeout_s), mode == "w"
        at = partial(Root.at, naming=naming)
        group = Group.together(self._processes)
        self._directory = at(directory, tier=DURABLE, keep=keep, group=group)
        self._index = self._directory.index
        self.directory = root = self._index.root
        if writes and self._processes.count > 1:
            given |= {"directory": root, "run_metadata": metadata, "compression": zstd}
            check_arguments_alike(self._processes, {**given, "local": near})
        self._tiers, self._roots = None, (self._directory,)
        if near is not None:
            pace = Pace(save.max_write_bytes_per_s)
            self._tiers = Tiers.at(near, self._directory, at, self._processes, pace, writes=writes)
            self._roots = (self._tiers.local, self._directory)
        options = SaveOptions(
            writes=writes,
            policy=save,
            run_metadata=metadata,
            item=item,
            zstd=zstd,
            incremental=incremental == "auto",
            budget_bytes=budget_bytes,
            on_progress=on_progress,
            on_commit=on_commit,
            notice=notice,
        )
        self._saver = Saver(self._roots, self._processes, options, self._tiers)
        self._resume = Resume(
            roots=self._roots,
            processes=self._processes,
            keep=keep,
            budget_bytes=budget_bytes,
            writes=writes,
            on_damage=self._saver.incremental.clear,
        )
        self._by_hand = ByHand(root, self._processes, self._roots, self._saver, self._tiers, writes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any, **overrides: Any) -> Self:
        """Opens a run from a dict or an `ml_collections.ConfigDict`.

        Args:
            config: The arguments of `CheckpointManager` by name; `save` and `keep` are dicts of the
                fields of `SavePolicy` and `KeepPolicy`, and `local` is a path or a dict of the
                fields of `LocalTier`. `save` may contain `auto`, a dict of the arguments of
                `SavePolicy.auto`. Bytes and seconds may be texts: "8GB", "15m".
            overrides: Arguments that replace those in `config`.

        Raises:
            TypeError: a name is unknown; the message suggests the nearest.

        Example:
            >>> import jaxckpt
            >>> jaxckpt.CheckpointManager.from_config({"directory": "runs/a", "keep": {"lats": 3}})
            Traceback (most recent call last):
            TypeError: keep has no field 'lats'. Did you mean 'last'?
        """
        return cls(**manager_arguments(cls, config, overrides))

    # --- saving ----------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Returns whether `save` would save at this step; never with `mode="r"`."""
        self._begin_call()
        return self._saver.decide(as_step("should_save", step)).save

    @property
    def decision(self) -> Decision | None:
        """Returns the latest answer of `should_save` or `save`, with its reason."""
        return self._saver.decision

    def save(
        self,
        step: int,
        state: object,
        *,
        items: Mapping[str, object] | None = None,
        metrics: Mapping[str, Any] | None = None,
        dtype: Any = None,  # whatever numpy takes for a dtype
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Saves a step in the background if it is due.

        After it returns, `state` and `items` may be donated, deleted or changed. All saves except
        this save and the previous have ended by then; `handle.result` waits for this save.

        Args:
            step: Must be higher than every step of the run.
            state: Any pytree; see `jaxckpt.save`.
            items: Further values by name: pytrees, JSON, bytes, or objects with `get_state` and
                `set_state`, or `state_dict` and `load_state_dict`, such as data iterators. Each
                process stores the states of its own objects; JSON is taken from process 0.
            metrics: Numbers by name, or dicts and lists of numbers; also arrays still being
                computed; only those of process 0 count. `keep` may rank by a metric.
            dtype: Saves the floating-point arrays of `state`, but not of `items`, in this dtype;
                see `jaxckpt.save`.
            force: Whether to save even if the step is not due; it replaces no step.
            custom_metadata: JSON to store with the step.

        Returns:
            A handle, or None if the step is not due, the run has it already or the manager was
            opened with `mode="r"`; `decision` has the reason.

        Raises:
            StepExists: the run already has this step, and `force` is set.
            ValueError: the run has a later step but lacks this step; or `force` is set, and `mode`
                is "r".
            UnsupportedLeaf: a value cannot be stored; nothing was written.
            CheckpointTimeout: earlier saves did not end, or did not free enough memory, within
                `timeout_s`.
            Any error of an earlier save that has not been raised yet; this step is not saved then.
        """
        if self._saver.ended or (force and self.mode == "r"):
            self._refuse()
        if self.mode == "r":
            self._index.report(f"{self.directory} is open with mode='r', so nothing is saved")
        check_type("save", "items", items, Mapping | None, "a dict of values by name")
        check_type("save", "metrics", metrics, Mapping | None, "a dict of numbers by name")
        step, items = as_step("save(step, state)", step), dict(items or {})
        dtype_name = None if dtype is None else floating(dtype)
        given = Given(step, state, items, metrics, dtype_name, custom_metadata)
        return self._saver.save(given, force=force)

    def _begin_call(self, *, writes: bool = False) -> None:
        # `close` waits for `on_commit`, which may still list steps.
        is_closed = self._saver.ended and not self._saver.worker.is_own_thread()
        if is_closed or (writes and self.mode == "r"):
            self._refuse()
        raise_first(self._saver.take_errors())

    def _refuse(self) -> NoReturn:
        if not self._saver.ended:
            raise ValueError(f"the manager of {self.directory} was opened with mode='r'")
        raise ValueError(f"the manager of {self.directory} is closed: {self._saver.ended}")

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Waits until all saves have ended and the steps not kept are deleted, in every process.

        Also waits until what the next step may share is read back and, with `local`, for uploads.

        Args:
            timeout_s: If None, the manager's, for each round of the processes.

        Raises:
            CheckpointTimeout: saves are still under way after `timeout_s`; `missing` has the
                processes that they wait for.
            ValueError: this process was forked from the process that saves.
            Any error of a save that has not been raised yet.
        """
        if self._saver.ended == FORKED:
            self._refuse()
        check_type("wait_until_finished", "timeout_s", timeout_s, Real | None, "a number")
        timeout_s = timeout_s and min(timeout_s, MOST_S)
        self._saver.wait_for_all(timeout_s)
        if self._tiers is not None:
            self._tiers.finish(timeout_s)

    def close(self) -> None:
        """Waits for the saves under way and releases the run; a forked child does neither.

        In a second thread, waits until the first thread has closed it.

        Raises:
            Any error of a save that has not been raised yet.
        """
        if self._saver.ended == FORKED:
            return
        why = "close() was called, or its `with` block has ended. Open another one"
        raise_first(self._saver.close(why))

    def __enter__(self) -> Self:
        if self._saver.ended:
            self._refuse()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._saver.ledger.note(end=failure(error))
            if self._tiers is not None and self._processes.count > 1:  # it may be some minutes
                self._index.warn(f"{self.directory} waits for uploads, then raises {error!r}")
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"and on closing {self.directory}: {text_of(failed)}")

    # --- resuming --------------------------------------------------------------------------------

    def restore(
        self,
        like: Any = None,  # any pytree
        *,
        step: int | Literal["latest", "best"] = "latest",
        items: Mapping[str, object] | None = None,
        fallback: bool = True,
        **options: Any,
    ) -> Any:  # any pytree
        """Restores the state of a step, and `items` in place.

        Args:
            like: The wanted structure, dtypes and shardings; see `jaxckpt.restore`.
            step: A number, "latest", or "best" by the metric of `keep`.
            items: Objects to restore in place, named as in `save`. They change only after
                everything has been read. For trees, see `restore_items`.
            fallback: Whether to restore the step before (or the next best) if a step is damaged.
                The damaged step is listed in `problems`; a manager with mode "w" also sets it aside
                if jaxckpt wrote it. A step given by number never falls back.
            options: Further arguments of `jaxckpt.restore`: `mesh`, `shardings`, `dtype`, ...

        Raises:
            CheckpointNotFound: no such step, or no step is complete.
            CorruptCheckpoint: the step is damaged, and no other may replace it.
            OSError: the step cannot be read now. This never leads to a fallback.
            TreeMismatch: `like` or an item does not fit.
        """
        self._begin_call()
        reading = self._reading(like, items, self._request("restore", options))
        found = self._resume.first_whole(step, reading.read, fallback=fallback)
        return self._go_on(found, reading, goes_on=step == "latest")

    def _reading(
        self, like: Any, items: Mapping[str, object] | None, request: RestoreRequest
    ) -> StateReading:
        check_type("restore", "items", items, Mapping | None, "a dict of objects by name")
        objects = dict(items or {})
        about: Any = {"processes": self._processes, "run": self.directory, "request": request}
        return StateReading(item=self._item, like=like, objects=objects, **about)

    def _go_on(self, found: tuple[int, int, Any], reading: _Reading, *, goes_on: bool) -> Any:
        """Returns the state that was read, having set objects, and continues from it if wanted."""
        first, self.restored_step, state = found
        if isinstance(reading, StateReading):
            self._saver.restored(self.restored_step, reading.meter, reading.start_s)
        self._saver.go_on(self.restored_step, first, is_newest=goes_on)
        reading.set_objects(state)  # last: an object of one process may raise
        return state

    def restore_or(
        self,
        init: Callable[[], Any],
        *,
        items: Mapping[str, object] | None = None,
        fallback: bool = True,
        **options: Any,
    ) -> tuple[Any, int]:
        """Restores the newest complete step, or starts with `init()` if the run is empty.

        Args:
            init: Makes the first state. If the run has steps, `init` is only traced, for the shapes
                and, if it is jitted with `out_shardings`, the shardings. It is called if it cannot
                be traced, and with `missing="keep"`, `only` or `skip`, for what is not restored.
            items, fallback, options: As in `restore`, but a glob that matches nothing is only
                reported, if one of `only` does. If the run is empty, they are checked against the
                state that `init` made. `dtype` casts it; `mesh` and `shardings` do not move it.

        Returns:
            The state and its step, which is 0 if `init` made the state.

        Raises:
            CheckpointNotFound: the run has steps, but none can be restored.
            UnsupportedFormat: the run has only links, or checkpoints of Flax; see `convert`.
            ValueError: `rename` swaps names, as the steps that the program saves would not show.
        """
        self._begin_call()
        check_type("restore_or", "init", init, Callable, "a function that makes the first state")
        report = self._resume.report_alike  # globs may be for steps of older code
        request = replace(self._request("restore_or", options), unmatched=report)
        reading = self._reading(None, items, request)
        self._saver.wait_for_first()
        if steps := self._resume.of("latest"):
            reading.like = init() if request.keeps_values else shapes_of(init)
            try:
                read = reading.read
                found = self._resume.first_whole("latest", read, fallback=fallback, copies=steps)
                return self._go_on(found, reading, goes_on=True), found[1]
            except NeverWhole as error:
                self._resume.report_alike(f"{error}. The run begins anew")
        self._saver.begin_anew()
        return as_restored(init(), request), 0

    def restore_items(
        self,
        *,
        step: int | Literal["latest", "best"] = "latest",
        items: Mapping[str, Any] | None = None,
        fallback: bool = True,
    ) -> dict[str, Any]:
        """Returns items of a step by name, including `state` and `metrics`.

        Args:
            step, fallback: As in `restore`.
            items: A target for each item to restore: a `like` for a tree, an object for its own
                state, which is restored in place after everything has been read, or None. If
                `items` is None, all items are returned as they were saved; for an object with a
                state, such as a data iterator, that is the list of the states of all processes.

        Raises:
            TreeMismatch: the step lacks an item, or a target does not fit.
        """
        self._begin_call()
        check_type("restore_items", "items", items, Mapping | None, "a dict of targets by name")
        reading = ItemsReading(
            processes=self._processes,
            run=self.directory,
            targets=None if items is None else dict(items),
            request=self._request("restore_items", {}),
        )
        found = self._resume.first_whole(step, reading.read, fallback=fallback)
        return self._go_on(found, reading, goes_on=step == "latest")

    # --- listing steps ---------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """Returns the committed steps in order. Lists the directory of each.

        With `local` on several hosts, all processes must call this, `latest_step` and `best_step`:
        they get the same answer, of what is on all disks.
        """
        self._begin_call()
        return self._resume.listed()

    def latest_step(self) -> int | None:
        """Returns the newest step that is complete, or None; see `all_steps`.

        With `mode="r"`, each process looks by itself, and another job may save meanwhile: to read
        the newest step in several processes, call `restore()` and ask for `restored_step`.
        """
        self._begin_call()
        return self._resume.newest()

    @property
    def tiers(self) -> dict[str, list[int] | None]:
        """The steps in each tier: "local" and "durable", and those "waiting" to be uploaded.

        "durable" is None while the directory behind `local` is away. Without `local`, all steps are
        durable.
        """
        found = {one.tier: one.known_steps() for one in self._roots[1:]}
        found[self._roots[0].tier] = self._roots[0].index.steps()
        waiting = [] if self._tiers is None else self._tiers.uploader.steps()
        return {LOCAL: [], **found, "waiting": waiting}

    def best_step(self) -> int | None:
        """Returns the complete step with the best `metric` of `keep`, or None; see `all_steps`."""
        self._begin_call()
        return self._resume.best()

    def metrics(self, step: int) -> dict[str, Any]:
        """Returns the metrics of a step, empty if it has none.

        Raises:
            CheckpointNotFound: no such step.
            CorruptCheckpoint, OSError: they cannot be read.
        """
        self._begin_call()
        index = self._index_of(step := as_step("metrics", step))
        info = index.info(step)
        if error := index.unknown.get(step):
            index.check_step(step)  # it may be deleted by now
            raise error
        return dict(info.metrics)

    def _index_of(self, step: int) -> StepIndex:
        """Returns the nearest root that has a step; CheckpointNotFound if there is none."""
        root = next((root for root in self._roots if root.has(step)), self._directory)
        root.index.check_step(step)
        return root.index

    def metadata(self, step: int) -> inspection.Checkpoint:
        """Returns `jaxckpt.open` of a step."""
        self._begin_call()
        index = self._index_of(step := as_step("metadata", step))
        return inspection.open(index.path(step))

    def custom_metadata(self, step: int) -> dict[str, Any]:
        """Returns the `custom_metadata` given to `save`."""
        self._begin_call()
        index = self._index_of(step := as_step("custom_metadata", step))
        found = read_step(index.storage, index.path(step), lambda found: found)
        return dict(found.metadata.custom_metadata or {})

    @property
    def run_metadata(self) -> dict[str, Any]:
        """Returns the `run_metadata` stored with the run, or the metadata that Orbax stored."""
        return run_metadata(self._index)

    @property
    def problems(self) -> list[str]:
        """Messages about steps and files skipped, left alone, set aside or not deletable."""
        return [problem for root in self._roots for problem in root.index.problems]

    def scrub(self) -> dict[int, VerifyReport]:
        """Reads every step back in full and compares it with its checksums.

        Damaged steps are listed in `problems`; a manager with mode "w" also sets aside those
        written by jaxckpt under another name, unless all steps are damaged. Nothing is lost, and
        read errors are only reported. The processes of a job divide the steps among themselves and
        may take `timeout_s` for each.

        Returns:
            The report of `jaxckpt.verify` for each step.
        """
        self._begin_call()
        if self.mode == "w":
            self.wait_until_finished()
        return self._by_hand.scrub()

    @property
    def timings(self) -> list[Timing]:
        """Returns the durations by phase of this manager's last thousand saves and restores."""
        return list(self._saver.timings)

    # --- keeping and deleting by hand ------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Keeps a step, regardless of the policy, until it is unpinned."""
        self._begin_call(writes=True)
        self._by_hand.pin(as_step("pin", step))

    def unpin(self, step: int) -> None:
        """Lets the policy delete a step again."""
        self._begin_call(writes=True)
        self._by_hand.unpin(as_step("unpin", step))

    def delete(self, step: int, *, item: str | None = None) -> None:
        """Deletes a step now, or moves it (`KeepPolicy.move_to`).

        Args:
            item: Deletes only this item, and never moves it. The state, which is the main item,
                goes only with the step. If a crash interrupts the deletion, the item is gone, and
                deleting it again frees its space.

        Raises:
            CheckpointNotFound: no such step or item.
            ValueError: the step is pinned, a reader holds it, another run or checkpoint is inside,
                or the item is the main one.
            OSError: the storage failed. The step is there still, or will be gone at the next try.
        """
        self._begin_call(writes=True)
        step, roots = as_step("delete", step), self._resume.roots if item is None else ()
        for root in roots:
            root.leaving.add(step)
        try:
            self.wait_until_finished()
            self._by_hand.delete(step, item)
        finally:
            for root in roots:
                root.leaving.discard(step)

    # --- preemption and readers ------------------------------------------------------------------

    def reached_preemption(self, step: int) -> bool:
        """Returns whether the job is being stopped and should end at this step.

        Call it after `save(step)`, which then has saved the step. All processes agree.
        """
        self._begin_call()
        return self._saver.preemption.reached(as_step("reached_preemption", step))

    def watch(self, timeout_s: float, *, after: int | None = None) -> Iterator[int]:
        """Yields new steps in order as they are committed, for an evaluator in another job.

        All its processes must call it with the same `after`, and get the same steps.
        The step being yielded is protected from deletion until the next one is asked for. Steps
        that are both committed and deleted in the meantime are skipped, as are those that are only
        on local disks.

        Args:
            timeout_s: Ends after this long without a new step.
            after: Begins after this step. If None, begins with the newest step.

        Example:
            >>> import tempfile, jaxckpt
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with jaxckpt.CheckpointManager(folder) as manager:
            ...         for step in (1, 2):
            ...             _ = manager.save(step, {"w": step})
            ...     with jaxckpt.CheckpointManager(folder, mode="r") as reader:
            ...         for step in reader.watch(timeout_s=0.1, after=0):
            ...             print(step, reader.restore(step=step))
            1 {'w': 1}
            2 {'w': 2}
        """
        self._begin_call()
        check_type("watch", "timeout_s", timeout_s, Real, "a number of seconds")
        after = None if after is None else as_step("watch(after=...)", after)
        return watch(self._directory.leases, self._processes, timeout_s, after)

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.directory!r}, mode {self.mode!r}>"

    def _repr_html_(self) -> str | None:
        return notebook.html("manager", self)


def saver_of(manager: CheckpointManager) -> Saver:
    """Returns the saving half of a manager, for the drop-in, which decides and waits as Orbax."""
    return manager._saver
