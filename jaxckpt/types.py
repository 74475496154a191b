"""The values that jaxckpt returns and hands to callbacks; importing them imports no jax.

The phases of `Progress` and `Timing`, in their order:

save      snapshot  bring the values to the host; the caller waits for this alone
          wait      for room in memory, and for earlier saves
          write     this process's share, until it is on disk
          meet      wait for the slowest process
          commit    merge, describe, publish
restore   find      metadata, and what goes where
          read      wait for data that is read in the background
          place     make arrays of it
          meet      wait for the slowest process
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from jaxckpt._core.text import counted, size_text
from jaxckpt.format.sharding import SavedSharding

__all__ = [
    "Decision",
    "DiffReport",
    "LeafDiff",
    "LeafInfo",
    "LeafStatistics",
    "OnProgress",
    "Problem",
    "Progress",
    "RestoreReport",
    "StepInfo",
    "Timing",
    "VerifyReport",
]

Kind = Literal["save", "restore"]
PHASES: Final = ("snapshot", "wait", "find", "read", "place", "write", "meet", "commit")
_MAX_LINES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a save or a restore is, in this process; given to `on_progress`.

    Attributes:
        kind: "save" or "restore".
        path: Of the checkpoint.
        phase: "snapshot", "wait", "write", "meet" or "commit"; "find", "read" or "meet".
        done_bytes, total_bytes: Of the values that this process writes or reads, uncompressed.
        seconds: Since it began.
        waiting_for: In the phase "meet", the processes that have not come yet, by index.
        ended: Whether this is the last that is told of it, well or not.
    """

    kind: Kind
    path: str
    phase: str
    done_bytes: int
    total_bytes: int
    seconds: float
    waiting_for: tuple[int, ...] = ()
    ended: bool = False


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a save or a restore took in this process.

    Attributes:
        kind: "save" or "restore".
        path: Of the checkpoint.
        step: Its number, if a manager saved or restored it.
        total_bytes: What this process wrote or read of the values, uncompressed.
        seconds: From the call to the commit, or to the tree.
        phases: Seconds by phase. Of a save: snapshot, wait, write, meet, commit; of a restore:
            find, read, place, meet. `snapshot` is what the training loop waits for.
        slowest: Index of the process that took longest to write or read, of several.
    """

    kind: Kind
    path: str
    step: int | None
    total_bytes: int
    seconds: float
    phases: Mapping[str, float]
    slowest: int | None = None

    @property
    def gb_per_s(self) -> float:
        """Of this process, in 10^9 bytes for each second; waiting for earlier saves is left out."""
        seconds = self.seconds - self.phases.get("wait", 0.0)
        return self.total_bytes / 1e9 / seconds if seconds > 0 else 0.0

    def __str__(self) -> str:
        verb = "saved" if self.kind == "save" else "restored"
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases.items())
        slowest = "" if self.slowest is None else f"; slowest was process {self.slowest}"
        return (
            f"{verb} {self.path}: {self.total_bytes} bytes here in {self.seconds:.2f} s, "
            f"{self.gb_per_s:.2f} GB/s ({phases} s{slowest})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did, as paths of leaves; given to `restore(report=...)`.

    Attributes:
        loaded: Restored.
        missing: In `like`, not in the checkpoint: kept as they were in `like`.
        extra: In the checkpoint, not in `like`: not read.
        cast: Restored with another dtype: path -> (saved, restored).
        renamed: saved path -> wanted path.
        timing: How long it took, by phase.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    cast: Mapping[str, tuple[str, str]]
    renamed: Mapping[str, str]
    timing: Timing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """What is known of one leaf without reading it.

    Attributes:
        path: Its keys joined with `/`.
        kind: "array" (jax), "numpy", "key", "int", "str", "empty", ...
        dtype: By name; "" where there is none.
        shape: Of the leaf.
        sharding: How it was laid out when it was saved, in words, or None.
        size_bytes: Of its values on disk, uncompressed.
        saved_sharding: `sharding` as data.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str | None
    size_bytes: int
    saved_sharding: SavedSharding | None = None

    def __str__(self) -> str:
        dims = "[" + ",".join(map(str, self.shape)) + "]"
        text = self.kind if self.kind in ("str", "bytes", "empty", "int") else f"{self.dtype}{dims}"
        return f"{text}  {self.sharding}" if self.sharding else text


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafStatistics:
    """What the values of one leaf are like.

    NaN and infinities are counted, and left out of everything else. Complex numbers are described
    by their magnitudes, PRNG keys by their data.

    Attributes:
        path: Of the leaf.
        size: How many values there are.
        min, max: Of the finite values, integers exactly; None where there is none.
        mean, std: Of the finite values, as numpy has them in float64; None where there is none.
        norm: The root of the sum of the squares of the finite values.
        nan, inf, zeros: How many there are of each.

    Example:
        >>> import tempfile, numpy as np, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/a", {"w": np.array([3.0, -4.0, 0.0, np.nan])})
        ...     print(jaxckpt.open(f"{folder}/a").statistics()["w"])
        w: 4 values, -4 to 3, mean -0.333333, std 2.86744, norm 5, 1 zero, 1 NaN
    """

    path: str
    size: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float
    nan: int
    inf: int
    zeros: int

    def __str__(self) -> str:
        parts = [f"{self.size} value{'' if self.size == 1 else 's'}"]
        if self.min is not None:
            parts += [f"{self.min:g} to {self.max:g}", f"mean {self.mean:g}", f"std {self.std:g}"]
        parts.append(f"norm {self.norm:g}")
        counts = {"zero": self.zeros, "NaN": self.nan, "infinite": self.inf}
        parts += [f"{count} {word}" for word, count in counts.items() if count]
        return f"{self.path or '(the tree itself)'}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        file: It is about, if one.
        leaf: Whose data it is, if one's.
        message: What it is.
        unreadable: Whether the storage failed to read it, so that nothing is known of what it
            holds. Everything else is damage.
    """

    file: str | None
    leaf: str | None
    message: str
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: Of the checkpoint.
        problems: Everything that is wrong.
        unchecked: What was read but carries no checksum to compare with, and files that nobody
            listed, each in words.
        files, leaves, size_bytes: How much was read: files compared with the record, leaves, and
            their values, uncompressed.
    """

    path: str
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]
    files: int
    leaves: int
    size_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def damaged(self) -> bool:
        """Whether something was read that is not what was written, or is missing."""
        return any(not problem.unreadable for problem in self.problems)

    def __str__(self) -> str:
        state = "good" if self.ok else f"BAD, {counted(len(self.problems), 'problem')}"
        lines = [
            f"{self.path}: {state}. Read {counted(self.files, 'file')} and "
            f"{counted(self.leaves, 'leaf')}, {size_text(self.size_bytes)}."
        ]
        lines += [f"  bad: {problem.message}" for problem in self.problems]
        lines += [f"  unchecked: {what}" for what in self.unchecked]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDiff:
    """One leaf that both checkpoints have, and in which they differ.

    What is about the values is None where they were not compared: not asked for, not of one shape,
    or no numbers. Of a PRNG key it is about its data.

    Attributes:
        path: Of the leaf.
        a, b: What each has: dtype and shape, or the text itself if it is short.
        size: How many values `a` has.
        differing: How many differ by more than `atol + rtol * abs(b)`, or of which one is NaN.
        max_abs: The largest difference; NaN is left out.
        max_rel: The largest one relative to `abs(b)`; infinite where a zero became something else.
        norm_a, norm_b, norm_diff: Roots of the sums of squares: of each side's finite values, and
            of the finite differences.
        nan_a, nan_b: How many NaNs each has.
    """

    path: str
    a: str
    b: str
    size: int
    differing: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    norm_diff: float | None = None
    nan_a: int | None = None
    nan_b: int | None = None

    def __str__(self) -> str:
        what = self.a if self.a == self.b else f"{self.a} -> {self.b}"
        text = f"{self.path or '(the tree itself)'}  {what}"
        if self.differing is None:
            return text
        text += f": {self.differing} of {self.size} differ"
        if self.max_abs is None:
            return text
        if self.norm_diff == 0 and self.differing:
            return f"{text}, none by a finite number; NaN {self.nan_a} -> {self.nan_b}"
        text += f", at most by {self.max_abs:.3g} ({self.max_rel:.3g} relative)"
        text += f"; norm {self.norm_a:.6g} -> {self.norm_b:.6g}, of the difference "
        text += f"{self.norm_diff:.3g}"
        return text + (f"; NaN {self.nan_a} -> {self.nan_b}" if self.nan_a or self.nan_b else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """In what two trees differ. Its text is a line for each difference.

    Attributes:
        a, b: The checkpoints.
        only_a, only_b: Paths of the leaves that one of them lacks.
        changed: The leaves that both have, and that differ.
        same: How many leaves do not.
    """

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[LeafDiff, ...]
    same: int

    @property
    def equal(self) -> bool:
        """Whether they do not differ at all."""
        return not (self.only_a or self.only_b or self.changed)

    def __str__(self) -> str:
        lines = [f"- {path or '(the tree itself)'}" for path in self.only_a]
        lines += [f"+ {path or '(the tree itself)'}" for path in self.only_b]
        lines += [f"! {leaf}" for leaf in self.changed]
        count = len(lines)
        if count > _MAX_LINES:
            lines[_MAX_LINES:] = [f"... and {count - _MAX_LINES} more"]
        told = "equal" if self.equal else f"{count} differ"
        same = f"{counted(self.same, 'leaf')} the same"
        return "\n".join([f"{self.a} -> {self.b}: {told}, {same}", *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether a step is saved, and why, or why not."""

    step: int
    save: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What is known of a committed step.

    Attributes:
        step: Its number.
        saved_s: Wall clock of its commit, in seconds since 1970.
        metrics: What was given to `save`.
        pinned: Whether it was pinned.
    """

    step: int
    saved_s: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
