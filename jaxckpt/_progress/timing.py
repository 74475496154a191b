"""How far a save or a restore is, and how long it took, by phase.

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
from dataclasses import dataclass
from typing import Final, Literal

# In the order in which they come.
PHASES: Final = ("snapshot", "wait", "find", "read", "place", "write", "meet", "commit")

Kind = Literal["save", "restore"]


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
