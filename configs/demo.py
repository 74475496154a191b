"""The demo (`make demo`): a character-level transformer of 1.6 million parameters."""


def get_config() -> dict[str, int]:
    return {
        "steps": 60,
        "save_every": 10,  # save at every tenth step
        "kill_from": 40,  # SIGKILL inside the first save from this step on
        "width": 256,  # of the residual stream; the MLP is four times as wide
        "heads": 4,
        "layers": 2,
        "batch": 16,  # sequences in a step
        "length": 32,  # characters in a sequence
    }
