"""What every storage promises, as tests that run unchanged on each."""

from __future__ import annotations

import io
import posixpath
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.storage import Entry, Storage

_LIMIT = 1 << 20


class _Interrupting(dict[str, int]):
    """Raises KeyboardInterrupt once its first item was used."""

    def items(self) -> Any:
        yield next(iter(super().items()))
        raise KeyboardInterrupt


class StorageContract:
    """The tests of a storage. Subclass it and give the fixtures `storage` and `root`.

    `root` is a path in the storage under which each test finds nothing, in a directory that is
    there where directories are.

    Example:
        class TestMyStorage(StorageContract):
            @pytest.fixture
            def storage(self): return MyStorage()
            @pytest.fixture
            def root(self): return f"/test/{uuid.uuid4()}"
    """

    def test_a_file_is_written_in_parts(self, storage: Storage, root: str) -> None:
        """It replaces what was there, as `write` does; parts are of 8 MiB."""
        storage.make_dir(root)
        for parts in ([b"old"], [bytes(8 << 20), b"new"]):
            storage.write(f"{root}/f", iter(parts))

        assert storage.read(f"{root}/f", max_bytes=9 << 20) == bytes(8 << 20) + b"new"

    def test_a_write_reads_back(self, storage: Storage, root: str) -> None:
        """What was written is read, bytes of every value, and none at all."""
        storage.write(f"{root}/all", bytes(range(256)))
        storage.write(f"{root}/none", b"")

        assert storage.read(f"{root}/all", max_bytes=_LIMIT) == bytes(range(256))
        assert storage.read(f"{root}/none", max_bytes=0) == b""
        assert storage.size(f"{root}/all") == 256
        assert storage.size(f"{root}/none") == 0

    def test_a_write_replaces(self, storage: Storage, root: str) -> None:
        """The second write wins, and nothing else is left beside it."""
        storage.write(f"{root}/f", b"first and longer")
        storage.write(f"{root}/f", b"second")

        assert storage.read(f"{root}/f", max_bytes=_LIMIT) == b"second"
        assert [*storage.entries(root)] == ["f"]

    def test_a_read_is_limited(self, storage: Storage, root: str) -> None:
        """A file of the limit is read; one byte more is a corrupt checkpoint that names it."""
        storage.write(f"{root}/f", b"12345")

        assert storage.read(f"{root}/f", max_bytes=5) == b"12345"
        with pytest.raises(CorruptCheckpoint) as caught:
            storage.read(f"{root}/f", max_bytes=4)
        assert caught.value.file == f"{root}/f"

    def test_a_read_fills_buffers(self, storage: Storage, root: str) -> None:
        """One after the other, from any byte on, as many as one likes; and not beyond the end."""
        storage.write(f"{root}/f", bytes(range(256)) * 16)
        sizes = [0, 1, 250, 3, *[1] * 1500, 0]
        buffers = [np.zeros(size, np.uint8) for size in sizes]

        storage.read_into(f"{root}/f", 7, buffers)
        storage.read_into(f"{root}/f", 0, [])

        assert b"".join(buffers) == (bytes(range(256)) * 16)[7 : 7 + sum(sizes)]
        with pytest.raises(EOFError, match="ends"):
            storage.read_into(f"{root}/f", 4095, [np.zeros(2, np.uint8)])
        with pytest.raises(FileNotFoundError):
            storage.read_into(f"{root}/missing", 0, buffers)

    @pytest.mark.parametrize("verb", ["read", "size", "entries"])
    def test_what_is_not_there_is_not_found(self, storage: Storage, root: str, verb: str) -> None:
        """Asking for something missing names it."""
        path = f"{root}/missing"
        limit = {"max_bytes": _LIMIT} if verb == "read" else {}

        with pytest.raises(FileNotFoundError) as caught:
            getattr(storage, verb)(path, **limit)

        assert caught.value.filename == path

    def test_a_create_happens_once(self, storage: Storage, root: str) -> None:
        """The first create wins; a later one changes nothing and says so."""
        assert storage.create(f"{root}/f", b"first") is True
        assert storage.create(f"{root}/f", b"second") is False

        assert storage.read(f"{root}/f", max_bytes=_LIMIT) == b"first"
        assert [*storage.entries(root)] == ["f"]

    def test_of_many_creates_one_wins(self, storage: Storage, root: str) -> None:
        """Eight creates at one moment: one says True, and its bytes are what is there."""
        start = threading.Barrier(8)

        def create(index: int) -> bool:
            start.wait()
            return storage.create(f"{root}/f", str(index).encode() * 1000)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))

        assert won.count(True) == 1
        winner = str(won.index(True)).encode()
        assert storage.read(f"{root}/f", max_bytes=_LIMIT) == winner * 1000

    def test_a_reader_sees_whole_files(self, storage: Storage, root: str) -> None:
        """While a file is replaced, a read gives the old bytes or the new ones."""
        storage.write(f"{root}/f", b"a" * 10_000)
        done = threading.Event()

        def replace() -> None:
            for letter in (b"b", b"c") * 5:
                storage.write(f"{root}/f", letter * 10_000)
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(replace)
            seen = []
            while not (done.is_set() or writing.done()):
                seen.append(storage.read(f"{root}/f", max_bytes=_LIMIT))
            writing.result()

        assert all(len(data) == 10_000 and len(set(data)) == 1 for data in seen)

    def test_kinds(self, storage: Storage, root: str) -> None:
        """A file, a directory and nothing are told apart; a prefix of a name is nothing."""
        storage.make_dir(f"{root}/dir/inner")
        storage.write(f"{root}/dir/inner/file", b"")

        assert storage.kind(f"{root}/dir/inner/file") == "file"
        assert storage.kind(f"{root}/dir/inner") == "dir"
        assert storage.kind(f"{root}/dir") == "dir"
        assert storage.kind(f"{root}/di") is None
        assert storage.kind(f"{root}/dir/inner/file/below") is None

    def test_entries_are_sorted_and_not_deep(self, storage: Storage, root: str) -> None:
        """A listing has the children, each once, in order."""
        storage.make_dir(f"{root}/b")
        for name in ("b/2", "b/1", "c", "a", "B", "é", "10", "9"):
            storage.write(f"{root}/{name}", b"")

        assert [*storage.entries(root)] == ["10", "9", "B", "a", "b", "c", "é"]
        assert [*storage.entries(f"{root}/b")] == ["1", "2"]

    def test_entries_have_kinds_and_sizes(self, storage: Storage, root: str) -> None:
        """One listing has what `kind` and `size` say of each child."""
        storage.make_dir(f"{root}/b/deep")
        storage.write(f"{root}/b/deep/f", b"deep")
        for name, data in {"c": b"", "B": b"12345", "é": b"1", "10": b"12"}.items():
            storage.write(f"{root}/{name}", data)

        found = storage.entries(root)

        assert found["b"] == Entry("dir", 0)
        files = {name: size for name, (kind, size) in found.items() if kind == "file"}
        assert files == {"10": 2, "B": 5, "c": 0, "é": 1}
        assert all(storage.kind(f"{root}/{name}") == kind for name, (kind, _) in found.items())
        assert storage.entries(f"{root}/b") == {"deep": Entry("dir", 0)}

    def test_make_dir_makes_parents_and_may_repeat(self, storage: Storage, root: str) -> None:
        """Missing parents are made, and a directory that is there is kept with what is in it."""
        storage.make_dir(f"{root}/a/b/c")
        storage.write(f"{root}/a/b/c/f", b"1")
        storage.make_dir(f"{root}/a/b/c")
        storage.make_dir(f"{root}/a")

        assert storage.read(f"{root}/a/b/c/f", max_bytes=_LIMIT) == b"1"

    def test_delete_empty_leaves_what_is_not(self, storage: Storage, root: str) -> None:
        """A directory with something in it stays; one without, or none, is gone."""
        storage.make_dir(f"{root}/d/inner")
        storage.write(f"{root}/d/f", b"1")

        assert not storage.delete_empty(f"{root}/d")
        assert storage.read(f"{root}/d/f", max_bytes=_LIMIT) == b"1"
        assert storage.delete_empty(f"{root}/d/inner")
        assert storage.delete_empty(f"{root}/d/inner")
        assert storage.kind(f"{root}/d/inner") is None

    def test_sync_changes_nothing(self, storage: Storage, root: str) -> None:
        """After a sync of a tree, and of one file, all is as before."""
        storage.make_dir(f"{root}/a/b")
        storage.write(f"{root}/a/b/f", b"1")

        storage.sync(f"{root}/a")
        storage.sync(f"{root}/a/b/f")

        assert storage.read(f"{root}/a/b/f", max_bytes=_LIMIT) == b"1"

    def test_rename_moves_a_tree(self, storage: Storage, root: str) -> None:
        """A renamed directory is whole under its new name; without renames it stays and raises."""
        storage.make_dir(f"{root}/a/b")
        storage.write(f"{root}/a/b/f", b"1")

        if storage.atomic_rename:
            storage.rename(f"{root}/a", f"{root}/z")
            assert [*storage.entries(root)] == ["z"]
            assert storage.read(f"{root}/z/b/f", max_bytes=_LIMIT) == b"1"
        else:
            with pytest.raises(OSError, match=root):
                storage.rename(f"{root}/a", f"{root}/z")
            assert [*storage.entries(root)] == ["a"]

    def test_rename_replaces_nothing(self, storage: Storage, root: str) -> None:
        """A target that is there, be it an empty directory, raises and both stay."""
        storage.make_dir(f"{root}/a")
        storage.make_dir(f"{root}/empty")
        storage.write(f"{root}/a/f", b"1")
        storage.write(f"{root}/g", b"2")

        for src, dst in [("a", "empty"), ("a", "g"), ("g", "a"), ("g", "a/f")]:
            wanted = FileExistsError if storage.atomic_rename else OSError
            with pytest.raises(wanted, match=root):
                storage.rename(f"{root}/{src}", f"{root}/{dst}")

        assert storage.read(f"{root}/a/f", max_bytes=_LIMIT) == b"1"
        assert storage.read(f"{root}/g", max_bytes=_LIMIT) == b"2"

    def test_exchange_swaps_or_says_no(self, storage: Storage, root: str) -> None:
        """Two trees change places, or nothing changes and the answer is False."""
        for name in ("a", "b"):
            storage.make_dir(f"{root}/{name}")
            storage.write(f"{root}/{name}/f", name.encode())

        swapped = storage.exchange(f"{root}/a", f"{root}/b")

        found = [storage.read(f"{root}/{name}/f", max_bytes=_LIMIT) for name in ("a", "b")]
        assert found == ([b"b", b"a"] if swapped else [b"a", b"b"])

    def test_a_link_is_the_same_file(self, storage: Storage, root: str) -> None:
        """A link outlives the file that it was made of; nothing that is there is replaced."""
        storage.write(f"{root}/a", b"1")
        storage.link(f"{root}/a", f"{root}/b")

        with pytest.raises(FileExistsError):
            storage.link(f"{root}/a", f"{root}/b")
        with pytest.raises(FileNotFoundError):
            storage.link(f"{root}/missing", f"{root}/c")
        storage.write(f"{root}/a", b"2")
        assert storage.read(f"{root}/b", max_bytes=_LIMIT) == b"1"
        storage.delete(f"{root}/a")
        assert storage.read(f"{root}/b", max_bytes=_LIMIT) == b"1"
        assert [*storage.entries(root)] == ["b"]

    def test_links_are_made_of_all_files_or_of_none(self, storage: Storage, root: str) -> None:
        """With the sizes that they must have; where there are no links, an error says so."""
        for name in ("a", "d/b"):
            storage.make_dir(posixpath.dirname(f"{root}/from/{name}"))
            storage.write(f"{root}/from/{name}", b"12")
        try:
            storage.link_all(f"{root}/from", f"{root}/to/new", {"a": 2, "d/b": 2})
        except io.UnsupportedOperation:
            assert storage.files(f"{root}/to") == {}
            return
        storage.delete(f"{root}/from/d")

        for bad in ({"a": 2, "d/b": 2}, {"d/x": 1, "a": 2}, {"a": 2, "d": 0}):
            with pytest.raises(FileNotFoundError):
                storage.link_all(f"{root}/from", f"{root}/none", bad)
        with pytest.raises(FileNotFoundError):
            storage.link_all(f"{root}/from", f"{root}/none", {"a": 3})
        with pytest.raises(KeyboardInterrupt):
            storage.link_all(f"{root}/from", f"{root}/none", _Interrupting({"a": 2, "b": 2}))
        assert storage.files(f"{root}/none") == {}
        assert storage.read(f"{root}/to/new/d/b", max_bytes=_LIMIT) == b"12"
        assert [*storage.files(f"{root}/to/new")] == ["a", "d/b"]

    def test_delete_takes_a_tree_and_nothing_else(self, storage: Storage, root: str) -> None:
        """A deleted directory is gone with all in it; a sibling whose name it begins stays."""
        for name in ("a", "a/b", "ab", "a b"):
            storage.make_dir(f"{root}/{name}")
            storage.write(f"{root}/{name}/f", b"1")

        storage.delete(f"{root}/a")

        assert storage.kind(f"{root}/a") is None
        assert [*storage.entries(root)] == ["a b", "ab"]

    def test_delete_takes_one_file(self, storage: Storage, root: str) -> None:
        """A deleted file is gone, and one whose name it begins stays."""
        storage.write(f"{root}/f", b"1")
        storage.write(f"{root}/f2", b"1")

        storage.delete(f"{root}/f")

        assert [*storage.entries(root)] == ["f2"]

    def test_delete_of_nothing_is_fine(self, storage: Storage, root: str) -> None:
        """Deleting what is not there, or is below a file, does nothing."""
        storage.write(f"{root}/f", b"1")

        storage.delete(f"{root}/missing")
        storage.delete(f"{root}/missing/below")
        storage.delete(f"{root}/f/below")

        assert [*storage.entries(root)] == ["f"]

    def test_a_hold_excludes_until_released(self, storage: Storage, root: str) -> None:
        """One holder at a time, even within a process; releasing twice does nothing."""
        first = storage.hold(f"{root}/lock")
        assert first is not None
        assert storage.hold(f"{root}/lock") is None
        other = storage.hold(f"{root}/other")
        assert other is not None

        first.release()
        second = storage.hold(f"{root}/lock")
        first.release()

        assert second is not None
        assert storage.hold(f"{root}/lock") is None
        second.release()
        other.release()

    def test_a_hold_keeps_what_is_in_the_file(self, storage: Storage, root: str) -> None:
        """A lock is made where there is no file, and leaves the bytes of one that is there."""
        storage.write(f"{root}/there", b"text")
        holds = [storage.hold(f"{root}/there"), storage.hold(f"{root}/made")]

        assert storage.read(f"{root}/there", max_bytes=_LIMIT) == b"text"
        assert storage.kind(f"{root}/made") == "file"
        for hold in holds:
            assert hold is not None
            hold.release()

    def test_a_directory_is_deleted_with_its_lock(self, storage: Storage, root: str) -> None:
        """A holder of a lock may delete the directory that it is in; it is gone after that."""
        storage.make_dir(f"{root}/a")
        hold = storage.hold(f"{root}/a/lock")
        assert hold is not None
        storage.write(f"{root}/a/f", b"text")

        storage.delete(f"{root}/a")
        hold.release()

        assert storage.kind(f"{root}/a") is None

    @pytest.mark.parametrize("name", ["a b", "é日本", "%41", "a?b#c", "'\"\\$x", "-n", "x" * 255])
    def test_names_are_taken_as_they_are(self, storage: Storage, root: str, name: str) -> None:
        """No character of a name means anything, and a name may be as long as one can be."""
        storage.make_dir(f"{root}/{name}")
        storage.write(f"{root}/{name}/{name}", b"1")

        assert [*storage.entries(root)] == [name]
        assert [*storage.entries(f"{root}/{name}")] == [name]
        assert storage.read(f"{root}/{name}/{name}", max_bytes=_LIMIT) == b"1"
        assert storage.create(f"{root}/{name}/{name}", b"2") is False
        storage.delete(f"{root}/{name}")
        assert storage.kind(f"{root}/{name}") is None

    @pytest.mark.parametrize("name", ["plain", "a b", "é日本", "%41", "a?b#c"])
    def test_tensorstore_reads_where_the_storage_writes(
        self, storage: Storage, root: str, name: str
    ) -> None:
        """TensorStore reads the files of a directory, by its driver or through us."""
        from jaxckpt.storage._staged import open_reader

        storage.make_dir(f"{root}/{name}/d")
        storage.write(f"{root}/{name}/one", b"1")
        storage.write(f"{root}/{name}/d/two", b"2")

        reader = open_reader(storage, f"{root}/{name}", database=False)
        assert reader.keys() == ["d/two", "one"]
        assert reader.values([("one", None), ("none", None)]) == [b"1", None]
