"""Decides where the local steps of a run are, and which steps on a disk are of other runs.

The id of a run with a local directory is

    the directory's id            if it has an id, so a run may be moved or renamed
    the local directory's id      if the directory is new or away, and the local directory names its
                                  URL; or it is new, and the local directory never named another
    a new id                      otherwise

A local directory belongs to the run if it has this id, or lacks steps. If its file is lost, its
steps show the id, but not the URL: a new run does not take them. A directory of an older
release has steps but lacks an id: it belongs to the run if one save is in both roots. If the steps
are of another run, nothing is done to them, and the run saves in `run-<token>` there.
"""

from __future__ import annotations

import errno
import hashlib
import posixpath
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from jaxckpt._core.text import command
from jaxckpt._run.copies import Saved, astray, latest
from jaxckpt._run.identity import (
    ensure_id,
    identities_in,
    indexes_in,
    is_new,
    lives_in,
    newest_saved,
    put_identity,
    read_identity,
    with_id,
)
from jaxckpt._run.index import StepIndex
from jaxckpt._run.listing import check_root, shown
from jaxckpt._run.reach import Reach, twice
from jaxckpt._run.shares import machine, origin_in, share_on_disk
from jaxckpt.format import names, run
from jaxckpt.format.run import Identity
from jaxckpt.multihost import Processes, leading, meeting, text_of
from jaxckpt.storage import locate, real

