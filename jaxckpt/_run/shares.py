"""Local disks of the hosts; each disk has one share of a step for each of its processes.

    disk      each has a file that identifies it
    share     a checkpoint of what one process held: its part of the step, as in the directory of
              the run, and the other chunks of its shards; see `_save.snapshot`
    part      what a process sends of its share: its data files, and a table of their places.
              Process 0 also sends the metadata, and unites the tables

A share has every chunk that its process needs to restore the step as it was, and nothing more.
"""

from __future__ import annotations

import posixpath
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from jaxckpt._disk.attempt import Work
from jaxckpt._disk.checksums import starts_of, units_by_key
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found
from jaxckpt._disk.item import open_tree
from jaxckpt._disk.places import Table, check_complete, decode_table, encode_table, unite
from jaxckpt._run.copies import Held, Saved
from jaxckpt._run.index import StepIndex
from jaxckpt._run.reach import twice
from jaxckpt.errors import CheckpointError, is_io_failure
from jaxckpt.format import names
from jaxckpt.format.ocdbt import decode_leaves, encode_leaves
from jaxckpt.format.step import FileFacts
from jaxckpt.multihost import Processes, meeting, text_of
from jaxckpt.multihost._collective import disagreement
from jaxckpt.storage import LocalStorage, Storage, together
from jaxckpt.storage._values import find_values

_MAX_ID_BYTES: Final = 64
_MAX_PART_BYTES: Final = 1 << 30
_FIRST_PAUSE_S: Final = 0.05  # between looks for the parts of other processes
_LONGEST_PAUSE_S: Final = 2.0
_PROBLEM: Final = "problem/"  # never the name of an item or a file


