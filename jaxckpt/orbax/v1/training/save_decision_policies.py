"""Policies that decide when to save."""

from jaxckpt.orbax._policies import *  # noqa: F403  # every public name
