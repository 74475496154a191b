"""A bar for a long save or restore, in a terminal or a notebook, if tqdm is installed."""

from __future__ import annotations

import importlib.util
import posixpath
import sys
from typing import Any, Final, final

from jaxckpt.types import Progress

_SHORT_S: Final = 1.5  # no bar for shorter work
_VERBS: Final = {"save": "saving", "restore": "restoring"}


def is_seen() -> bool:
    """Returns whether a bar would be seen and tqdm is installed."""
    return (_in_notebook() or sys.stderr.isatty()) and importlib.util.find_spec("tqdm") is not None


def _in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


@final
class Bar:
    """Shows saves and restores, one at a time: bytes, rate, phase and the processes to wait for."""

    def __init__(self) -> None:
        self._bar: Any = None  # of tqdm

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            if progress.ended or progress.seconds < _SHORT_S:
                return
            self._bar = _tqdm()(desc=words(progress), unit="B", unit_scale=True)
            self._bar.start_t -= progress.seconds
        bar = self._bar
        bar.set_description(words(progress), refresh=False)
        bar.total = progress.total_bytes or None
        bar.n = progress.done_bytes
        bar.refresh()
        if progress.ended:
            self._bar = None
            bar.close()


def words(progress: Progress) -> str:
    """Returns a description such as `saving 1000: waits for process 3, 7`."""
    what = f"{_VERBS[progress.kind]} {posixpath.basename(progress.path)}"
    if progress.ended:
        return what
    if not progress.waiting_for:
        return f"{what}: {progress.phase}"
    shown = ", ".join(map(str, progress.waiting_for[:8]))
    more = ", ..." if len(progress.waiting_for) > 8 else ""
    return f"{what}: waits for process {shown}{more}"


def _tqdm() -> Any:
    if _in_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm
    else:
        from tqdm.std import tqdm
    return tqdm
