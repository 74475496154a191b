"""Errors of `Checkpointer`."""


class StepAlreadyExistsError(FileExistsError):
    """The step to save is there."""


class StepNotFoundError(FileNotFoundError):
    """The step to load or delete is not there."""
