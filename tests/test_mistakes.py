"""Natural mistakes: each error says where, what was wanted, what was found and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, SavePolicy


def make_state() -> dict[str, Any]:
    params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": 7}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a checkpoint `one`, a run `run` and an empty directory."""
    folder = tmp_path_factory.mktemp("mistakes")
    state = make_state()
    jaxckpt.save(folder / "one", state)
    with CheckpointManager(folder / "run") as manager:
        for step in (10, 20, 30):
            manager.save(step, state, metrics={"eval/loss": 1 / step})
    (folder / "empty").mkdir()
    (folder / "file").write_bytes(b"text\n")
    return folder


@pytest.fixture
def state():
    return make_state()


def managed(call: Callable[[CheckpointManager], object], **options: Any) -> Callable[..., object]:
    """A call of a manager of the run, as a call with the directory and a state."""

    def within(state: dict[str, Any]) -> object:
        del state
        with CheckpointManager("run", **options) as manager:
            return call(manager)

    return within


def closed(state: dict[str, Any]) -> None:
    manager = CheckpointManager("new")
    manager.close()
    manager.save(1, state)


def donated(_: object) -> None:
    array = jnp.ones(3)
    array.delete()
    jaxckpt.save("new", {"a": array})


def in_jit(_: object) -> None:
    jax.jit(lambda x: jaxckpt.save("new", {"a": x}))(jnp.ones(3))


def restored_in_jit(_: object) -> None:
    like = {"step": 0, "params": {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}}
    jax.jit(lambda like: jaxckpt.restore("one", like))(like)


def measured_in_jit(_: object) -> None:
    with jaxckpt.CheckpointManager("measured") as manager:
        jax.jit(lambda x: manager.save(1, {}, metrics={"loss": x}))(1.0)


def wide(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "params": {"w": jnp.ones((8, 5)), "b": jnp.zeros(4)}}


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "params": {"kernel": jnp.ones((8, 4)), "b": jnp.zeros(4)}}


def of_ints(state: dict[str, Any]) -> dict[str, Any]:
    ints = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), state["params"])
    return {**state, "params": ints}


ROWS = NamedSharding(Mesh(np.array(jax.devices()).reshape(-1), ("x",)), P(None, "x"))
UNKNOWN: Any = jaxckpt
FROM = {name: getattr(jaxckpt, name) for name in ("save", "restore", "fork", "diff", "open")}
SAVE, RESTORE, FORK, DIFF, OPEN = (FROM[n] for n in ("save", "restore", "fork", "diff", "open"))
KEEP: Any = KeepPolicy
EVERY: Any = SavePolicy
MANAGER: Any = CheckpointManager

