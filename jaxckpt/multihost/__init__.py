"""Barrier, gather and agree among the processes of a job, each with a time limit."""

from jaxckpt.multihost._collective import (
    Meeting,
    check_alike,
    disagreement,
    lead,
    leading,
    meet,
    raise_first,
    text_of,
)
from jaxckpt.multihost._distributed import Distributed
from jaxckpt.multihost._protocol import Device, Json, Processes
from jaxckpt.multihost._service import current, playing
from jaxckpt.multihost._single import Single

__all__ = [
    "Device",
    "Distributed",
    "Json",
    "Meeting",
    "Processes",
    "Single",
    "check_alike",
    "current",
    "disagreement",
    "lead",
    "leading",
    "meet",
    "playing",
    "raise_first",
    "text_of",
]
