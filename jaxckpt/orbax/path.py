"""Paths: `path.step` has what programs use."""

from jaxckpt.orbax import step as step
