"""The only process of a job."""

from __future__ import annotations

import json
from typing import final

from jaxckpt.multihost._protocol import Device, Json


@final
class Single:
    """`Processes` where there is one: nobody to wait for, so nothing can time out."""

    index: int = 0
    count: int = 1

    def process_of(self, device: Device) -> int:
        """Always this one."""
        del device
        return 0

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Returns at once."""
        del name, timeout_s

    def gather(self, name: str, value: Json, *, timeout_s: float) -> list[Json]:
        """Returns `[value]`, as JSON gives it back."""
        del name, timeout_s
        return [json.loads(json.dumps(value))]

    def agree(self, name: str, value: Json, *, timeout_s: float) -> Json:
        """Returns `value`, as JSON gives it back."""
        del name, timeout_s
        return json.loads(json.dumps(value))

    def missing(self, name: str) -> list[int]:
        """Nobody."""
        del name
        return []
