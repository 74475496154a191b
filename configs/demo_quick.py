"""The demo, shorter: for tests."""


def get_config() -> dict[str, int]:
    return {
        "steps": 12,
        "save_every": 3,
        "kill_from": 9,
        "width": 256,  # not smaller: the kill needs a save that takes a while
        "heads": 4,
        "layers": 1,
        "batch": 8,
        "length": 16,
    }
