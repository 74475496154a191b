"""At which saves a run compares replicas, and what it knows of their differences.

`_save.replicas` compares them for one save.
"""

from __future__ import annotations

import math
from typing import final

from jaxckpt._run.index import StepIndex
from jaxckpt._run.schedule import SavePolicy
from jaxckpt._save.replicas import Replicas
from jaxckpt.multihost import Processes


@final
class Comparisons:
    """Decides when the replicas of a run are compared: see `SavePolicy.check_replicas`."""

    def __init__(
        self, index: StepIndex, processes: Processes, policy: SavePolicy, main: str
    ) -> None:
        self._index, self._processes = index, processes
        self._policy, self._main = policy, main
        self._unchecked = math.inf  # saves since the last comparison; infinite: it is due
        self._differences: list[str] = []  # that the last comparison found
        self._was_alike = False  # whether one has found none

    def ask(self) -> None:
        """Lets the next save compare replicas."""
        self._unchecked = math.inf

    def begin(self) -> Replicas:
        """Returns the replicas of a save, which are compared if that is due."""
        return Replicas(
            self._processes,
            self._policy.may_differ,
            main=self._main,
            compares=0 < self._policy.check_replicas <= self._unchecked,
            known=lambda: self._differences,
            marks=lambda: self._was_alike,
        )

    def count(self, replicas: Replicas | None) -> None:
        """Counts a save; without replicas, it could not take its values."""
        self._unchecked = 1 if replicas and replicas.compares else self._unchecked + 1

    def end(self, step: int, replicas: Replicas) -> None:
        """Reports what was found, once the step is committed."""
        if replicas.differences:
            self._report(step, "; ".join(replicas.differences))
        if not replicas.compares:
            return
        self._differences = [f"at step {step}: {text}" for text in replicas.differences]
        if replicas.differences or replicas.is_later:
            self.ask()
        else:
            self._was_alike = True

    def _report(self, step: int, differences: str) -> None:
        text = f"step {step} is marked: replicas differ, so a device may compute wrongly"
        if not self._was_alike:  # the program may work so
            text = f"step {step}: replicas differ, as whenever this job has compared them"
        text += f": {differences}. See 'If replicas differ' in docs/runs.md"
        self._index.report(text, logs=self._processes.index == 0)  # one of all logs it
