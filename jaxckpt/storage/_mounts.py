"""Finds the file system of a local path, and recognizes a bucket that is mounted as a directory."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

_TABLE: Final = "/proc/self/mountinfo"  # Linux only
_BUCKET_TOOLS: Final = ("gcsfuse", "s3fs", "mountpoint-s3", "rclone", "juicefs")


class Mount(NamedTuple):
    """A mounted file system: its kind such as "ext4" or "fuse.s3fs", what is mounted, and where."""

    kind: str
    source: str
    point: str

    @property
    def bucket_tool(self) -> str:
        """The program that shows a bucket as this file system, or ""."""
        fuse, _, program = self.kind.partition(".")
        names = (program, self.source) if fuse == "fuse" else ()
        return next((tool for tool in _BUCKET_TOOLS if tool in names), "")


def mount_of(path: str) -> Mount | None:
    """Returns the file system of a path; None if it is unknown."""
    try:
        with open(_TABLE, encoding="utf-8", errors="surrogateescape") as file:
            return find_mount(file.read(), os.path.realpath(path))
    except OSError:
        return None


def find_mount(table: str, path: str) -> Mount | None:
    """Returns the file system of a path without links, given the text of `mountinfo`.

    Example:
        >>> table = "29 1 8:1 / / rw - ext4 /dev/sda rw\\n41 29 0:9 / /b rw - fuse.s3fs s3fs rw\\n"
        >>> find_mount(table, "/b/run").bucket_tool, find_mount(table, "/bc").kind
        ('s3fs', 'ext4')
    """
    mounts = [_parse(line) for line in table.splitlines()]
    over = [one for one in mounts if f"{path}/".startswith(f"{one.point.rstrip('/')}/")]
    # Of those mounted at the same place, the last hides the others.
    return max(reversed(over), key=lambda one: len(one.point), default=None)


def _parse(line: str) -> Mount:
    place, _, kind = line.partition(" - ")
    name, source, *_ = kind.split(" ")
    return Mount(name, _unescaped(source), _unescaped(place.split(" ")[4]))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
