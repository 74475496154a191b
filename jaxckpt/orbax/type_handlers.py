"""The names that programs import from `orbax.checkpoint.type_handlers`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from etils import epath

from jaxckpt.format import names
from jaxckpt.orbax._trees import PLACEHOLDER as PLACEHOLDER
from jaxckpt.orbax.args import ArrayRestoreArgs as ArrayRestoreArgs
from jaxckpt.orbax.args import RestoreArgs as RestoreArgs
from jaxckpt.orbax.args import SaveArgs as SaveArgs
from jaxckpt.orbax.args import SingleReplicaArrayRestoreArgs as SingleReplicaArrayRestoreArgs


@dataclass
class ParamInfo:
    """The facts about a leaf that Orbax gives to its handlers, which jaxckpt does not call.

    Attributes:
        name, keypath, parent_dir, value_typestr: Of the leaf, in which tree, and of its handler.
        skip_deserialize, is_ocdbt_checkpoint, use_zarr3, write_shape: How it is stored.
    """

    name: str | None = None
    keypath: tuple[Any, ...] | None = None
    parent_dir: epath.Path | None = None
    skip_deserialize: bool | None = None
    is_ocdbt_checkpoint: bool | None = None
    use_zarr3: bool | None = False
    value_typestr: str | None = None
    write_shape: tuple[int, ...] | None = None


class TypeHandler:
    """The base of Orbax's handlers of leaves, which jaxckpt does not call."""


class ArrayHandler(TypeHandler):
    """The handler of arrays."""

    def __init__(self, **tuning: Any) -> None:
        del tuning


# Nothing is broadcast: each process reads what its devices need.
NumpyHandler = ScalarHandler = StringHandler = SingleReplicaArrayHandler = ArrayHandler


def register_type_handler(
    ty: Any, handler: TypeHandler, func: Any = None, override: bool = False
) -> None:
    """Accepts the handlers of arrays above.

    Raises:
        NotImplementedError: a handler of another class.
    """
    if not isinstance(handler, ArrayHandler):
        raise NotImplementedError(
            f"register_type_handler({ty}, {handler}): the types that can be stored are fixed. "
            "Convert the leaves before a save, and back after a restore."
        )


def is_ocdbt_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Returns whether the arrays of a tree are in an OCDBT database."""
    return (epath.Path(path) / names.OCDBT_MANIFEST).exists()
