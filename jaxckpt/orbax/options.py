"""Options, with Orbax's names and defaults, and the effect of each here."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jaxckpt.orbax import policies


@dataclass
class AsyncOptions:
    """Describes how to save in the background.

    Attributes:
        timeout_secs: Limit in seconds for each wait for another process or an earlier save.
        barrier_sync_fn: No effect.
        post_finalization_callback: Called without arguments after each commit.
        create_directories_asynchronously: No effect.
    """

    timeout_secs: int = 1200
    barrier_sync_fn: Callable[..., Any] | None = None
    post_finalization_callback: Callable[[], Any] | None = None
    create_directories_asynchronously: bool = True


MultiprocessingOptions = policies.MultiprocessingOptions


@dataclass(unsafe_hash=True)
class FileOptions:
    """Describes how to make directories.

    Attributes:
        path_permission_mode: The permissions of the directories of a run, its steps and their
            items, such as 0o750, less those that the umask takes away; None for 0o777. No effect
            in buckets.
        skip_sync_file_validations: No effect.
    """

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


class AtomicityMode(enum.StrEnum):
    """Names how a save becomes visible: jaxckpt has one protocol, so only AUTO is taken."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


@dataclass(unsafe_hash=True)
class AtomicityOptions:
    """Describes how a save becomes visible.

    Attributes:
        mode: Only AUTO is supported.
        allow_legacy_atomic_rename: No effect.
    """

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


# Arguments that only tune how Orbax reads and writes, or that jaxckpt always does: no effect.
TUNING: Final = frozenset(
    "array_metadata_validator barrier_sync_key_prefix checkpoint_metadata_store "
    "enable_background_delete enable_pinned_host_transfer "
    "enable_should_save_is_saving_in_progress_check is_prioritized_key_fn lightweight_initialize "
    "memory_limit_options num_deletion_threads pytree_metadata_options restore_concurrent_gb "
    "save_concurrent_gb save_device_host_concurrent_gb single_host_load_and_broadcast "
    "use_compression use_zarr3".split()
)

# Arguments that are refused with another value than this default, and the reason.
_REFUSED: Final[Mapping[str, tuple[Any, str]]] = {
    "active_processes": (None, "all processes of the job take part in a save"),
    "handler_impl": (None, "there is one implementation"),
    "enable_per_process_directory_creation": (False, "all processes share one file system"),
    "primary_host": (0, "process 0 leads, and all processes share one file system"),
    "mode": ("auto", "there is one commit protocol; see docs/reliability.md"),
    "temporary_path_class": (None, "there is one commit protocol; see docs/reliability.md"),
    "todelete_full_path": (None, "use jaxckpt's KeepPolicy(move_to=...)"),
    "type_handler_registry": (None, "the types that can be stored are fixed"),
    "logger": (None, "read `jaxckpt.CheckpointManager.timings` instead"),
}


_PROTOCOLS: Final = ("AtomicRenameTemporaryPath", "CommitFileTemporaryPath")  # or Orbax's own


def check(**given: Any) -> None:
    """Raises NotImplementedError for arguments that would be ignored, and TypeError for others.

    The fields of options among them are checked too.
    """
    for name, value in given.items():
        if name.endswith("_options"):
            fields = vars(value).items() if value is not None else ()
            check(**{k: v for k, v in fields if k in _REFUSED or k.endswith("_options")})
        elif name in _REFUSED:
            default, why = _REFUSED[name]
            if value != default and getattr(value, "__name__", "") not in _PROTOCOLS:
                raise NotImplementedError(f"jaxckpt.orbax: {name}={value!r}: {why}")
        elif name == "use_ocdbt":
            if not value:
                policies.warn_once(
                    "use_ocdbt=False: jaxckpt always writes OCDBT. For plain zarr, use "
                    "`jaxckpt.convert(..., ocdbt=False)`."
                )
        elif name not in TUNING:
            raise TypeError(f"unexpected argument {name!r}")


# The options of a manager that only reads.
_FOR_READERS: dict[str, Any] = dict.fromkeys(
    "max_to_keep keep_time_interval keep_period save_on_steps todelete_subdir todelete_full_path "
    "should_save_fn".split()
)
_FOR_READERS |= {"save_interval_steps": 0, "create": False, "cleanup_tmp_directories": False}


