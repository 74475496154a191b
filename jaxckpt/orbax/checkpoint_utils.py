"""Restore args from targets, and waiting for the steps of another job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxckpt.multihost import current, lead
from jaxckpt.orbax import args, metadata, step
from jaxckpt.orbax._trees import PLACEHOLDER as PLACEHOLDER
from jaxckpt.orbax._trees import as_data


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Returns a tree of restore args for the arrays, numbers and metadata of a target.

    Args:
        sharding_tree: The shardings. If None, the target's shardings.
        set_global_shape: Whether the args contain the shapes.
        strict: Whether another shape is an error.
    """
    if support_layout:
        raise NotImplementedError("support_layout: layouts are not restored")

    def made(leaf: Any, *given: Any) -> Any:
        leaf = as_data(leaf)
        sharding = given[0] if given else getattr(leaf, "sharding", None)
        return _restore_args(leaf, sharding, set_global_shape, strict)

    return jax.tree.map(made, target, *([] if sharding_tree is None else [sharding_tree]))


def _restore_args(leaf: Any, sharding: Any, has_shape: bool, strict: bool) -> Any:
    if leaf is PLACEHOLDER or isinstance(leaf, (str, bool, int, float)):
        return args.RestoreArgs(restore_type=type(leaf))
    if isinstance(leaf, metadata.StringMetadata):
        return args.RestoreArgs(restore_type=str)
    if isinstance(leaf, metadata.ScalarMetadata):
        kind = type(np.zeros((), leaf.dtype).item())
        return args.RestoreArgs(restore_type=kind, dtype=leaf.dtype)
    if not hasattr(leaf, "dtype"):
        raise ValueError(f"Unsupported type: {type(leaf)}")
    if isinstance(leaf, np.ndarray) or (sharding is None and not isinstance(leaf, jax.Array)):
        return args.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return args.ArrayRestoreArgs(
        sharding=sharding,
        global_shape=None if is_key or not has_shape else tuple(leaf.shape),
        dtype=leaf.dtype,
        strict=strict,
    )


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    *,
    min_interval_secs: int = 0,
    timeout_fn: Callable[[], bool] | None = None,
    **options: Any,
) -> Iterator[int]:
    """Yields the newest step whenever there is a new one; see `wait_for_new_checkpoint`."""
    newest = None
    while True:
        until = None if newest is None else newest + 1
        with wait_for_new_checkpoint(
            checkpoint_dir, until_step=until, timeout_fn=timeout_fn, **options
        ) as found:
            if found != -1:
                start_s = time.monotonic()
                yield (newest := found)
                time.sleep(max(0.0, start_s + min_interval_secs - time.monotonic()))
            elif timeout_fn is None or _asks(checkpoint_dir, timeout_fn):
                return


def _asks(checkpoint_dir: str | os.PathLike[str], timeout_fn: Callable[[], bool]) -> bool:
    """Asks `timeout_fn` in process 0 for all."""
    name = f"end of the steps in {os.fspath(checkpoint_dir)}"
    return lead(current(), name, lambda: bool(timeout_fn()), where=name, meets=True)


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    snapshot_dir: Any = None,
    **naming: Any,
) -> Iterator[int]:
    """Waits for a step, and yields it; -1 after the timeout, unless `timeout_fn` is not true.

    Process 0 looks, and calls `timeout_fn`, for all processes, once all have made this call. Takes
    no snapshot: a step may be deleted later, but not while jaxckpt restores it.
    """
    del snapshot_dir  # a step is leased while it is restored
    for of_snapshots in ("set_immutable", "ignore_snapshot_errors"):
        naming.pop(of_snapshots, None)
    format = naming.pop("step_name_format", None) or step.standard_name_format(**naming)
    processes, start_s = current(), time.monotonic()

    def look() -> int | None:
        """Returns a step, -1 after the timeout, or None to go on in another round."""
        end_s = time.monotonic() + processes.timeout_s / 10
        while True:
            steps = [int(s.step) for s in format.find_all(epath.Path(checkpoint_dir))]
            newest = max(steps, default=-1)
            if newest >= 0 and (until_step is None or newest >= until_step):
                return newest
            wakes_s = time.monotonic() + seconds_to_sleep
            is_late = timeout is not None and wakes_s > start_s + timeout
            if is_late and (timeout_fn is None or timeout_fn()):
                return -1
            time.sleep(seconds_to_sleep)
            if wakes_s > end_s:
                return None

    name = f"new checkpoint in {os.fspath(checkpoint_dir)}, until_step={until_step}"
    processes.gather(name, None, len)  # so that no call gets the answer of an earlier one
    call, found = f"{name}/{processes.uses(name)}", None
    rounds = processes.within(processes.timeout_s + seconds_to_sleep)
    while found is None:
        found = lead(rounds, call, look, where=name)
    yield found
