"""Policies that decide when to save."""

from jaxckpt.orbax._policies import AnySavePolicy as AnySavePolicy
from jaxckpt.orbax._policies import ContinuousCheckpointingPolicy as ContinuousCheckpointingPolicy
from jaxckpt.orbax._policies import DecisionContext as DecisionContext
from jaxckpt.orbax._policies import FixedIntervalPolicy as FixedIntervalPolicy
from jaxckpt.orbax._policies import InitialSavePolicy as InitialSavePolicy
from jaxckpt.orbax._policies import PreemptionCheckpointingPolicy as PreemptionCheckpointingPolicy
from jaxckpt.orbax._policies import SaveDecisionPolicy as SaveDecisionPolicy
from jaxckpt.orbax._policies import SpecificStepsPolicy as SpecificStepsPolicy
