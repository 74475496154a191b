"""Names the directories of steps."""

from __future__ import annotations

import re
from typing import Any

from jaxckpt.orbax.step import NameFormat as NameFormat
from jaxckpt.orbax.step import composite_name_format as composite_name_format
from jaxckpt.orbax.step import standard_name_format as standard_name_format


def naming(name_format: Any) -> dict[str, Any]:
    """Returns `step_prefix` and `step_digits` of a format, Orbax's own included.

    Raises:
        NotImplementedError: the names are not `[<prefix>_]<step>`.
    """
    if name_format is None:
        return {}
    match = re.fullmatch(r"(?:(.+)_)?(0*7)", name_format.build_name(7))
    digits = len(match[2]) if match and match[2] != "7" else None
    like = {"step_prefix": match and match[1], "step_format_fixed_length": digits}
    found = standard_name_format(**like)
    if match is None or found.build_name(123456) != name_format.build_name(123456):
        raise NotImplementedError(
            f"{name_format}: jaxckpt names steps `[<prefix>_]<step>`, padded with zeros; see "
            "step_prefix and step_digits of jaxckpt.CheckpointManager"
        )
    return {"step_prefix": found.step_prefix, "step_digits": digits}
