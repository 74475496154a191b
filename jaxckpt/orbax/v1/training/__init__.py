"""The checkpoints of a training run.

_checkpointer            `Checkpointer`: a run, its steps, their metadata
save_decision_policies   when to save
preservation_policies    which steps stay
errors                   errors of `Checkpointer`
"""

from jaxckpt.orbax.v1.training import errors as errors
from jaxckpt.orbax.v1.training import preservation_policies as preservation_policies
from jaxckpt.orbax.v1.training import save_decision_policies as save_decision_policies
from jaxckpt.orbax.v1.training._checkpointer import Checkpointer as Checkpointer
from jaxckpt.orbax.v1.training._checkpointer import CheckpointMetadata as CheckpointMetadata
from jaxckpt.orbax.v1.training._checkpointer import RootMetadata as RootMetadata
