"""The same as `args`, where programs import it from."""

from jaxckpt.orbax.args import *  # noqa: F403
