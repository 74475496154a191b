"""Takes what a call of `save` is given: its copies on the host, made in the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from jaxckpt._progress.meter import Meter
from jaxckpt._run import items as _items
from jaxckpt._run.comparisons import Comparisons
from jaxckpt._run.incremental import Incremental
from jaxckpt._run.root import Root
from jaxckpt._save.replicas import Replicas
from jaxckpt._save.snapshot import Items, SaveItem, TreeItem, take_tree
from jaxckpt.format import names
from jaxckpt.multihost import Processes


@dataclass(slots=True)
class Given:
    """Holds the arguments of one call of `save`, and their copies on the host."""

    step: int
    state: object
    items: Mapping[str, object]
    metrics: Mapping[str, Any] | None
    dtype: str | None
    custom_metadata: Mapping[str, Any] | None
    is_durable: bool = True  # whether it goes to the directory
    taken: list[SaveItem] = field(default_factory=list)
    replicas: Replicas | None = None
    numbers: dict[str, Any] = field(default_factory=dict)  # the metrics, once they are computed

    @property
    def trees(self) -> Sequence[TreeItem]:
        return [item for item in self.taken if isinstance(item, TreeItem)]


@final
@dataclass(slots=True)
class Taking:
    """Copies the arguments of each call of `save`."""

    roots: Sequence[Root]  # where steps are saved, the nearest first
    processes: Processes
    item: str  # of the state
    zstd: int | None
    incremental: Incremental
    comparisons: Comparisons
    _lacked_metric: bool = False  # whether a step did, which is reported once

    def take(self, given: Given, meter: Meter, saving: Sequence[object]) -> None:
        """Copies everything to the host, and begins to compare replicas, if that is due."""
        main, state, metrics = self.item, given.state, given.metrics
        for name in given.items:
            names.check_item(name, main, names.STATE_ITEM, names.DEFAULT_ITEM)
        given.taken, given.replicas = [], None  # of this try only
        taken, replicas = list[SaveItem](), self.comparisons.begin()
        with meter.phase("snapshot"):
            options: dict[str, Any] = {"zstd": self.zstd, "replicas": replicas}
            options["holds"] = self.roots[0].group.part is not None
            options["storage"] = self.incremental.storage
            bases = self.incremental.begin(is_saving=bool(saving))
            if isinstance(state, Items):
                taken += state.taken(self.processes)
            else:
                how = {"copy": True, "dtype": given.dtype, "base": bases.get(main), **options}
                taken.append(take_tree(main, state, self.processes, **how))
            for name, value in given.items.items():
                base = bases.get(name)
                taken.append(_items.take_item(name, value, self.processes, base=base, **options))
        for root in self.roots:
            if isinstance(root.keep.metric, str):  # a function needs numbers that may come later
                self._check_metric(metrics, root.keep.metric, given.step)
        if metrics is not None or self.processes.index:  # which takes what process 0 tells, if any
            taken.append(_items.take_metrics(metrics or {}, given.numbers.update))
        given.taken, given.replicas = taken, replicas

    def _check_metric(self, given: Mapping[str, Any] | None, wanted: str, step: int) -> None:
        """Reports the first step that lacks the metric of the policy."""
        metrics, is_shared = given or {}, self.roots[0].group.part is None
        has_it = not isinstance(metrics.get(wanted), Mapping | list | tuple | str | None)
        # The numbers of process 0 count. Others that have some are to have the same.
        tells = self.processes.index == 0 or (is_shared and given is not None)
        if has_it or self._lacked_metric or not tells:
            return
        self._lacked_metric = True
        self.roots[0].index.report(
            f"step {step} has no number for the metric {wanted!r} that KeepPolicy ranks by; it has "
            f"{', '.join(metrics) or 'none'}. While no step has it, `best` keeps all steps. Later "
            "steps that lack it are not reported."
        )
