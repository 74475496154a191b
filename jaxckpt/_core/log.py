"""The log of jaxckpt, which all modules write to."""

import logging
from typing import Final

logger: Final = logging.getLogger("jaxckpt")
