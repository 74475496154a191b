"""The only process of a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from jaxckpt.multihost._protocol import DEFAULT_TIMEOUT_S, Device, Json


@final
@dataclass(frozen=True)
class Single:
    """`Processes` of a job with one process: nothing waits, so nothing times out."""

    index: int = 0
    count: int = 1
    timeout_s: float = field(default=DEFAULT_TIMEOUT_S, compare=False)

    def within(self, timeout_s: float) -> Single:
        return Single(timeout_s=timeout_s)

    @staticmethod  # always the same function, for the caches of placements
    def process_of(device: Device) -> int:
        del device
        return 0

    def gather(
        self, name: str, value: Json, judge: Callable[[list[Any]], Json] = list, *, where: str = ""
    ) -> Any:  # JSON
        del name, where
        return json.loads(json.dumps(judge([json.loads(json.dumps(value))])))

    def agree(self, name: str, value: Json) -> Json:
        del name
        return json.loads(json.dumps(value))

    def missing(self, name: str) -> list[int]:
        del name
        return []
