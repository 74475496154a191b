"""Gather and agree among the processes of a job, each with a time limit.

_protocol     gather and agree; one process
_collective   makes all processes return or all raise
_group        the processes that write to one directory
_distributed  the rounds over a key-value service
_service      JAX's coordination service
"""

from jaxckpt.multihost._collective import (
    Meeting,
    check_alike,
    first_of,
    lead,
    leading,
    meet,
    meeting,
    raise_first,
    raise_if_any,
    slowest_of,
    text_of,
)
from jaxckpt.multihost._distributed import Distributed
from jaxckpt.multihost._group import Group
from jaxckpt.multihost._protocol import Device, Json, Processes, Single
from jaxckpt.multihost._service import current, playing

__all__ = [
    "Device",
    "Distributed",
    "Group",
    "Json",
    "Meeting",
    "Processes",
    "Single",
    "check_alike",
    "current",
    "first_of",
    "lead",
    "leading",
    "meet",
    "meeting",
    "playing",
    "raise_first",
    "raise_if_any",
    "slowest_of",
    "text_of",
]
