"""The directories of steps, by their names."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from etils import epath

from jaxckpt._run.index import StepIndex
from jaxckpt.format import names
from jaxckpt.format.run import StepNames
from jaxckpt.orbax.metadata import get_step_metadata
from jaxckpt.storage import locate

_NAME: Final = re.compile(rf"(?:.+_)?(\d+)(?:{re.escape(names.TEMPORARY)}(?:-.*)?)?")


@dataclass(frozen=True)
class Metadata:
    """A step and its directory."""

    step: int
    path: epath.Path

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """Returns when the save began, if that is recorded."""
        return self._recorded("init_timestamp_nsecs")

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """Returns when the save was committed, if that is recorded."""
        return self._recorded("commit_timestamp_nsecs")

    def _recorded(self, name: str) -> int | None:
        with contextlib.suppress(ValueError):
            return getattr(get_step_metadata(self.path), name)
        return None


class NameFormat:
    """Names the directories of steps, and finds them; a program's own class has these methods."""

    __class_getitem__ = classmethod(lambda cls, _: cls)  # in annotations: what `find_all` yields

    def build_name(self, step: int) -> str:
        """Returns the name of a step."""
        raise NotImplementedError(f"{type(self).__name__} names no steps")

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator[Any]:
        """Yields the committed steps in a directory."""
        raise NotImplementedError(f"{type(self).__name__} finds no steps")

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> Any:
        """Returns a committed step; ValueError if there is none."""
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(f"No step path found with step={step} and {self} in {base_path}.")


@dataclass(frozen=True, kw_only=True)
class StandardNameFormat(NameFormat):
    """Names `[<prefix>_]<step>`, padded with zeros if of a fixed length."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    single_host_load_and_broadcast: bool = False

    @property
    def _names(self) -> StepNames:
        return StepNames(prefix=self.step_prefix, digits=self.step_format_fixed_length)

    def build_name(self, step: int) -> str:
        """Returns the name of a step."""
        return self._names.of(step)

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator[Metadata]:
        """Yields the committed steps in a directory."""
        return _committed(base_path, self._names.step)

    def __str__(self) -> str:
        return f'StandardNameFormat("{self.build_name(1234)}")'


def _committed(
    base_path: str | os.PathLike[str], step_of: Callable[[str], int | None]
) -> Iterator[Metadata]:
    """Yields the directories with the names of steps, without incomplete steps.

    One with no file of a checkpoint counts where a rename commits, as it does for Orbax.
    """
    index = StepIndex(*locate(base_path), quiet=True)
    for name, entry in index.entries().items():
        step = step_of(name)
        if step is not None and entry.kind == "dir" and not is_path_temporary(name):
            state = index.state_of(name, entry)
            if state == "committed" or (state is None and index.storage.atomic_rename):
                yield Metadata(step, epath.Path(base_path) / name)


standard_name_format = StandardNameFormat


def names_of(name_format: Any) -> StepNames | None:
    """Returns the names of a format, Orbax's own included; None if there is none.

    Raises:
        NotImplementedError: the names are not `[<prefix>_]<step>`, or of several kinds.
    """
    if name_format is None:
        return None
    match = re.fullmatch(r"(?:(.+)_)?(0*7)", name_format.build_name(7))
    found = StepNames(prefix=match and match[1], digits=len(match[2]) if match else 1)
    is_one = len(getattr(name_format, "read_name_formats", ())) < 2
    if not (match and is_one) or found.of(123456) != name_format.build_name(123456):
        raise NotImplementedError(
            f"{name_format}: jaxckpt names all steps `[<prefix>_]<step>`, padded with zeros; see "
            "step_prefix and step_digits of jaxckpt.CheckpointManager"
        )
    return found


def index_of(directory: str | os.PathLike[str], names: StepNames) -> StepIndex:
    """Returns the steps of these names in a directory."""
    return StepIndex(*locate(directory), naming=names, quiet=True)


def build_step_path(base_path: str | os.PathLike[str], name_format: Any, step: int) -> epath.Path:
    """Returns the directory of a step, existing or not."""
    return epath.Path(base_path) / name_format.build_name(step)


def get_save_directory(
    step: int,
    directory: str | os.PathLike[str],
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: str | os.PathLike[str] | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> epath.Path:
    """Returns the directory of a step, or of one of its items."""
    given = {"step_prefix": step_prefix, "step_format_fixed_length": step_format_fixed_length}
    named = step_name_format or standard_name_format(**given)
    path = epath.Path(override_directory or build_step_path(directory, named, step))
    return path if name is None else path / name


def latest_step_metadata(root_path: str | os.PathLike[str], name_format: Any) -> Any:
    """Returns the newest committed step, or None."""
    return max(name_format.find_all(root_path), default=None, key=lambda found: found.step)


def find_step_path(
    base_path: str | os.PathLike[str],
    name_format: Any,
    *,
    step: int,
    include_uncommitted: bool = False,
) -> epath.Path:
    """Returns the directory of a step or of its save under way; ValueError if neither exists."""
    name = name_format.build_name(step)
    for found in all_temporary_paths(base_path) if include_uncommitted else ():
        if found.get_final().name == name:
            return found.get()
    return name_format.find_step(base_path, step).path


def checkpoint_steps_paths(checkpoint_dir: str | os.PathLike[str]) -> list[epath.Path]:
    """Returns the directories of the committed steps, whatever their names."""
    return [found.path for found in _committed(checkpoint_dir, _number)]


def checkpoint_steps(checkpoint_dir: str | os.PathLike[str]) -> list[int]:
    """Returns the committed steps in a directory, whatever their names."""
    return sorted(found.step for found in _committed(checkpoint_dir, _number))


def any_checkpoint_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
    """Returns a committed step in a directory, or None."""
    return max(checkpoint_steps(checkpoint_dir), default=None)


def step_from_checkpoint_name(name: str) -> int:
    """Returns the number at the end of the name of a step, also of one being written."""
    if (number := _number(name)) is None:
        raise ValueError(f"Unrecognized name format: {name}.")
    return number


def _number(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def is_path_temporary(path: str | os.PathLike[str], **_: Any) -> bool:
    """Returns whether a directory is a save under way or its remains."""
    return names.TEMPORARY in os.path.basename(os.fspath(path))


def is_path_finalized(path: str | os.PathLike[str], **_: Any) -> bool:
    """Returns whether a directory exists and is not a save under way."""
    return epath.Path(path).exists() and not is_path_temporary(path)


@dataclass(frozen=True)
class TemporaryPath:
    """The directory of a save under way, or left behind."""

    path: epath.Path

    def get(self) -> epath.Path:
        """Returns the directory."""
        return self.path

    def get_final(self) -> epath.Path:
        """Returns the directory as it is named once it is committed."""
        return self.path.parent / self.path.name.split(names.TEMPORARY)[0]


def all_temporary_paths(root: str | os.PathLike[str], **_: Any) -> list[TemporaryPath]:
    """Returns the directories of saves under way, or left behind."""
    return [TemporaryPath(path) for path in epath.Path(root).iterdir() if is_path_temporary(path)]