# What was done, and texts that the error contains: where, wanted, found, next.
MISTAKES: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "a path misspelt": (
        lambda s: RESTORE("onee"),
        ("onee: no such file", "contains empty, file, one"),
    ),
    "a step missing": (
        lambda s: RESTORE("run/40"),
        ("run/40: no such file", "contains 10, 20, 30"),
    ),
    "a file that is none": (
        lambda s: RESTORE("file"),
        ("file is no checkpoint", "Flax msgpack file"),
    ),
    "an empty directory": (lambda s: RESTORE("empty"), ("empty is not a checkpoint", "or a run")),
    "a run without steps": (
        lambda s: (jaxckpt.CheckpointManager("new").close(), RESTORE("new")),
        ("new is a run without a committed step yet",),
    ),
    "a directory of weights": (
        lambda s: (Path("hf").mkdir(), Path("hf/model.safetensors").touch(), RESTORE("hf")),
        ("hf is not a checkpoint", "hf/model.safetensors"),
    ),
    "a function as target": (
        lambda s: jaxckpt.restore("one", lambda: 1),
        ("(the tree itself)", "jax.eval_shape"),
    ),
    "saved into the root": (lambda s: SAVE("/", s), ("/ is no path for", "such as /first")),
    "a text as step of a fork": (
        lambda s: FORK("run", "new", step="7"),
        ("fork: step must be an",),
    ),
    "settings of a store as a dict": (
        lambda s: UNKNOWN.use_store("s3://bucket", {"region": "eu-1"}),
        ("settings must be StoreSettings(...), got {'region': 'eu-1'}",),
    ),
    "a text of seconds of a store": (
        lambda s: UNKNOWN.StoreSettings(timeout_s="30"),
        ("timeout_s must be above 0 and below 1e+09, got '30'",),
    ),
    "no limit of time of a store": (
        lambda s: UNKNOWN.StoreSettings(timeout_s=float("inf")),
        ("timeout_s must be above 0 and below 1e+09, got inf",),
    ),
    "too many seconds of a store": (
        lambda s: UNKNOWN.StoreSettings(stall_s=1e300),
        ("stall_s must be above 0 and below 1e+09, got 1e+300",),
    ),
    "the profile as credentials of a store": (
        lambda s: UNKNOWN.StoreSettings(credentials="dev"),
        ("credentials must be one of ('default', 'environment', 'anonymous'), got 'dev'",),
    ),
    "a peer without a scheme": (
        lambda s: UNKNOWN.LocalTier("x", peers=["10.0.0.1:8080"]),
        ("without a query, got '10.0.0.1:8080'",),
    ),
    "half a try of a store": (
        lambda s: UNKNOWN.StoreSettings(tries=2.5),
        ("tries must be an int, got 2.5",),
    ),
    "saved twice": (lambda s: SAVE("one", s), ("one already exists", "overwrite")),
    "arguments swapped": (lambda s: SAVE(s, "x"), ("save: path must be", "save(path, tree)", "{")),
    "a function as leaf": (lambda s: SAVE("f", {"a": len}), ("a: is a", "Leave out, or convert")),
    "an object as leaf": (lambda s: SAVE("f", {"a": object()}), ("a: is a builtins.object",)),
    "an array of text": (lambda s: SAVE("f", {"a": np.array(["a"])}), ("a: has dtype <U1",)),
    "an object without a state as item": (
        managed(lambda m: m.save(40, {}, items={"data": object()})),
        ("item 'data'", "get_state and set_state can be an item"),
    ),
    "in jit": (in_jit, ("a: is traced; call save outside jit",)),
    "a target in jit": (restored_in_jit, ("params/b is traced; call restore outside jit",)),
    "metrics in jit": (measured_in_jit, ("'loss' is traced; call save outside jit",)),
    "a donated leaf": (donated, ("a: was deleted or donated", "before the call that donates")),
    "another shape": (
        lambda s: RESTORE("one", wide(s)),
        ("1 leaf of the target does not fit", "wanted float32[8,5]   saved float32[8,4]", "resize"),
    ),
    "a renamed layer": (
        lambda s: RESTORE("one", renamed(s)),
        ("params/kernel   wanted float32[8,4]   saved nothing", "'kernel'} lets 1 leaf fit"),
    ),
    "only the parameters as target": (
        lambda s: RESTORE("one", s["params"]),
        ("To restore only the part 'params'", "jaxckpt.open(path)['params'].restore(like)"),
    ),
    "only misspelt": (lambda s: RESTORE("one", only="paramz"), ("Did you mean 'params'?",)),
    "only with a part as target": (
        lambda s: RESTORE("one", s["params"], only="params"),
        ("`only` takes whole paths", "jaxckpt.open(path)['params']"),
    ),
    "a step by position": (
        lambda s: RESTORE("run", 20),
        ("`like` is a single value", "name it, as in step=20"),
    ),
    "a step of a manager by position": (
        managed(lambda m: m.restore(20)),
        ("`like` is a single value", "name it, as in step=20"),
    ),
    "restore(step=) of no step": (
        lambda s: RESTORE("run", step=25),
        ("run/25: no such file", "contains 10, 20, 30"),
    ),
    "a step of no run": (
        lambda s: RESTORE("one", step=25),
        ("one/25: no such file", "one is itself a checkpoint."),
    ),
    "restore(step='best')": (
        lambda s: RESTORE("run", step="best"),
        ("restore: step must be an int, got 'best'",),
    ),
    "restore(target=)": (lambda s: RESTORE("run", target=s), ("no argument 'target'", "'like'")),
    "restore(sharding=)": (lambda s: RESTORE("one", sharding=1), ("Did you mean 'shardings'?",)),
    "a third argument": (
        lambda s: OPEN("one", "state"),
        ("open does not take 'state' by position", "item='state'"),
    ),
    "a sharding of another rank": (
        lambda s: RESTORE("one", shardings=ROWS),
        ("not fit the sharding", "which is for 2 dimensions"),
    ),
    "a mesh as target": (lambda s: RESTORE("one", ROWS.mesh), ("got Mesh. Pass mesh=",)),
    "a mesh as shardings": (
        lambda s: RESTORE("one", shardings=ROWS.mesh),
        ("a sharding, or a PartitionSpec and mesh=, got Mesh(",),
    ),
    "a PartitionSpec without a mesh": (
        lambda s: RESTORE("one", shardings=P("x")),
        ("shardings: leaf opt/0/count needs a sharding, or a PartitionSpec and mesh=",),
    ),
    "shardings misspelt": (
        lambda s: RESTORE("one", shardings={"paramz": ROWS}),
        ("shardings: nothing is named paramz; the tree has opt/0/count",),
    ),
    "a mesh of a number": (lambda s: RESTORE("one", mesh=4), ("mesh must be a jax.sharding.Mesh",)),
    "a dtype misspelt": (lambda s: RESTORE("one", dtype="flaot32"), ("Did you mean 'float32'?",)),
    "ints for floats": (
        lambda s: RESTORE("one", of_ints(s)),
        ("wanted int32[4]     saved float32[4]", "dtype=... for a cast"),
    ),
    "a bad pattern": (lambda s: RESTORE("one", s, rename={"(": "x"}), ("re.escape",)),
    "max_to_keep": (lambda s: MANAGER("run", max_to_keep=3), ("keep=KeepPolicy(last=...)",)),
    "options=": (lambda s: MANAGER("run", options=None), ("save=SavePolicy(...)",)),
    "save=100": (lambda s: MANAGER("run", save=100), ("a SavePolicy(every_steps=...), got 100",)),
    "keep=3": (lambda s: MANAGER("run", keep=3), ("a KeepPolicy(last=...), got 3",)),
    "incremental=True": (
        lambda s: MANAGER("run", incremental=True),
        ("incremental must be 'auto' or False, got True",),
    ),
    "a list as metadata of a run": (
        lambda s: MANAGER("run", run_metadata=[1]),
        ("run_metadata must be a dict of JSON values: 'list' object is not a mapping",),
    ),
    "an option unknown": (lambda s: MANAGER("run", xyz=1), ("'xyz'. It has directory, save",)),
    "mode='read'": (lambda s: MANAGER("run", mode="read"), ("mode must be 'w' or 'r'",)),
    "a directory twice": (
        lambda s: MANAGER("run", "x", directory="x"),
        ("does not take 'x' by position",),
    ),
    "KeepPolicy(3)": (lambda s: KEEP(3), ("KeepPolicy does not take 3 by position", "last=3")),
    "KeepPolicy(lats=3)": (lambda s: KEEP(lats=3), ("no argument 'lats'", "'last'")),
    "best without metric": (lambda s: KEEP(best=2), ("KeepPolicy(best=2) needs metric=",)),
    "an odd mode": (
        lambda s: KEEP(best=2, metric="loss", mode="maximum"),
        ("mode must be 'min' or 'max', got 'maximum'",),
    ),
    "SavePolicy(interval=)": (lambda s: EVERY(interval=10), ("Did you mean 'every_steps'?",)),
    "SavePolicy(10)": (lambda s: EVERY(10), ("SavePolicy does not take 10", "every_steps=10")),
    "every_steps=-1": (
        lambda s: EVERY(every_steps=-1),
        ("every_steps must be at least 0, got -1",),
    ),
    "auto(mtbf=)": (lambda s: EVERY.auto(mtbf=9), ("Call SavePolicy.auto(mtbf_hours=...)",)),
    "a text of seconds": (lambda s: EVERY(every_seconds="15m"), ("must be a number, got '15m'",)),
    "step and state swapped": (
        managed(lambda m: m.save(make_state(), 1)),
        ("save(step, state): step must be an int, got {",),
    ),
    "an older step": (
        managed(lambda m: m.save(5, make_state())),
        ("step 5 is older than step 30", "manager.delete", "jaxckpt.fork"),
    ),
    "a step again with force": (
        managed(lambda m: m.save(30, make_state(), force=True)),
        ("run/30 already exists or is being saved", "delete it first (manager.delete)"),
    ),
    "saved over a run": (
        lambda s: SAVE("run", s),
        ("run is a directory but not a checkpoint, and contains 10, 20, 30", "run/NAME"),
    ),
    "a step of 1.0": (managed(lambda m: m.save(1.0, {})), ("step must be an int, got 1.0",)),
    "a step of True": (managed(lambda m: m.save(True, {})), ("step must be an int, got True",)),
    "metrics=0.5": (managed(lambda m: m.save(40, {}, metrics=0.5)), ("dict of numbers by name",)),
    "metrics of arrays": (
        managed(lambda m: m.save(40, {}, metrics={"loss": jnp.ones(3)})),
        ("metric 'loss' must be one number",),
    ),
    "items=[1]": (managed(lambda m: m.save(40, {}, items=[1])), ("dict of values by name",)),
    "step='bst'": (managed(lambda m: m.restore(step="bst")), ("Did you mean 'best'?",)),
    "step='newest'": (
        managed(lambda m: m.restore(step="newest")),
        ("Did you mean 'latest'?",),
    ),
    "step='30'": (managed(lambda m: m.restore(step="30")), ("Did you mean 30?",)),
    "args= of a restore": (managed(lambda m: m.restore(30, args=1)), ("Did you mean 'like'?",)),
    "restore_or(step=)": (
        managed(lambda m: m.restore_or(make_state, step=30)),
        ("restore_or takes no argument 'step'. Call restore(like, step=...)",),
    ),
    "best without policy": (managed(lambda m: m.restore(step="best")), ("KeepPolicy(metric=...)",)),
    "manager.restore of no step": (
        managed(lambda m: m.restore(step=25)),
        ("run has no committed step 25", "It has 10, 20, 30"),
    ),
    "restore_or with a value": (
        managed(lambda m: m.restore_or(make_state())),
        ("init must be a function that makes the first state, got {",),
    ),
    "an item missing": (
        managed(lambda m: m.restore_items(step=30, items={"ema": {}})),
        ("has no item 'ema'; it has metrics, state",),
    ),
    "pin of no step": (managed(lambda m: m.pin(77)), ("has no committed step 77",)),
    "delete of no step": (managed(lambda m: m.delete(77)), ("has no committed step 77",)),
    "an empty run": (
        lambda s: MANAGER("empty", mode="r").restore(),
        ("no committed step", "restore_or(init)"),
    ),
    "after close": (closed, ("is closed: close() was called", "Open another one")),
    "a leaf misspelt": (lambda s: OPEN("one")["params/v"], ("Did you mean 'params/w'?",)),
    "open(path)[0]": (lambda s: OPEN("one")[0], ("nothing at '0'", "It has opt, params, step")),
    "open(path)[1.5]": (lambda s: OPEN("one")[1.5], ("text or a tuple of keys, got 1.5",)),
    "gzip": (lambda s: SAVE("g", s, compression="gzip"), ("'zstd:<level>'", "got 'gzip'")),
    "no bucket": (lambda s: SAVE("gs:///x", s), ("gs://bucket/",)),
    "gcs://": (lambda s: SAVE("gcs://b/x", s), ("no storage for gcs://", "gs://?")),
    "https://": (lambda s: SAVE("https://b/x", s), ("no storage for https://", "Download it")),
    "hf://": (lambda s: RESTORE("hf://org/x"), ("huggingface_hub.snapshot_download",)),
    "a slash lost": (lambda s: SAVE("s3:/b/x", s), ("a URL that lost a '/'", "as a str")),
    "below a file": (lambda s: SAVE("file/x", s), ("file/x: the save failed", "Not a directory")),
    "where nothing can be made": (lambda s: SAVE("/proc/x", s), ("/proc/x", "Save elsewhere")),
    "diff of nothing": (lambda s: DIFF("one", "two"), ("two: no such file", "contains")),
    "an odd ending": (
        lambda s: jaxckpt.export_safetensors("one", "w.bin"),
        ("w.bin must end in .safetensors",),
    ),
    "a fork into a run": (lambda s: FORK("run/10", "run"), ("already has steps", "a new run")),
    "a fork of no step": (lambda s: FORK("one", "forked"), ("pass a number: fork(..., step=0)",)),
    "a name misspelt": (lambda s: UNKNOWN.CheckpointManger, ("Did you mean CheckpointManager?",)),
    "jaxckpt.load": (lambda s: UNKNOWN.load, ("Did you mean restore?",)),
    "jaxckpt.Checkpointer": (lambda s: UNKNOWN.Checkpointer, ("jaxckpt.orbax",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name, place, state, monkeypatch):
    """The error has each text of the table, and no value in it fills the screen."""
    call, texts = MISTAKES[name]
    monkeypatch.chdir(place)

    with pytest.raises(Exception) as caught:  # noqa: PT011  # the texts are compared
        call(state)

    message = str(caught.value)
    assert [text for text in texts if text not in message] == []
    assert max(map(len, message.split("\n"))) < 600


def test_a_metric_that_no_step_has_is_reported(place, monkeypatch, caplog):
    """`best_step` returns None, and the log lists the metrics of the steps."""
    monkeypatch.chdir(place)
    keep = KeepPolicy(best=1, metric="eval_loss")

    with CheckpointManager("run", mode="r", keep=keep) as manager:
        assert manager.best_step() is None
        problems = manager.problems

    assert "no step has a number 'eval_loss' in its metrics, which are eval/loss" in problems[0]
    assert problems[0] in caplog.text


def test_a_save_by_a_reader_warns_once(place, monkeypatch, caplog):
    """With mode="r" nothing is saved, which the log says at the first call."""
    monkeypatch.chdir(place)

    with CheckpointManager("run", mode="r") as manager:
        assert manager.save(40, {}) is None
        assert manager.save(50, {}) is None

    assert caplog.text.count("so nothing is saved") == 1
