"""Writes samples with the installed release of Orbax: one directory per sample.

    python tests/golden/generate.py <directory>

Run it in an environment of each release, then pack the samples with `pack.py`. A sample that the
release has no API for, or fails to save, is left out, and the reason is printed. Neither the
library nor the tests use this file; it documents how `extra.tar.xz` and `old.tar.xz` were made: the
latter with Orbax 0.4.0 to 0.4.2 on JAX 0.4.18 and 0.5.3 on JAX 0.4.24, by `--only`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import types
from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Any

TWO_HOSTS = "JAXCKPT_GENERATE_PROCESS"
NUMPY_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 complex64 complex128"
)
SAMPLES: dict[str, Any] = {}
STEPS = (1, 5)


class Skip(Exception):
    """This release cannot write this sample."""


def sample(function: Any) -> Any:
    SAMPLES[function.__name__.replace("_", "-")] = function
    return function


def alias_removed_modules() -> None:
    """Stands in for what Orbax 0.1 imports and later JAX lacks; Orbax's own code is untouched."""
    import jax
    from jax.experimental import maps, pjit
    from jax.experimental.array_serialization import serialization

    def module(name: str, **content: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(content)
        sys.modules.setdefault(name, made)

    class Gone:
        """An array type that nothing is an instance of any more."""

    module("jax.experimental.global_device_array", GlobalDeviceArray=Gone)
    module("jax._src.device_array", DeviceArray=Gone)
    module("jax.experimental.gda_serialization", serialization=serialization)
    sys.modules["jax.experimental.gda_serialization.serialization"] = serialization
    vars(maps).setdefault("Mesh", jax.sharding.Mesh)
    vars(pjit).setdefault("PartitionSpec", jax.sharding.PartitionSpec)
    if not hasattr(jax.config, "jax_array"):
        type(jax.config).jax_array = True  # pyright: ignore[reportAttributeAccessIssue]


# The trees.


def mesh() -> Any:
    import jax
    import numpy as np

    shape = (2, 4) if TWO_HOSTS in os.environ else (4, 2)
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))


