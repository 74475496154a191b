"""The directories of steps, by their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from etils import epath

from jaxckpt._run.index import StepIndex
from jaxckpt.format import names
from jaxckpt.format.run import StepNames
from jaxckpt.storage import locate


@dataclass(frozen=True)
class Metadata:
    """A step and its directory."""

    step: int
    path: epath.Path


@dataclass(frozen=True, kw_only=True)
class StandardNameFormat:
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
        index = StepIndex(*locate(base_path), naming=self._names, quiet=True)
        for step in index.steps():
            yield Metadata(step, epath.Path(base_path) / self.build_name(step))

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> Metadata:
        """Returns a committed step; ValueError if there is none."""
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(f"No step path found with name={self.build_name(step)} in {base_path}.")


def standard_name_format(**options: Any) -> StandardNameFormat:
    """Returns a naming scheme."""
    return StandardNameFormat(**options)


def composite_name_format(*formats: Any) -> Any:
    """Is not supported."""
    raise NotImplementedError("composite_name_format: a run has one naming scheme")


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


def checkpoint_steps_paths(checkpoint_dir: str | os.PathLike[str]) -> list[epath.Path]:
    """Returns the directories of the committed steps, whatever their names."""
    root = epath.Path(checkpoint_dir)
    steps = checkpoint_steps(checkpoint_dir)
    index = StepIndex(*locate(checkpoint_dir), quiet=True)
    return [root / os.path.basename(index.check_step(step)) for step in steps]


def checkpoint_steps(checkpoint_dir: str | os.PathLike[str]) -> list[int]:
    """Returns the committed steps in a directory."""
    return StepIndex(*locate(checkpoint_dir), quiet=True).steps()


def any_checkpoint_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
    """Returns a committed step in a directory, or None."""
    return StepIndex(*locate(checkpoint_dir), quiet=True).newest()


def step_from_checkpoint_name(name: str) -> int:
    """Returns the number at the end of the name of a step, also of one being written."""
    number = name.split(names.TEMPORARY)[0].rpartition("_")[2]
    if not number.isdigit():
        raise ValueError(f"Unrecognized name format: {name}.")
    return int(number)


def is_path_temporary(path: str | os.PathLike[str], **_: Any) -> bool:
    """Returns whether a directory is a save under way, or what is left of one."""
    return names.TEMPORARY in os.path.basename(os.fspath(path))


def is_path_finalized(path: str | os.PathLike[str], **_: Any) -> bool:
    """Returns whether a directory exists and is no save under way."""
    return epath.Path(path).exists() and not is_path_temporary(path)


def all_temporary_paths(root: str | os.PathLike[str], **_: Any) -> list[epath.Path]:
    """Returns the directories of saves under way, or left behind."""
    return [path for path in epath.Path(root).iterdir() if is_path_temporary(path)]
