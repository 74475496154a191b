"""`Context`: the options of the calls in its `with`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Final, Self, final

from jaxckpt.orbax import options as v0_options
from jaxckpt.orbax.policies import warn_once
from jaxckpt.orbax.v1 import options
from jaxckpt.orbax.v1._trees import ACTIVE

# The attribute, the keyword that also reads it, and the class.
_PARTS: Final = (
    ("pytree", "pytree_options", options.PyTreeOptions),
    ("array", "array_options", options.ArrayOptions),
    ("asynchronous", "async_options", options.AsyncOptions),
    ("multiprocessing", "multiprocessing_options", options.MultiprocessingOptions),
    ("file", "file_options", options.FileOptions),
    ("checkpointables", "checkpointables_options", options.CheckpointablesOptions),
    ("pathways", "pathways_options", options.PathwaysOptions),
    ("deletion", "deletion_options", options.DeletionOptions),
    ("memory", "memory_options", options.MemoryOptions),
    ("safetensors", "safetensors_options", options.SafetensorsOptions),
    ("atomicity", "atomicity_options", options.AtomicityOptions),
)
_ATTRIBUTES: Final = {keyword: name for name, keyword, _ in _PARTS}


@final
class Context:
    """Options: `array`, `pytree`, `asynchronous`, ...; active in its `with`.

    Args:
        context: The context whose options to start with, instead of the enclosing `with`'s.
        checkpoint_layout: What is read.
        given: Options by keyword, such as `array_options=`.
    """

    def __init__(
        self,
        context: Context | None = None,
        *,
        checkpoint_layout: options.CheckpointLayout | str | None = None,
        **given: Any,
    ) -> None:
        if unknown := given.keys() - _ATTRIBUTES.keys():
            raise TypeError(f"Context takes no argument {', '.join(sorted(unknown))}")
        old = {} if context is None else context._parts
        self._parts: dict[str, Any] = {}
        for name, keyword, kind in _PARTS:
            part = given.get(keyword) or old.get(name)
            self._parts[name] = kind() if part is None else copy.deepcopy(part)
        layout = options.CheckpointLayout.ORBAX if context is None else context.checkpoint_layout
        self._layout = options.CheckpointLayout(checkpoint_layout or layout)
        self._entered: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("_parts", {})
        part = parts.get(_ATTRIBUTES.get(name, name))
        if part is None:
            raise AttributeError(f"Context has no attribute {name!r}")
        return part

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {part for part, *_ in _PARTS} | _ATTRIBUTES.keys():
            raise AttributeError(f"set the fields of {name}, or make a new Context")
        object.__setattr__(self, name, value)

    @property
    def checkpoint_layout(self) -> options.CheckpointLayout:
        """Returns the layout that is read."""
        return self._layout

    @checkpoint_layout.setter
    def checkpoint_layout(self, value: options.CheckpointLayout | str) -> None:
        if id(self) in options.FROZEN.get():
            raise RuntimeError("Cannot mutate an active Context; set its options before `with`")
        self._layout = options.CheckpointLayout(value)

    def __enter__(self) -> Self:
        frozen = options.FROZEN.get() | {id(self), *_ids(self._parts.values())}
        self._entered.append((options.FROZEN.set(frozen), ACTIVE.set(self)))
        return self

    def __exit__(self, *_: object) -> None:
        frozen, before = self._entered.pop()
        ACTIVE.reset(before)
        options.FROZEN.reset(frozen)

    def check(self) -> None:
        """Raises NotImplementedError for options that would be ignored, and should not be."""
        v0_options.check(
            multiprocessing_options=self.multiprocessing,
            atomicity_options=self.atomicity,
            use_ocdbt=self.array.saving.use_ocdbt,
        )
        if not self.array.loading.raise_array_data_missing_error:
            warn_once("raise_array_data_missing_error=False: jaxckpt raises if data is missing")


def _ids(parts: Any) -> Iterator[int]:
    for part in parts:
        yield id(part)
        yield from _ids(x for f in fields(part) if is_dataclass(x := getattr(part, f.name)))


def get_context(default: Context | None = None) -> Context:
    """Returns the active context, or else the given one, or one without options."""
    return ACTIVE.get() or default or Context()
