"""A training run that saves in the background, is killed while it saves, and goes on elsewhere.

    python examples/demo.py            about a minute; --run DIR keeps the files
    python examples/demo.py --config configs/demo_quick.py

A small character-level transformer (Flax NNX, AdamW) learns the source of Python's own standard
library on eight virtual CPU devices. `train` below is the training loop, and all of its dealings
with checkpoints; the demo runs it four times, each time in a new process:

    uninterrupted   mesh 4x2, all steps: what the others are compared with
    killed          mesh 4x2; kills itself with SIGKILL in the middle of a save
    resumed 4x2     from the newest step that the killed run left, on the same mesh: the same bits
    resumed 2x2     from the same step on half of the devices: the same curve, but for rounding

It exits with 1 if anything that it claims is not so.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The size of everything; `configs/demo.py` says what each means."""

    steps: int
    save_every: int
    kill_from: int
    width: int
    heads: int
    layers: int
    batch: int
    length: int


CONFIG = Path(__file__).parents[1] / "configs" / "demo.py"

# Other devices sum in another order, hence some 1e-6 between runs on two meshes. Without the saved
# PRNG key, data position or moments of Adam it is over 1e-2.
TOLERANCE = 1e-4


# --- the model -------------------------------------------------------------------------------


def weight(rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str | None, ...]) -> nnx.Param:
    """A matrix, and the mesh axes that its dimensions are split over."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
    return nnx.Param(init(rngs.params(), shape))


class Block(nnx.Module):
    """Attention and an MLP, split over `model`; split over `data` too, only to save memory."""

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
    """Characters in, logits of the next character out."""

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
    """Splits activations as the batch is split, not as the weights are."""
    return jax.lax.with_sharding_constraint(x, P("data"))


# --- the data --------------------------------------------------------------------------------


def read_text() -> np.ndarray[Any, Any]:
    """Some of the standard library's source, as uint8[characters]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = "".join(file.read_text(errors="replace") for file in files)
    return np.frombuffer(text.encode("ascii", errors="replace"), np.uint8)


def read_batch(text: np.ndarray[Any, Any], position: int, config: Config) -> np.ndarray[Any, Any]:
    """A batch as a function of its number, so that the number is all there is to save."""
    key = jax.random.fold_in(jax.random.key(1), position)
    starts = jax.random.randint(key, (config.batch, 1), 0, len(text) - config.length)
    return text[np.asarray(starts) + np.arange(config.length + 1)].astype(np.int32)


# --- the training loop -----------------------------------------------------------------------


def train(
    config: Config, run: Path, mesh_text: str, restore: Path | None, kill_from: int | None
) -> None:
    """Trains, saves into `run/<step>` in the background, logs losses into `run.jsonl`."""
    mesh_shape = tuple(map(int, mesh_text.split("x")))
    mesh = jax.make_mesh(mesh_shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    optimizer = optax.adamw(1e-3)
    text = read_text()

    def new_state() -> dict[str, Any]:
        params = nnx.state(Transformer(config, nnx.Rngs(0)), nnx.Param)
        return {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(2)}

    # Shapes, dtypes and the shardings that the model asks for on this mesh; nothing is computed.
    jax.set_mesh(mesh)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    abstract = jax.eval_shape(new_state)
    shardings = nnx.as_pure(nnx.get_named_sharding(abstract, mesh))

    # Either from scratch, or from a checkpoint straight into those shardings.
    if restore is None:
        create = jax.jit(lambda: nnx.as_pure(new_state()), out_shardings=shardings)
        state, step, position = create(), 0, 0
    else:
        start = time.monotonic()
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            nnx.as_pure(abstract),
            shardings,
        )
        state = jaxckpt.restore(restore, {**like, "step": 0, "data": {"position": 0}})
        step, position = state.pop("step"), state.pop("data")["position"]
        say(f"restored step {step} onto {len(mesh.devices.flat)} devices in {since(start)}")

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

    start, first_step, handle, blocked_s = time.monotonic(), step, None, []
    with run.with_suffix(".jsonl").open("w", buffering=1) as log:
        while step < config.steps:
            batch = read_batch(text, position, config)
            state, loss = train_step(state, jax.device_put(batch, NamedSharding(mesh, P("data"))))
            step, position = step + 1, position + 1
            log.write(json.dumps({"step": step, "loss": float(loss)}) + "\n")
            if step == first_step + 1:
                say(f"compiled the training step in {since(start)}")
            if step % config.save_every == 0:
                if handle is not None:
                    handle.result()  # raises what went wrong in the save before
                before = time.monotonic()
                handle = jaxckpt.save_async(
                    run / str(step),
                    {**state, "step": step, "data": {"position": position}},
                    custom_metadata={"mesh": mesh_text},
                )  # from here on the next training step may donate `state`
                blocked_s.append(time.monotonic() - before)
                if kill_from is not None and step >= kill_from:
                    die_while_saving(handle)
    handle.result()
    ms = 1e3 * float(np.median(blocked_s))
    say(f"to step {step} in {since(start)}; a save holds training up for {ms:.0f} ms (median)")


