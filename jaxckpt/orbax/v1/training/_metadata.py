"""The metadata of a run and of its steps."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from etils import epath

from jaxckpt.orbax.v1 import _metadata


@dataclass(kw_only=True)
class CheckpointMetadata(_metadata.CheckpointMetadata[Any]):
    """The metadata of a step."""

    step: int
    metrics: Any = None

    @property
    def time(self) -> datetime.datetime | None:
        """Returns when it was committed."""
        return self.commit_timestamp


@dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """The metadata of a run."""

    directory: epath.Path
    custom_metadata: Any = None
