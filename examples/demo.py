"""Trains a model while killing, stopping, resuming and forking the run, and checks the results.

    python examples/demo.py            takes about a minute; --run DIR keeps the files
    python examples/demo.py --config configs/demo_quick.py
    python examples/demo.py --gin_file configs/demo.gin

A small character-level transformer (Flax NNX, AdamW) learns the source of Python's own standard
library on eight virtual CPU devices. `train` below is the training loop and contains all the code
for checkpoints. The demo runs it five times, each time in a new process:

    uninterrupted   mesh 4x2, all steps: the reference for the other processes
    killed          mesh 4x2; gets SIGKILL in the middle of a save
    stopped         resumes in the same root; gets SIGTERM in the middle of a save, saves its
                    current step, and exits
    finished        resumes in the same root and runs to the end: the same bits
    forked          starts at the step where the run was stopped, as a separate run on half of the
                    devices: the same curve, except for rounding

It exits with 1 if any of its claims does not hold.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.types import StepInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of the model and of the run; `configs/demo.py` explains the fields."""

    steps: int
    kill_from: int
    stop_from: int
    width: int
    heads: int
    layers: int
    batch: int
    length: int


OpenManager = Callable[[Path], jaxckpt.CheckpointManager]  # opens the run in a directory

CONFIG = Path(__file__).parents[1] / "configs" / "demo.py"

# Other devices sum in another order, so two meshes differ by some 1e-6. Without the saved PRNG key,
# data position or moments of Adam, the difference is over 1e-2.
TOLERANCE = 1e-4


# --- the model -------------------------------------------------------------------------------


def weight(rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str | None, ...]) -> nnx.Param:
    """Returns a matrix, annotated with the mesh axes that its dimensions are split over."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
    return nnx.Param(init(rngs.params(), shape))


class Block(nnx.Module):
    """Attention and an MLP, split over `model`, and also over `data` to save memory."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.norm_1 = nnx.Param(jnp.ones(config.width))
        self.qkv = weight(rngs, (config.width, 3 * config.width), ("data", "model"))
        self.out = weight(rngs, (config.width, config.width), ("model", "data"))
        self.norm_2 = nnx.Param(jnp.ones(config.width))
        self.up = weight(rngs, (config.width, 4 * config.width), ("data", "model"))
        self.down = weight(rngs, (4 * config.width, config.width), ("model", "data"))
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        batch, length, width = x.shape
        qkv = (normalize(x) * self.norm_1) @ self.qkv
        q, k, v = jnp.split(qkv.reshape(batch, length, self.heads, -1), 3, axis=-1)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        attended = attended.reshape(batch, length, width)
        x = by_batch(x + self.dropout(attended @ self.out, rngs=rngs))
        hidden = jax.nn.gelu((normalize(x) * self.norm_2) @ self.up)
        return by_batch(x + self.dropout(hidden @ self.down, rngs=rngs))


class Transformer(nnx.Module):
    """Maps characters to logits of the next character."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embedding = weight(rngs, (128, config.width), (None, "model"))
        self.position = weight(rngs, (config.length, config.width), (None, "model"))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.Param(jnp.ones(config.width))

    def __call__(self, characters: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = by_batch(self.embedding[characters] + self.position)
        for block in self.blocks:
            x = block(x, rngs)
        return (normalize(x) * self.norm) @ self.embedding.T


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def by_batch(x: jax.Array) -> jax.Array:
    """Splits activations like the batch, not like the weights."""
    return jax.lax.with_sharding_constraint(x, P("data"))


# --- the data --------------------------------------------------------------------------------


def read_text() -> np.ndarray[Any, Any]:
    """Reads part of the standard library's source as uint8[characters]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = "".join(file.read_text(errors="replace") for file in files)
    return np.frombuffer(text.encode("ascii", errors="replace"), np.uint8)


class Batches:
    """Yields batches; each is a function of its number, so only the number has to be saved."""

    def __init__(self, config: Config) -> None:
        self.config, self.text, self.position = config, read_text(), 0

    def __next__(self) -> np.ndarray[Any, Any]:
        batch, length = self.config.batch, self.config.length
        key = jax.random.fold_in(jax.random.key(1), self.position)
        starts = jax.random.randint(key, (batch, 1), 0, len(self.text) - length)
        self.position += 1
        return self.text[np.asarray(starts) + np.arange(length + 1)].astype(np.int32)

    def get_state(self) -> dict[str, int]:
        """Returns the state for the manager to save."""
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        """Sets the state after the manager has restored it."""
        self.position = state["position"]


# --- the training loop -----------------------------------------------------------------------


