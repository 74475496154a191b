"""The files of arrays that have not changed, which a step shares with an earlier step.

link         the files, as long as the values to compare with exist
remember     the latest steps, after their commits
read back    in the background, the files that the next step may share, until it begins
"""

from __future__ import annotations

import contextlib
import io
import posixpath
from collections.abc import Mapping, Sequence
from typing import final

from jaxckpt._disk.attempt import Work
from jaxckpt._disk.data_files import give_way
from jaxckpt._run.root import Root
from jaxckpt._save.snapshot import SaveItem, TreeItem
from jaxckpt._save.unchanged import Base, LinkFailed
from jaxckpt._save.worker import is_ending
from jaxckpt.errors import CheckpointError
from jaxckpt.storage import Storage


@final
class Incremental:
    """Describes what the next step in a root may share."""

    def __init__(self, root: Root, *, wanted: bool) -> None:
        storage = root.index.storage
        links = storage.hard_links and root.keep.keeps_two
        self._root = root
        self._is_on = wanted and (storage.server_copies or links)
        # The latest steps, by item. The next step may refer to the first of them if there are
        # `_most_bases`: on a file system, the two newest steps share no file.
        self._bases: list[dict[str, Base]] = []
        self._most_bases = 1 if storage.server_copies else 2
        self._reading: object | None = None  # the current read-back for the next step; None ends it

    @property
    def storage(self) -> Storage | None:
        """Returns where the next save may refer to this save, or None."""
        return self._root.index.storage if self._is_on else None

    def begin(self, *, is_saving: bool) -> Mapping[str, Base]:
        """Returns the base of each item for a step; files that are not read back yet stay out.

        Args:
            is_saving: Whether a save is under way: the two newest steps are not known yet.
        """
        self._reading = None
        is_known = not is_saving and len(self._bases) == self._most_bases
        return self._bases[0] if is_known else {}

    def link(self, items: Sequence[SaveItem], root: Root, work: Work) -> bool:
        """Links the files of unchanged shards while their values exist; returns whether it worked.

        If not, nothing is linked, and the next steps are whole.
        """
        based = [
            (item.changes, work.folder(item.name))
            for item in items
            if isinstance(item, TreeItem) and item.changes and item.changes.base is not None
        ]
        storage, is_linked = root.index.storage, root is self._root or not based
        try:
            for changes, folder in based if is_linked else ():
                changes.link(storage, folder)
        except (OSError, CheckpointError) as error:
            is_linked = False
            if isinstance(error, io.UnsupportedOperation):  # hard links are not supported
                self._is_on = False
            for changes, folder in based:
                with contextlib.suppress(OSError, CheckpointError):
                    storage.delete_files([f"{folder}/{file}" for file in changes.files])
        if not is_linked:
            self.clear()
        return is_linked

    def remember(self, trees: Sequence[TreeItem], root: Root, path: str) -> None:
        """Lets later steps refer to the committed step; mends damage found in earlier steps."""
        if root is not self._root:  # which the next step will not be
            self.clear()
            return
        bases = {}
        for item in trees:
            if item.changes is not None:
                here = posixpath.join(path, item.name).rstrip("/"), item.tables[0]
                for text in item.changes.mended(root.index.storage, *here):
                    root.index.report(text)
                if (base := item.changes.base_of_next(*here)) is not None:
                    bases[item.name] = base
        self._bases = [*self._bases, bases][-self._most_bases :]

    def fail(self, error: BaseException | None) -> None:
        """Lets the next step be whole after a failed one."""
        if isinstance(error, LinkFailed):
            self._is_on = False  # the store does not copy
        self.clear()

    def clear(self) -> None:
        """Lets the next step be whole, since the last step may be damaged."""
        self._bases = []

    def end(self) -> None:
        """Reads back no more files, as there will be no later step."""
        self._is_on, self._reading = False, None

    def read_back(self) -> None:
        """Reads back from the disk the files that the next step may share, until it begins."""
        reading = self._reading = object()

        def goes_on() -> bool:
            return self._reading is reading and self._is_on and not is_ending()

        bases, index = self._bases, self._root.index
        if len(bases) == self._most_bases and goes_on():
            give_way()
            for item, base in bases[0].items():
                for text in base.read_back(bases[-1].get(item), index.storage, goes_on):
                    index.report(text)
