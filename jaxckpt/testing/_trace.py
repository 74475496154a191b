"""Records a training loop after each step, and finds the kind of difference between two runs.

A run is recorded without its values: a digest of each leaf, and some of its numbers, which show
whether a difference is one of rounding.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

import numpy as np

Kind = Literal[
    "data order",
    "rng",
    "reduction order",
    "state",
    "unsaved value",
    "not deterministic",
    "not resumed",
]

_SAMPLED: Final = 64  # values of each array, to show and to compare in size
_ROUNDING: Final = 16  # in units of the dtype's precision: what another order of sums may change
_BITS: Final = "only last bits differ: another order of sums, or a small value not restored."
_KEY: Final = re.compile(r"key|rng|seed", re.IGNORECASE)
_GLOBAL: Final = "global generators of "  # begins the names of things outside the state


@final
class ResumeDiffers(AssertionError):
    """A resumed run is not the uninterrupted run, bit for bit.

    Attributes:
        step: The first step that differs. The step that was resumed from means that the state is
            already different when it has been restored.
        leaf: The path of the first leaf of the state, or "loss" or "batch", that differs there.
        kind: What kind of thing differs, as far as it can be told.
    """

    def __init__(self, text: str, *, step: int, leaf: str, kind: Kind) -> None:
        super().__init__(text)
        self.step = step
        self.leaf = leaf
        self.kind: Kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One leaf, or the loss, or a leaf of the batch, without its bytes."""

    digest: str  # of dtype, shape and bytes; of a single number, of its value
    what: str  # dtype and shape, or the type
    sharding: str = ""
    is_key: bool = False
    sample: list[float] = field(default_factory=list)
    total: float = 0.0  # of the absolute values

    def is_rounding(self, other: Thing) -> bool:
        """Returns whether two things of a floating-point dtype differ in their last bits only."""
        if self.what != other.what or not self.sample or "float" not in self.what:
            return False
        import jax

        mine, theirs = (np.array([*thing.sample, thing.total]) for thing in (self, other))
        dtype = self.what.partition("[")[0]
        # A Python float is mostly made of a float32.
        precision = float(jax.numpy.finfo("float32" if dtype == "float" else dtype).eps)
        # The total shows what happened beside the sample, and is larger.
        size = np.array([*[np.abs(mine[:-1]).max()] * len(self.sample), self.total])
        return bool((np.abs(mine - theirs) <= _ROUNDING * precision * size).all())

    def beside(self, other: Thing) -> tuple[str, str]:
        """Returns how both look, with the first values of their samples that differ."""
        pairs = zip(self.sample, other.sample, strict=False)
        mine, theirs = next(((f" {a!r}", f" {b!r}") for a, b in pairs if a != b), ("", ""))
        return self.what + mine, other.what + theirs


