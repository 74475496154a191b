"""Describes and reads a local step on the disk of this process, for the others; see `coverage`.

outline    what is alike in the shares of all processes: small files, the metadata of the arrays
entry      a chunk, or a file of one process, with the checksums to record of it
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, product
from typing import Any, NamedTuple, final

import numpy as np

from jaxckpt._disk.checksums import units_by_key
from jaxckpt._disk.chunks import LeafRead
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found, Wanted
from jaxckpt._disk.item import open_tree
from jaxckpt._disk.native import Item
from jaxckpt._disk.places import Table, decode_table, encode_table
from jaxckpt._disk.reader import keys_here, read_leaves
from jaxckpt._inspect.verify import reads_here
from jaxckpt._run.index import StepIndex
from jaxckpt.errors import CheckpointError, UnsupportedFormat
from jaxckpt.format import names
from jaxckpt.format.ocdbt import Place, decode_leaves, encode_leaves
from jaxckpt.format.step import MAX_RECORD_BYTES, Record, decode_record
from jaxckpt.storage import Storage
from jaxckpt.storage._values import read_place

_Failed = Callable[[LeafRead, Exception], object]


class Entry(NamedTuple):
    """A chunk, or a small file, on the disk of this process."""

    folder: str  # of the item
    place: bytes | Place
    units: Sequence[int] = ()  # the numbers of its checksums
    sums: Sequence[int] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of the value, and of its checksums with their numbers."""
        place = self.place
        return len(place) if isinstance(place, bytes) else place.size, 8 * len(self.units)


class Outline(NamedTuple):
    """Describes what is alike in the shares of all processes."""

    record: Record
    files: Mapping[str, bytes]  # the small files, by path in the step
    tables: Mapping[str, Table]  # the metadata of its arrays, by item
    sums: Mapping[str, int]  # how many checksums an item has


def encode_outline(found: Found, items: Mapping[str, Item]) -> bytes:
    """Reads what other shares have too.

    Args:
        items: Its trees with arrays.
    """
    united = tuple(posixpath.join(item, part) for item in items for part in names.UNITED)
    record, sizes = f"{found.path}/{names.RECORD}", found.recorded(found.path)
    given = {"record": found.storage.read(record, max_bytes=MAX_RECORD_BYTES)}
    for file in sizes:
        if not file.startswith((*united, *names.OF_COPY)):
            given[f"file {file}"] = found.read(found.path, file)
    for item, opened in items.items():
        described = {k: v for k, v in keys_here(opened).items() if k.endswith(names.ZARR3)}
        count = sizes[posixpath.join(item, names.CHUNK_SUMS)].size // 4
        given[f"item {item}"] = encode_table(Table(described, [count], [0]))
    return encode_leaves(given)


def decode_outline(data: bytes, file: str) -> Outline:
    """Decodes it; `file` is the record's, for messages."""
    given: Any = decode_leaves(data)
    record = decode_record(given.pop("record"), file=file)
    files = {name[5:]: one for name, one in given.items() if name.startswith("file ")}
    tables = {name[5:]: decode_table(x) for name, x in given.items() if name.startswith("item ")}
    sums = {item: table.units[0] for item, table in tables.items()}
    return Outline(record, files, tables, sums)


