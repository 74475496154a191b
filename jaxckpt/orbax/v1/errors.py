"""Errors of Orbax v1, raised where Orbax raises them."""


class InvalidLayoutError(ValueError):
    """The path does not hold a checkpoint of the wanted kind."""


class DeletionInProgressError(RuntimeError):
    """The deletion of the wanted item has begun."""


class DeletionRecoveryError(RuntimeError):
    """The deletion of another item has not ended."""
