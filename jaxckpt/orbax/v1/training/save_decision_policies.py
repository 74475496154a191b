"""Policies that decide when to save."""

from jaxckpt.orbax.policies import *  # noqa: F403  # every public name
