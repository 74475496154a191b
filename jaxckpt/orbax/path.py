"""Paths: `path.step` and `path.atomicity` have what programs use."""

from jaxckpt.orbax import atomicity as atomicity
from jaxckpt.orbax import step as step