def train(
    config: Config, manager: jaxckpt.CheckpointManager, log_file: Path, options: argparse.Namespace
) -> None:
    """Trains from the newest step of the run to the end, or until a signal stops the job."""
    mesh_shape = tuple(map(int, options.mesh.split("x")))
    mesh = jax.make_mesh(mesh_shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    optimizer = optax.adamw(1e-3)
    data = Batches(config)

    def new_state() -> dict[str, Any]:
        params = nnx.state(Transformer(config, nnx.Rngs(0)), nnx.Param)
        return {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(2)}

    # Shapes, dtypes and the shardings of the model on this mesh; nothing is computed.
    jax.set_mesh(mesh)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    abstract = jax.eval_shape(new_state)
    shardings = nnx.as_pure(nnx.get_named_sharding(abstract, mesh))

    init = jax.jit(lambda: nnx.as_pure(new_state()), out_shardings=shardings)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        key, dropout_key = jax.random.split(state["key"])

        def loss_of(params: Any) -> jax.Array:  # nnx.State
            model = nnx.merge(graph, params)
            logits = model(batch[:, :-1], nnx.Rngs(dropout=dropout_key))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, loss

    start, blocked_s = time.monotonic(), []
    number = signal.Signals[options.signal] if options.signal else None
    with manager, log_file.open("w", buffering=1) as log:
        # Starts from scratch, or restores the newest complete step with these shardings.
        state, first_step = manager.restore_or(init, items={"data": data})
        if first_step:
            say(f"restored step {first_step} onto {mesh.size} devices in {since(start)}")
        for step in range(first_step + 1, config.steps + 1):
            batch = jax.device_put(next(data), NamedSharding(mesh, P("data")))
            state, loss = train_step(state, batch)
            print(json.dumps({"step": step, "loss": float(loss)}), file=log)
            if step == first_step + 1:
                say(f"compiled the training step, {since(start)} after the start")
            before = time.monotonic()
            handle = manager.save(
                step,
                state,
                items={"data": data},
                metrics={"loss": loss},
                force=step == config.steps,
                custom_metadata={"mesh": options.mesh},
            )  # from here on, the next training step may donate `state`
            if handle is not None:
                blocked_s.append(time.monotonic() - before)
                print(json.dumps({"saved": step}), file=log)
                is_due = number is not None and step >= options.signal_from
                if is_due and signal_while_saving(handle, number):
                    number = None  # only once
                    print(json.dumps({"signalled": step}), file=log)
            if manager.reached_preemption(step):
                print(json.dumps({"preempted": step}), file=log)
                say(f"received the signal, and saved step {step}")
                break
    ms = 1e3 * float(np.median(blocked_s))
    say(f"reached step {step} in {since(start)}; a save blocks training for {ms:.0f} ms (median)")


def signal_while_saving(handle: jaxckpt.SaveHandle, number: signal.Signals) -> bool:
    """Sends a signal to this process once part of the data is on disk; False if it was too late."""
    target = Path(handle.path)
    while not handle.done():
        sizes = [size_of(path) for path in uncommitted(target.parent, int(target.name))]
        if sum(sizes) > 1_000_000 and not handle.done():
            os.kill(os.getpid(), number)
            return True
    return False


def uncommitted(run: Path, step: int) -> list[Path]:
    """Returns the temporary paths of a save of this step that has not been committed."""
    return [path for path in run.iterdir() if path.name.startswith(f"{step}.")]


def size_of(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except FileNotFoundError:  # a file was renamed in the meantime
        return 0


# --- the demo --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The training log of one process; JSON keeps every bit of a loss."""

    losses: dict[int, float]
    saved: list[int]
    signalled: list[int]
    preempted: list[int]


def read_log(file: Path) -> Log:
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    events = {
        name: [row[name] for row in rows if name in row]
        for name in ("saved", "signalled", "preempted")
    }
    return Log(losses={row["step"]: row["loss"] for row in rows if "loss" in row}, **events)


def demo(config: Config, open_manager: OpenManager, root: Path, config_options: list[str]) -> bool:
    """Runs all processes, prints the results, and returns whether all claims hold."""
    start = time.monotonic()
    straight, run, half = root / "uninterrupted", root / "run", root / "half"
    claims: dict[str, bool] = {}
    with open_manager(straight) as manager:  # a wrong option raises before anything is trained
        keep = manager.keep

    def launch(name: str, run: Path, mesh: str, *options: object) -> tuple[int, Log]:
        log_file = root / f"{name}.jsonl"
        own = ("--run", run, "--log", log_file, "--mesh", mesh, *options)
        return launch_training(mesh, *own, *config_options), read_log(log_file)

    print(f"1. Train {config.steps} steps without interruption: 8 devices, mesh 4x2")
    code, whole = launch("uninterrupted", straight, "4x2")
    if code != 0:
        print(f"FAIL: exit code {code}")
        return False

    print("\n2. Train the same again, with a SIGKILL in the middle of a save")
    kill = ("--signal", "SIGKILL", "--signal-from", config.kill_from)
    code, killed = launch("killed", run, "4x2", *kill)
    last = max(killed.losses)
    parts = uncommitted(run, last)
    if code != -signal.SIGKILL or len(parts) != 1 or (run / str(last)).exists():
        print(f"FAIL: exit code {code}, {run} holds {os.listdir(run)}: not killed in a save")
        return False
    claims[f"SIGKILL came while the save of step {last} was writing"] = True
    say(f"it left {parts[0].name}: {size_of(parts[0]) / 1e6:.1f} MB, not committed")
    newest, report = jaxckpt.open(run), jaxckpt.verify(run)  # both use the newest good step
    say(f"{str(newest).splitlines()[0]}\n   {report}")
    resumed_from = max(step for step in killed.saved if step != last)
    claims[f"step {resumed_from} is the newest complete checkpoint, and passes verify"] = (
        report.ok and Path(newest.path).name == str(resumed_from)
    )

    print(
        "\n3. Resume in a new process: 8 devices, mesh 4x2; with a SIGTERM in the middle of a save"
    )
    stop = ("--signal", "SIGTERM", "--signal-from", config.stop_from)
    code, stopped = launch("stopped", run, "4x2", *stop)
    last_of_stopped = max(stopped.losses)
    if code != 0 or not stopped.signalled or stopped.preempted != [last_of_stopped]:
        print(f"FAIL: exit code {code}, {stopped}: not stopped in a save")
        return False
    claims |= {
        f"the leftovers of the SIGKILL are gone, and step {last} is saved": (
            not uncommitted(run, last) and (run / str(last)).is_dir()
        ),
        f"SIGTERM came while the save of step {stopped.signalled[0]} was writing": True,
        f"it saved step {last_of_stopped} completely, reported it and exited with 0": (
            Path(jaxckpt.open(run).path).name == str(last_of_stopped) and jaxckpt.verify(run).ok
        ),
    }

    print(f"\n4. Fork step {last_of_stopped} into a separate run")
    fork = Path(jaxckpt.fork(run / str(last_of_stopped), half))
    say(f"{fork.relative_to(root)} from {jaxckpt.open(fork).lineage}")
    claims[f"the fork has all {size_of(fork) / 1e6:.1f} MB of step {last_of_stopped} as links"] = (
        is_linked(run / str(last_of_stopped), fork)
    )

    print("\n5. Resume and run to the end: 8 devices, mesh 4x2, as before")
    finish_code, finished = launch("finished", run, "4x2")

    print("\n6. Resume from the fork on half of the devices: 4 devices, mesh 2x2")
    half_code, forked = launch("forked", half, "2x2")

    print("\n7. The tree of the fork's newest checkpoint")
    print(jaxckpt.open(half))

    print("\n8. Losses")
    rows = {1, resumed_from, resumed_from + 1, last, last_of_stopped, last_of_stopped + 1}
    curves = {"killed": killed, "stopped": stopped, "finished": finished, "forked": forked}
    curves = {"uninterrupted": whole, **curves}
    print_losses(
        sorted({*rows, (last_of_stopped + config.steps) // 2, config.steps}),
        {name: log.losses for name, log in curves.items()},
    )

    print("\n9. Verdict")
    parts_of_curve = {
        f"steps 1-{last}, killed": (killed, range(1, last + 1)),
        f"steps {resumed_from + 1}-{last_of_stopped}, stopped": (
            stopped,
            range(resumed_from + 1, last_of_stopped + 1),
        ),
        f"steps {last_of_stopped + 1}-{config.steps}, finished": (
            finished,
            range(last_of_stopped + 1, config.steps + 1),
        ),
    }
    for name, (log, steps) in parts_of_curve.items():
        claims[f"{name}: losses bit-equal"] = log.losses == {n: whole.losses[n] for n in steps}
    rest = range(last_of_stopped + 1, config.steps + 1)
    farthest = max(abs(forked.losses.get(n, np.inf) - whole.losses[n]) for n in rest)
    losses = killed.losses | stopped.losses | finished.losses
    saved = {  # the losses of the steps that each run has saved
        straight: {n: whole.losses[n] for n in whole.saved},
        run: {n: losses[n] for n in [*killed.saved, *stopped.saved, *finished.saved]},
        half: {n: (stopped.losses | forked.losses)[n] for n in [last_of_stopped, *forked.saved]},
    }
    kept = {path: steps_in(path) for path in saved}
    reports = [jaxckpt.verify(path / str(step)) for path in saved for step in kept[path]]
    names = f"steps {rest[0]}-{rest[-1]}"
    is_same_end = is_same_tree(straight, run)
    claims |= {
        f"step {config.steps}, finished: every leaf of the state equal": is_same_end,
        f"{names}, forked on 2x2: losses within {TOLERANCE:g} ({farthest:.0e})": (
            farthest <= TOLERANCE
        ),
        "the last two processes exited with 0": finish_code == half_code == 0,
        "the loss fell": whole.losses[config.steps] < 0.9 * whole.losses[1],
        f"of steps {sorted(saved[run])} the policy kept {kept[run]}, as expected": all(
            kept[path] == to_keep(keep, saved[path]) for path in saved
        ),
        f"all {len(reports)} checkpoints pass verify": all(report.ok for report in reports),
    }
    for claim, holds in claims.items():
        say(f"{'ok  ' if holds else 'FAIL'} {claim}")
    passed = all(claims.values())
    print(f"\n{'ALL CLAIMS HOLD' if passed else 'SOME CLAIMS DO NOT HOLD'} ({since(start)})")
    return passed


def launch_training(mesh: str, *options: object) -> int:
    """Trains in a new process with a virtual device per mesh position; returns the exit code."""
    count = int(np.prod([int(n) for n in mesh.split("x")]))
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    command = [sys.executable, __file__, "--phase", "train", *map(str, options)]
    return subprocess.run(command, env=env, check=False).returncode


def is_linked(source: Path, fork: Path) -> bool:
    """Whether every file of every item of a fork is a file of its source: no bytes were copied."""
    files = [file for file in fork.glob("*/**/*") if file.is_file()]
    return bool(files) and all(file.samefile(source / file.relative_to(fork)) for file in files)


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name) for path in run.iterdir() if path.name.isdecimal())


def to_keep(keep: jaxckpt.KeepPolicy, losses: dict[int, float]) -> list[int]:
    """Returns the steps that the policy should have kept, if none of them is old."""
    infos = [StepInfo(step=n, saved_s=0.0, metrics={"loss": loss}) for n, loss in losses.items()]
    return sorted(keep.kept(infos, now_s=0.0))


def print_losses(steps: list[int], runs: dict[str, dict[int, float]]) -> None:
    print("   step" + "".join(f"{name:>15}" for name in runs))
    for step in steps:
        cells = (f"{run[step]:.7f}" if step in run else "" for run in runs.values())
        print(f"   {step:4}" + "".join(f"{cell:>15}" for cell in cells))


def is_same_tree(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same tree."""
    trees = [jaxckpt.restore(run, as_numpy=True) for run in (a, b)]
    return jax.tree.all(jax.tree.map(lambda one, other: bool(np.all(one == other)), *trees))


def say(text: str) -> None:
    print(f"   {text}")


def since(start: float) -> str:
    return f"{time.monotonic() - start:.1f} s"


def read_config(options: argparse.Namespace) -> tuple[Config, OpenManager]:
    """Returns the sizes, and a function that opens the run in a directory."""
    if options.gin_file is not None:
        import gin

        from jaxckpt.integrations import gin as jaxckpt_gin

        gin.add_config_file_search_path(str(CONFIG.parent))  # for `include`
        new_config = gin.external_configurable(Config, module="demo")
        jaxckpt_gin.load([options.gin_file])
        return new_config(), jaxckpt_gin.CheckpointManager
    found = runpy.run_path(str(options.config))["get_config"]()
    checkpoint = found.pop("checkpoint", {})
    names = [field.name for field in fields(Config)]
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(name, [*names, "checkpoint"], n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(names)}."
            raise TypeError(f"{options.config} has no field {name!r}. {hint}")

    def open_manager(run: Path) -> jaxckpt.CheckpointManager:
        return jaxckpt.CheckpointManager.from_config(checkpoint, directory=run)

    return Config(**found), open_manager


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills and resumes a training run.")
    parser.add_argument("--run", type=Path, help="a new directory, in which all files are kept")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, default=CONFIG, help="a file with get_config()")
    source.add_argument("--gin_file", type=Path, help="a gin file to use instead of --config")
    own = parser.add_argument_group("for the processes that the demo starts")
    own.add_argument("--phase", choices=["demo", "train"], default="demo")
    own.add_argument("--mesh")
    own.add_argument("--log", type=Path)
    own.add_argument("--signal", choices=["SIGKILL", "SIGTERM"])
    own.add_argument("--signal-from", type=int)
    options = parser.parse_args()
    config, open_manager = read_config(options)
    jax.config.update("jax_platforms", "cpu")
    logging.basicConfig(format="   jaxckpt: %(message)s")

    if options.phase == "train":
        train(config, open_manager(options.run), options.log, options)
        return 0
    config_options = ["--config", str(options.config)]
    if options.gin_file is not None:
        config_options = ["--gin_file", str(options.gin_file)]
    with tempfile.TemporaryDirectory(prefix="jaxckpt-demo-") as folder:
        root = (options.run or Path(folder, "demo")).resolve()
        root.mkdir(parents=True)
        return 0 if demo(config, open_manager, root, config_options) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # in order with the output of the other processes
    sys.exit(main())
