"""The names that programs import for Pathways, which jaxckpt does not use."""

from __future__ import annotations

import enum
from typing import Any


class CheckpointingImpl(enum.Enum):
    """Names how Orbax moves arrays with Pathways."""

    NO_DISPATCHER = enum.auto()
    COLOCATED_PYTHON = enum.auto()
    PERSISTENCE = enum.auto()

    @classmethod
    def from_options(
        cls, *, use_colocated_python: bool = False, use_persistence_array_handler: bool = False
    ) -> CheckpointingImpl:
        """Returns the name for these options."""
        if use_colocated_python:
            return cls.COLOCATED_PYTHON
        return cls.PERSISTENCE if use_persistence_array_handler else cls.NO_DISPATCHER


def register_type_handlers(*_: Any, **__: Any) -> None:
    """Is not supported."""
    raise NotImplementedError("register_type_handlers: jaxckpt does not use Pathways")
