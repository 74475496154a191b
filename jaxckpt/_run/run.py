"""A run's root: which steps it holds, who may write there, what is deleted or set aside.

All of it is about directories and small files; no array is looked at, and jax is not needed.

    <root>/<step>                       a committed step
    <root>/<step>.orbax-checkpoint-tmp-...   one that is being written, or deleted
    <root>/<step>.jaxckpt-bad-...       one that turned out to be damaged
    <root>/_jaxckpt.owner, .lock        who may write, and whether they live
    <root>/_jaxckpt.doomed, .lease-...  what writers and readers tell each other about deletion

Who may write. A job that opens a run for writing puts a token of its own into `owner`, then renames
away all that others were writing there. Whoever commits looks at `owner` just before. So a process
of an earlier job that was thought dead and wakes up finds its work gone, or another's token, and
cannot commit; if it commits first, the new job lists its step. While the owner's lock shows that it
lives, a job that merely opens the run does not take it over: its first save does.
"""

from __future__ import annotations

import io
import logging
import os
import posixpath
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.find import find, looks_committed, read_found
from jaxckpt._disk.found import Found, check_sizes
from jaxckpt._run.leases import Leases
from jaxckpt._save.handle import is_under_way
from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, SaveFailed
from jaxckpt.format import jsontext, names, run
from jaxckpt.format.run import Owner, StepNames
from jaxckpt.storage import Hold, Storage, is_temporary_file
from jaxckpt.types import StepInfo

_logger = logging.getLogger("jaxckpt")

_LISTINGS: Final = 3


