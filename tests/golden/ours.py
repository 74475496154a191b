"""Writes samples with this version of jaxckpt, one for each layout that it writes.

    python -m tests.golden.ours

They go into `jaxckpt-<version>.tar.xz` in this directory, and their names into `index.json`. Each
has `ckpt/`, and what it must restore to in `expected.json`:

    note     how it was written
    reads    a list of checkpoints: `path` below `ckpt`, `options` of `jaxckpt.restore`, the `tree`
    run      the run at `path`: its steps, metrics, items, and what else a reader gives

A tree is recorded as `described` gives it: bits as SHA-256. docs/releasing.md says when to run it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt.format.arrays import AS_BYTES_DTYPES, STORABLE_DTYPES, dtype_of
from tests import multiprocess
from tests.golden.pack import pack

Expected = dict[str, Any]
SAMPLES: dict[str, Callable[[Path], Expected]] = {}


def sample(write: Callable[[Path], Expected]) -> Callable[[Path], Expected]:
    SAMPLES[write.__name__.replace("_", "-")] = write
    return write


# --- trees as JSON -----------------------------------------------------------------------------


def described(node: Any, path: str = "") -> dict[str, Any]:
    """Returns a tree as JSON: by path, the type of a container, or the facts about a leaf."""
    if isinstance(node, jax.Array | np.ndarray):
        return {path: _array(node)}
    if isinstance(node, str | bytes | bool | int | float):
        return {path: [type(node).__name__, repr(node)]}
    found: dict[str, Any] = {path: type(node).__name__}
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda below: below is not node)
    for keys, child in children[0]:
        found |= described(child, path + jax.tree_util.keystr(keys))
    return found


def _array(array: jax.Array | np.ndarray) -> list[Any]:
    found: list[Any] = ["jax.Array" if isinstance(array, jax.Array) else "ndarray"]
    found += [str(array.dtype), list(array.shape)]
    bits = array
    if isinstance(array, jax.Array):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            bits = jax.random.key_data(array)
        if isinstance(array.sharding, NamedSharding):
            spec = [list(axes) if isinstance(axes, tuple) else axes for axes in array.sharding.spec]
            found.append([dict(array.sharding.mesh.shape), spec])
    return [*found, hashlib.sha256(np.asarray(bits).tobytes()).hexdigest()]


def run_facts(manager: CheckpointManager) -> Expected:
    """Returns what a reader gives of a run, as JSON."""
    steps = manager.all_steps()
    return {
        "steps": steps,
        "best": manager.best_step() if manager.keep.best else None,
        "metrics": [manager.metrics(step) for step in steps],
        "custom_metadata": [manager.custom_metadata(step) for step in steps],
        "run_metadata": manager.run_metadata,
        "items": [described(manager.restore_items(step=step)) for step in steps],
    }


def read(tree: Any, path: str = "", **options: Any) -> Expected:
    return {"path": path, "options": options, "tree": described(tree)}


# --- the trees ---------------------------------------------------------------------------------


def every_leaf() -> Any:
    """Returns every dtype, and every kind of leaf, key and container."""
    params = {"w": jnp.arange(12.0).reshape(4, 3), "b": jnp.arange(3, dtype=jnp.bfloat16) / 7}
    names = sorted(STORABLE_DTYPES | AS_BYTES_DTYPES)
    return {
        "params": params,
        "opt": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params),
        "dtypes": {name: np.array([0, 1, 1]).astype(dtype_of(name)) for name in names},
        "on devices": {name: jnp.ones(5, name) for name in ("int4", "float8_e4m3fn", "bool")},
        "keys": {
            "threefry": jax.random.key(1),
            "batch": jax.random.split(jax.random.key(2), (2, 3)),
            "rbg": jax.random.key(3, impl="rbg"),
            "raw": jax.random.PRNGKey(5),
        },
        "shapes": {"0-d": np.array(2.5), "none": np.zeros((0, 3)), "nan": np.array([np.nan, -0.0])},
        "python": {"int": 7, "large": (1 << 63) + 1, "float": 0.1, "bool": True},
        "text": {"line": 'hé"llo\n', "": "", "bytes": b"\x00\xff"},
        "a/b": {"~": np.ones(1), "c~1d": np.ones(2)},
        "numbers": {0: np.ones(1), 11: np.ones(2), -3: 4},
        "empty": [None, {}, [], ()],
        "nested": [1, (2, [3, {"x": (4,)}])],
    }


def put(value: np.ndarray, *spec: Any) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def sharded_tree() -> Any:
    """Returns arrays in several shardings; the same in one process and in two."""
    return {
        "both": put(np.arange(96.0, dtype=np.float32).reshape(8, 12), "data", "model"),
        "rows": put(np.arange(12).astype(jnp.bfloat16).reshape(4, 3), "data"),
        "columns": put(np.arange(24, dtype=np.int8).reshape(3, 8), None, "model"),
        "one axis": put(np.arange(16, dtype=np.uint16), ("data", "model")),
        "replicated": put(np.arange(6.0, dtype=np.float32)),
        "step": 11,
        "text": "hello",
    }


class Data:
    """A data iterator."""

    def __init__(self) -> None:
        self.taken = 0

    def get_state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def set_state(self, state: Mapping[str, int]) -> None:
        self.taken = state["taken"]


# --- the samples: each writes `ckpt` and returns what to expect ----------------------------------


@sample
def every_kind(ckpt: Path) -> Expected:
    tree = every_leaf()
    jaxckpt.save(ckpt, tree)
    return {"note": "save(path, tree)", "reads": [read(tree)]}


@sample
def sharded(ckpt: Path) -> Expected:
    tree = sharded_tree()
    jaxckpt.save(ckpt, tree)
    return {"note": "save(path, tree), 2x4 devices", "reads": [read(tree)]}


@sample
def slashes(ckpt: Path) -> Expected:
    tree = {"a/": np.ones(1), "b": {"/": np.ones(2), "c/d": np.ones(3)}, "b/": {"x": 1}}
    jaxckpt.save(ckpt, tree)
    return {"note": "keys that end in a slash", "reads": [read(tree)]}


@sample
def item(ckpt: Path) -> Expected:
    tree = sharded_tree()
    jaxckpt.save(ckpt / "named", tree, item="default")
    jaxckpt.save(ckpt / "none", tree, item=None)
    note = 'save(..., item="default"), save(..., item=None)'
    return {"note": note, "reads": [read(tree, name) for name in ("named", "none")]}


@sample
def compressed(ckpt: Path) -> Expected:
    value = (np.arange(1 << 18) % 7).astype(np.float32).reshape(2, -1)
    tree = {"large": put(value, "data"), "small": np.arange(5.0)}
    jaxckpt.save(ckpt / "saved", tree, compression="zstd")
    jaxckpt.convert(ckpt / "saved", ckpt / "plain", ocdbt=False, compression="zstd")
    note = 'save(..., compression="zstd"), and convert of it with ocdbt=False'
    return {"note": note, "reads": [read(tree, name) for name in ("saved", "plain")]}


@sample
def converted(ckpt: Path) -> Expected:
    tree = every_leaf()
    del tree["a/b"]  # plain zarr has a directory for each key, and fewer dtypes
    for name in AS_BYTES_DTYPES:
        del tree["dtypes"][name]
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/saved", tree)
        jaxckpt.convert(f"{folder}/saved", ckpt, ocdbt=False)
    return {"note": "convert(..., ocdbt=False)", "reads": [read(tree)]}


@sample
def safetensors(ckpt: Path) -> Expected:
    tree = {"params": {"w": np.arange(12.0).reshape(4, 3), "b": np.ones(3, jnp.bfloat16)}}
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/saved", tree)
        ckpt.mkdir()
        jaxckpt.export_safetensors(f"{folder}/saved", ckpt / "one.safetensors")
    reads = [{**read(tree, "one.safetensors"), "unverified": True}]
    return {"note": "export_safetensors", "reads": reads}


@sample
def run(ckpt: Path) -> Expected:
    data, state = Data(), sharded_tree()
    keep = KeepPolicy(best=2, metric="loss")
    with CheckpointManager(
        ckpt, keep=keep, step_prefix="ckpt", step_digits=4, run_metadata={"dataset": "c4"}
    ) as manager:
        for step in (1, 5):
            data.taken = step
            items = {
                "data": data,
                "config": {"lr": 0.1, "layers": [8, 8], "name": None},
                "tokenizer": b"\x00\x01",
                "ema": {"w": np.arange(3.0) * step},
            }
            metrics = {"loss": 1 / step, "nan": float("nan")}
            manager.save(step, state, items=items, metrics=metrics, custom_metadata={"n": step})
        manager.wait_until_finished()
        manager.pin(1)
        facts = run_facts(manager)
    return {
        "note": "CheckpointManager with metrics, items, metadata, a prefix and a pinned step",
        "reads": [read(state), read(state, "ckpt_0001")],
        "run": {"path": "", **facts},
    }


@sample
def shared_files(ckpt: Path) -> Expected:
    frozen = jnp.asarray(np.arange(1 << 18, dtype=np.float32) % 5)
    with CheckpointManager(ckpt) as manager:
        for step in range(1, 5):
            state = {"frozen": frozen, "w": jnp.full(4, step)}
            manager.save(step, state).result()
            manager.wait_until_finished()
        facts = run_facts(manager)
    files = [file for file in ckpt.rglob("d/*") if file.stat().st_nlink > 1]
    assert files, "no step shares a file"
    reads = [read({"frozen": frozen, "w": jnp.full(4, step)}, str(step)) for step in range(1, 5)]
    return {"note": "steps that share files", "reads": reads, "run": {"path": "", **facts}}


@sample
def local_disk(ckpt: Path) -> Expected:
    with CheckpointManager(
        ckpt / "run",
        save=SavePolicy(every_steps=2),
        local=LocalTier(ckpt / "disk", save=SavePolicy(every_steps=1)),
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": jnp.full(4, step)}).result()
        manager.wait_until_finished()
        assert manager.tiers == {"local": [2, 3], "durable": [2], "waiting": []}
        facts = run_facts(manager)
    reads = [read({"w": jnp.full(4, 2)}, "run"), read({"w": jnp.full(4, 3)}, "disk")]
    facts |= {"path": "run", "local": "disk"}
    return {"note": "CheckpointManager(local=...)", "reads": reads, "run": facts}


@sample
def two_processes(ckpt: Path) -> Expected:
    multiprocess.run_processes("golden:together", args=[ckpt])
    return {"note": "save by two processes of 4 devices", "reads": [read(sharded_tree())]}


@sample
def two_hosts(ckpt: Path) -> Expected:
    multiprocess.run_processes("golden:apart", args=[ckpt, 3])
    # A reader without the hosts has the step of the directory; the test starts two for the rest.
    reads = [read({**sharded_tree(), "step": 2}, "run")]
    return {"note": "CheckpointManager(local=...) on two hosts", "reads": reads}


@sample
def fork(ckpt: Path) -> Expected:
    tree = sharded_tree()
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/4", tree)
        jaxckpt.fork(f"{folder}/4", ckpt, step=0)
    return {"note": "fork of a checkpoint", "reads": [read(tree), read(tree, "0")]}


@sample
def drop_in(ckpt: Path) -> Expected:
    import jaxckpt.orbax as ocp

    tree = {"w": jnp.arange(4.0), "b": np.ones(2), "step": 3}
    ocp.PyTreeCheckpointer().save(ckpt / "tree", tree)
    ocp.v1.save(ckpt / "v1", tree)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(ckpt / "one", options=options) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree), metrics={"loss": 0.5})
    names = ("state", "extra")
    with ocp.CheckpointManager(ckpt / "several", item_names=names) as manager:
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree), extra=ocp.args.JsonSave({"a": [1, None]})
        )
        manager.save(7, args=args)
    paths = ("tree", "v1", "one/1")
    reads = [read(tree, path) for path in paths] + [read(tree, "several/7", item="state")]
    return {"note": "jaxckpt.orbax: checkpointers and managers", "reads": reads}


def main() -> None:
    socket.gethostname = lambda: "host"  # the files of a run name it
    prefix = f"jaxckpt-{jaxckpt.__version__}"
    # The records of a run with a local disk have the path; a short one that says nothing.
    folder = Path(tempfile.gettempdir()) / "golden"
    shutil.rmtree(folder, ignore_errors=True)
    for name, write in SAMPLES.items():
        sample_folder = folder / f"{prefix}-{name}"
        sample_folder.mkdir(parents=True)
        expected = {"version": jaxckpt.__version__, **write(sample_folder / "ckpt")}
        (sample_folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(f"{prefix}-{name}: written", flush=True)
    pack(folder, f"{prefix}.tar.xz")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