def sharded(value: Any, *spec: Any) -> Any:
    import jax

    sharding = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def training_tree(*, strings: bool = True, int_keys: bool = True) -> Any:
    """Returns the state of a small training loop, with every common kind of leaf."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    Adam = namedtuple("Adam", "count mu nu")  # noqa: PYI024  # as optax has it
    random = np.random.RandomState(len(version()))

    def params(scale: float) -> Any:
        def values(*shape: int) -> Any:
            # + 0: no negative zeros, so that the third of these is all fill values
            return (random.standard_normal(shape) * scale + 0).astype(np.float32)

        return {
            "dense": {
                "kernel": sharded(values(8, 6), "data", "model"),
                "bias": sharded(values(6)),
            },
            "emb": sharded(values(8, 16).astype(ml_dtypes.bfloat16), "data"),
        }

    tree: dict[str, Any] = {
        "params": params(1.0),
        "opt_state": (Adam(jnp.asarray(4, jnp.int32), params(0.1), params(0.0)), ()),
        "list": [np.ones(2, np.float32), {"x": np.arange(3.0)}],
        "tup": (np.full(2, 4), 9),
        "np0d": np.array(2.5, np.float32),
        "np_arr": np.arange(5, dtype=np.int32),
        "rng": jax.random.PRNGKey(3),
        "flag": jnp.array([True, False]),
        "step": 7,
        "lr": 0.5,
    }
    if strings:
        tree["name"] = "run-a"
    if int_keys:
        tree["idx"] = {0: np.ones(1), 11: np.zeros(1)}
    return {**tree, "none": None, "empty": {}, "empty_list": []}


def version() -> str:
    from importlib import metadata

    for name in ("orbax-checkpoint", "orbax"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise RuntimeError("Orbax is not installed")


def release() -> tuple[int, ...]:
    return tuple(int(part) for part in version().split("."))


def tree_of_release() -> Any:
    """The training tree, as far as this release can save it at all."""
    return training_tree(strings=release() >= (0, 3))


def children(node: Any) -> Any:
    if isinstance(node, dict):
        return [(str(key), child) for key, child in node.items()]
    if hasattr(node, "_fields"):
        return [(field, getattr(node, field)) for field in node._fields]
    if isinstance(node, list | tuple):
        return [(str(i), child) for i, child in enumerate(node)]
    return None


def flatten(node: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    below = children(node)
    if below is None:
        return {} if node is None else {path: node}
    return {k: v for key, child in below for k, v in flatten(child, (*path, key)).items()}


def describe(out: Path, tree: Any, note: str, **more: Any) -> None:
    """Writes `expected.json` and `expected.npz`."""
    from importlib import metadata

    import jax
    import numpy as np

    leaves: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for path, leaf in flatten(tree).items():
        entry = "/".join(path)
        if isinstance(leaf, str):
            leaves[entry] = {"kind": "str", "value": leaf, "path": path}
            continue
        if isinstance(leaf, jax.Array) and "key<" in str(leaf.dtype):
            impl = str(jax.random.key_impl(leaf))
            leaves[entry] = {"kind": "prng_key", "impl": impl, "shape": leaf.shape, "path": path}
            values[entry] = np.asarray(jax.random.key_data(leaf))
            continue
        value = np.asarray(leaf)
        kind = "jax.Array" if isinstance(leaf, jax.Array) else type(leaf).__name__
        facts = {"kind": kind, "dtype": value.dtype.name, "shape": value.shape, "path": path}
        if value.dtype.name not in NUMPY_NAMES.split():
            facts["npz_view"] = f"uint{8 * value.dtype.itemsize}"
            value = value.view(facts["npz_view"])
        leaves[entry], values[entry] = facts, value
    versions = {name: metadata.version(name) for name in ("jax", "tensorstore", "flax")}
    about = {"orbax_version": version(), **versions, "note": note, "devices": 8, **more}
    (out / "expected.json").write_text(json.dumps({**about, "leaves": leaves}, indent=1) + "\n")
    np.savez_compressed(out / "expected.npz", **values)


# The APIs, as each release has them.


def accepts(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def handler(**options: Any) -> Any:
    import orbax.checkpoint as ocp

    for name in options:
        if not accepts(ocp.PyTreeCheckpointHandler.__init__, name):
            raise Skip(f"no option {name}")
    return ocp.PyTreeCheckpointHandler(**options)


def save_pytree(path: Path, tree: Any, save_args: Any = None, **options: Any) -> None:
    import orbax.checkpoint as ocp

    checkpointer = ocp.Checkpointer(handler(**options))
    kwargs = {} if save_args is None else {"save_args": save_args}
    if hasattr(ocp, "args") and accepts(ocp.Checkpointer.save, "args"):
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, **kwargs))
    else:
        checkpointer.save(os.fspath(path), tree, **kwargs)


def manager_options(**options: Any) -> Any:
    import orbax.checkpoint as ocp

    for name in options:
        if not accepts(ocp.CheckpointManagerOptions.__init__, name):
            raise Skip(f"no manager option {name}")
    return ocp.CheckpointManagerOptions(**options)


def finish(manager: Any) -> None:
    for name in ("wait_until_finished", "close"):
        if hasattr(manager, name):
            getattr(manager, name)()


def save_steps(
    root: Path, steps: Any, options: Any, make_args: Any, *, items: Any = None, custom: bool = True
) -> None:
    """Saves the steps with the `args` API, each with metrics and custom metadata if there is."""
    import orbax.checkpoint as ocp

    if not (hasattr(ocp, "args") and accepts(ocp.CheckpointManager.save, "args")):
        raise Skip("no args")
    names = {"item_names": items} if items else {}
    manager = ocp.CheckpointManager(root, options=options, metadata={"lang": "en"}, **names)
    for step in steps:
        more: dict[str, Any] = {}
        if custom and accepts(ocp.CheckpointManager.save, "custom_metadata"):
            more["custom_metadata"] = {"note": f"step {step}", "tokens": 1000 * step}
        if options.best_fn:
            more["metrics"] = {"loss": 1.0 / step}
        manager.save(step, args=make_args(step), **more)
    finish(manager)


# The samples. Each writes `out/ckpt` and describes it.


@sample
def pytree_default(out: Path) -> None:
    tree = tree_of_release()
    save_pytree(out / "ckpt", tree)
    describe(out, tree, "Checkpointer(PyTreeCheckpointHandler()), the defaults of this release")


@sample
def pytree_noocdbt(out: Path) -> None:
    tree = tree_of_release()
    save_pytree(out / "ckpt", tree, use_ocdbt=False)
    describe(out, tree, "use_ocdbt=False")


@sample
def pytree_ocdbt(out: Path) -> None:
    old = release() < (0, 4)  # 0.3 fails on strings here
    tree = training_tree(strings=not old)
    save_pytree(out / "ckpt", tree, use_ocdbt=True)
    describe(out, tree, "use_ocdbt=True")


@sample
def pytree_zarr3(out: Path) -> None:
    tree = tree_of_release()
    save_pytree(out / "ckpt", tree, use_ocdbt=True, use_zarr3=True)
    describe(out, tree, "use_ocdbt=True, use_zarr3=True")


@sample
def pytree_zarr3_noocdbt(out: Path) -> None:
    tree = tree_of_release()
    save_pytree(out / "ckpt", tree, use_ocdbt=False, use_zarr3=True)
    describe(out, tree, "use_ocdbt=False, use_zarr3=True")


def aggregated(out: Path, small: bool) -> None:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    if not accepts(ocp.SaveArgs, "aggregate"):
        raise Skip("no aggregate")
    tree = tree_of_release()
    save_args = jax.tree_util.tree_map(
        lambda leaf: ocp.SaveArgs(aggregate=not small or np.size(leaf) < 9), tree
    )
    options = {"use_ocdbt": False} if accepts(ocp.PyTreeCheckpointHandler, "use_ocdbt") else {}
    save_pytree(out / "ckpt", tree, save_args, **options)
    describe(out, tree, f"SaveArgs(aggregate=True) for {'small' if small else 'all'} leaves")


@sample
def pytree_aggregate(out: Path) -> None:
    aggregated(out, small=True)


@sample
def pytree_aggregate_all(out: Path) -> None:
    aggregated(out, small=False)


@sample
def standard(out: Path) -> None:
    import orbax.checkpoint as ocp

    if not hasattr(ocp, "StandardCheckpointer"):
        raise Skip("no StandardCheckpointer")
    tree = training_tree(strings=False)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(out / "ckpt", tree)
    finish(checkpointer)
    describe(out, tree, "StandardCheckpointer().save")


@sample
def strings(out: Path) -> None:
    import jax.numpy as jnp

    if release() < (0, 3):
        raise Skip("no string leaves")
    tree = {"a": {"b": 'hé"llo\n'}, "empty": "", "list": ["x", "y"], "w": jnp.arange(4.0)}
    save_pytree(out / "ckpt", tree)
    describe(out, tree, "string leaves beside an array")


@sample
def strings_noocdbt(out: Path) -> None:
    import jax.numpy as jnp

    if release() < (0, 3):
        raise Skip("no string leaves")
    tree = {"a": {"b": 'hé"llo\n'}, "empty": "", "list": ["x", "y"], "w": jnp.arange(4.0)}
    save_pytree(out / "ckpt", tree, use_ocdbt=False)
    describe(out, tree, "string leaves beside an array, use_ocdbt=False")


@sample
def defaultdict_aggregate(out: Path) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp

    # JAX listed the keys as they were inserted, so the names of the arrays are mixed up.
    mixed = defaultdict(list, {"z": jnp.ones(2), "a": jnp.arange(4.0), "k": np.arange(3)})
    more = defaultdict(list, {"n": jnp.ones(3), "m": 3, "c": np.ones(4)})
    tree = {"dd": mixed, "more": more, "s": np.full(2, 7), "w": jnp.arange(5.0)}
    save_args = jax.tree_util.tree_map(lambda x: ocp.SaveArgs(aggregate=x is mixed["k"]), tree)
    save_pytree(out / "ckpt", tree, save_args)
    describe(out, tree, "a defaultdict with unsorted keys, of which one is aggregated")


@sample
def empties(out: Path) -> None:
    import jax.numpy as jnp

    tree = {"none": None, "dict": {}, "list": [], "in": {"none": [None, {}]}, "w": jnp.ones(3)}
    save_pytree(out / "ckpt", tree)
    describe(out, tree, "None and empty containers")


@sample
def prng_keys(out: Path) -> None:
    import jax

    if not hasattr(jax.random, "key"):
        raise Skip("no typed keys")
    keys = {
        "threefry": jax.random.key(1),
        "batch": jax.random.split(jax.random.key(2), (2, 3)),
        "rbg": jax.random.key(3, impl="rbg"),
        "unsafe": {"rbg": jax.random.key(4, impl="unsafe_rbg")},
        "legacy": jax.random.PRNGKey(5),
    }
    save_pytree(out / "ckpt", keys)
    if not any((out / "ckpt").rglob("array_metadatas")):
        raise Skip("keys lose their type")
    describe(out, keys, "typed PRNG keys")


@sample
def leaf_kinds(out: Path) -> None:
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    names = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
        "complex128 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e3m4 int4 int2"
    )
    tree: dict[str, Any] = {}
    for name in names.split():
        with contextlib.suppress(Exception):
            dtype = np.dtype(getattr(ml_dtypes, name, name))
            value = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
            trial = {"np": value} if dtype.itemsize == 8 or name == "complex128" else {}
            trial["jax"] = jnp.asarray(value)
            save_pytree(out / "trial" / name, trial)
            tree[name] = trial
    shutil.rmtree(out / "trial", ignore_errors=True)
    save_pytree(out / "ckpt", tree)
    describe(out, tree, "every dtype that this release saves")


@sample
def bare_leaf(out: Path) -> None:
    import numpy as np

    tree = sharded(np.arange(64.0, dtype=np.float32).reshape(8, 8), "data", "model")
    save_pytree(out / "ckpt", tree)
    describe(out, tree, "the tree is one array: empty key path")


@sample
def manager_legacy_single(out: Path) -> None:
    import orbax.checkpoint as ocp

    tree = tree_of_release()
    (out / "ckpt").mkdir()
    prefixed = accepts(ocp.CheckpointManagerOptions.__init__, "step_prefix")
    options = manager_options(**({"step_prefix": "ckpt"} if prefixed else {}))
    manager = ocp.CheckpointManager(
        os.fspath(out / "ckpt"), ocp.Checkpointer(handler()), options=options
    )
    manager.save(3, tree)
    finish(manager)
    describe(out, tree, f"CheckpointManager(dir, Checkpointer), step 3, prefixed: {prefixed}")


@sample
def manager_legacy(out: Path) -> None:
    import orbax.checkpoint as ocp

    (out / "ckpt").mkdir()
    tree = tree_of_release()
    checkpointers = {"state": ocp.Checkpointer(handler())}
    if hasattr(ocp, "JsonCheckpointHandler"):
        checkpointers["meta"] = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    names = list(checkpointers)  # the manager adds to the dict
    more: dict[str, Any] = {}
    if accepts(ocp.CheckpointManager.__init__, "metadata"):
        more["metadata"] = {"lang": "en"}
    options = manager_options(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    manager = ocp.CheckpointManager(os.fspath(out / "ckpt"), checkpointers, options=options, **more)
    for step in STEPS:
        items = {"state": tree, "meta": {"epoch": step}}
        items = {name: items[name] for name in names}
        manager.save(step, items, metrics={"loss": 1.0 / step})
    finish(manager)
    items = {"meta": {"epoch": "step"}} if "meta" in names else {}
    describe(out, tree, "CheckpointManager(dir, {name: Checkpointer}), best_fn", items=items)


@sample
def manager_composite(out: Path) -> None:
    import orbax.checkpoint as ocp

    tree = training_tree()
    options = manager_options(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    save_steps(
        out / "ckpt",
        STEPS,
        options,
        lambda step: ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree), meta=ocp.args.JsonSave({"epoch": step})
        ),
        items=("state", "meta"),
    )
    items = {"meta": {"epoch": "step"}}
    describe(out, tree, "Composite, best_fn, root and step metadata", items=items)


@sample
def manager_default(out: Path) -> None:
    import orbax.checkpoint as ocp

    tree = training_tree()
    options = manager_options(step_format_fixed_length=5)
    save_steps(out / "ckpt", (3,), options, lambda _: ocp.args.PyTreeSave(tree))
    describe(out, tree, "item `default`, step_format_fixed_length=5")


@sample
def manager_prefix_padded(out: Path) -> None:
    import orbax.checkpoint as ocp

    tree = training_tree(strings=False)
    options = manager_options(step_prefix="run", step_format_fixed_length=6)
    save_steps(out / "ckpt", STEPS, options, lambda _: ocp.args.StandardSave(tree))
    describe(out, tree, "StandardSave, step_prefix='run', step_format_fixed_length=6")


def save_flax(out: Path, use_orbax: bool) -> None:
    import flax
    import orbax.checkpoint as ocp
    from flax.training import checkpoints

    with contextlib.suppress(AttributeError, LookupError):
        flax.config.update("flax_use_orbax_checkpointing", use_orbax)
    tree = training_tree(strings=not use_orbax or release() >= (0, 3), int_keys=False)
    more: dict[str, Any] = {}
    if use_orbax:
        if not accepts(checkpoints.save_checkpoint, "orbax_checkpointer"):
            raise Skip("this Flax does not know Orbax")
        tree = {**tree, "opt_state": tree["opt_state"][:1]}
        for key in ("none", "empty", "empty_list"):
            tree.pop(key)
        more["orbax_checkpointer"] = ocp.Checkpointer(handler())
    checkpoints.save_checkpoint(os.fspath(out / "ckpt"), tree, step=12, **more)
    what = "an Orbax checkpointer" if use_orbax else "a msgpack file"
    describe(out, tree, f"flax.training.checkpoints.save_checkpoint, {what}")


@sample
def flax_legacy(out: Path) -> None:
    save_flax(out, use_orbax=False)


@sample
def flax_orbax(out: Path) -> None:
    save_flax(out, use_orbax=True)


def import_v1() -> Any:
    try:
        from orbax.checkpoint import v1
    except ImportError:
        try:
            from orbax.checkpoint.experimental import v1
        except ImportError as error:
            raise Skip("no v1") from error
    return v1


@sample
def v1_save(out: Path) -> None:
    v1 = import_v1()
    tree = training_tree()
    (getattr(v1, "save", None) or v1.save_pytree)(out / "ckpt", tree)
    describe(out, tree, "v1 save of a pytree")


@sample
def v1_checkpointables(out: Path) -> None:
    v1 = import_v1()
    tree = training_tree()
    v1.save_checkpointables(out / "ckpt", {"model": tree, "data": {"epoch": 3}})
    describe(out, tree, "v1 save_checkpointables, beside `data` {'epoch': 3}", item="model")


@sample
def v1_training(out: Path) -> None:
    v1 = import_v1()
    tree = training_tree()
    with v1.training.Checkpointer(out / "ckpt") as checkpointer:
        save = getattr(checkpointer, "save", None) or checkpointer.save_pytree
        for step in STEPS:
            save(step, tree, metrics={"loss": 1.0 / step})
    describe(out, tree, "v1 training.Checkpointer, steps 1 and 5, metrics")


# Two processes: this script starts itself again, twice.


def two_host_tree() -> Any:
    import ml_dtypes
    import numpy as np

    random = np.random.RandomState(2)

    def values(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    tree: dict[str, Any] = {
        "dm": sharded(values(8, 12), "data", "model"),
        "m_only": sharded(values(8, 8), "model"),
        "d_only": sharded(values(6, 4), "data"),
        "both": sharded(values(16), ("data", "model")),
        "repl": sharded(values(16, 8)),
        "odd": sharded(values(3, 5)),
        "big": sharded(values(8, 512), "data", "model"),
        "bf16": sharded(values(8, 8).astype(ml_dtypes.bfloat16), None, "model"),
        "np": np.arange(4),
        "step": 11,
        "s": "hello",
    }
    return tree


def two_hosts(out: Path, what: str) -> None:
    if release() < (0, 4):
        raise Skip("JAX of that time has no CPU job of two processes")
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, os.fspath(out), "--only", what],
            env={**os.environ, TWO_HOSTS: str(index)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    try:
        errors = [job.communicate(timeout=120)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, error in zip(jobs, errors, strict=True):
        if job.returncode:
            raise RuntimeError(error.decode()[-300:])


def one_of_two(out: Path, what: str) -> None:
    """Runs in each of the two processes."""
    import jax
    import numpy as np

    index = int(os.environ[TWO_HOSTS])
    with contextlib.suppress(AttributeError):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("localhost:23457", num_processes=2, process_id=index)
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    tree = two_host_tree()
    if what == "manager":
        save_steps(
            out / "ckpt", (1,), manager_options(), lambda _: ocp.args.PyTreeSave(tree), custom=False
        )
    else:
        save_pytree(out / "ckpt", tree, use_ocdbt=False)
    whole = {
        key: multihost_utils.process_allgather(value, tiled=True)
        if isinstance(value, jax.Array)
        else value
        for key, value in tree.items()
    }
    if index == 0:
        describe(out, whole, f"2 processes x 4 devices, mesh data=2 x model=4; {what}")
        about = json.loads((out / "expected.json").read_text())
        for key, value in tree.items():
            if not isinstance(value, np.ndarray | int | str):
                about["leaves"][key]["kind"] = "jax.Array"
        (out / "expected.json").write_text(json.dumps(about, indent=1) + "\n")
    multihost_utils.sync_global_devices("described")


@sample
def mp2_manager(out: Path) -> None:
    two_hosts(out, "manager")


@sample
def mp2_noocdbt(out: Path) -> None:
    two_hosts(out, "noocdbt")


def generate(into: Path, only: str | None) -> None:
    for what, write in SAMPLES.items():
        if only and only not in what:
            continue
        out = into / f"orbax-{version()}-{what}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        try:
            write(out)
        except Exception as error:
            shutil.rmtree(out)
            print(f"{out.name}: left out, {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        # Its text holds the path it was written to, and no reader looks at it.
        for marker in out.rglob("commit_success.txt"):
            marker.write_text("Checkpoint commit was successful")
        print(f"{out.name}: written", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("into", type=Path)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    devices = 4 if TWO_HOSTS in os.environ else 8
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    if TWO_HOSTS in os.environ:
        one_of_two(arguments.into.resolve(), arguments.only)
    else:
        if release() < (0, 2):
            alias_removed_modules()
        generate(arguments.into.resolve(), arguments.only)
