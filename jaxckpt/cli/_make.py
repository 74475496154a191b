"""`convert`, `export`, `import`, `fork`, `upload` and `heal`: one checkpoint from another.

The options in `how` are the arguments of the same names of the function that does it.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
from collections.abc import Iterator
from typing import Any

import click

from jaxckpt._core.text import size_text
from jaxckpt.cli import _options, _output
from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, SaveFailed
from jaxckpt.format import names
from jaxckpt.format.run import is_like_step


@click.command(cls=_options.OnSteps)
@click.argument("src", type=_options.PATH)
@click.argument("dst", type=_options.PATH)
@_options.item
@_options.only
@_options.skip
@_options.dtype
@click.option("--compression", help="zstd, or zstd:3 for level 3; by default none.")
@click.option("--ocdbt/--no-ocdbt", default=True, help="One database (default), or plain files.")
@_options.overwrite
@_options.yes
@_options.as_json
def convert(
    src: str, dst: str, item: str | None, overwrite: bool, yes: bool, as_json: bool, **how: Any
) -> None:
    """Copy a checkpoint, or a part of it, in another dtype if wanted. Also called `cp`.

    SRC is a checkpoint of jaxckpt, Orbax or Flax. Orbax can read the copy too.
    """
    from jaxckpt._convert.convert import convert as convert_checkpoint
    from jaxckpt._inspect.open import open as open_checkpoint

    ckpt = open_checkpoint(src, item=item)
    with _writing(dst, overwrite=overwrite, yes=yes):
        convert_checkpoint(src, dst, item=item, overwrite=overwrite, **how)
    left = [name for name in ckpt.items if name != ckpt.item]
    _wrote(dst, as_json=as_json, not_copied=left)
    if left and not as_json:
        _output.note(f"not copied: {', '.join(left)}. `jaxckpt fork` copies a step with all items.")


@click.command(cls=_options.OnSteps)
@click.argument("src", type=_options.PATH)
@click.argument("path", type=_options.PATH)
@_options.item
@_options.only
@_options.skip
@_options.dtype
@click.option(
    "--max-shard",
    "max_shard_bytes",
    type=_options.SIZE,
    help="Split into files of at most SIZE, such as 5GB.",
)
@_options.overwrite
@_options.yes
@_options.as_json
def export(src: str, path: str, overwrite: bool, yes: bool, as_json: bool, **how: Any) -> None:
    """Write the arrays of a checkpoint to safetensors.

    PATH is a `.safetensors` file. With --max-shard there may be several files and an index, as on
    Hugging Face.
    """
    from jaxckpt._convert.safetensors import export_safetensors, files_of_model

    if overwrite and (there := files_of_model(path)):
        _output.confirm(f"Replace {', '.join(there)}?", yes=yes)
    file = export_safetensors(src, path, overwrite=overwrite, **how)
    _wrote(file, as_json=as_json)


@click.command("import")
@click.argument("path", type=_options.PATH)
@click.argument("dst", type=_options.PATH)
@_options.dtype
@_options.overwrite
@_options.yes
@_options.as_json
def import_(
    path: str, dst: str, dtype: str | None, overwrite: bool, yes: bool, as_json: bool
) -> None:
    """Make a checkpoint from safetensors.

    PATH is a `.safetensors` file, or a `.safetensors.index.json` with its shards beside it.
    """
    from jaxckpt._convert.safetensors import import_safetensors

    with _writing(dst, overwrite=overwrite, yes=yes):
        import_safetensors(path, dst, dtype=dtype, overwrite=overwrite)
    _wrote(dst, as_json=as_json)


@click.command(cls=_options.OnSteps)
@click.argument("src", type=_options.PATH)
@click.argument("root", type=_options.PATH)
@click.option("--step", type=_options.STEP, help="The new step (default: unchanged).")
@_options.as_json
def fork(src: str, root: str, step: int | None, as_json: bool) -> None:
    """Start a run at ROOT from a step of another run.

    SRC is a step, or a run's root, which means its newest complete step. No data is copied.
    """
    from jaxckpt._run.fork import fork as fork_step

    _wrote(fork_step(src, root, step=step), as_json=as_json)


@click.command()
@click.argument("src", type=_options.PATH)
@click.argument("dst", type=_options.PATH)
@click.option(
    "--step",
    "steps",
    type=_options.STEP,
    multiple=True,
    help="Only this step. Repeatable.",
    shell_complete=_options.complete_steps,
)
@click.option("--max-rate", type=_options.RATE, help="Send at most SIZE a second, such as 50MB.")
@click.option("--no-job", is_flag=True, help="Assume no job at DST (file system without locks).")
@_options.as_json
def upload(
    src: str, dst: str, steps: tuple[int, ...], max_rate: int | None, no_job: bool, as_json: bool
) -> int:
    """Copy the steps of a run that another place lacks.

    SRC and DST are roots of runs; DST may be in a bucket, and is made if missing. Copies the newest
    step first, or only those given, and goes on where an earlier upload was cut off. Each is
    checked while it is sent. Refuses steps of another run, and leaves out those that the run
    abandoned for an earlier step.

    Of a run on several hosts, SRC is the share of a process. Run this on each host, on that of
    process 0 last: it commits the steps of which all parts are there.
    """
    from jaxckpt._disk.pace import Pace
    from jaxckpt._disk.transaction import refuse_inside
    from jaxckpt._run import upload as uploads
    from jaxckpt._run.index import StepIndex
    from jaxckpt._run.leases import Leases
    from jaxckpt._run.listing import check_root, existing_root
    from jaxckpt.cli._between import check_same_run, join, missing_steps
    from jaxckpt.cli._owned import locked
    from jaxckpt.storage import locate

    source, (storage, root) = StepIndex(*existing_root(src), quiet=True), locate(dst)
    if not steps and not source.steps():
        raise CheckpointNotFound(f"{source.root} {source.emptiness()}: nothing can be uploaded")
    for step in steps:
        source.check_there(step)  # before DST is made
    refuse_inside(storage, root, lambda: check_root(storage, root))
    storage.make_dir(root)
    with locked(storage, root, no_job=no_job) as target:
        check_same_run(source, target, asked_for=bool(steps))
        join(target, source)
        done, trusted, owner = [], dict[str, int](), target.owner()
        leases = Leases(source)  # a job at SRC keeps the step that is being sent

        def fence() -> None:
            if target.owner() != owner:
                raise SaveFailed(f"{root}: a job has taken the run over. Upload when it has ended.")

        missing, left = ([*steps], []) if steps else missing_steps(source, target)
        while missing:
            step = missing.pop(0)
            try:
                with leases.protect(step):
                    sent = uploads.upload(
                        source, target, step, fence=fence, pace=Pace(max_rate), trusted=trusted
                    )
            except (CheckpointError, OSError) as error:
                source.forget(step)
                is_there = source.is_committed(step)
                if steps or (is_there and not isinstance(error, CorruptCheckpoint)):
                    raise
                left += [step] if is_there else []
                gone = f"step {step} was deleted meanwhile, and is left out"
                _output.note(str(error) if is_there else gone)
                if not is_there:  # the job may have saved others
                    tried = {*left, *(sent.step for sent in done)}
                    there, _ = missing_steps(source, target)
                    missing = [n for n in there if n not in tried]
                continue
            done.append(sent)
            if not as_json:
                kept = f", {size_text(sent.found_bytes)} were there" if sent.found_bytes else ""
                what = f"the part of process {sent.process} of " if sent.process else ""
                _output.echo(f"wrote {what}{sent.path}: sent {size_text(sent.sent_bytes)}{kept}")
            if not as_json and sent.lacks:
                who = ", ".join(map(str, sent.lacks))
                _output.echo(f"not committed: upload the parts of processes {who}, then this again")
    for problem in source.problems if left else ():
        _output.note(problem)
    if left:
        which = ", ".join(map(str, left))
        _output.note(f"not uploaded, since they are damaged, unreadable or no directories: {which}")
    if as_json:
        _output.print_json([sent._asdict() for sent in done])
    elif not done and not left:
        _output.echo(f"{root} has every step of {source.root}")
    return 1 if left or any(sent.lacks for sent in done) else 0


@click.command()
@click.argument("root", type=_options.PATH)
@click.argument("other", type=_options.PATH)
@click.option("--no-job", is_flag=True, help="Assume no job at ROOT (file system without locks).")
@_options.as_json
def heal(root: str, other: str, no_job: bool, as_json: bool) -> int:
    """Mend damaged steps of a run from their copies in another place.

    ROOT and OTHER are roots of runs, one of which was uploaded to the other. Reads every step of
    ROOT; replaces the bad files of a damaged one by those of its verified copy in OTHER.
    """
    from jaxckpt._run.heal import heal as heal_step
    from jaxckpt._run.index import StepIndex
    from jaxckpt._run.listing import existing_root
    from jaxckpt._run.scrub import look
    from jaxckpt.cli._between import check_same_run, has_lost_item, unread
    from jaxckpt.cli._owned import owned

    good, (storage, where) = StepIndex(*existing_root(other), quiet=True), existing_root(root)
    check_same_run(good, StepIndex(storage, where, quiet=True), asked_for=True)
    if good.root == where:
        raise ValueError(f"OTHER must be another place than ROOT, which is {where}")
    mended: dict[int, list[str]] = {}
    failed: dict[int, str] = {}
    shared: dict[int, list[str]] = {}  # the bad files of failed steps
    with owned(storage, where, no_job=no_job) as run:
        # In a bucket, what has lost its commit marker looks like a save under way.
        begun = (n for n in run.index.listing().directories().values() if run.index.has_record(n))
        for step in sorted({*run.index.present(), *begun}):
            report = look(run.leases, step)
            is_bad = run.index.has_record(step) if report is None else report.damaged
            if report is not None and not (report.ok or is_bad):
                # Another program may have removed an item; that is damage if the copy has it.
                is_bad = has_lost_item(run.index, good, step)
                if not is_bad and (problem := unread(run.index.storage, report)) is not None:
                    failed[step] = f"it cannot be read: {problem.message}"
            if not is_bad:
                continue
            try:
                with run.leases.protect(step, changes=True):  # against a later job's
                    mended[step] = heal_step(run.index, good, step, run.owner.check)
            except (CheckpointError, OSError) as error:
                failed[step] = str(error)
                files = {p.file for p in report.problems if p.file} if report else ()
                path = run.index.path(step)
                shared[step] = sorted(os.path.relpath(file, path) for file in files)
        for step in [*failed] if mended else ():  # it may share a file that was mended
            report = look(run.leases, step)
            if report is not None and report.ok:
                del failed[step]
                if step in shared:  # else it could not be read before
                    mended[step] = shared[step]
    if as_json:
        _output.print_json({"path": where, "mended": mended, "failed": failed})
        return 1 if failed else 0
    for step, files in mended.items():
        _output.echo(f"mended step {step}: {', '.join(files)}")
    for step, why in failed.items():
        _output.echo(f"step {step} is not mended: {why}")
    if not mended and not failed:
        _output.echo(f"{where}: no step is damaged")
    return 1 if failed else 0


@contextlib.contextmanager
def _writing(dst: str, *, overwrite: bool, yes: bool) -> Iterator[None]:
    """Asks before DST is replaced, and locks the run of which it is a step, if that has locks.

    Raises:
        SaveFailed: a running job owns the run.
        ValueError: a reader holds the step to replace.
    """
    from jaxckpt._run.index import StepIndex
    from jaxckpt._run.leases import Leases
    from jaxckpt.cli._owned import locked
    from jaxckpt.storage import locate

    storage, where = locate(dst)
    root, name = posixpath.split(where)
    if overwrite and storage.kind(where) is not None:
        leases = Leases(StepIndex(storage, root, quiet=True))
        if is_like_step(name) and name in leases.leased(leases.index.entries()):
            raise ValueError(f"{where} is not replaced: a reader holds it. Try again later.")
        _output.confirm(f"Replace {where}?", yes=yes)
    with contextlib.ExitStack() as stack:
        if is_like_step(name) and storage.kind(f"{root}/{names.LOCK}") is not None:
            try:
                stack.enter_context(locked(storage, root))
            except SaveFailed as error:
                if not isinstance(error.__cause__, io.UnsupportedOperation):
                    raise
        yield


def _wrote(path: str, *, as_json: bool, **more: object) -> None:
    from jaxckpt.storage import locate

    _, where = locate(path)
    if as_json:
        _output.print_json({"path": where, **more})
    else:
        _output.echo(f"wrote {where}")
