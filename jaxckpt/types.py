"""Defines the values that jaxckpt returns and passes to callbacks; does not import jax.

The phases of `Progress` and `Timing`, in order:

save      snapshot  copy the values to the host; the caller waits only for this
          wait      wait for free memory and for earlier saves
          copy      wait for the values of accelerators, copied in the background
          write     write this process's share to disk
          meet      wait for the slowest process
          commit    merge, describe, publish
restore   find      read the metadata and plan the reads
          read      wait for data that is read in the background
          move      carry values that another process has read
          place     make arrays of the data
          meet      wait for the slowest process
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from jaxckpt._core.text import aligned, counted, size_text
from jaxckpt.errors import printable
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

Operation = Literal["save", "restore"]
PHASES: Final = tuple("snapshot wait find read place move copy write meet commit".split())
MAX_LINES: Final = 200
_ROOT: Final = "(the tree itself)"
_NUMBERS: Final = ("differ", "at most", "relative", "NaN")
DIFF_HEAD: Final = ("leaf", "type", *_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a save or a restore in this process; passed to `on_progress`.

    Attributes:
        kind: "save" or "restore".
        path: The checkpoint.
        phase: For a save "snapshot", "wait", "copy", "write", "meet" or "commit"; for a restore
            "find", "read", "move" or "meet".
        done_bytes, total_bytes: Of the values that this process writes or reads, uncompressed.
        seconds: Time since the start.
        waiting_for: In the phase "meet", the indices of the processes that are not there yet.
        ended: Whether this is the last report, after success or failure.
    """

    kind: Operation
    path: str
    phase: str
    done_bytes: int
    total_bytes: int
    seconds: float
    waiting_for: tuple[int, ...] = ()
    ended: bool = False


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Timing:
    """The time that a save or a restore took in this process; as text, a sentence.

    Attributes:
        kind: "save" or "restore".
        path: The checkpoint.
        step: Its number, if a manager saved or restored it.
        total_bytes: Bytes of the values that this process wrote or read, uncompressed.
        seconds: From the call to the commit, or to the return of the tree.
        phases: Seconds by phase: snapshot, wait, copy, write, meet and commit of a save; find,
            read, place, move and meet of a restore. The training loop waits only for `snapshot`,
            which enqueues the copies of accelerators; `copy` is until they have arrived.
        slowest: Index of the process that took longest to write or read, if there are several.
    """

    kind: Operation
    path: str
    step: int | None
    total_bytes: int
    seconds: float
    phases: Mapping[str, float]
    slowest: int | None = None

    @property
    def gb_per_s(self) -> float:
        """Throughput of this process in 10^9 bytes per second, without the phase "wait"."""
        seconds = self.seconds - self.phases.get("wait", 0.0)
        return self.total_bytes / 1e9 / seconds if seconds > 0 else 0.0

    def __repr__(self) -> str:
        verb = "saved" if self.kind == "save" else "restored"
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases.items())
        slowest = "" if self.slowest is None else f"; slowest was process {self.slowest}"
        return (
            f"{verb} {self.path}: {self.total_bytes} bytes here in {self.seconds:.2f} s, "
            f"{size_text(self.gb_per_s * 1e9)}/s ({phases} s{slowest})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The paths of the leaves of a restore; passed to `restore(report=...)`.

    Attributes:
        loaded: Leaves that were restored.
        missing: Leaves of `like` that are not in the checkpoint, and keep their values.
        extra: Leaves of the checkpoint that are not in `like`, and were not read.
        cast: The (saved, restored) dtypes of leaves restored with another dtype, by path.
        renamed: The wanted path of each renamed leaf, by saved path.
        resized: Leaves that were cut off, or padded with zeros, to the wanted shape.
        read_once: Leaves of which each value was read by one process, which others got it from.
        job_bytes: Uncompressed bytes of the chunks that all processes read; None for one process.
        moved_bytes: Bytes that came from other processes.
        timing: The time that the restore took.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    cast: Mapping[str, tuple[str, str]]
    renamed: Mapping[str, str]
    resized: tuple[str, ...] = ()
    read_once: tuple[str, ...] = ()
    job_bytes: int | None = None
    moved_bytes: int = 0
    timing: Timing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """The metadata of one leaf.

    Attributes:
        path: Its keys joined with `/`.
        kind: "array" (jax), "numpy", "key", "int", "str", "empty", ...
        dtype: Name of the dtype, or "".
        shape: Shape of the leaf.
        sharding: The sharding that it was saved with, in words, or None.
        size_bytes: Bytes of its values on disk, uncompressed.
        saved_sharding: `sharding` as data.
        compression: "zstd" if jaxckpt compressed it, or None.
        container: Name of the class of an empty container, unless it is built into Python.
        chunk_shape: Shape of the chunks on disk, or None if it is not stored as an array.
        inner_shape: Shape of the parts that each chunk is divided into, or None.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str | None
    size_bytes: int
    saved_sharding: SavedSharding | None = None
    compression: str | None = None
    container: str | None = None
    chunk_shape: tuple[int, ...] | None = None
    inner_shape: tuple[int, ...] | None = None

    @property
    def type_text(self) -> str:
        """Returns the type as text: `float32[4,8]`, `str`, `{}`, `EmptyState()`."""
        if self.kind == "empty":
            word = {"Dict": "{}", "List": "[]", "Tuple": "()"}.get(self.dtype, self.dtype)
            return f"{self.container}()" if self.container else word
        if self.kind in ("str", "bytes", "int"):
            return self.kind
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return "  ".join(filter(None, (self.type_text, self.sharding, self.compression)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafStatistics:
    """Statistics of the values of one leaf.

    NaN and infinities are counted, and ignored otherwise. Complex numbers count by their
    magnitudes, PRNG keys by their data.

    Attributes:
        path: Path of the leaf.
        size: Number of values.
        min, max: Extremes of the finite values, exact for integers; None if there are none.
        mean, std: Of the finite values, as numpy computes them in float64; None if there are none.
        norm: The square root of the sum of squares of the finite values.
        nan, inf, zeros: Number of NaNs, infinities and zeros.

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
        return f"{printable(self.path) or _ROOT}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a checkpoint.

    Attributes:
        file: The file concerned, if any.
        leaf: The leaf concerned, if any.
        message: The problem in words.
        unreadable: Whether the data is not known to be damaged: the storage failed to read it, or
            another program removed a whole item. Every other problem is damage.
    """

    file: str | None
    leaf: str | None = None
    message: str
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyReport:
    """The result of `verify`; as text, one line for each problem.

    Attributes:
        path: The checkpoint.
        problems: All problems found.
        unchecked: Descriptions of data without a checksum, and of files that are not recorded.
        files, leaves, size_bytes: Number of files compared with the record, of leaves read, and of
            bytes of their values, uncompressed.
    """

    path: str
    problems: tuple[Problem, ...] = ()
    unchecked: tuple[str, ...] = ()
    files: int = 0
    leaves: int = 0
    size_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Returns whether the checkpoint is free of problems."""
        return not self.problems

    @property
    def damaged(self) -> bool:
        """Returns whether data is missing or differs from what was written."""
        return any(not problem.unreadable for problem in self.problems)

    def __repr__(self) -> str:
        bad = "BAD" if self.damaged else "UNREADABLE"
        state = "good" if self.ok else f"{bad}, {counted(len(self.problems), 'problem')}"
        lines = [
            f"{self.path}: {state}. Read {counted(self.files, 'file')} and "
            f"{counted(self.leaves, 'leaf')}, {size_text(self.size_bytes)}."
        ]
        lines += [
            f"  {'unreadable' if problem.unreadable else 'bad'}: {problem.message}"
            for problem in self.problems
        ]
        lines += [f"  unchecked: {what}" for what in self.unchecked]
        return "\n".join(printable(part) for line in lines for part in line.split("\n"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDiff:
    """One leaf or container that both checkpoints have, with a difference.

    The fields about values are None if values were not compared: not requested, of another shape,
    or not numbers. A PRNG key is compared by its data.

    Attributes:
        path: Path of the leaf.
        a, b: Dtype and shape of the leaf in each, or a short text itself.
        size: Number of values in `a`.
        differing: Number of values that differ by more than `atol + rtol * abs(b)`, or where only
            one side is NaN.
        max_abs: The largest difference, ignoring NaN.
        max_rel: The largest difference relative to `abs(b)`; infinite if a zero is not zero in `a`.
        norm_a, norm_b, norm_diff: Square roots of the sums of squares of each side's finite values,
            and of the finite differences.
        nan_a, nan_b: Number of NaNs in each.
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
        text = f"{printable(self.path) or _ROOT}  {self._what}"
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

    @property
    def _what(self) -> str:
        return self.a if self.a == self.b else f"{self.a} -> {self.b}"

    def _cells(self) -> list[str]:
        """Returns the columns of `DIFF_HEAD`."""
        values = "" if self.differing is None else f"{self.differing} of {self.size}"
        cells = [printable(self.path) or _ROOT, self._what, values]
        if self.max_abs is None:
            return [*cells, "", "", ""]
        nans = f"{self.nan_a} -> {self.nan_b}" if self.nan_a or self.nan_b else ""
        if self.norm_diff == 0 and self.differing:  # no value differs by a finite number
            return [*cells, "", "", nans]
        return [*cells, f"{self.max_abs:.3g}", f"{self.max_rel:.3g}", nans]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffReport:
    """The differences between two trees; as text, a table.

    A row is a leaf that changed (`!`), or a leaf or a whole branch that only `a` has (`-`), that
    only `b` has (`+`), or that is the same in both (`=`).

    Attributes:
        a, b: The checkpoints.
        only_a, only_b: Paths of the leaves that only one of them has.
        changed: The leaves that both have and that differ, and the containers of other types.
        same_paths: Paths of the leaves that do not differ.
        uncompared: Further items that both have, and that were not compared.
        unmatched: Further items that only one of them has.
    """

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[LeafDiff, ...]
    same_paths: tuple[str, ...]
    uncompared: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()

    @property
    def same(self) -> int:
        """Number of leaves that do not differ."""
        return len(self.same_paths)

    @property
    def equal(self) -> bool:
        """Returns whether the checkpoints are equal."""
        return not (self.only_a or self.only_b or self.changed or self.unmatched)

    def __repr__(self) -> str:
        leaves = len(self.only_a) + len(self.only_b) + len(self.changed)
        result = "equal" if self.equal else f"{leaves + len(self.unmatched)} differ"
        title = f"{self.a} -> {self.b}: {result}, {counted(self.same, 'leaf')} the same"
        for what, items in (("not compared", self.uncompared), ("in one only", self.unmatched)):
            title += f"; {what}: item {', '.join(map(printable, items))}" if items else ""
        if not leaves:
            return title
        columns = zip(["", *DIFF_HEAD], *self._rows(), strict=True)
        used = [column for column in columns if any(column[1:])]
        lines = aligned(list(zip(*used, strict=True)), right=[c[0] in _NUMBERS for c in used])
        head, *rows = lines
        if len(rows) > MAX_LINES:
            rows[MAX_LINES:] = [f"... and {len(rows) - MAX_LINES} more"]
        return "\n".join([title, head, *rows])

    def _rows(self) -> Iterator[list[str]]:
        changed = tuple(leaf.path for leaf in self.changed)
        groups = {"-": self.only_a, "+": self.only_b, "!": changed, "=": self.same_paths}
        for sign, paths in groups.items():
            if sign == "!":
                yield from ([sign, *leaf._cells()] for leaf in self.changed)
                continue
            others = (path for group in groups.values() if group is not paths for path in group)
            for branch, leaves in _branches(paths, others).items():
                count = counted(leaves, "leaf") if branch.endswith("/") else ""
                yield [sign, printable(branch) or _ROOT, count, "", "", "", ""]


def _branches(paths: Sequence[str], others: Iterable[str]) -> Counter[str]:
    """Counts paths by the highest branch ("opt/") without any of `others`, or by themselves."""
    taken = {branch for path in others for branch in _above(path)}
    return Counter(next(one for one in (*_above(path), path) if one not in taken) for path in paths)


def _above(path: str) -> list[str]:
    return [path[: i + 1] for i, c in enumerate(path) if c == "/"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Records whether a step is saved, and the reason."""

    step: int
    save: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """The facts about a committed step.

    Attributes:
        step: Its number.
        saved_s: Wall clock of its commit, in seconds since 1970.
        metrics: The metrics passed to `save`.
        pinned: Whether it is pinned.
        differences: Replicas that differed when it was saved; see `SavePolicy.check_replicas`.
    """

    step: int
    saved_s: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    differences: Sequence[str] = ()
