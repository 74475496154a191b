"""Names for `temporary_path_class`, which programs import from `orbax.checkpoint.path.atomicity`.

They are ignored: jaxckpt renames in file systems, and writes a marker in buckets.
"""


class AtomicRenameTemporaryPath:
    """Stands for a commit by a rename."""


class CommitFileTemporaryPath:
    """Stands for a commit by a marker."""
