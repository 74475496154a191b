"""Policies that decide which steps stay."""

from jaxckpt.orbax._policies import *  # noqa: F403  # every public name
