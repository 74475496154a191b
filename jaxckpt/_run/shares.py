"""Local disks of the hosts; each disk has one share of a step for each of its processes.

    disk      each has a file that identifies it
    share     a checkpoint of what one process held: its part of the step, as in the directory of
              the run, and the other chunks of its shards; see `_save.snapshot`
    upload    all processes send their parts, in one save there; process 0 unites the tables

A share has every chunk that its process needs to restore the step as it was, and nothing more.
"""

from __future__ import annotations

import posixpath
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, final

import numpy as np

from jaxckpt._disk.commit import Work
from jaxckpt._disk.find import find, open_item
from jaxckpt._disk.found import Found
from jaxckpt._disk.native import Item
from jaxckpt._disk.places import Table, decode_table, encode_table, sums_of, unite
from jaxckpt._progress.meter import Meter
from jaxckpt._run.index import StepIndex
from jaxckpt._run.upload import Pace, Sending, checked, lineage_of, upload_token
from jaxckpt._save.job import SaveRequest
from jaxckpt._save.snapshot import FileItem, Finished, SaveItem, folder_of
from jaxckpt.errors import CheckpointError, CheckpointNotFound
from jaxckpt.format import names, step
from jaxckpt.format.ocdbt import Place
from jaxckpt.format.step import FileFacts, Record
from jaxckpt.multihost import Json, Processes, meet
from jaxckpt.storage import LocalStorage, Storage
from jaxckpt.storage._values import find_values

_MAX_ID_BYTES: Final = 64
_NOTHING: Final = Table({})


def machine() -> str:
    """Returns a name of this machine that no other has, though it began with the same disk."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # Linux only
            return file.read()
    except OSError:
        return socket.gethostname()


def share_on_disk(
    storage: Storage, root: str, processes: Processes, *, timeout_s: float, machine: str
) -> str:
    """Returns the name of this process's share of a local directory.

    It is "" if all processes see the same directory: then they save there together. Its file is the
    same then, which it also is on disks of one image, and no disk is in two machines.

    Args:
        machine: See `machine`.
    """
    found, problem = "", None
    try:
        storage.make_dir(root)
        file = f"{root}/{names.DISK}"
        if storage.kind(file) is None:  # there may be no room for it
            storage.create(file, secrets.token_hex(16).encode())
        found = storage.read(file, max_bytes=_MAX_ID_BYTES).decode("ascii", "replace")
    except Exception as error:  # reported to the others, then raised
        problem = error
    here = machine if isinstance(storage, LocalStorage) else ""  # else it may have a server
    name, mine = f"local {names.DISK}", [found, here]
    met = meet(processes, name, mine, problem, _ranks, timeout_s=timeout_s)
    met.check(problem, f"the local directory {root} cannot be used")
    ranks = met.verdict
    return names.share(ranks[processes.index % len(ranks)]) if ranks else ""


def _ranks(disks: Sequence[Any]) -> list[int]:
    """Returns the number of each process within its disk; empty if all processes share one disk.

    If the numbers repeat because all hosts have equally many processes, returns only one period.

    Example:
        >>> _ranks([["a", "host0"], ["a", "host0"], ["b", "host1"], ["b", "host1"]])
        [0, 1]
    """
    if all(one == disks[0] for one in disks):
        return []
    # Whatever the machines are called: two processes must not have one share.
    there: Counter[str] = Counter()
    ranks = []
    for disk, _ in disks:
        ranks.append(there[disk])
        there[disk] += 1
    period = ranks.index(0, 1) if 0 in ranks[1:] else len(ranks)
    is_periodic = all(rank == i % period for i, rank in enumerate(ranks))
    return ranks[:period] if is_periodic else ranks


def steps_on_disk(index: StepIndex) -> list[tuple[int, str]]:
    """Returns the steps of a share that can be found, each with the save that it comes from."""
    found = []
    for number in index.steps():
        try:
            origin = find(index.storage, index.path(number)).origin
        except (CheckpointError, OSError) as error:
            index.report(f"step {number} in {index.root} cannot be found: {error}")
            continue
        if origin is not None:
            found.append((number, origin))
    return found


def origin_in(index: StepIndex, number: int) -> str | None:
    """Returns the save that a step comes from; None if that is unknown."""
    try:
        return find(index.storage, index.path(number)).origin
    except CheckpointError:  # the restore reports the problem
        return None


def upload_request(
    source: StepIndex,
    target: StepIndex,
    number: int,
    processes: Processes,
    *,
    name: str,
    fence: Callable[[], None],
    pace: Pace,
    timeout_s: float,
) -> SaveRequest:
    """Returns the save of a step in the directory of a run, of the parts on the hosts' disks."""
    path = target.path(number)
    common = partial(
        SaveRequest,
        storage=target.storage,
        path=path,
        processes=processes,
        name=name,
        meter=Meter("save", path, step=number),
        is_step=True,
        fence=fence if processes.index == 0 else None,
        resumes=True,
        timeout_s=timeout_s,
    )
    try:
        found = find(source.storage, source.check_step(number))
        record = _checked_share(found, processes)
        main = [record.item] if record.item in found.items else []
        items = [_item(found, one, pace, processes) for one in dict.fromkeys([*main, *found.items])]
        return common(
            items=items,
            custom_metadata=found.metadata.custom_metadata or {},
            started_ns=found.metadata.init_ns or 0,
            lineage=lineage_of(found),
            life=lambda: record.life,
            token=upload_token(found),
        )
    except Exception as error:  # reported to the others, then raised
        return common(items=[], problem=error, token=secrets.token_hex(8))


