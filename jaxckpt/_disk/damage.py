"""Names the leaf and the file when stored data cannot be read."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from jaxckpt._disk.found import file_problem, pointer_problem
from jaxckpt._disk.native import Item
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, is_io_failure
from jaxckpt.format.ocdbt import Place
from jaxckpt.format.tree import Leaf
from jaxckpt.storage._values import find_values

# At most this many keys are searched for the sake of a better message.
_MOST_KEYS: Final = 1 << 20


def blame(item: Item, leaf: Leaf | None, error: Exception) -> Exception:
    """Returns a CorruptCheckpoint that names the leaf, and the file if it is known to be bad.

    An error that does not show bad data, such as an OSError or MemoryError, is returned as it is.
    """
    from jaxckpt.storage._arrays import data_error

    text = leaf.text if leaf else None
    is_ours = isinstance(error, CheckpointError) or not isinstance(error, (ValueError, OSError))
    if not is_ours and not is_io_failure(error):
        error = data_error(error, item.path, text)
    if not isinstance(error, CorruptCheckpoint):
        return error
    known = error.file is not None and error.file.startswith(f"{item.path}/")  # pyright: ignore
    file, problem = (
        bad_file(item) or (not known and _damaged_file(item, str(error))) or (error.file, "")
    )
    problem = (file and pointer_problem(item.found.storage, file)) or problem
    if not problem:
        return error
    where = f"leaf {text}: " if text else ""
    named = CorruptCheckpoint(
        f"{where}{file} {problem}. Restore an older checkpoint. ({error})", leaf=text, file=file
    )
    named.__cause__ = error
    return named


def bad_file(item: Item) -> tuple[str, str] | None:
    """Returns the first file of the record that is now missing or has the wrong size."""
    found = replace(item.found, listings={})
    for path, facts in found.record.files.items() if found.record else ():
        if problem := file_problem(found, path, facts):
            return f"{found.path}/{path}", problem
    return None


def _damaged_file(item: Item, message: str) -> tuple[str, str] | None:
    """Returns the data file with the chunk that a TensorStore message names, and its problem."""
    key = re.search(r'"([^"]*(?:/c(?:/\d+)*|[/.\d]+))"', message)
    if key is None or not item.database:
        return None
    try:
        found = find_values(item.found.storage, item.path, max_keys=_MOST_KEYS)
        place = (found or {}).get(key[1])
        if not isinstance(place, Place):
            return None
        file = f"{item.path}/{place.file}"
        return file, "is damaged" if item.found.storage.kind(file) else "is missing"
    except (ValueError, OSError):
        return None
