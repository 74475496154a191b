"""How the processes of a job find each other: barrier, gather, agree, each with a time limit."""

from jaxckpt.multihost._collective import Meeting, disagreement, lead, leading, meet, text_of
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
    "current",
    "disagreement",
    "lead",
    "leading",
    "meet",
    "playing",
    "text_of",
]
