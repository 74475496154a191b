"""Reads the facts about a step, and those that are stored with the run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from jaxckpt._disk.find import lost_record
from jaxckpt._disk.found import Found, check_sizes
from jaxckpt._run.listing import ListedRoot
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import jsontext, names, run
from jaxckpt.format.run import StepNames
from jaxckpt.storage import Storage, listing


def check_found(listed: ListedRoot, number: int, found: Found) -> None:
    """Checks that all files of a step are present in their recorded sizes; reads no data.

    Reports items that another program removed; the step is whole without them.

    Raises:
        CorruptCheckpoint: a file is missing or has a different size.
    """
    saved_as = found.record.name if found.record is not None else ""
    if saved_as and (listed.naming or StepNames()).step(saved_as) not in (None, number):
        listed.report(f"{found.path} was saved as {saved_as}, then renamed or copied")
    for item in found.removed:
        listed.report(found.was_removed(item))
    check_sizes(found)


def saved_s(found: Found) -> float | None:
    """Returns when a checkpoint was saved, in seconds since 1970; None if not recorded."""
    saved_ns = found.metadata.commit_ns or found.metadata.init_ns
    return None if saved_ns is None else saved_ns / 1e9


def metrics_of(found: Found) -> dict[str, Any]:
    """Reads the metrics of a step; empty if it has none."""
    item = f"{found.path}/{names.METRICS_ITEM}"
    file = f"{item}/{names.METRICS_FILE}"
    if found.contents(item).get(names.METRICS_FILE) != "file":
        return {}
    metrics = jsontext.loads(found.read(item, names.METRICS_FILE), file=file)
    return metrics if isinstance(metrics, dict) else {}


def is_ours(storage: Storage, path: str) -> bool:
    """Returns whether jaxckpt wrote a directory, at least in part."""
    inside = listing(storage, path) or {}
    files = (inside.get(name) for name in (names.RECORD, names.WRITER))
    return any(file is not None and file.kind == "file" for file in files) or lost_record(
        Found(storage=storage, path=path, listings={path: inside})
    )


def run_metadata(listed: ListedRoot) -> dict[str, Any]:
    """Reads the metadata of a run; empty if it has none."""
    for name in (names.ROOT_METADATA_FILE, names.OLD_ROOT_METADATA_FILE):
        file = f"{listed.root}/{names.ROOT_METADATA}/{name}"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            data = listed.storage.read(file, max_bytes=jsontext.MAX_BYTES)
            return run.decode_metadata(data, file=file)
    return {}


def write_run_metadata(listed: ListedRoot, metadata: Mapping[str, Any]) -> None:
    """Writes the metadata of a run that has none; other metadata stays and is reported."""
    folder = f"{listed.root}/{names.ROOT_METADATA}"
    try:
        if not run_metadata(listed):
            listed.storage.make_dir(folder)
            data = jsontext.dumps({"custom_metadata": dict(metadata)})
            listed.storage.create(f"{folder}/{names.ROOT_METADATA_FILE}", data)
        if run_metadata(listed) != metadata:
            listed.report(f"{folder} has other run_metadata than this job, and stays as it is")
    except CorruptCheckpoint as error:
        listed.report(f"{error}. The run goes on; remove the file to have it written again")
