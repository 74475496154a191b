"""The peers to compare: jaxckpt, both generations of Orbax, others, and a plain file."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, final

import jax
import numpy as np

import jaxckpt

# One system call takes at most 2 GiB and 1,024 buffers.
_LARGEST_READ: Final = 1 << 30
_BATCH: Final = 32


class Peer(Protocol):
    """One way to save and restore a tree.

    Attributes:
        is_async: Whether `save` returns before the work is done, so that its time is meaningful.
        reshards: Whether `restore` uses the shardings of `like`.
    """

    name: str
    is_async: bool
    reshards: bool

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        """Starts to save `tree`, and returns a function that waits for the commit."""
        ...

    def restore(self, path: Path, like: Any) -> Any:
        """Restores with the shapes and shardings of `like`."""
        ...

    def close(self) -> None: ...


@final
class Jaxckpt:
    name = "jaxckpt"
    is_async = True
    reshards = True

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        return jaxckpt.save_async(path, tree).result

    def restore(self, path: Path, like: Any) -> Any:
        return jaxckpt.restore(path, like)

    def close(self) -> None:
        pass


@final
class OrbaxV0:
    """The asynchronous `StandardCheckpointer`, one for all saves, as in a training loop."""

    is_async = True
    reshards = True

    def __init__(self, module: str = "orbax.checkpoint", name: str = "orbax v0") -> None:
        self.name = name
        self._checkpointer: Any = importlib.import_module(module).StandardCheckpointer()

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        self._checkpointer.save(path, tree)
        return self._checkpointer.wait_until_finished

    def restore(self, path: Path, like: Any) -> Any:
        return self._checkpointer.restore(path, like)

    def close(self) -> None:
        self._checkpointer.close()


@final
class OrbaxV1:
    """`save_async` and `load`, formerly called `save_pytree_async` and `load_pytree`."""

    is_async = True
    reshards = True

    def __init__(
        self, module: str = "orbax.checkpoint.experimental.v1", name: str = "orbax v1"
    ) -> None:
        self.name = name
        v1: Any = importlib.import_module(module)
        self._save_async = getattr(v1, "save_async", None) or v1.save_pytree_async
        self._load = getattr(v1, "load", None) or v1.load_pytree

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        return self._save_async(path, tree).result

    def restore(self, path: Path, like: Any) -> Any:
        return self._load(path, like)

    def close(self) -> None:
        pass


@final
class Torch:
    """`torch.distributed.checkpoint` of whole tensors, since it does not support jax's shards.

    It saves from and restores into tensors in host memory, in one process.
    """

    name = "torch dcp"
    is_async = False
    reshards = False

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        values = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        state = {str(i): self._torch.from_numpy(value) for i, value in enumerate(values)}
        return lambda: self._dcp.save(state, checkpoint_id=path, no_dist=True)

    def restore(self, path: Path, like: Any) -> Any:
        values = [np.empty(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(like)]
        state = {str(i): self._torch.from_numpy(value) for i, value in enumerate(values)}
        self._dcp.load(state, checkpoint_id=path, no_dist=True)
        return values

    def close(self) -> None:
        pass


@final
class ArraySerialization:
    """JAX's own `array_serialization`: a directory of TensorStore for each array."""

    name = "jax serialization"
    is_async = True
    reshards = True

    def __init__(self) -> None:
        module: Any = importlib.import_module("jax.experimental.array_serialization.serialization")
        self._manager: Any = module.GlobalAsyncCheckpointManager()

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        leaves = jax.tree.leaves(tree)
        paths = [f"{path}/{i}" for i in range(len(leaves))]
        self._manager.serialize_with_paths(leaves, paths, on_commit_callback=lambda: None)
        return self._manager.wait_until_finished

    def restore(self, path: Path, like: Any) -> Any:
        leaves, structure = jax.tree.flatten(like)
        paths = [f"{path}/{i}" for i in range(len(leaves))]
        shardings = [leaf.sharding for leaf in leaves]
        return structure.unflatten(self._manager.deserialize_with_paths(shardings, paths))

    def close(self) -> None:
        pass


@final
class Safetensors:
    """`safetensors.flax`: whole arrays in one file, restored on one device, without fsync."""

    name = "safetensors"
    is_async = False
    reshards = False

    def __init__(self) -> None:
        self._flax: Any = importlib.import_module("safetensors.flax")

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        tensors = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
        path.mkdir()
        return lambda: self._flax.save_file(tensors, path / "data.safetensors")

    def restore(self, path: Path, like: Any) -> Any:
        tensors = self._flax.load_file(path / "data.safetensors")
        return [tensors[str(i)] for i in range(len(jax.tree.leaves(like)))]

    def close(self) -> None:
        pass


@final
class Roofline:
    """Writes the same bytes sequentially to one file with fsync, and reads them into new memory."""

    name = "roofline"
    is_async = False
    reshards = True  # it reads all bytes, whatever the sharding

    def save(self, path: Path, tree: Any) -> Callable[[], object]:
        shards = [
            np.asarray(shard.data)
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]

        def write() -> None:
            path.mkdir()
            with open(path / "data", "wb", buffering=0) as file:
                # In batches, so that the cost of system calls is not measured.
                for batch in _batches(shards):
                    if os.writev(file.fileno(), batch) != sum(shard.nbytes for shard in batch):
                        raise OSError(f"{path}: a short write")
                os.fsync(file.fileno())

        return write

    def restore(self, path: Path, like: Any) -> Any:
        del like
        with open(path / "data", "rb", buffering=0) as file:
            memory = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
            done = 0
            while done < memory.size:
                done += file.readinto(memory[done : done + _LARGEST_READ].data)
        return memory

    def close(self) -> None:
        pass


def _batches(shards: list[np.ndarray[Any, Any]]) -> list[list[np.ndarray[Any, Any]]]:
    return [shards[i : i + _BATCH] for i in range(0, len(shards), _BATCH)]


# Keyed by the names for `--peers`.
PEERS: Final[dict[str, Callable[[], Peer]]] = {
    "jaxckpt": Jaxckpt,
    "v1": OrbaxV1,
    "v0": OrbaxV0,
    "drop-in-v1": lambda: OrbaxV1("jaxckpt.orbax.v1", "drop-in v1"),
    "drop-in-v0": lambda: OrbaxV0("jaxckpt.orbax", "drop-in v0"),
    "jax": ArraySerialization,
    "safetensors": Safetensors,
    "torch": Torch,
    "roofline": Roofline,
}
