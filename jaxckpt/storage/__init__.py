"""Where checkpoints are: one protocol, and what implements it.

`locate` turns what a user wrote into a storage and a path in it. All other modules take both.
TensorStore is imported only when a memory store is used, or `jaxckpt.storage._arrays` itself.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from jaxckpt.errors import UnsupportedFormat
from jaxckpt.storage._local import LocalStorage, is_temporary_file
from jaxckpt.storage._protocol import Entry, Hold, Kind, Storage

if TYPE_CHECKING:
    from jaxckpt.storage._memory import MemoryStorage

__all__ = [
    "Entry",
    "Hold",
    "Kind",
    "LocalStorage",
    "MemoryStorage",
    "Storage",
    "is_temporary_file",
    "locate",
]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What pathlib makes of a URL: Path("gs://bucket/run") is "gs:/bucket/run", a relative path.
_BROKEN_URL = re.compile(r"(az|file|gcs|gs|hdfs|hf|https?|memory|s3):/")


def locate(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Finds the storage that a path or URL is in, and the absolute path in that storage.

    A leading `~` means the home directory; `..` is taken off by name; links are not resolved. A
    `file://` URL may hold %-escapes, a plain path holds none.

    Args:
        path: A local path, `file:///...`, or `memory://name/...`.

    Raises:
        ValueError: the path is empty, or has a NUL byte, a backslash or, as a URL, no name in it.
        UnsupportedFormat: the URL is of a kind that jaxckpt has no storage for.

    Example:
        >>> locate("/runs/./vit//b16/")[1]
        '/runs/vit/b16'
        >>> storage, path = locate("memory://scratch/run")
        >>> storage.scheme, path
        ('memory', '/scratch/run')
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"the path must be a str or an os.PathLike of str, not {path!r}")
    if not text or "\0" in text:
        raise ValueError(f"the path is empty or holds a NUL byte: {text!r}")
    if "\\" in text:
        raise ValueError(f"the path holds a backslash, which TensorStore takes for a '/': {text!r}")
    if _BROKEN_URL.match(text) and not _URL.match(text):
        raise UnsupportedFormat(
            f"{text!r} is a URL that lost a '/', as URLs do in pathlib.Path. Give it as a str, or "
            "as an etils.epath.Path."
        )
    if not (url := _URL.match(text)):
        return LocalStorage(), _absolute(os.path.expanduser(text))
    match url[1].lower():
        case "file":
            return LocalStorage(), _file_url_path(text, url[2])
        case "memory":
            return _memory_storage(), _memory_url_path(text, url[2])
        case _:
            raise UnsupportedFormat(
                f"{text!r}: jaxckpt does not support {url[1]}:// yet, nor any other object store. "
                "Save to a local or network file system, and copy committed checkpoints with the "
                "store's own tool (gcloud storage rsync, aws s3 sync)."
            )


def _absolute(path: str) -> str:
    # POSIX lets a path that starts with exactly two slashes mean something else. Nobody does.
    return "/" + os.path.abspath(path).lstrip("/")


def _file_url_path(text: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"{text!r} names no local file: wanted file:///absolute/path")
    path = unquote(path)
    if "\0" in path:
        raise ValueError(f"the path holds a NUL byte: {text!r}")
    return _absolute("/" + path)


def _memory_url_path(text: str, rest: str) -> str:
    path = posixpath.normpath("/" + rest.lstrip("/"))
    if path == "/":
        raise ValueError(f"{text!r} names no memory store: wanted memory://name or more")
    return path


def _memory_storage() -> MemoryStorage:
    from jaxckpt.storage._memory import MemoryStorage

    return MemoryStorage()


def __getattr__(name: str) -> object:
    if name == "MemoryStorage":
        from jaxckpt.storage._memory import MemoryStorage

        return MemoryStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
