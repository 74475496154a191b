"""Two ways to commit a checkpoint and to remove it: by a rename, and by a marker written last.

`transaction` has the lines of both, with what a crash after each of them leaves.

To delete, `RenameCommit` renames to `...-deleting-...`, then removes the files. A crash leaves a
name that no reader takes for a checkpoint, and the next writer finishes the job.

`MarkerCommit` removes `commit_success.txt` first, and last `_jaxckpt.writing`, by which the next
writer recognizes the remains. All writers share the directory. So a deletion first takes this file,
and then looks whether there is a commit; and a writer checks after its commit that the file is
still its own. Where locks are leases, a writer that stood still for longer than its lease asks for
it again before it deletes the next files: they may be another writer's by then.

A `check` raises if another writer has taken over. It is called at the last moment: after a rename,
which is undone then, or before the first request that deletes something.
"""

from __future__ import annotations

from jaxckpt._disk.attempt import UNLOCKED
from jaxckpt._disk.by_marker import MarkerCommit
from jaxckpt._disk.by_rename import RenameCommit
from jaxckpt.storage import Hold, Storage

Commit = RenameCommit | MarkerCommit


def commit_of(storage: Storage, path: str, hold: Hold = UNLOCKED) -> Commit:
    """Returns how the checkpoint at a path is committed and removed; by its writer, with a lock."""
    return (RenameCommit if storage.atomic_rename else MarkerCommit)(storage, path, hold)