def machine() -> str:
    """Returns a name of this machine that no other has, though it began with the same disk."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # Linux only
            return file.read()
    except OSError:
        return socket.gethostname()


def share_on_disk(storage: Storage, root: str, processes: Processes, *, machine: str) -> str:
    """Returns the name of this process's share of a local directory.

    It is "" if all processes see the same directory: then they save there together. Its file is the
    same then, which it also is on disks of one image, and no disk is in two machines.
    """
    where = f"the local directory {root} cannot be used"
    with meeting(processes, f"local {names.DISK}", _ranks, where=where) as met:
        storage.make_dir(root)
        file = f"{root}/{names.DISK}"
        if storage.kind(file) is None:  # there may be no room for it
            storage.create(file, secrets.token_hex(16).encode())
        found = storage.read(file, max_bytes=_MAX_ID_BYTES).decode("ascii", "replace")
        here = machine if isinstance(storage, LocalStorage) else ""  # else it may have a server
        met.value = [found, here]
    ranks = met.value
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


def steps_on_disk(index: StepIndex, *, is_ranked: bool = False) -> list[Held]:
    """Returns the steps of a share that can be found, with their metrics if they are ranked."""
    found = (_held(index, number) for number in index.steps())
    return [_with_metrics(index, one) if is_ranked else one for one in found if one is not None]


def _held(index: StepIndex, number: int) -> Held | None:
    """Returns a step that comes from a save, or reports why not."""
    try:
        found = twice(lambda: find(index.storage, index.path(number)))
    except (CheckpointError, OSError) as error:
        index.report(f"step {number} in {index.root} cannot be found: {error}")
        return Held(number, problem=text_of(error)) if is_io_failure(error) else None
    if found.record is None:
        return None
    saved = Saved.of(number, found.record.life, found.metadata.commit_ns or 0)
    return Held(number, found.origin, saved, part=found.part or (0, 1))


def _with_metrics(index: StepIndex, held: Held) -> Held:
    if held.save is None:
        return held
    info, error = index.info(held.step), index.unknown.get(held.step)
    if error is None:
        return held._replace(metrics={**info.metrics})
    return held._replace(problem=text_of(error) if is_io_failure(error) else None)


def origin_in(index: StepIndex, number: int) -> str | None:
    """Returns the save that a step comes from; None if that is unknown."""
    try:
        return find(index.storage, index.path(number)).origin
    except CheckpointError:  # the restore reports the problem
        return None


def part_in(index: StepIndex, number: int) -> Sequence[int]:
    """Returns whose shards of a step are here, and of how many processes; empty if not whole."""
    if not index.is_whole(number):
        return ()
    return find(index.storage, index.path(number)).part or (0, 1)


# --- uploading -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Lists the files that one process adds to a step in the directory of its run."""

    found: Found  # on its disk
    work: Work  # in the directory
    process: int
    count: int
    files: Mapping[str, str]  # the files to send: their names on its disk by their names there
    tables: Mapping[str, Table]  # where the values of each item lie there

    def facts(self) -> dict[str, FileFacts]:
        """Returns the facts about each file to send."""
        recorded = self.found.recorded(self.found.path)
        return {name: recorded[file] for name, file in self.files.items()}

    def leave(self, storage: Storage) -> None:
        """Leaves the tables and this process's own files for process 0, after the data files."""
        own = names.process_file(self.process, self.count)
        mine = [f for f in self.found.recorded(self.found.path) if posixpath.basename(f) == own]
        left = {file: self.found.read(self.found.path, file) for file in mine}
        left |= {item: encode_table(table) for item, table in self.tables.items()}
        _leave(storage, self.work, self.process, left)

    def take(
        self,
        storage: Storage,
        parts: dict[int, bytes],
        lacks: list[int],
        rest: Callable[[float], None],
        wait_s: float,
    ) -> None:
        """Adds to `parts` what the other processes left, once all have.

        Args:
            lacks: Is set to the processes that have left nothing; nothing is taken if that is
                still so after `wait_s`.
            rest: Waits for some seconds.
        """
        deadline_s, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
        files = {i: names.part(i, self.work.mark) for i in range(1, self.count) if i not in parts}
        while files:
            there = {*storage.entries(self.work.path)}
            lacks[:] = [i for i, file in files.items() if file not in there]
            if not lacks:
                break
            if (left_s := deadline_s - time.monotonic()) <= 0:
                return
            rest(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        paths = [f"{self.work.path}/{file}" for file in files.values()]
        reads = [partial(storage.read, path, max_bytes=_MAX_PART_BYTES) for path in paths]
        parts.update(zip(files, together(storage, reads), strict=True))
        storage.delete_files(paths)

    def unite(
        self, storage: Storage, parts: Mapping[int, bytes]
    ) -> tuple[dict[str, bytes], dict[str, FileFacts]]:
        """Returns the files that unite all parts, and facts about the files already there.

        Raises:
            ProcessesDisagree: another process could not send its part.
        """
        others = {i: _decode(parts[i]) for i in sorted(parts)}
        if why := {i: left[_PROBLEM].decode() for i, left in others.items() if _PROBLEM in left}:
            raise disagreement(f"{self.found.path} was not uploaded", why, count=len(why))
        files, known = {}, self.facts()
        for left in others.values():
            files |= {file: data for file, data in left.items() if file not in self.tables}
        for item, mine in self.tables.items():
            tables = [decode_table(left[item]) for left in others.values() if item in left]
            tables.append(mine)  # last: of small host arrays all have a value, and its own counts
            leaves = open_tree(self.found, item).tree.leaves
            stored = [leaf.array for leaf in leaves if leaf.has_array]
            folder = posixpath.join(self.work.path, item)
            check_complete(folder, tables, stored)
            *_, chunks = starts_of(stored)
            united, facts = unite(storage, folder, tables, chunks, self.work)
            files |= {posixpath.join(item, file): data for file, data in united.items()}
            known = {posixpath.join(item, file): one for file, one in facts.items()} | known
        return files, known


def part_of(found: Found, work: Work) -> Part:
    """Returns what this process sends of a step on its disk."""
    assert found.record is not None
    files = {file: file for file in found.record.files if file not in names.OF_COPY}
    process, count = found.part or (0, 1)
    tables, data = {}, {}
    for item, path in found.items.items() if found.part else ():
        if names.OCDBT_MANIFEST not in found.recorded(path):
            continue
        table = _table(found, item)
        there = {file: names.data_file_of(file, work.mark) for file in table.files()}
        tables[item] = table.renamed(there)
        data |= {posixpath.join(item, to): posixpath.join(item, file) for file, to in there.items()}
        united = tuple(posixpath.join(item, name) for name in names.UNITED)
        files = {name: file for name, file in files.items() if not name.startswith(united)}
    sent = data if process else data | files  # process 0 sends the metadata
    return Part(found=found, work=work, process=process, count=count, files=sent, tables=tables)


def _table(found: Found, item: str) -> Table:
    """Returns where the values of this process's part lie on its disk, and their checksums."""
    path = found.items[item]
    places = find_values(found.storage, path) or {}
    mine = {
        key: place
        for key, place in places.items()
        if isinstance(place, bytes) or not place.file.startswith(names.OCDBT_HELD)
    }
    sums = np.frombuffer(found.read(path, names.CHUNK_SUMS), "<u4")
    # Not those of held chunks: host arrays, and replicas gone astray, differ between processes.
    leaves = open_tree(found, item).tree.leaves
    units = [unit for *_, some in units_by_key(leaves, mine) for unit in some]
    return Table(mine, units, sums[units].tolist())


def refuse(storage: Storage, work: Work, process: int, error: Exception) -> None:
    """Lets process 0 know that the part of another process will not come."""
    _leave(storage, work, process, {_PROBLEM: (text_of(error) or "").encode()})


def _leave(storage: Storage, work: Work, process: int, left: Mapping[str, bytes]) -> None:
    storage.make_dir(work.path)
    storage.write(f"{work.path}/{names.part(process, work.mark)}", encode_leaves(left))


def _decode(data: bytes) -> dict[str, bytes]:
    return {name: one for name, one in decode_leaves(data).items() if isinstance(one, bytes)}
