"""Policies, and the manager."""

from jaxckpt.orbax import policies as preservation_policy  # noqa: F401
from jaxckpt.orbax import policies as save_decision_policy  # noqa: F401
from jaxckpt.orbax.checkpoint_manager import AbstractCheckpointManager as AbstractCheckpointManager
from jaxckpt.orbax.checkpoint_manager import CheckpointManager as CheckpointManager
from jaxckpt.orbax.options import CheckpointManagerOptions as CheckpointManagerOptions
from jaxckpt.orbax.policies import *  # noqa: F403  # every public name
from jaxckpt.orbax.policies import CheckpointInfo as PolicyCheckpointInfo  # noqa: F401
