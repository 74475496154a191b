"""Policies that decide which steps stay."""

from jaxckpt.orbax.policies import *  # noqa: F403  # every public name
