"""Options, with Orbax's names and defaults, and what each of them does here."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jaxckpt.orbax import _policies
from jaxckpt.orbax._records import record

_logger = logging.getLogger("jaxckpt")


AsyncOptions = record(
    "AsyncOptions",
    "timeout_secs=1200 barrier_sync_fn=None post_finalization_callback=None "
    "create_directories_asynchronously=True",
)
MultiprocessingOptions = _policies.MultiprocessingOptions
FileOptions = record("FileOptions", "path_permission_mode=None skip_sync_file_validations=False")
MemoryLimitOptions = record("MemoryLimitOptions", "max_transfer_concurrent_gb=None")
CompositeOptions = record(
    "CompositeOptions",
    "multiprocessing_options=None temporary_path_class=None file_options=None "
    "atomicity_options=None async_options=None",
)


class AtomicityMode(enum.StrEnum):
    """Names how a save becomes visible: jaxckpt has one protocol, so only AUTO is taken."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


AtomicityOptions = record("AtomicityOptions", "mode='auto' allow_legacy_atomic_rename=False")

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
    "path_permission_mode": (None, "the umask determines the permissions"),
    "primary_host": (0, "process 0 leads, and all processes share one file system"),
    "mode": ("auto", "there is one commit protocol; see docs/reliability.md"),
    "temporary_path_class": (None, "there is one commit protocol; see docs/reliability.md"),
    "todelete_full_path": (None, "use jaxckpt's KeepPolicy(move_to=...)"),
    "type_handler_registry": (None, "the types that can be stored are fixed"),
    "logger": (None, "read `jaxckpt.CheckpointManager.timings` instead"),
}


def check(**given: Any) -> None:
    """Raises NotImplementedError for arguments that would have no effect, and TypeError for others.

    The fields of options among them are checked too.
    """
    for name, value in given.items():
        if name.endswith("_options"):
            fields = vars(value).items() if value is not None else ()
            check(**{k: v for k, v in fields if k in _REFUSED or k.endswith("_options")})
        elif name in _REFUSED:
            default, why = _REFUSED[name]
            if value != default:
                raise NotImplementedError(f"jaxckpt.orbax: {name}={value!r}: {why}")
        elif name == "use_ocdbt":
            if not value:
                _policies.warn_once(
                    "use_ocdbt=False: jaxckpt always writes OCDBT. For plain zarr, use "
                    "`jaxckpt.convert(..., ocdbt=False)`."
                )
        elif name not in TUNING:
            raise TypeError(f"unexpected argument {name!r}")


class _Checks:
    def __getattr__(self, name: str) -> Any:  # the fields are in the table below
        raise AttributeError(name)

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', got {self.best_mode!r}")
        if self.preservation_policy is None and (self.max_to_keep or 0) < 0:
            raise ValueError("Setting of `max_to_keep` must be None or non-negative.")
        if None not in (self.todelete_subdir, self.todelete_full_path):
            raise ValueError("todelete_subdir and todelete_full_path both cannot be set together")
        named, field = self.step_name_format, "single_host_load_and_broadcast"
        if named is not None and getattr(named, field, False) != getattr(self, field):
            raise ValueError(f"{field} of the options and of step_name_format differ")
        if self.read_only:
            self._unset_for_readers()
        self.save_on_steps = frozenset(self.save_on_steps or ())

    def _unset_for_readers(self) -> None:
        unset = {"save_interval_steps": 0, "create": False, "cleanup_tmp_directories": False}
        names = ("max_to_keep", "keep_time_interval", "keep_period", "save_on_steps")
        unset |= dict.fromkeys((*names, "todelete_subdir", "todelete_full_path", "should_save_fn"))
        for name, value in unset.items():
            if getattr(self, name):
                setattr(self, name, value)
                _logger.warning("read_only=True, setting %s=%s", name, value)

    def saves(self) -> Any:
        """Returns the policy for saving that these options describe."""
        if self.save_decision_policy is not None:
            return self.save_decision_policy
        rules: list[Any] = [_policies.PreemptionCheckpointingPolicy()]
        if self.should_save_fn is not None:
            return _policies.AnySavePolicy([_ShouldSave(self.should_save_fn), *rules])
        interval = _policies.FixedIntervalPolicy(self.save_interval_steps)
        steps = _policies.SpecificStepsPolicy(self.save_on_steps or ())
        return _policies.AnySavePolicy([interval, steps, *rules, _policies.InitialSavePolicy()])

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
            rules.append(_policies.EveryNSteps(self.keep_period))
        if self.keep_time_interval is not None:
            seconds = int(self.keep_time_interval.total_seconds())
            rules.append(_policies.EveryNSeconds(seconds))
        if self.best_fn is None:
            rules.append(_policies.LatestN(self.max_to_keep))
        else:
            best = _policies.BestN(
                get_metric_fn=self.best_fn,
                reverse=self.best_mode == "min",
                n=self.max_to_keep,
                keep_checkpoints_without_metrics=self.keep_checkpoints_without_metrics,
            )
            rules.append(best)
        return _policies.AnyPreservationPolicy(rules)


CheckpointManagerOptions = record(
    "CheckpointManagerOptions",
    "save_interval_steps=1 max_to_keep=None keep_time_interval=None keep_period=None "
    "best_fn=None best_mode='max' keep_checkpoints_without_metrics=True "
    "step_prefix=None step_format_fixed_length=None step_name_format=None create=True "
    "cleanup_tmp_directories=False save_on_steps=None "
    "single_host_load_and_broadcast=False todelete_subdir=None "
    "todelete_full_path=None enable_background_delete=False num_deletion_threads=None "
    "read_only=False enable_async_checkpointing=True async_options=None "
    "should_save_fn=None atomicity_options=None save_root_metadata=True "
    "temporary_path_class=None save_decision_policy=None preservation_policy=None "
    "prevent_write_metrics=False enable_should_save_is_saving_in_progress_check=True "
    "enable_per_process_directory_creation=False lightweight_initialize=False",
    _Checks,
    multiprocessing_options=MultiprocessingOptions,
    file_options=FileOptions,
)


@dataclass
class _ShouldSave(_policies.SaveDecisionPolicy):
    ask: Callable[[int, int | None], bool]

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return self.ask(step.step, previous_steps[-1].step if previous_steps else None)
