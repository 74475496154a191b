"""Names the directories of steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from jaxckpt.orbax import step as step_names
from jaxckpt.orbax.metadata import found_at


class NameFormat(Protocol):
    """Names the directories of steps, and finds them; a program's own class has these methods."""

    def build_name(self, step: int) -> str: ...

    def find_all(self, base_path: Any) -> Iterator[Any]: ...

    def find_step(self, base_path: Any, step: int) -> Any: ...


@dataclass(frozen=True)
class _StandardNameFormat(NameFormat):
    names: step_names.StandardNameFormat

    def build_name(self, step: int) -> str:
        return self.names.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        return map(_described, self.names.find_all(base_path))

    def find_step(self, base_path: Any, step: int) -> Any:
        return _described(self.names.find_step(base_path, step))


def _described(found: step_names.Metadata) -> Any:
    from jaxckpt.orbax.v1.training._metadata import CheckpointMetadata

    saved = found_at(found.path).metadata
    times = {"init_timestamp_nsecs": saved.init_ns, "commit_timestamp_nsecs": saved.commit_ns}
    return CheckpointMetadata(found.path, step=found.step, metadata=None, **times)


def standard_name_format(**options: Any) -> NameFormat:
    """Returns the format `[<prefix>_]<step>`: `step_prefix=`, `step_format_fixed_length=`."""
    return _StandardNameFormat(step_names.standard_name_format(**options))


@dataclass(frozen=True)
class _CompositeNameFormat(NameFormat):
    write_name_format: NameFormat
    read_name_formats: Any

    def __post_init__(self) -> None:
        if self.write_name_format not in self.read_name_formats:
            raise ValueError(f"{self.write_name_format} must be present in read_name_formats")

    def build_name(self, step: int) -> str:
        return self.write_name_format.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        found = {one.path: one for f in self.read_name_formats for one in f.find_all(base_path)}
        yield from found.values()

    def find_step(self, base_path: Any, step: int) -> Any:
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(f"No step {step} found under {base_path} by {self.read_name_formats}")


def composite_name_format(write_name_format: Any, read_name_formats: Any) -> NameFormat:
    """Returns a format that writes one kind of names and reads several."""
    return _CompositeNameFormat(write_name_format, read_name_formats)


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
    found = step_names.standard_name_format(**like)
    if match is None or found.build_name(123456) != name_format.build_name(123456):
        raise NotImplementedError(
            f"{name_format}: jaxckpt names steps `[<prefix>_]<step>`, padded with zeros; see "
            "step_prefix and step_digits of jaxckpt.CheckpointManager"
        )
    return {"step_prefix": found.step_prefix, "step_digits": digits}