_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Names where a process has the local steps of its run."""

    run: str  # the id of the run
    root: str
    share: str = ""  # where in the local directory; "" if all processes have one root
    # Further roots there that may have its steps, and which of these the run did not go on from.
    others: Mapping[str, Sequence[int]] = field(default_factory=dict)
    guest: str = ""  # its directory on a disk that has the steps of another run
    away: OSError | None = None  # why the directory of the run cannot be reached
    astray: Sequence[int] = ()  # steps from which the run did not go on
    problems: Sequence[str] = ()


def settle(
    local: StepIndex, directory: StepIndex, processes: Processes, *, writes: bool, reach: Reach
) -> Local:
    """Decides where the processes of a job have the local steps of their run.

    Args:
        writes: Whether to write the id into the directory and local directories that lack an id.
        reach: To the directory, which is not waited for if there are local steps.

    Raises:
        OSError: the directory cannot be reached, and no local steps of its run exist.
    """
    share, away = "", None
    if processes.count > 1:
        share = share_on_disk(local.storage, local.root, processes, machine=machine())
    name = f"manager {directory.root}/run"
    with leading(processes, name, where=directory.root) as led:
        if processes.index == 0:
            found, durable, away = _learn(local, directory, reach, writes=writes)
            home = _home(local, directory, found, share, writes=writes)
            if away is not None and not home.index.steps():
                raise away  # the run would look new
            mine = home.judged(home.newest(durable))
            led.value = [found, durable, None if away is None else text_of(away), mine]
    found, durable, text, mine = led.value
    if share:
        where = f"the local directory {local.root} cannot be used"
        with meeting(processes, f"{name}/places", _of_disks, where=where) as met:
            home = _home(local, directory, found, share, writes=writes)
            disk = _token(machine(), posixpath.dirname(home.index.root))
            met.value = [disk, home.newest(durable and Saved.told(durable))]
        counts, newest = met.value
        mine = home.judged(newest and Saved.told(newest), counts[disk])
    away = away or (None if text is None else OSError(errno.EIO, text))
    guest = names.guest(_token(found, directory.root))
    return Local(run=found, share=share, guest=guest, away=away, **mine)


def _learn(
    local: StepIndex, directory: StepIndex, reach: Reach, *, writes: bool
) -> tuple[str, Saved | None, OSError | None]:
    """Returns the id of a run, the newest step of its directory, and why that is away."""
    url, here = directory.root, identities_in(local)
    ours = {at: one.id for at, one in here.items() if one and one.directory == url}
    named, root = next(iter(ours.values()), ""), here[local.root]
    free = root.id if root is not None and root.directory == "" else ""
    ask = partial(_learn_there, directory, named or free, writes=writes)
    has_steps = any(_steps_in(StepIndex(local.storage, at, quiet=True)) for at in ours)
    try:
        return *(twice(partial(reach.ask, ask)) if has_steps else ask()), None
    except OSError as error:
        if not named:
            raise
        return named, None, error


def _learn_there(directory: StepIndex, wanted: str, *, writes: bool) -> tuple[str, Saved | None]:
    """Returns the id of a directory, which if new gets the wanted one, and its newest step."""
    entries = check_root(directory.storage, directory.root)
    known = wanted if is_new(entries) else ""
    if writes:
        if entries is None:
            directory.storage.make_dir(directory.root)
        known = ensure_id(directory, entries, known)
    elif (found := read_identity(directory)) is not None:
        known = found.id
    newest = newest_saved(directory)
    if newest is not None and newest.run != known:  # copied there by hand
        newest = Saved(newest.step)
    return known, newest


@dataclass(frozen=True, slots=True)
class _Home:
    """The steps of a run on one disk: in the root of this process, and in further roots."""

    index: StepIndex
    lives: Mapping[str, Sequence[Saved]]  # how the run got to the steps in each root
    problems: Sequence[str]

    def newest(self, durable: Saved | None) -> Saved | None:
        """Returns where the run was last, given the newest step of its directory."""
        return latest((one for lives in self.lives.values() for one in lives), durable)

    def judged(self, newest: Saved | None, count: int = 0) -> dict[str, Any]:
        """Returns fields of `Local`, given where the run was last, and how many have this disk."""
        index, at = self.index, posixpath.dirname(self.index.root)
        of_job = {f"{at}/{names.share(rank)}" for rank in range(count)} - {index.root}
        mine = ((root, lives) for root, lives in self.lives.items() if root not in of_job)
        others = {root: astray(lives, newest) for root, lives in mine}
        told = [
            f"{root}: steps {gone} are of an earlier life of this run, which has step "
            f"{newest.step} now: it went on without them. They are not restored, and deleted after "
            "the next save there. To keep one: "
            + _copying(root, posixpath.basename(index.path(gone[-1])))
            for root, gone in others.items()
            if gone and newest is not None
        ]
        problems, gone = [*index.problems, *self.problems, *told], others.pop(index.root)
        return {"root": index.root, "others": others, "astray": gone, "problems": problems}


def _copying(root: str, step: str) -> str:
    """Returns the command that copies a step, of which a share may have only a part."""
    if names.shares([posixpath.basename(root)]):
        return shlex.join(["cp", "-r", f"{root}/{step}", "NEW"])
    return command("fork", f"{root}/{step}", "NEW")


def _of_disks(given: Sequence[Any]) -> Any:  # JSON
    """Returns how many processes have each disk, and where the run was last on all of them."""
    return [Counter(disk for disk, _ in given), latest(Saved.told(one) for _, one in given if one)]


def _home(
    local: StepIndex, directory: StepIndex, run_id: str, share: str, *, writes: bool
) -> _Home:
    """Finds the root of the local steps of this process, and what else this disk has."""
    home, problems = _choose(local, directory, run_id), []
    identity = Identity(id=run_id, directory=directory.root)
    for _ in range(_TRIES if writes else 0):
        local.storage.make_dir(home)
        if put_identity(StepIndex(local.storage, home, quiet=True), identity).id == run_id:
            break
        home = _choose(local, directory, run_id)  # another job was faster
    if home != local.root and (text := _about_others(local, identity, home)):
        problems.append(text)
    index = StepIndex(local.storage, f"{home}/{share}".rstrip("/"), local.naming, quiet=True)
    entries = StepIndex(local.storage, home, quiet=True).entries()
    roots = [home, *(f"{home}/{one}" for one in names.shares(entries))]
    others = [StepIndex(local.storage, root, local.naming, quiet=True) for root in roots]
    lives = {one.root: lives_in(one) for one in others if one.root != index.root}
    return _Home(index, {index.root: lives_in(index), **lives}, problems)


def _choose(local: StepIndex, directory: StepIndex, run_id: str) -> str:
    """Returns the home of a run in a local directory: the root that has its steps, or is to."""
    url, here = directory.root, identities_in(local)
    for at, one in with_id(here, Identity(id=run_id, directory=url)):
        if not _is_copy(one, directory):
            return at
    if here[local.root] is None and (
        not _steps_in(local) or any(share_a_save(one, directory) for one in indexes_in(local))
    ):
        return local.root
    return f"{local.root}/{names.guest(_token(run_id, url))}"


def _token(*texts: str) -> str:
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()[:16]


def _steps_in(local: StepIndex) -> dict[str, list[int]]:
    """Returns the steps of a local directory by root, without roots that have none."""
    found = {index.root: index.present() for index in indexes_in(local)}
    return {root: steps for root, steps in found.items() if steps}


def share_a_save(local: StepIndex, directory: StepIndex) -> bool:
    """Returns whether one save is in both roots."""
    try:
        both = local.listing().steps.keys() & directory.listing().steps.keys()
        saves = ((origin_in(local, n), origin_in(directory, n)) for n in sorted(both, reverse=True))
        return any(here is not None and here == there for here, there in saves)
    except OSError:  # it is away
        return False


def _is_copy(identity: Identity, directory: StepIndex) -> bool:
    """Returns whether a run is a copy of that whose local steps these are, as `cp -r` makes it.

    Both have the same id. If the directory that the local steps name has it no more, the run was
    moved; if that cannot be found out, nothing is taken from there.
    """
    if identity.directory in (None, "", directory.root):
        return False
    try:
        storage, root = locate(identity.directory)
        if real(storage, root) == real(directory.storage, directory.root):
            return False
        there = read_identity(StepIndex(storage, root, quiet=True))
    except (OSError, ValueError):
        return True
    return there is not None and there.id == identity.id


def _about_others(local: StepIndex, identity: Identity, home: str) -> str:
    """Returns a message about the steps of another run, or "" if there are none."""
    there, other = _steps_in(local), read_identity(local)
    if not there:
        return ""
    listed = "; ".join(f"{root}: {shown([*map(str, steps)])}" for root, steps in there.items())
    remove = "; ".join(command("rm", at, *n) for at, n in there.items())
    name_it = f"echo '{run.encode(identity).decode()}' > {local.root}/{names.RUN}"
    keep = f" If they are of this run, stop the job and: rm -r {home} && {name_it}"
    whose, advice = "another run", f" If nobody needs them: {remove}."
    if other is None or not other.directory:
        advice += keep
    if other is None:
        whose += " or an older release, none of which is in the directory of this run"
    elif other.directory == identity.directory:
        whose = f"another run of {other.directory}, or {names.RUN} is damaged there or here"
        advice = keep
    elif other.directory:
        whose = f"another run, {other.directory}"
    return f"{listed} are steps of {whose}. They are left alone; this run saves in {home}.{advice}"
