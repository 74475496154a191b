"""Examines a path or URL where checkpoints are to be kept."""

from __future__ import annotations

import importlib.util

from jaxckpt.cli._checks import Finding, Location, try_out
from jaxckpt.errors import StoreError, UnsupportedFormat
from jaxckpt.storage import locate
from jaxckpt.storage._settings import SCHEMES


def examine(path: str) -> list[Finding]:
    """Tries out a place for checkpoints: what works there, how fast, and what to do about the rest.

    All that it writes is below one temporary name at the path, and is deleted at the end.

    Raises:
        ValueError, UnsupportedFormat: as `locate`.
        NotADirectoryError: the path is a file.
    """
    scheme = path.partition("://")[0].lower() if "://" in path else ""
    if scheme in SCHEMES and importlib.util.find_spec("obstore") is None:
        advice = "install the package obstore: pip install obstore"
        return [Finding(name="obstore", state="failed", advice=advice)]
    try:
        location = _location(path, scheme)
    except StoreError as error:
        if scheme not in SCHEMES:  # a file system that hangs
            raise
        advice = "correct StoreSettings, or the environment"
        return [Finding(name="credentials", state="failed", advice=advice, error=str(error))]
    return try_out(location)


def _location(path: str, scheme: str) -> Location:
    if scheme in SCHEMES:
        from jaxckpt.cli._bucket_checks import BucketLocation

        return BucketLocation(scheme, path)
    from jaxckpt.cli._folder_checks import FolderLocation

    storage, where = locate(path)
    if storage.scheme != "file":
        raise UnsupportedFormat(f"{path} is in the memory of one program: nothing to try out")
    return FolderLocation(storage, where)