def choose(given: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Returns which process sends each chunk, and its sizes there, which are 0 if none has it.

    Args:
        given: For each process and chunk, the sizes on its disk.

    Example:
        >>> choose([[[4, 8], [4, 8], [0, 0]], [[4, 8], [4, 8], [0, 0]]])
        [[0, 4, 8], [1, 4, 8], [0, 0, 0]]
    """
    sent, chosen = [0] * len(given), []
    for sizes in zip(*given, strict=True):
        have = [i for i, size in enumerate(sizes) if sum(size)] or [0]
        sender = min(have, key=sent.__getitem__)
        sent[sender] += sum(sizes[sender])
        chosen.append([sender, *sizes[sender]])
    return chosen


@final
class Disk:
    """A step on the disk of this process."""

    def __init__(self, found: Found) -> None:
        """Opens its trees.

        Raises:
            CheckpointError, OSError, ValueError: it is damaged.
        """
        self.found, self.items = found, dict[str, Item]()
        for name, path in found.items.items():
            if names.OCDBT_MANIFEST in found.recorded(path):
                if names.CHUNK_SUMS not in found.recorded(path):
                    raise UnsupportedFormat(
                        f"{path} lacks {names.CHUNK_SUMS}: it cannot be checked"
                    )
                self.items[name] = open_tree(found, name)
        self.outline = encode_outline(found, self.items)

    def lacks(self, *, states: bool = False) -> int:
        """Returns a number with a bit for each checksum, set if its chunk is not here.

        Args:
            states: Whether the states of objects, such as data iterators, have bits, too.
        """
        bits = [np.zeros(1, bool)]  # one more, for a step without any
        recorded = self.found.recorded(self.found.path) if states else {}
        counts = {file: names.process_count(posixpath.basename(file)) for file in recorded}
        for folder, count in sorted({(posixpath.dirname(f), n) for f, n in counts.items() if n}):
            files = (f"{folder}/{names.process_file(i, count)}" for i in range(count))
            bits.append(np.array([file not in recorded for file in files]))
        for _, item in sorted(self.items.items()):
            bits.append(np.ones(self.found.recorded(item.path)[names.CHUNK_SUMS].size // 4, bool))
            for *_, units in units_by_key(item.tree.leaves, keys_here(item)):
                bits[-1][[*units]] = False
        return int(np.packbits(np.concatenate(bits)).tobytes().hex(), 16)

    def entries(
        self, wanted: AbstractSet[Wanted], budget_bytes: int, failed: _Failed = lambda *_: None
    ) -> dict[Wanted, Entry]:
        """Returns those of some chunks and files that are here and good.

        Args:
            budget_bytes: For checking them; 0 if their checksums are not asked for.
            failed: Called with the error of each chunk that is not good.
        """
        found: dict[Wanted, Entry] = {}
        for name, item in self.items.items():
            there = keys_here(item)
            keys = [key for key in there if (name, key) in wanted]
            units = {key: some for key, _, some in units_by_key(item.tree.leaves, keys)}
            sums = np.frombuffer(self.found.read(item.path, names.CHUNK_SUMS), "<u4")
            for key in _good(item, units, budget_bytes, failed) if budget_bytes else units:
                mine = units[key]
                found[name, key] = Entry(item.path, there[key], mine, sums[mine].tolist())
        recorded = self.found.recorded(self.found.path)
        for name, file in wanted:
            if name is None and file in recorded:
                found[name, file] = Entry("", self.found.read(self.found.path, file))
        return found


def lacking(
    indexes: Iterable[StepIndex], steps: Iterable[int], *, states: bool = False
) -> list[Any]:  # JSON
    """Returns what each root on this disk lacks of some steps, for `whole_of`."""
    told = []
    for index, step in product(indexes, steps):
        try:
            disk = Disk(find(index.storage, index.path(step)))
            told.append([step, disk.found.origin, hex(disk.lacks(states=states))])
        except FileNotFoundError:
            pass
        except (CheckpointError, OSError, ValueError):  # it may have all of it, and be mended
            told.append([step, "", "0"])
    return told


def whole_of(given: Sequence[Any]) -> list[int]:
    """Returns the steps of which all disks together may have every chunk, of one save."""
    lacks: dict[tuple[int, str], int] = {}
    for step, save, bits in chain(*given):
        lacks[step, save] = lacks.get((step, save), -1) & int(bits, 16)
    return sorted({step for (step, _), bits in lacks.items() if not bits})


def read_entry(storage: Storage, entry: Entry) -> bytes:
    """Returns what is sent of an entry: its value, and its checksums with their numbers."""
    value = entry.place
    if not isinstance(value, bytes):
        value = read_place(storage, entry.folder, value)
    return value + np.array([entry.units, entry.sums], "<u4").tobytes()


def _good(item: Item, keys: Container[str], budget_bytes: int, failed: _Failed) -> list[str]:
    """Reads some chunks; returns the keys of those that are as they were written."""
    reads, bad = {}, set[int]()

    def note(read: LeafRead, error: Exception) -> None:
        bad.add(id(read))
        failed(read, error)

    for key, read in reads_here(item, keys):
        # A leaf of its own for each: the first error of a leaf counts for all its reads.
        reads[key] = read._replace(leaf=read.leaf._replace())
    given = [*reads.values()]
    for _ in read_leaves(item, given, budget_bytes=budget_bytes, failed=note):
        pass
    return [key for key, read in reads.items() if id(read) not in bad]
