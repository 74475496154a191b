"""Twins of the world for tests, and a check of exact resume for your own training loop.

_storage      storages that crash, fail or report each call
_processes    several processes in one
_resume       a training loop that is killed and has to resume with the same bits
_trace        what a loop has after each step, and what kind of thing differs
"""

from jaxckpt.testing._processes import MemoryService as MemoryService
from jaxckpt.testing._processes import ProcessKilled as ProcessKilled
from jaxckpt.testing._processes import SimulatedProcesses as SimulatedProcesses
from jaxckpt.testing._processes import simulate as simulate
from jaxckpt.testing._resume import check_exact_resume as check_exact_resume
from jaxckpt.testing._storage import CrashingStorage as CrashingStorage
from jaxckpt.testing._storage import FailingStorage as FailingStorage
from jaxckpt.testing._storage import SimulatedCrash as SimulatedCrash
from jaxckpt.testing._storage import WatchedStorage as WatchedStorage
from jaxckpt.testing._trace import ResumeDiffers as ResumeDiffers