@dataclass
class CheckpointManagerOptions:
    """Describes when a manager saves, what it keeps and how it names steps.

    Attributes:
        save_interval_steps: Save multiples of this.
        max_to_keep: How many steps stay, the newest or, with `best_fn`, the best; all if None.
        keep_time_interval: Keep steps that are this far apart, too.
        keep_period: Keep multiples of this, too.
        best_fn: Returns the number to rank by from the metrics of a step.
        best_mode: "max" or "min": which number is best.
        keep_checkpoints_without_metrics: Whether such steps stay besides the best.
        step_prefix: Steps are named `<prefix>_<step>`.
        step_format_fixed_length: The digits in the names of steps.
        step_name_format: The same as the two before, as one object.
        create: Whether to make the directory of the run.
        cleanup_tmp_directories: No effect: the first save always removes what is left of others.
        save_on_steps: Save these, too.
        single_host_load_and_broadcast: Whether process 0 lists the steps for all, also for readers.
        todelete_subdir: A directory of the run to which steps are moved instead of being deleted.
        todelete_full_path: Is refused.
        enable_background_delete: No effect: steps are always deleted in the background.
        num_deletion_threads: No effect.
        read_only: Whether to skip saves and deletions.
        enable_async_checkpointing: Whether `save` returns before the commit.
        async_options: See `AsyncOptions`.
        multiprocessing_options: See `MultiprocessingOptions`.
        should_save_fn: Gets a step and the newest one; decides instead of the interval and steps.
        file_options: See `FileOptions`.
        atomicity_options: See `AtomicityOptions`.
        save_root_metadata: Whether to store the `metadata` given to the manager.
        temporary_path_class: No effect; only the classes of `path.atomicity` are taken.
        save_decision_policy: Decides when to save, instead of the options above.
        preservation_policy: Decides what to keep, and excludes the options above.
        prevent_write_metrics: Whether to store no metrics.
        enable_should_save_is_saving_in_progress_check: No effect.
        enable_per_process_directory_creation: Is refused.
        lightweight_initialize: No effect: opening reads no step.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Iterable[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = field(default_factory=FileOptions)
    atomicity_options: AtomicityOptions | None = None
    save_root_metadata: bool = True
    temporary_path_class: type | None = None
    save_decision_policy: policies.SaveDecisionPolicy | None = None
    preservation_policy: policies.PreservationPolicy | None = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', got {self.best_mode!r}")
        if self.preservation_policy is None and (self.max_to_keep or 0) < 0:
            raise ValueError("Setting of `max_to_keep` must be None or non-negative.")
        if None not in (self.todelete_subdir, self.todelete_full_path):
            raise ValueError("todelete_subdir and todelete_full_path both cannot be set together")
        named, name = self.step_name_format, "single_host_load_and_broadcast"
        if named is not None and getattr(named, name, False) != getattr(self, name):
            raise ValueError(f"{name} of the options and of step_name_format differ")
        for name, value in _FOR_READERS.items() if self.read_only else ():
            setattr(self, name, value)
        self.save_on_steps = frozenset(self.save_on_steps or ())

    def saves(self) -> Any:
        """Returns the policy for saving that these options describe."""
        if self.save_decision_policy is not None:
            return self.save_decision_policy
        rules: list[Any] = [policies.PreemptionCheckpointingPolicy()]
        if self.should_save_fn is not None:
            return policies.AnySavePolicy([_ShouldSave(self.should_save_fn), *rules])
        interval = policies.FixedIntervalPolicy(self.save_interval_steps)
        steps = policies.SpecificStepsPolicy(frozenset(self.save_on_steps or ()))
        return policies.AnySavePolicy([interval, steps, *rules, policies.InitialSavePolicy()])

    def keeps(self) -> Any:
        """Returns the policy for keeping that these options describe."""
        if self.preservation_policy is not None:
            if self.keep_time_interval or self.max_to_keep or self.keep_period:
                raise ValueError(
                    "`preservation_policy` and `delete options` are mutually exclusive"
                )
            return self.preservation_policy
        rules: list[Any] = []
        if self.keep_period is not None:
            rules.append(policies.EveryNSteps(self.keep_period))
        if self.keep_time_interval is not None:
            seconds = int(self.keep_time_interval.total_seconds())
            rules.append(policies.EveryNSeconds(seconds))
        if self.best_fn is None:
            rules.append(policies.LatestN(self.max_to_keep))
        else:
            best = policies.BestN(
                get_metric_fn=self.best_fn,
                reverse=self.best_mode == "min",
                n=self.max_to_keep,
                keep_checkpoints_without_metrics=self.keep_checkpoints_without_metrics,
            )
            rules.append(best)
        return policies.AnyPreservationPolicy(rules)


@dataclass
class _ShouldSave(policies.SaveDecisionPolicy):
    ask: Callable[[int, int | None], bool]

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return self.ask(step.step, previous_steps[-1].step if previous_steps else None)
