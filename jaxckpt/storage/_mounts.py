"""Finds the file system of a local path, and recognizes a bucket that is mounted as a directory."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from jaxckpt.errors import StoreError

_TABLE: Final = "/proc/self/mountinfo"  # Linux only
# Plain "fuse" is the type that mount-s3 has, and gcsfuse as a volume of GKE. JuiceFS is missing
# because a rename is one transaction there.
_BUCKETS: Final = ("fuse", "fuse.gcsfuse", "fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs")
_NETWORKS: Final = frozenset(
    "9p afs autofs beegfs ceph cifs fuse gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs "
    "panfs pvfs2 smb3 smbfs virtiofs wekafs".split()
)


class Mount(NamedTuple):
    """A mounted file system: its kind, such as "ext4" or "fuse.s3fs", and where it is."""

    kind: str
    point: str

    @property
    def is_bucket(self) -> bool:
        """Returns whether this is a bucket, in which a rename copies and deletes."""
        return self.kind in _BUCKETS

    @property
    def may_hang(self) -> bool:
        """Returns whether calls wait for a server or a program; a broken disk returns errors."""
        return self.kind.partition(".")[0] in _NETWORKS


def mounts() -> dict[int, Mount]:
    """Returns the mounts by the number of their device, `st_dev` of their files, if it is known."""
    try:
        with open(_TABLE, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return find_mounts(file.read())
    except (FileNotFoundError, PermissionError):  # other errors pass: a bucket is no local disk
        return {}


def device_of(
    path: str, stat: Callable[[str], Any], mounts: Callable[[], dict[int, Mount]] = mounts
) -> int:
    """Returns the number of the device that a path is on, or will be once it is made."""
    while True:  # at least the root exists
        try:
            return stat(path).st_dev
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            # The server or program of a mount may be away, as that of a FUSE bucket.
            is_missing = getattr(error, "errno", None) in (None, errno.ENOENT, errno.ENOTDIR)
            table = {} if is_missing else {one.point: at for at, one in mounts().items()}
        if path in table:
            return table[path]
        path = os.path.dirname(path)


@lru_cache(maxsize=1)
def find_mounts(table: str) -> dict[int, Mount]:
    """Returns the mounts by the number of their device, given the text of `mountinfo`.

    Example:
        >>> table = "29 1 8:1 / / rw - ext4 /dev/sda rw\\n41 29 0:9 / /b rw - fuse.s3fs s3fs rw\\n"
        >>> find_mounts(table)[os.makedev(0, 9)]
        Mount(kind='fuse.s3fs', point='/b')
    """
    return dict(map(_parse, filter(None, table.split("\n"))))


def _parse(line: str) -> tuple[int, Mount]:
    mount, _, kind = line.partition(" - ")
    _, _, device, _, point, *_ = mount.split(" ")
    major, minor = map(int, device.split(":"))
    point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)
    return os.makedev(major, minor), Mount(kind.split(" ")[0], point)