@dataclass(slots=True)
class Run:
    """The root of a run, seen by one process.

    Attributes:
        naming: How its steps are called; None: as they are found.
        token: Of this opening; "" as long as it does not own the run.
        unknown: Steps of which it could not be read what policies look at.
        problems: Everything that was skipped, left alone, set aside or removed, in words.
        quiet: Whether problems are only remembered, and nobody is warned of them.
        keep: For people to see: the fields of the policy. None: those of the owner before.
    """

    storage: Storage
    root: str
    naming: StepNames | None = None
    token: str = ""
    problems: list[str] = field(default_factory=list)
    quiet: bool = False
    keep: Mapping[str, Any] | None = None
    unknown: set[int] = field(default_factory=set)
    _hold: Hold | None = None
    _closed: bool = False
    _committed: dict[str, bool] = field(default_factory=dict)
    _whole: set[str] = field(default_factory=set)
    _infos: dict[int, StepInfo] = field(default_factory=dict)
    _failed: bool = False  # to delete, since when something may be left over
    _leases: Leases = field(init=False)

    def __post_init__(self) -> None:
        self._leases = Leases(self.storage, self.root, self.report)

    # --- which steps there are ---------------------------------------------------------------

    def path(self, number: int) -> str:
        """The directory of a step, there or not."""
        return f"{self.root}/{self._naming().of(number)}"

    def _naming(self, entries: Sequence[str] | None = None) -> StepNames:
        if self.naming is not None:
            return self.naming
        entries = self._entries() if entries is None else entries
        for name in run.like_steps(entries):
            if self._is_committed(name):
                self.naming = run.guess_names(name, entries)  # they are all called alike
                return self.naming
        return StepNames()

    def _entries(self) -> list[str]:
        try:
            return self.storage.names(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def numbers(self) -> list[int]:
        """The steps in the root by their names alone, committed or not, in order."""
        entries = self._entries()
        naming = self._naming(entries)
        return sorted(n for n in map(naming.step, entries) if n is not None)

    def steps(self) -> list[int]:
        """The committed steps, in order. Looks into each directory once, and reads no file."""
        naming = self._naming()
        found: list[int] = []
        for _ in range(_LISTINGS):  # a writer may delete all of one listing, when it has new ones
            numbers = self.numbers()
            found = [n for n in numbers if self._is_committed(naming.of(n))]
            if found or not numbers:
                break
        return found

    def torn(self) -> list[int]:
        """What jaxckpt wrote, has the name of a step and no commit marker: an incomplete copy."""
        return [n for n in self.numbers() if self.torn_file(n) is not None]

    def torn_file(self, number: int) -> str | None:
        """The commit marker that such a step lacks; None if it is none."""
        path = self.path(number)
        # Without a rename it may be a save under way; the next save there removes what is left.
        if not self.storage.atomic_rename or self._is_committed(posixpath.basename(path)):
            return None
        return f"{path}/{names.COMMIT_MARKER}" if self._is_ours(path) else None

    def newest(self) -> int | None:
        """The newest committed step; looks into as few directories as it can."""
        naming = self._naming()
        return next((n for n in reversed(self.numbers()) if self._is_committed(naming.of(n))), None)

    def _is_committed(self, name: str) -> bool:
        if name in self._committed:
            return self._committed[name]
        path = f"{self.root}/{name}"
        try:
            committed = self.storage.kind(path) == "dir" and looks_committed(self.storage, path)
        except FileNotFoundError:  # deleted just now
            return False
        if committed and self.storage.atomic_rename:
            # No more is remembered: what is incomplete may be complete the next time.
            self._committed[name] = True
        elif not committed and not (names.is_temporary(name) or is_under_way(path)):
            self.report(f"{path} is no committed step, and is left alone")
        return committed

    def report(self, problem: str) -> None:
        """Warns of something, once, and remembers it."""
        if problem not in self.problems:
            self.problems.append(problem)
            if not self.quiet:
                _logger.warning("%s", problem)

    def note_strays(self) -> None:
        """Remembers what is in the root and belongs to no run."""
        naming = self._naming()
        known = (names.OWNER, names.DOOMED, names.LOCK, names.ROOT_METADATA)
        for name in self._entries():
            is_step = naming.step(name) is not None
            if is_step and self.storage.kind(f"{self.root}/{name}") != "dir":
                self.report(f"{self.root}/{name} is called like a step, but is no directory")
            elif names.is_set_aside(name):
                self.problems.append(f"{self.root}/{name} was set aside earlier: it is damaged")
            elif names.is_temporary(name):
                self.problems.append(f"{self.root}/{name} is temporary, of another writer")
            elif not is_step and name not in known and not names.is_lease(name):
                self.problems.append(f"{self.root}/{name} is no part of a run; it is left alone")

    # --- what is known of a step ---------------------------------------------------------------

    def check_step(self, number: int) -> str:
        """The directory of a committed step; CheckpointNotFound if there is none."""
        path = self.path(number)
        if not self._is_committed(posixpath.basename(path)) or self.storage.kind(path) is None:
            steps = self.steps()
            shown = ", ".join(map(str, steps[-8:])) or "none"
            more = f"the newest of {len(steps)}: " if len(steps) > 8 else ""
            raise CheckpointNotFound(
                f"{self.root} has no committed step {number}. It has {more}{shown}."
            )
        return path

    def check_whole(self, number: int) -> Found:
        """Finds a step whose files are all there, in the sizes they were written in.

        Reads its metadata, not its data.

        Raises:
            CheckpointNotFound: there is no such step, or it is being deleted.
            CorruptCheckpoint: it is not whole.
        """
        self.check_there(number)
        found = find(self.storage, self.path(number))
        self.check_found(number, found)
        return found

    def check_there(self, number: int) -> None:
        """Refuses a step that is not there, torn, or being deleted."""
        path = self.path(number)
        if (file := self.torn_file(number)) is not None:
            raise CorruptCheckpoint(f"{file} is missing: step {number} is not whole", file=file)
        self.check_step(number)
        if posixpath.basename(path) in self._leases.leaving:
            raise CheckpointNotFound(f"{path} is being deleted")

    def check_found(self, number: int, found: Found) -> None:
        """Raises CorruptCheckpoint if a step that was found is not whole."""
        saved_as = found.record.name if found.record is not None else ""
        if saved_as and self._naming().step(saved_as) not in (None, number):
            self.report(f"{found.path} was saved as {saved_as}: it was renamed, or is a copy of it")
        check_sizes(found)

    def is_whole(self, number: int) -> bool:
        """Whether `check_whole` finds a step; what is damaged is reported once."""
        name = posixpath.basename(self.path(number))
        if name in self._whole:
            return True
        try:
            self.check_whole(number)
        except CheckpointNotFound:
            return False
        except CorruptCheckpoint as error:
            self.report(f"step {number} is damaged, and is skipped: {error}")
            return False
        if self.token:
            self._whole.add(name)
        return True

    def info(self, number: int) -> StepInfo:
        """What policies look at, from the small files of the step or from memory."""
        if number in self._infos:
            return self._infos[number]
        info, complete = self._read_info(number)
        if complete and self.token:  # only the owner knows that nobody saves the step anew
            self._infos[number] = info
        if complete:
            self.unknown.discard(number)
        else:
            self.unknown.add(number)
        return info

    def _read_info(self, number: int) -> tuple[StepInfo, bool]:
        path, metrics, complete = self.path(number), {}, True
        # Of a step that does not say when it was saved it is known that it was before now.
        saved_s = time.time()
        try:
            found = read_found(self.storage, path, self.storage.entries(path))
            saved_ns = found.metadata.commit_ns or found.metadata.init_ns
            saved_s = saved_s if saved_ns is None else saved_ns / 1e9
            item = f"{path}/{names.METRICS_ITEM}"
            if found.contents(item).get(names.METRICS_FILE) == "file":
                data = found.read(item, names.METRICS_FILE)
                metrics = jsontext.loads(data, file=f"{item}/{names.METRICS_FILE}")
        except (CheckpointError, OSError) as error:
            self.report(f"what step {number} says of itself cannot be read: {error}")
            complete = False
        metrics = metrics if isinstance(metrics, dict) else {}
        return StepInfo(step=number, saved_s=saved_s, metrics=metrics), complete

    def remember(self, info: StepInfo) -> None:
        """Takes note of what this process itself has saved."""
        self._infos[info.step] = info
        self._committed[posixpath.basename(self.path(info.step))] = True

    # --- who may write --------------------------------------------------------------------------

    def check_root(self) -> None:
        """Raises NotADirectoryError if the root is something else; it may come to be later."""
        kind = self.storage.kind(self.root)
        if kind not in (None, "dir") and not self._is_link_to_dir():
            raise NotADirectoryError(f"{self.root} is a {kind}, not a directory of a run")

    def open_for_writing(self) -> None:
        """Makes the root, and takes the run over unless its owner lives.

        Raises:
            NotADirectoryError, PermissionError, OSError: the root cannot be a run's.
        """
        kind = None
        try:
            self.check_root()
            kind = self.storage.kind(self.root)
            holds_checkpoint = kind is not None and self.holds_checkpoint()
        except PermissionError as error:
            raise self._no_permission(error) from error
        if holds_checkpoint:
            raise ValueError(
                f"{self.root} is a checkpoint itself. A run is the directory around its steps: "
                f"{posixpath.dirname(self.root)}?"
            )
        try:
            if kind is None:
                self.storage.make_dir(self.root)
            self._hold = self._lock()
        except FileExistsError as error:
            raise NotADirectoryError(f"{self.root} lies below a file: {error}") from error
        except PermissionError as error:
            raise self._no_permission(error) from error
        if self._hold is not None:
            self.take_over()
        else:
            self.report(
                f"{self.root} is open for writing in a job that lives: {self.who()}. The first "
                "save of this one takes it over. To read only, open it with mode='r'."
            )

    def _no_permission(self, error: PermissionError) -> PermissionError:
        return PermissionError(
            f"{self.root} cannot be written: {error}. To read only, open it with mode='r'."
        )

    def _is_link_to_dir(self) -> bool:
        return self.storage.scheme == "file" and os.path.isdir(self.root)

    def holds_checkpoint(self) -> bool:
        """Whether the root is a checkpoint itself, and so no run."""
        marks = {names.RECORD, names.CHECKPOINT_METADATA, names.TREE_METADATA, names.WRITER}
        return not marks.isdisjoint(self._entries())

    def _lock(self) -> Hold | None:
        try:
            return self.storage.hold(f"{self.root}/{names.LOCK}")
        except io.UnsupportedOperation:
            return _NoHold()

    def who(self) -> str:
        """The job that owns the run, in words."""
        owner = self.owner()
        return "unknown" if owner is None else f"process {owner.pid} on {owner.host}"

    def owner(self) -> Owner | None:
        """The job that may commit here, or None: there was none yet, or its file is damaged."""
        file = f"{self.root}/{names.OWNER}"
        try:
            return run.decode_owner(self.storage.read(file, max_bytes=run.MAX_BYTES), file=file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CorruptCheckpoint as error:
            self.report(f"{error}; it is written anew")
            return None

    def take_over(self) -> None:
        """Makes this the job that may commit here, and clears up after the ones before."""
        if self.token:
            return
        self.token = secrets.token_hex(8)
        try:
            self._write_owner()
        except BaseException:
            self.token = ""
            raise
        self._sweep()

    def _write_owner(self) -> None:
        before = self.owner() if self.keep is None else None
        owner = Owner(
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            opened_ns=time.time_ns(),
            keep=self.keep or (before.keep if before is not None else {}),
        )
        self.storage.write(f"{self.root}/{names.OWNER}", run.encode_owner(owner))

    def fence(self) -> None:
        """Takes the run over if this job has not yet done so.

        Raises:
            SaveFailed: another job has taken it over since.
        """
        if not self.token:
            self.take_over()
        owner = self.owner()
        if owner is None:  # somebody deleted or damaged it: nobody else has taken the run
            self._write_owner()
        elif owner.token != self.token:
            when = time.ctime(owner.opened_ns / 1e9)
            raise SaveFailed(
                f"{self.root} was opened for writing by another job ({self.who()}) at {when}, and "
                "this one may no longer save there. Let one job write a run; to read it, open it "
                "with mode='r'."
            )
        # The one that had the lock may have ended: show that this one lives.
        if self._hold is None and not self._closed:
            self._hold = self._lock()

    def _sweep(self) -> None:
        """Finishes or removes what earlier jobs were doing; leaves what others than jaxckpt do."""
        for entry in self._entries():
            path = f"{self.root}/{entry}"
            try:
                if (name := names.replaced(entry)) is not None:
                    _transaction.recover(self.storage, f"{self.root}/{name}")
                elif (name := names.ours_temporary(entry)) is not None:
                    if not is_under_way(f"{self.root}/{name}"):
                        self._remove_leftover(path)
                elif self._is_forgotten(entry):
                    self.storage.delete(path)
            except OSError as error:
                self.report(f"{path} is left over, and cannot be removed: {error}")
        if self.storage.kind(f"{self.root}/{names.DOOMED}") is not None:
            self.storage.delete(f"{self.root}/{names.DOOMED}")

    def _is_forgotten(self, entry: str) -> bool:
        """Whether it is a lease that has expired, or what a kill left of a small file."""
        if is_temporary_file(entry):  # a reader that lives will write its lease again
            return True
        return names.is_lease(entry) and self._leases.lease_of(entry) is None

    def _remove_leftover(self, path: str) -> None:
        if not names.is_deleting(posixpath.basename(path)):
            _logger.warning("removing %s, left by a save that did not end", path)
        _transaction.remove_work(self.storage, path)

    def close(self) -> None:
        """Lets go of the lock."""
        if self._hold is not None:
            self._hold.release()
            self._hold = None
        self._closed = True

    # --- what goes ------------------------------------------------------------------------------

    def delete(self, numbers: Iterable[int], *, asked_for: bool = False) -> list[int]:
        """Deletes steps, but for pinned ones and those that a reader holds; says which went.

        What cannot be deleted is reported, and stays or goes with the next call. Never raises.

        Args:
            asked_for: By the user, so that it may be what another program wrote.
        """
        wanted = {self._naming().of(n): n for n in numbers}
        gone: list[int] = []
        try:
            self._finish_deletions()
            if not wanted:
                return []
            doomed = f"{self.root}/{names.DOOMED}"
            self.storage.write(doomed, run.encode_doomed(list(wanted)))
            held = self._leases.steps(self._entries())
            for name, number in wanted.items():
                if name not in held and self._delete_step(name, asked_for=asked_for):
                    gone.append(number)
            self.storage.delete(doomed)
        except OSError as error:
            self._failed = True
            self.report(f"{self.root}: old steps cannot be deleted: {error}")
        for number in gone:
            self._forget(number)
        return gone

    def _delete_step(self, name: str, *, asked_for: bool) -> bool:
        path = f"{self.root}/{name}"
        try:
            if self.storage.kind(f"{path}/{names.PINNED}") is not None:
                return False
            if not asked_for and self.storage.kind(f"{path}/{names.RECORD}") is None:
                self.report(f"{path} was not written by jaxckpt: no policy deletes it")
                return False
            _transaction.remove(self.storage, path)
        except FileNotFoundError:
            return True  # somebody else did
        except OSError as error:
            self.report(f"{path} cannot be deleted: {error}. It is tried again.")
            return self.storage.kind(path) is None
        return True

    def why_not(self, number: int) -> str:
        """Why a step was not deleted."""
        if self._naming().of(number) in self._leases.steps(self._entries()):
            return "a reader holds it"
        return self.problems[-1] if self.problems else "unknown"

    def _finish_deletions(self) -> None:
        for entry in self._entries():
            begun = names.is_deleting(entry) and names.ours_temporary(entry) is not None
            # A file that could not be written could not be removed either.
            if begun or (self._failed and is_temporary_file(entry)):
                self.storage.delete(f"{self.root}/{entry}")
        self._failed = False

    def _forget(self, number: int) -> None:
        name = self._naming().of(number)
        self._committed.pop(name, None)
        self._whole.discard(name)
        self._infos.pop(number, None)

    def _is_ours(self, path: str) -> bool:
        return self.storage.kind(path) == "dir" and any(
            self.storage.kind(f"{path}/{name}") == "file" for name in (names.RECORD, names.WRITER)
        )

    def set_aside(self, number: int, why: str, *, file: str | None = None) -> None:
        """Takes a damaged step out of the run; one of another program is only skipped.

        Args:
            file: That is damaged. Only jaxckpt misses its own record.
        """
        path = self.path(number)
        if not self._is_ours(path) and file != f"{path}/{names.RECORD}":
            self.report(f"step {number} is damaged, and is skipped: {why}")
            return
        aside = f"{self.root}/{names.set_aside(posixpath.basename(path), secrets.token_hex(4))}"
        try:
            self.storage.rename(path, aside)
        except OSError as error:
            self.report(f"step {number} is damaged, and cannot be set aside ({error}): {why}")
            return
        self._forget(number)
        self.report(f"step {number} is damaged, and was set aside as {aside}: {why}")

    # --- what is kept ---------------------------------------------------------------------------

    def pin(self, number: int) -> None:
        """Keeps a step whatever the policy says."""
        path = self.check_step(number)
        self.storage.write(f"{path}/{names.PINNED}", b"")
        # A writer names what it deletes before it looks for pins.
        if not self._leases.is_staying(posixpath.basename(path)):
            raise CheckpointNotFound(f"{path} is being deleted; it cannot be pinned any more")

    def unpin(self, number: int) -> None:
        """Undoes `pin`."""
        self.storage.delete(f"{self.check_step(number)}/{names.PINNED}")

    def is_pinned(self, number: int) -> bool:
        """Whether a step is pinned, by whomever."""
        return self.storage.kind(f"{self.path(number)}/{names.PINNED}") is not None

    def leased(self, number: int) -> AbstractContextManager[bool]:
        """Keeps a step from being deleted meanwhile; says whether it is still there."""
        return self._leases.hold(self._naming().of(number), self._is_committed)


class _NoHold:
    """The lock where there are none."""

    def release(self) -> None:
        """Does nothing."""
