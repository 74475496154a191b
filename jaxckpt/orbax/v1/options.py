"""The options of a `Context`, with Orbax's names and defaults.

These have an effect: `timeout_secs`, `post_finalization_callback`, `partial_load`, the dtypes of
storage options, `enable_padding_and_truncation`, `registry`, `todelete_full_path`,
`read_concurrent_bytes` and the layout. `Context.check` refuses those that should have one, and the
others tune what jaxckpt does in its own way.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from etils import epath

from jaxckpt.orbax import options as v0
from jaxckpt.orbax.options import AtomicityMode as AtomicityMode
from jaxckpt.orbax.v1 import handlers

FROZEN: Final[ContextVar[frozenset[int]]] = ContextVar("frozen options", default=frozenset())


class _Options:
    """Cannot be changed while a context that has it is active."""

    def __setattr__(self, name: str, value: Any) -> None:
        if id(self) in FROZEN.get():
            raise RuntimeError(f"{name}: set the options of a context before entering its `with`")
        object.__setattr__(self, name, value)


@dataclass(kw_only=True)
class AsyncOptions(_Options, v0.AsyncOptions):
    """Describes how to save in the background, with the fields of v0."""


@dataclass(kw_only=True)
class AtomicityOptions(_Options, v0.AtomicityOptions):
    """Describes how a save becomes visible, with the fields of v0."""


@dataclass(kw_only=True)
class MultiprocessingOptions(_Options, v0.MultiprocessingOptions):
    """Names who takes part in a save, with the fields of v0."""


@dataclass(kw_only=True)
class FileOptions(_Options, v0.FileOptions):
    """Describes how to make directories; the other fields are as in v0.

    Attributes:
        path_class: No effect.
    """

    path_class: type = epath.Path


@dataclass(kw_only=True)
class PyTreeOptions(_Options):
    """Describes how to save (`saving`) and load (`loading`) trees."""

    @dataclass(kw_only=True)
    class Saving(_Options):
        """Ignores `pytree_metadata_options`."""

        pytree_metadata_options: Any = None

    @dataclass(kw_only=True)
    class Loading(_Options):
        """`partial_load` is whether saved leaves may be missing in the target."""

        partial_load: bool = False

    saving: Saving = field(default_factory=Saving)
    loading: Loading = field(default_factory=Loading)


@dataclass(kw_only=True)
class ArrayOptions(_Options):
    """Describes how to save (`saving`) and load (`loading`) arrays."""

    @dataclass(kw_only=True)
    class Saving(_Options):
        """Describes how to save arrays.

        Attributes:
            storage_options: How to store all of them.
            scoped_storage_options_creator: Gets a path and a leaf; returns the leaf's options,
                or None for `storage_options`.
            use_ocdbt, use_zarr3, use_compression, ocdbt_target_data_file_size,
                enable_pinned_host_transfer, enable_post_merge_validation, use_replica_parallel,
                min_slice_bytes_for_replica_parallel, max_replicas_for_replica_parallel,
                enable_replica_parallel_separate_folder, enable_write_sharding_file,
                array_metadata_store: No effect.
        """

        @dataclass(kw_only=True)
        class StorageOptions(_Options):
            """Stores `dtype`; ignores `chunk_byte_size` and `shard_axes`."""

            dtype: Any = None
            chunk_byte_size: int | None = None
            shard_axes: tuple[int, ...] | None = None

        storage_options: StorageOptions = field(default_factory=StorageOptions)
        use_ocdbt: bool = True
        use_zarr3: bool = True
        use_compression: bool = True
        ocdbt_target_data_file_size: int | None = None
        enable_pinned_host_transfer: bool | None = None
        enable_post_merge_validation: bool = True
        use_replica_parallel: bool | None = None
        min_slice_bytes_for_replica_parallel: int | None = None
        max_replicas_for_replica_parallel: int | None = None
        enable_replica_parallel_separate_folder: bool = False
        enable_write_sharding_file: bool = True
        array_metadata_store: Any = None
        scoped_storage_options_creator: Callable[[Any, Any], Any] | None = None

    @dataclass(kw_only=True)
    class Loading(_Options):
        """Describes how to load arrays.

        Attributes:
            enable_padding_and_truncation: Whether jax arrays are cut off or padded to the shapes of
                the target.
            raise_array_data_missing_error: No effect: missing data always raises.
            use_load_and_broadcast, load_and_broadcast_options: No effect.
        """

        @dataclass(kw_only=True)
        class LoadAndBroadcastOptions(_Options):
            """No effect: each process reads what its own devices need.

            Attributes:
                replica_axis_index, primary_replica_id, broadcast_memory_limit_bytes,
                    broadcast_memory_scaling_factor: No effect.
            """

            replica_axis_index: int | None = 0
            primary_replica_id: int | None = 0
            broadcast_memory_limit_bytes: int | None = None
            broadcast_memory_scaling_factor: float | None = 0.75

        enable_padding_and_truncation: bool = False
        raise_array_data_missing_error: bool = True
        use_load_and_broadcast: bool = False
        load_and_broadcast_options: LoadAndBroadcastOptions = field(
            default_factory=LoadAndBroadcastOptions
        )

    saving: Saving = field(default_factory=Saving)
    loading: Loading = field(default_factory=Loading)


@dataclass(kw_only=True)
class PathwaysOptions(_Options):
    """Ignores `checkpointing_impl`."""

    checkpointing_impl: Any = None


@dataclass(kw_only=True)
class DeletionOptions(_Options):
    """Describes how to delete steps in buckets: `gcs_deletion_options`."""

    @dataclass(kw_only=True)
    class GcsDeletionOptions(_Options):
        """`todelete_full_path` is where deleted steps of a run go."""

        todelete_full_path: str | None = None

    gcs_deletion_options: GcsDeletionOptions = field(default_factory=GcsDeletionOptions)


@dataclass(kw_only=True)
class MemoryOptions(_Options):
    """Describes how much memory to use.

    Attributes:
        read_concurrent_bytes: Of the host, while a tree is loaded.
        write_concurrent_bytes, transfer_concurrent_bytes, regulator_options, expected_surge_bytes,
            is_prioritized_key_fn, serialization_status_callback, deepcopy_host_arrays: No effect.
    """

    write_concurrent_bytes: int | None = None
    read_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None
    regulator_options: Any = None
    expected_surge_bytes: float | None = None
    is_prioritized_key_fn: Callable[..., Any] | None = None
    serialization_status_callback: Callable[..., Any] | None = None
    deepcopy_host_arrays: bool = True


@dataclass(kw_only=True)
class SafetensorsOptions(_Options):
    """Ignores `max_over_read_ratio` and `read_chunk_bytes`."""

    max_over_read_ratio: float | None = None
    read_chunk_bytes: int | None = None


@dataclass(kw_only=True)
class CheckpointablesOptions(_Options):
    """The handlers of the program's own types: `registry`."""

    registry: handlers.CheckpointableHandlerRegistry = field(
        default_factory=lambda: handlers.local_registry(read_only=True)
    )


class CheckpointLayout(enum.Enum):
    """Names what is read: checkpoints, safetensors, or whichever is there."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"
