"""Finds steps of a run where no process of the job saves: other roots on its disk, and peers.

A peer is a disk without a process. Any static server will do, since nothing is listed there:

    <url>/_jaxckpt.run           whose steps these are; in `run-<token>/` if a disk has several runs
    <root>/_jaxckpt.steps        the steps that may be in a root; `share_0`, `share_1` ... are tried
    <root>/<step>/_jaxckpt.json  the files of a step, which belong to it by size and checksum
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

from jaxckpt._run.index import StepIndex, at_once
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, is_io_failure
from jaxckpt.format import names, run
from jaxckpt.format.run import Identity, StepNames
from jaxckpt.format.step import MAX_RECORD_BYTES, decode_record
from jaxckpt.storage import Entry, Storage, now
from jaxckpt.storage._ahead import Ahead

_MOST: Final = 256  # shares of a disk, and steps of a share


@final
@dataclass(slots=True, kw_only=True)
class Peers:
    """The places beside the share of this process that may have steps of its run."""

    here: Sequence[StepIndex] = ()  # on its own disk
    urls: Sequence[str] = ()
    run: str = ""  # the id of the run
    guest: str = ""  # its directory on a disk that has the steps of another run
    naming: StepNames | None = None
    report: Callable[[str], None] = lambda _: None
    _found: list[StepIndex] | None = field(default=None)

    def __bool__(self) -> bool:
        """Returns whether there is any place; alike in all processes."""
        return bool(self.here or self.urls)

    def forget(self) -> None:
        """Lets the peers be asked again."""
        self._found = None

    def there(self) -> list[StepIndex]:
        """Returns the roots on the disks of peers; reports the peers that do not answer."""
        if self._found is None:
            self._found = [one for found in at_once(self._ask, self.urls) for one in found]
        return self._found

    def having(self, step: int) -> Iterator[StepIndex]:
        """Yields the roots at peers that have a step, and are not left out meanwhile."""
        for one in self.there():
            if one in self.there() and step in one.steps():
                yield one

    def leave(self, index: StepIndex, error: Exception) -> None:
        """Reports why a root is of no use; leaves out its whole peer if that does not answer."""
        self.report(f"{index.root} is left out: {error}")
        gone = [index]
        if is_io_failure(error):
            gone = [one for one in self.there() if now(one.storage) is now(index.storage)]
        self._found = [one for one in self.there() if one not in gone]

    def _ask(self, url: str) -> list[StepIndex]:
        try:
            return [*self._roots(url)]
        except (CheckpointError, OSError, ValueError) as error:
            self.report(f"the peer {url} is left out: {error}")
        return []

    def _roots(self, url: str) -> Iterator[StepIndex]:
        from jaxckpt.storage._object import peer_storage

        storage, at = peer_storage(url)
        for home in (at, f"{at}/{self.guest}"):
            found = StepIndex(storage, home).small(Identity, names.RUN)
            if found is not None and found.id == self.run:
                yield from self._roots_in(storage, home)

    def _roots_in(self, storage: Storage, home: str) -> Iterator[StepIndex]:
        with suppress(FileNotFoundError):  # the run of a single process
            yield self._root(storage, home)
        with suppress(FileNotFoundError):  # until there is no further share
            for rank in range(_MOST):
                yield self._root(storage, f"{home}/{names.share(rank)}")

    def _root(self, storage: Storage, root: str) -> StepIndex:
        """Returns the steps of a root, whose listings are made from the records of the steps."""
        files: dict[str, Entry] = {}
        small: dict[str, bytes] = {}  # what shows which steps there are, as in a listing
        file = f"{root}/{names.STEPS}"
        data = storage.read(file, max_bytes=run.MAX_BYTES)
        for step in run.decode_steps(data, file=file)[-_MOST:]:
            paths = [f"{root}/{step}/{name}" for name in (names.RECORD, names.CHECKPOINT_METADATA)]
            try:
                first = {path: storage.read(path, max_bytes=MAX_RECORD_BYTES) for path in paths}
                recorded = decode_record(first[paths[0]], file=paths[0]).files
            except FileNotFoundError:  # it was deleted, or not committed
                continue
            except CorruptCheckpoint as error:
                self.report(str(error))
                continue
            small |= first
            files |= {f"{step}/{name}": Entry("file", one.size) for name, one in recorded.items()}
            # On a disk, a step has its name only once it is committed.
            for name in (names.RECORD, names.COMMIT_MARKER):
                files[f"{step}/{name}"] = Entry("file", 0)
        view = Ahead(storage, root, files, small)
        return StepIndex(view, root, self.naming, quiet=True)
