"""Policies that decide which steps stay."""

from jaxckpt.orbax._policies import AnyPreservationPolicy as AnyPreservationPolicy
from jaxckpt.orbax._policies import BestN as BestN
from jaxckpt.orbax._policies import CustomSteps as CustomSteps
from jaxckpt.orbax._policies import EveryNSeconds as EveryNSeconds
from jaxckpt.orbax._policies import EveryNSteps as EveryNSteps
from jaxckpt.orbax._policies import EveryNStepsClosest as EveryNStepsClosest
from jaxckpt.orbax._policies import LatestDuration as LatestDuration
from jaxckpt.orbax._policies import LatestN as LatestN
from jaxckpt.orbax._policies import PreservationContext as PreservationContext
from jaxckpt.orbax._policies import PreservationPolicy as PreservationPolicy
from jaxckpt.orbax._policies import PreserveAll as PreserveAll
