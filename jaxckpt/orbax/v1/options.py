"""The options of a `Context`, with Orbax's names and defaults.

These have an effect: `timeout_secs`, `post_finalization_callback`, `partial_load`, the dtypes of
storage options, `enable_padding_and_truncation`, `registry`, `todelete_full_path`,
`read_concurrent_bytes` and the layout. `Context.check` refuses those that should have one, and the
others tune what jaxckpt does in its own way.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from etils import epath

from jaxckpt.orbax import options as v0_options
from jaxckpt.orbax._records import record
from jaxckpt.orbax.options import AtomicityMode
from jaxckpt.orbax.v1 import handlers

FROZEN: Final[ContextVar[frozenset[int]]] = ContextVar("frozen options", default=frozenset())


class _Options:
    """Cannot be changed while a context that has it is active."""

    def __setattr__(self, name: str, value: Any) -> None:
        if id(self) in FROZEN.get():
            raise RuntimeError(f"{name}: set the options of a context before entering its `with`")
        object.__setattr__(self, name, value)

    def v0(self) -> Any:
        """Returns options of v0 with the fields that they have there."""
        kind = getattr(v0_options, type(self).__name__)
        names = vars(kind())
        return kind(**{name: value for name, value in vars(self).items() if name in names})


def _options(name: str, fields: str = "", **more: Any) -> Any:
    """Returns a class of options; a class among `more` is also an attribute."""
    made = record(name, fields, _Options, **more)
    for kind in more.values():
        if isinstance(kind, type) and issubclass(kind, _Options):
            setattr(made, kind.__name__, kind)
    return made


AsyncOptions = _options(
    "AsyncOptions",
    "timeout_secs=1200 post_finalization_callback=None create_directories_asynchronously=True",
)
AtomicityOptions = _options(
    "AtomicityOptions", mode=AtomicityMode.AUTO, allow_legacy_atomic_rename=False
)
MultiprocessingOptions = _options(
    "MultiprocessingOptions", "primary_host=0 active_processes=None barrier_sync_key_prefix=None"
)
FileOptions = _options(
    "FileOptions",
    "path_permission_mode=None skip_sync_file_validations=False",
    path_class=epath.Path,
)
PyTreeOptions = _options(
    "PyTreeOptions",
    saving=_options("Saving", "pytree_metadata_options=None"),
    loading=_options("Loading", "partial_load=False"),
)
ArrayOptions = _options(
    "ArrayOptions",
    saving=_options(
        "Saving",
        "use_ocdbt=True use_zarr3=True use_compression=True ocdbt_target_data_file_size=None "
        "enable_pinned_host_transfer=None enable_post_merge_validation=True "
        "use_replica_parallel=None min_slice_bytes_for_replica_parallel=None "
        "max_replicas_for_replica_parallel=None enable_replica_parallel_separate_folder=False "
        "array_metadata_store=None scoped_storage_options_creator=None",
        enable_write_sharding_file=True,
        storage_options=_options(
            "StorageOptions", "dtype=None chunk_byte_size=None shard_axes=None"
        ),
    ),
    loading=_options(
        "Loading",
        "enable_padding_and_truncation=False raise_array_data_missing_error=True "
        "use_load_and_broadcast=False",
        load_and_broadcast_options=_options(
            "LoadAndBroadcastOptions",
            "replica_axis_index=0 primary_replica_id=0 broadcast_memory_limit_bytes=None "
            "broadcast_memory_scaling_factor=0.75",
        ),
    ),
)
PathwaysOptions = _options("PathwaysOptions", "checkpointing_impl=None")
DeletionOptions = _options(
    "DeletionOptions",
    gcs_deletion_options=_options("GcsDeletionOptions", "todelete_full_path=None"),
)
MemoryOptions = _options(
    "MemoryOptions",
    "write_concurrent_bytes=None read_concurrent_bytes=None transfer_concurrent_bytes=None "
    "regulator_options=None expected_surge_bytes=None is_prioritized_key_fn=None "
    "serialization_status_callback=None deepcopy_host_arrays=True",
)
SafetensorsOptions = _options(
    "SafetensorsOptions", "max_over_read_ratio=None read_chunk_bytes=None"
)


@dataclass
class CheckpointablesOptions(_Options):
    """The handlers of the program's own types."""

    registry: handlers.CheckpointableHandlerRegistry = field(
        default_factory=lambda: handlers.local_registry(read_only=True)
    )


class CheckpointLayout(enum.Enum):
    """Names what is read: checkpoints, safetensors, or whichever is there."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"
