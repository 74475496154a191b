"""What a save holds of the caller's values, and what becomes of each on disk.

A checkpoint is made of items. Each is one of two things here: a tree, whose arrays go into a
database, or a few small files. Either has been brought to the host when it is made: from then on
the caller may donate, delete or change what it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxckpt._core.transfer import stage
from jaxckpt._disk.checksums import encode_share, merge_shares
from jaxckpt._disk.writer import database_of, merge, write_arrays
from jaxckpt._save.tree_plan import Layout, layout_of
from jaxckpt.errors import SaveFailed
from jaxckpt.format import arrays, jsontext, names, step
from jaxckpt.multihost import Json, Processes
from jaxckpt.storage import Storage


@dataclass(slots=True, kw_only=True)
class FileItem:
    """An item of a few small files.

    Attributes:
        mine: What every process writes for itself, by file name.
        shared: Makes what process 0 writes, by file name. Runs in the background.
    """

    name: str
    mine: Mapping[str, bytes] = field(default_factory=dict)
    shared: Callable[[], Mapping[str, bytes]] = dict
    handler: str = step.JSON_HANDLER

    @property
    def size_bytes(self) -> int:
        """What it holds in memory, about."""
        return sum(map(len, self.mine.values()))

    def write(self, storage: Storage, work: str, processes: Processes) -> None:
        """Writes this process's files below the directory of the checkpoint."""
        del processes
        if self.mine:
            storage.make_dir(f"{work}/{self.name}")
        for file, data in self.mine.items():
            storage.write(f"{work}/{self.name}/{file}", data)

    def said(self) -> Json:
        """What the processes compare."""
        return {"item": "files"}

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Why the processes' files do not belong together, by process."""
        return {}

    def finish(
        self, storage: Storage, work: str, processes: Processes, said: Sequence[Any]
    ) -> dict[str, bytes]:
        """Process 0, when all have written: the files to add, by name in the item."""
        del said, processes
        storage.make_dir(f"{work}/{self.name}")
        return dict(self.shared())

    def read_back(self, storage: Storage, work: str, processes: Processes) -> dict[str, bytes]:
        """Process 0: small files that others wrote, whose digests belong in the record."""
        if not self.mine:
            return {}
        files = [names.process_file(i, processes.count) for i in range(processes.count)]
        return {
            file: storage.read(f"{work}/{self.name}/{file}", max_bytes=jsontext.MAX_BYTES)
            for file in files
        }


@dataclass(slots=True, kw_only=True)
class TreeItem:
    """A pytree, of whose arrays this process writes its share.

    Attributes:
        snapshot: The values of the layout's sources; None once they are written.
        share: What process 0 has to say of its own chunks, for `_sums`.
    """

    name: str
    layout: Layout
    snapshot: Sequence[np.ndarray[Any, Any]] | None
    share: bytes = b""
    handler: str = step.PYTREE_HANDLER

    @property
    def size_bytes(self) -> int:
        """What it holds in memory, about."""
        return self.layout.plan.total_bytes

    def write(self, storage: Storage, work: str, processes: Processes) -> None:
        """Writes this process's share, and lets go of it."""
        assert self.snapshot is not None  # a save is run once
        database = database_of(f"{work}/{self.name}", processes.index, processes.count)
        snapshot, self.snapshot = self.snapshot, None
        requests = self.layout.requests
        sums = write_arrays(storage, database, requests, snapshot, describe=processes.index == 0)
        share = encode_share(requests.units, sums)
        if processes.index == 0:
            self.share = share
        elif share:
            storage.write(f"{database}/{names.CHUNK_SUMS}", share)
        if processes.index != 0 and storage.kind(database) == "dir":
            storage.sync(database)

    def said(self) -> Json:
        """What the processes compare."""
        return {"item": "tree", "tree": self.layout.fingerprint, "bytes": self.size_bytes}

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Why the processes' trees are not one, by process."""
        failures = {
            i: "has another tree, other shapes or other shardings than process 0"
            for i, one in enumerate(said)
            if one["tree"] != said[0]["tree"]
        }
        # The processes agree on the shards, but maybe not on who has which.
        wanted = sum(
            math.prod(stored.shape) * arrays.dtype_of(stored.dtype).itemsize
            for stored in self.layout.plan.stored
        )
        written = sum(one["bytes"] for one in said)
        if not failures and written != wanted:
            failures[0] = f"all processes together wrote {written} bytes of {wanted}"
        return failures

    def finish(
        self, storage: Storage, work: str, processes: Processes, said: Sequence[Any]
    ) -> dict[str, bytes]:
        """Process 0, when all have written: merges the databases; returns the metadata files."""
        item = f"{work}/{self.name}"
        writers = [i for i, one in enumerate(said) if one["bytes"] or i == 0]
        if processes.count > 1 and self.layout.plan.stored:
            merge(storage, item, writers)
        files = dict(self.layout.files)
        if any("/" in name for name in files):
            storage.make_dir(f"{item}/{names.ARRAY_METADATAS}")
        elif not self.layout.plan.stored:  # nobody wrote there
            storage.make_dir(item)
        if self.layout.plan.stored:
            files[names.CHUNK_SUMS] = self._chunk_sums(storage, item, writers)
        return files

    def _chunk_sums(self, storage: Storage, item: str, writers: Sequence[int]) -> bytes:
        count = self.layout.requests.unit_count
        files = [f"{names.process_database(i)}/{names.CHUNK_SUMS}" for i in writers if i]
        shares = _values(storage, item, files).values()
        table = merge_shares([self.share, *(share or b"" for share in shares)], count)
        if table is None:
            raise SaveFailed(f"{item}: no process wrote some of the {count} chunks")
        return table

    def read_back(self, storage: Storage, work: str, processes: Processes) -> dict[str, bytes]:
        """Process 0: small files that others wrote, whose digests belong in the record."""
        if not self.layout.plan.stored:
            return {}
        folders = [names.process_database(i) for i in range(1, processes.count)]
        files = [f"{folder}/{name}" for folder in folders for name in _OF_PROCESS]
        if processes.count > 1:
            files.append(f"{names.process_database(0)}/{names.OCDBT_MANIFEST}")
        found = _values(storage, f"{work}/{self.name}", [names.OCDBT_MANIFEST, *files])
        if found[names.OCDBT_MANIFEST] is None:
            raise SaveFailed(
                f"{work}/{self.name}/{names.OCDBT_MANIFEST} is missing: the arrays went somewhere "
                "else"
            )
        return {file: data for file, data in found.items() if data is not None}


# What each process leaves in the directory of its database, beside data.
_OF_PROCESS = (names.OCDBT_MANIFEST, names.CHUNK_SUMS)


def _values(storage: Storage, folder: str, files: Sequence[str]) -> dict[str, bytes | None]:
    """Small files below a directory of our own, read side by side; None for what is not there."""
    from jaxckpt.storage._arrays import Reader, value_of

    if not files:
        return {}
    reader = Reader(storage.kvstore(folder), database=False)
    reads = [reader.get(file) for file in files]
    return {file: value_of(read.result()) for file, read in zip(files, reads, strict=True)}


Item = TreeItem | FileItem


def take_tree(name: str, value: object, processes: Processes, *, copy: bool) -> TreeItem:
    """Takes a tree apart and brings this process's share of it to the host.

    Args:
        copy: Whether numpy arrays may change before they are written.

    Raises:
        UnsupportedLeaf: leaves cannot be stored; all are named.
    """
    layout, values = layout_of(value, processes)
    return TreeItem(name=name, layout=layout, snapshot=stage(values, layout.sources, copy=copy))