_MISSING: Final = Thing(digest="", what="nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Records the loop after one step."""

    step: int
    is_start: bool
    things: Mapping[str, Thing]  # by name, in the order in which they are compared

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Row:
        """Returns the row whose `asdict` this is."""
        return cls(**{**row, "things": {n: Thing(**t) for n, t in row["things"].items()}})

    def differing(self, other: Row) -> list[str]:
        """Returns the names of what differs, if the other row is a start: of the state only."""
        names = [n for n in {**self.things, **other.things} if not n.startswith(_GLOBAL)]
        if other.is_start or self.is_start:
            names = [name for name in names if not _is_outside(name)]
        return [n for n in names if self.of(n).digest != other.of(n).digest]

    def of(self, name: str) -> Thing:
        return self.things.get(name, _MISSING)


def _is_outside(name: str) -> bool:
    return name == "loss" or name.partition("/")[0] == "batch"


def row_of(yielded: tuple[Any, ...]) -> Row:
    """Makes a row of what the loop yields; TypeError if it is not of 3 or 4 values."""
    if not isinstance(yielded, tuple) or len(yielded) not in (3, 4):
        raise TypeError(
            "the loop must yield (step, state, loss) or (step, state, loss, batch), got "
            f"{type(yielded).__name__}"
        )
    step, state, loss, *batch = yielded
    things = {
        f"batch/{name}".rstrip("/"): leaf for name, leaf in _leaves(batch[0] if batch else {})
    }
    if loss is not None:
        things["loss"] = loss
    things |= {f"state/{name}".rstrip("/"): leaf for name, leaf in _leaves(state)}
    found = {name: _thing(name, leaf) for name, leaf in things.items()}
    generators = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    found |= {f"{_GLOBAL}{name}": _thing(name, repr(s)) for name, s in generators.items()}
    return Row(step=int(step), is_start=loss is None, things=found)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    import jax

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _thing(name: str, value: Any) -> Thing:
    import jax

    if not (hasattr(value, "dtype") or isinstance(value, bool | int | float | complex)):
        text = f"{type(value).__name__} {value!r}"
        return Thing(digest=hashlib.sha256(text.encode()).hexdigest(), what=text[:40])
    sharding = str(getattr(value, "sharding", ""))
    is_key = isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(value) if is_key else value)
    is_key = is_key or (array.dtype == np.uint32 and _KEY.search(name) is not None)
    what = f"{getattr(value, 'dtype', type(value).__name__)}{[*array.shape]}"
    # A number is itself, whether Python's or an array's: a restore may turn one into the other.
    data = f"{_number(array)}".encode() if array.ndim == 0 else what.encode() + array.tobytes()
    is_real = array.dtype.kind in "biuf" or "float" in f"{array.dtype}"
    values = array.ravel().astype(np.float64) if is_real else np.zeros(0)
    return Thing(
        digest=hashlib.sha256(data).hexdigest(),
        what=what,
        sharding=sharding,
        is_key=is_key,
        sample=values[:: max(1, values.size // _SAMPLED)].tolist(),
        total=float(np.abs(values).sum()),
    )


def _number(array: np.ndarray[Any, Any]) -> object:
    is_exact = array.dtype.kind in "biuc"
    return array.item() if is_exact else float(array)


@final
class Trace:
    """Records everything that a run of the loop yielded."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        if not self.rows:
            raise ValueError("the loop yielded nothing")
        first = self.rows[0]
        self.start = first.step - (not first.is_start)  # the step that it went on from
        self.last = self.rows[-1].step
        self._after = {row.step: row for row in self.rows}

    def check_end(self, steps: int) -> None:
        if self.last != steps:
            raise ValueError(f"the loop ended after step {self.last}, before step {steps}")

    def after(self, step: int) -> Row:
        """Returns what there was after a step; nothing if the loop did not yield there."""
        return self._after.get(step, Row(step=step, is_start=False, things={}))

    def steps_with(self, things: Mapping[str, Thing]) -> list[int]:
        """Returns the steps that had the same things."""
        return [
            row.step
            for row in self.rows
            if all(row.of(name).digest == thing.digest for name, thing in things.items())
        ]


# --- what differs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The newest step when the loop was killed."""

    step: int
    leaves: Collection[str]

    def origin(self, leaf: str) -> str:
        """Returns whether a leaf that differs was saved."""
        if leaf in self.leaves:
            return (
                f"Step {self.step} has {leaf}: it was rebuilt or changed after the restore, or "
                "computed from something that was."
            )
        return f"Step {self.step} has no leaf {leaf}: was it saved?"


def compare(wanted: Trace, other: Trace, saved: Saved | None) -> None:
    """Raises ResumeDiffers at the first step that differs.

    Args:
        saved: The step that the other run resumed from; None if it ran from the start, too.
    """
    for row in other.rows:
        if names := wanted.after(row.step).differing(row):
            raise _Difference(wanted, other, row, names, saved).error()


@final
@dataclass(frozen=True, slots=True)
class _Difference:
    """The first step that differs, and what can be told from it."""

    wanted: Trace
    other: Trace
    row: Row  # of the other run
    names: Sequence[str]  # of what differs
    saved: Saved | None

    @property
    def _whole(self) -> Row:
        return self.wanted.after(self.row.step)

    def error(self) -> ResumeDiffers:
        kind, name, why = self._judged()
        wanted, got = self._whole.of(name).beside(self.row.of(name))
        run = "another run from the start"
        if self.saved is not None:
            run = f"the run resumed from step {self.other.start}"
        leaf = name.removeprefix("state/")
        others = [n.removeprefix("state/") for n in self.names if n != name]
        also = f"\n  also different: {', '.join(others[:8])}" if others else ""
        return ResumeDiffers(
            f"{run} differs from the uninterrupted run, first after step {self.row.step}\n"
            f"  {leaf}   uninterrupted {wanted}   here {got}{also}\n  {kind}: {why}",
            step=self.row.step,
            leaf=leaf,
            kind=kind,
        )

    def _judged(self) -> tuple[Kind, str, str]:
        """Returns the kind, the name of the thing to show, and the reason."""
        names, row = self.names, self.row
        state = [name for name in names if not _is_outside(name)]
        if batches := [name for name in names if name.startswith("batch")]:
            return "data order", batches[0], self._whose_batch(batches)
        if keys := [name for name in names if row.of(name).is_key]:
            return "rng", keys[0], f"it is a PRNG key. {self._origin(keys[0])}"
        if generators := self._generators():
            why = f"the loop draws from {generators[0]}, which no checkpoint has. Save its state."
            return "rng", names[0], why
        is_rounding = all(self._whole.of(name).is_rounding(row.of(name)) for name in names)
        moved = self._moved()
        if is_rounding and (moved or self.saved is None):
            why = f"only last bits differ. {moved or 'The loop differs from run to run by itself.'}"
            return "reduction order", names[0], why
        if self.saved is None:
            return "not deterministic", names[0], "no kill was needed for it to differ."
        if is_rounding:
            return "state" if state else "unsaved value", names[0], _BITS
        anew = [name for name in state if self._begins_anew(name)]
        if anew or ("loss" not in names and not self._was_equal()):
            name = (anew or state)[0]
            return "state", name, self._origin(name)
        return "unsaved value", names[0], self._outside()

    def _whose_batch(self, batches: Sequence[str]) -> str:
        steps = self.wanted.steps_with({name: self.row.of(name) for name in batches})
        if not steps:
            return "no step of the uninterrupted run read this batch."
        return f"this is the batch of step {steps[0]}. Was the position of the iterator restored?"

    def _generators(self) -> list[str]:
        """Returns the global generators that the loop uses, and that are elsewhere now."""
        whole = self.wanted.rows
        return [
            name
            for name in self.row.things
            if name.startswith(_GLOBAL)
            and self.row.of(name).digest != self._whole.of(name).digest
            and whole[0].of(name).digest != whole[-1].of(name).digest
        ]

    def _moved(self) -> str:
        """Returns a thing whose sharding has differed: sums then have another order."""
        for row in self.other.rows[: self.other.rows.index(self.row) + 1]:
            for name, thing in row.things.items():
                before = self.wanted.after(row.step).of(name).sharding
                if before and thing.sharding and before != thing.sharding:
                    leaf = name.removeprefix("state/")
                    return f"{leaf} had the sharding {before}, and now has {thing.sharding}."
        return ""

    def _begins_anew(self, name: str) -> bool:
        """Returns whether a leaf is as it was as many steps after the first start."""
        steps = self.row.step - self.other.start
        then = self.wanted.after(self.wanted.start + steps)
        return then.of(name).digest == self.row.of(name).digest

    def _was_equal(self) -> bool:
        """Returns whether the state before this step is known to be equal."""
        return self.row is not self.other.rows[0]

    def _origin(self, name: str) -> str:
        if self.saved is None or self.row.step > self.other.start + 1:
            return "It was equal after the step before."
        begins = " It is as after a new start." if self._begins_anew(name) else ""
        return self.saved.origin(name.removeprefix("state/")) + begins

    def _outside(self) -> str:
        has_batch = any(name.startswith("batch") for name in self.row.things)
        before = ["the state before"] * self._was_equal() + ["the batch"] * has_batch
        verb = "are" if len(before) > 1 else "is"
        equal = f", though {' and '.join(before)} {verb} equal" if before else ""
        order = "" if has_batch else " the position in the data (yield the batch to see it),"
        return (
            f"something outside the state differs{equal}. Not restored may be{order} a generator, "
            "a counter, a learning rate, or a number added up on the host."
        )