def die_while_saving(handle: jaxckpt.SaveHandle) -> None:
    """Kills this process when a part of the data is on disk; returns if the save was quicker."""
    target = Path(handle.path)
    while not handle.done():
        sizes = [size_of(path) for path in uncommitted(target.parent, int(target.name))]
        if sum(sizes) > 1_000_000 and not handle.done():
            os.kill(os.getpid(), signal.SIGKILL)


def uncommitted(run: Path, step: int) -> list[Path]:
    """What a save of this step works in until it commits."""
    return [path for path in run.iterdir() if path.name.startswith(f"{step}.")]


def size_of(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except FileNotFoundError:  # a file that was renamed meanwhile
        return 0


# --- the demo --------------------------------------------------------------------------------


def demo(config: Config, root: Path, config_file: Path) -> bool:
    """Runs everything, prints it, and says whether all claims hold."""
    start = time.monotonic()
    size = ("--config", config_file)
    claims: dict[str, bool] = {}
    run = root / "run"  # that is killed and goes on

    print(f"1. Train {config.steps} steps without interruption: 8 devices, mesh 4x2")
    launch(root / "uninterrupted", "4x2", *size)

    print("\n2. The same again, with a SIGKILL in the middle of a save")
    code = launch(run, "4x2", "--kill-from", config.kill_from, *size, check=False)
    before_kill = read_losses(root / "run.jsonl")
    last = max(before_kill)
    parts = uncommitted(run, last)
    if code != -signal.SIGKILL or len(parts) != 1 or (run / str(last)).exists():
        print(f"FAIL: exit code {code}, {run} holds {os.listdir(run)}: not killed in a save")
        return False
    claims[f"SIGKILL came while the save of step {last} was writing"] = True
    say(f"it left {parts[0].name}: {size_of(parts[0]) / 1e6:.1f} MB, not committed")

    print("\n3. What can be restored")
    newest = jaxckpt.open(run)  # of a run's root: its newest good step. Reads metadata only.
    saved_step = newest["step"].restore()
    report = jaxckpt.verify(run)
    say(f"{str(newest).splitlines()[0]}\n   {report}")
    claims[f"the newest whole checkpoint is step {saved_step}, and passes verify"] = (
        report.ok and saved_step == last - config.save_every
    )

    print("\n4. Resume from it in a new process: 8 devices, mesh 4x2, as before")
    launch(root / "resumed-4x2", "4x2", "--restore", run, *size)

    print("\n5. Resume from it on half of the devices, and go on saving there: 4 devices, mesh 2x2")
    launch(run, "2x2", "--restore", run, *size)
    claims[f"saving step {last} again removed what the kill had left"] = (
        not uncommitted(run, last) and (run / str(last)).is_dir()
    )

    print("\n6. The newest checkpoint of that run, as a tree")
    print(jaxckpt.open(run))

    print("\n7. Losses")
    curve = read_losses(root / "uninterrupted.jsonl")
    same, other = read_losses(root / "resumed-4x2.jsonl"), read_losses(root / "run.jsonl")
    rest = range(saved_step + 1, config.steps + 1)
    print_losses(
        sorted({1, saved_step, rest[0], last, last + 1, (last + config.steps) // 2, config.steps}),
        {"uninterrupted": curve, "killed": before_kill, "resumed 4x2": same, "resumed 2x2": other},
    )

    print("\n8. Verdict")
    farthest = max(abs(other.get(step, np.inf) - curve[step]) for step in rest)
    reports = [jaxckpt.verify(path) for path in root.glob("*/*")]
    names = f"steps {rest[0]}-{rest[-1]}"
    start_of_curve = {step: curve[step] for step in range(1, last + 1)}
    rest_of_curve = {step: curve[step] for step in rest}
    is_same_end = is_same_tree(root / "uninterrupted", root / "resumed-4x2")
    claims |= {
        f"steps 1-{last}, killed: losses bit-equal": before_kill == start_of_curve,
        f"{names}, resumed on 4x2: losses bit-equal": same == rest_of_curve,
        f"step {rest[-1]}, resumed on 4x2: every leaf of the state equal": is_same_end,
        f"{names}, resumed on 2x2: losses within {TOLERANCE:g} ({farthest:.0e})": (
            farthest <= TOLERANCE
        ),
        "the loss fell": curve[config.steps] < 0.9 * curve[1],
        f"all {len(reports)} checkpoints pass verify": all(report.ok for report in reports),
    }
    for claim, holds in claims.items():
        say(f"{'ok  ' if holds else 'FAIL'} {claim}")
    passed = all(claims.values())
    print(f"\n{'ALL CLAIMS HOLD' if passed else 'SOME CLAIMS DO NOT HOLD'} ({since(start)})")
    return passed


def launch(run: Path, mesh: str, *options: object, check: bool = True) -> int:
    """Trains in a new process with a virtual device for each place of the mesh; its exit code."""
    count = int(np.prod([int(n) for n in mesh.split("x")]))
    command = [__file__, "--phase", "train", "--run", run, "--mesh", mesh, *options]
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    return subprocess.run([sys.executable, *map(str, command)], env=env, check=check).returncode


def read_losses(log: Path) -> dict[int, float]:
    """Losses by step. JSON keeps every bit of them."""
    rows = map(json.loads, log.read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def print_losses(steps: list[int], runs: dict[str, dict[int, float]]) -> None:
    print("   step" + "".join(f"{name:>15}" for name in runs))
    for step in steps:
        cells = (f"{run[step]:.7f}" if step in run else "" for run in runs.values())
        print(f"   {step:4}" + "".join(f"{cell:>15}" for cell in cells))


def is_same_tree(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same tree, whatever is in it."""
    trees = [jaxckpt.restore(run, as_numpy=True) for run in (a, b)]
    return jax.tree.all(jax.tree.map(lambda one, other: bool(np.all(one == other)), *trees))


def say(text: str) -> None:
    print(f"   {text}")


def since(start: float) -> str:
    return f"{time.monotonic() - start:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description="A training run that is killed, and goes on.")
    parser.add_argument("--run", type=Path, help="a new directory, to keep all of it")
    parser.add_argument("--config", type=Path, default=CONFIG, help="a file with get_config()")
    own = parser.add_argument_group("for the processes that the demo starts")
    own.add_argument("--phase", choices=["demo", "train"], default="demo")
    own.add_argument("--mesh")
    own.add_argument("--restore", type=Path)
    own.add_argument("--kill-from", type=int)
    options = parser.parse_args()
    config = Config(**runpy.run_path(str(options.config))["get_config"]())
    jax.config.update("jax_platforms", "cpu")

    if options.phase == "train":
        train(config, options.run, options.mesh, options.restore, options.kill_from)
        return 0
    with tempfile.TemporaryDirectory(prefix="jaxckpt-demo-") as folder:
        root = (options.run or Path(folder, "demo")).resolve()
        root.mkdir(parents=True)
        return 0 if demo(config, root, options.config) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # in order with what the other processes print
    sys.exit(main())
