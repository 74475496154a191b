"""Names the directories of steps."""

from jaxckpt.orbax.step import NameFormat as NameFormat
from jaxckpt.orbax.step import standard_name_format as standard_name_format
