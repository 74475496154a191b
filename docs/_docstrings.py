"""Rewrites docstrings of jaxckpt where mkdocstrings expects another form of Google's style."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

# An error in a list of errors that has no name, and the heading over an example.
OTHERS = re.compile(r"^( +)(Any error )", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Docstrings(Extension):
    """Rewrites docstrings into the form that mkdocstrings expects, before they are parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            text = OTHERS.sub(r"\1Others: \2", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", text)
