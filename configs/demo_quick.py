"""A shorter demo, for tests."""

from typing import Any


def get_config() -> dict[str, Any]:
    return {
        "steps": 15,
        "kill_from": 6,
        "stop_from": 9,
        "width": 256,  # a smaller model would save too fast for the kill
        "heads": 4,
        "layers": 1,
        "batch": 8,
        "length": 16,
        "checkpoint": {"save": {"every_steps": 3}, "keep": {"last": 2, "every_steps": 6}},
    }
