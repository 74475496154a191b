"""A model of a disk, replayed from the shim's log, and of its contents after a power cut.

A sync of a file covers its bytes, not its name; a sync of a directory covers the names in it, not
the files that they name. POSIX promises no more than this. A journal like that of ext4 keeps names
in the order in which they were changed, and may keep only the name of a file that was not synced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class Node:
    """A file or a directory, as processes see it and as it is on the disk."""

    is_dir: bool
    names: dict[str, Node] = field(default_factory=dict)
    synced_names: dict[str, Node] = field(default_factory=dict)
    data: bytes = b""
    synced_data: bytes = b""

    def sync(self):
        self.synced_names, self.synced_data = dict(self.names), self.data


class Disk:
    """Starts as what is at `root` now, all of it synced; `play` changes it as a log says.

    Attributes:
        shared: Whether others write there too, so that directories may be there that no line of the
            log makes.
        marks: The marks in the log, so far.
    """

    def __init__(self, root, *, shared=False):
        self.shared = shared
        self.root = os.path.normpath(root)
        self.top = _copy(Path(root)) if os.path.isdir(root) else Node(is_dir=True)
        self.marks = []

    def play(self, log, data=None):
        """Plays a whole log."""
        for _ in self.steps(log, data):
            pass
        return self

    def steps(self, log, data=None) -> Iterator[str]:
        """Plays a log, and stops after each line of it."""
        stored = data.read_bytes() if data is not None else None
        for line in log.read_text().splitlines():
            what, path, more = line.split("\t")
            if what == "write":
                offset, size, where = map(int, more.split())
                written = b"\1" * size if stored is None else stored[where : where + size]
                self._write(path, offset, written)
            else:
                getattr(self, f"_{what}")(*([path, more] if more else [path]))
            yield line

    # --- what is on the disk ---------------------------------------------------------------------

    def unsynced(self):
        """The files with bytes, and the names, that wait in a cache; with all above the root."""
        files, names = set(), set()
        for path, parent, name, node in _walk(self.top, self.root):
            if parent.synced_names.get(name) is not node:
                names.add(path)
            if node is not None and node.data != node.synced_data:
                files.add(path)
        return files, names

    def leave(self, folder, *, names, data):
        """Writes what a power cut leaves.

        Args:
            names: Of a directory: the dict of its nodes that is left.
            data: Of a file: the bytes that are left.
        """

        def put(node, place):
            place.mkdir(parents=True)
            for name, inner in names(node).items():
                if inner.is_dir:
                    put(inner, place / name)
                else:
                    (place / name).write_bytes(data(inner))

        put(self.top, Path(folder))

    # --- what a log says -------------------------------------------------------------------------

    def _find(self, path):
        node = self.top
        for part in os.path.relpath(path, self.root).split("/"):
            if part == ".":
                continue
            if self.shared and part not in node.names:
                node.names[part] = node.synced_names[part] = Node(is_dir=True)
            node = node.names[part]
        return node

    def _place(self, path):
        parent, name = os.path.split(path)
        return self._find(parent).names, name

    def _mark(self, text):
        self.marks.append(text)

    def _new(self, path, kind):
        names, name = self._place(path)
        names[name] = Node(is_dir=kind == "dir")

    def _write(self, path, offset, written):
        node = self._find(path)
        padded = node.data[:offset].ljust(offset, b"\0")
        node.data = padded + written + node.data[offset + len(written) :]

    def _cut(self, path, size):
        node = self._find(path)
        node.data = node.data[: int(size)].ljust(int(size), b"\0")

    def _sync(self, path):
        with contextlib.suppress(KeyError):  # it was removed meanwhile, by another thread
            self._find(path).sync()

    def _gone(self, path):
        names, name = self._place(path)
        if name in names or not self.shared:
            del names[name]

    def _link(self, path, other):
        names, name = self._place(other)
        names[name] = self._find(path)

    def _move(self, path, other):
        names, name = self._place(path)
        node = names.pop(name)
        names, name = self._place(other)
        names[name] = node

    def _swap(self, path, other):
        names, name = self._place(path)
        names2, name2 = self._place(other)
        names[name], names2[name2] = names2[name2], names[name]


def _copy(path):
    node = Node(is_dir=path.is_dir())
    if node.is_dir:
        node.names = {entry.name: _copy(entry) for entry in path.iterdir()}
    else:
        node.data = path.read_bytes()
    node.sync()
    return node


def _walk(node, path):
    """Yields (path, parent, name, node) of all names that there are, or that the disk still has."""
    for name in {**node.names, **node.synced_names}:
        inner = node.names.get(name)
        yield f"{path}/{name}", node, name, inner
        if inner is not None and inner.is_dir:
            yield from _walk(inner, f"{path}/{name}")