def _checked_share(found: Found, processes: Processes) -> Record:
    record, own = checked(found), (processes.index, processes.count)
    if record.share != own:
        what = f"is not what process {own[0]} of {own[1]} held, but {record.share}"
        raise CheckpointNotFound(f"{found.path} {what}")
    return record


def _item(found: Found, name: str, pace: Pace, processes: Processes) -> SaveItem:
    handler = found.metadata.handlers.get(name, step.JSON_HANDLER)
    path = found.items[name]
    files = found.recorded(path)
    if names.TREE_METADATA in files:
        return SentTree(name=name, found=found, pace=pace, handler=handler)
    own = names.process_file(processes.index, processes.count)

    def read(file: str) -> bytes:
        folder = posixpath.join(path, posixpath.dirname(file)).rstrip("/")
        return found.read(folder, posixpath.basename(file))

    shared = [file for file in files if file not in (own, names.COMMIT_MARKER)]
    return FileItem(
        name=name,
        mine={own: read(own)} if own in files else {},
        shared=lambda: {file: read(file) for file in shared},
        handler=handler,
    )


@final
@dataclass(kw_only=True)
class SentTree:
    """A pytree whose part of this process is on its disk, in the form to be uploaded."""

    name: str
    found: Found
    pace: Pace
    handler: str
    sent: Table = _NOTHING  # where the values lie in the directory

    @property
    def size_bytes(self) -> int:
        """The size of the files to send."""
        return sum(self._files().values())

    @property
    def _path(self) -> str:
        return self.found.items[self.name]

    @cached_property
    def _table(self) -> Table:
        """Where the values of this process's part lie on its disk, with the checksums."""
        if names.OCDBT_MANIFEST not in self._recorded:
            return _NOTHING
        places = find_values(self.found.storage, self._path) or {}
        mine = {
            key: place
            for key, place in places.items()
            if isinstance(place, bytes) or not place.file.startswith(names.OCDBT_HELD)
        }
        sums = np.frombuffer(self._read(names.CHUNK_SUMS), "<u4")
        units = sums.nonzero()[0]  # of the others it has 0
        return Table(mine, units.tolist(), sums[units].tolist())

    @property
    def _recorded(self) -> Mapping[str, FileFacts]:
        return self.found.recorded(self._path)

    def _files(self) -> dict[str, int]:
        """Returns the files of this process's part, with their sizes."""
        places = self._table.places.values()
        files = {place.file for place in places if isinstance(place, Place)}
        return {file: self._recorded[file].size for file in sorted(files)}

    def arrive(self) -> None:
        """Waits for nothing: the values are on the disk."""

    def write(self, storage: Storage, work: Work, processes: Processes) -> None:
        """Sends this process's part, but not files already in the target."""
        del processes
        names_there = {file: names.data_file_of(file, work.mark) for file in self._files()}
        Sending(
            source=self.found.storage,
            source_folder=self._path,
            target=storage,
            folder=folder_of(self, work),
            pace=self.pace,
            sources={name: file for file, name in names_there.items()},
            is_alone=False,
        ).send_all({names_there[file]: size for file, size in self._files().items()})
        places = {
            key: place if isinstance(place, bytes) else place._replace(file=names_there[place.file])
            for key, place in self._table.places.items()
        }
        self.sent = self._table._replace(places=places)

    def part(self) -> bytes | None:
        """Returns where the values lie in the directory."""
        return encode_table(self.sent) if self.sent.places else None

    def said(self) -> Json:
        """Returns the facts that the processes compare."""
        return {"item": "tree", "tree": self.found.origin}

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Returns which processes have the part of another save than process 0."""
        others = [i for i, one in enumerate(said) if one["tree"] != said[0]["tree"]]
        return dict.fromkeys(others, "has the part of another save than process 0")

    def finish(
        self, storage: Storage, work: Work, processes: Processes, parts: Mapping[int, bytes]
    ) -> Finished:
        """Completes the database with the chunks that the other processes sent."""
        del processes
        files = {name: self._read(name) for name in self._metadata()}
        for folder in {posixpath.dirname(name) for name in files}:
            storage.make_dir(posixpath.join(folder_of(self, work), folder).rstrip("/"))
        if names.OCDBT_MANIFEST not in self._recorded:
            return files, {}
        opened = open_item(self.found, self.name)
        assert isinstance(opened, Item)
        stored = [leaf.array for leaf in opened.tree.leaves if leaf.has_array]
        tables = [self.sent, *map(decode_table, parts.values())]
        files[names.CHUNK_SUMS] = sums_of(tables, stored)
        manifest, sizes = unite(storage, folder_of(self, work), tables, stored, work)
        known = {name: FileFacts(size=size) for name, size in sizes.items()}
        return {**files, names.OCDBT_MANIFEST: manifest}, known

    def _metadata(self) -> list[str]:
        merged = (names.CHUNK_SUMS, names.OCDBT_MANIFEST, names.COMMIT_MARKER)
        return [
            name
            for name in self.found.recorded(self._path)
            if name not in merged
            and not name.startswith((names.OCDBT_PROCESS, f"{names.OCDBT_DATA}/"))
        ]

    def _read(self, name: str) -> bytes:
        folder = posixpath.join(self._path, posixpath.dirname(name)).rstrip("/")
        return self.found.read(folder, posixpath.basename(name))
