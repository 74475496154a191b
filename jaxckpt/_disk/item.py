"""Opens the items of a checkpoint that was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jaxckpt._core.collector import paused
from jaxckpt._disk.found import Found, JsonItem, find_trees, is_item, json_name
from jaxckpt.errors import CheckpointNotFound, UnsupportedFormat
from jaxckpt.format import jsontext, names, safetensors, step, tree
from jaxckpt.storage import corrupt

if TYPE_CHECKING:
    from jaxckpt._disk.native import Item, Undecoded


def open_item(found: Found, name: str | None = None) -> Item | JsonItem:
    """Reads everything about an item but its array data; see `read_item`."""
    return decode_item(read_item(found, name))


def read_item(found: Found, name: str | None = None) -> Item | JsonItem | Undecoded:
    """Reads the metadata of an item, and decodes them unless we may have written them.

    A JSON item is read completely.

    Args:
        name: If None, the main one; see `main_item`.

    Raises:
        CheckpointNotFound: the item does not exist, or `name` is None and there are several.
        CorruptCheckpoint: a metadata file is missing or damaged; the error names it.
        UnsupportedFormat: a newer program wrote it.
    """
    from jaxckpt._disk import foreign, native, tensors  # numpy; listing steps does without

    name = choose_item(found, name)
    path = found.items[name]
    if found.is_file:
        is_safetensors = path.endswith(safetensors.SUFFIXES)
        return (tensors.read_item if is_safetensors else foreign.read_flax)(found, name)
    inside = found.contents(path)
    if (file := json_name(found, path)) is not None:
        value = jsontext.loads(found.read(path, file), file=f"{path}/{file}")
        return JsonItem(name=name, value=value)
    found.refuse_holes(path)
    if names.TREE_METADATA not in inside:
        if name and not is_item(found, path):
            handler = found.metadata.handlers.get(name, "")
            raise UnsupportedFormat(f"{path} has files of a program, which only {handler} reads")
        return foreign.read_item(found, name)
    native.check_data_files(found, path)
    return native.Undecoded(found=found, name=name, data=found.read(path, names.TREE_METADATA))


def decode_item(item: Item | JsonItem | Undecoded) -> Item | JsonItem:
    """Decodes the metadata of a tree, if they are not yet decoded."""
    from jaxckpt._disk import foreign, native

    if not isinstance(item, native.Undecoded):
        return item
    with paused():
        saved = tree.decode(item.data, file=item.file)
        # As we write it, `_METADATA` alone describes the arrays.
        described = all(x.stored is not None or x.kind in _WITHOUT_ARRAY for x in saved.leaves)
        read = native.read_tree if saved.typed and described else foreign.read_tree
        return read(item.found, item.name, saved)


# The kinds of leaves that are stored without an array; a large int is stored as text.
_WITHOUT_ARRAY: Final = ("str", "int", "empty", "ellipsis")


def open_tree(found: Found, name: str | None = None) -> Item:
    """Opens an item that must be a tree; UnsupportedFormat if it is JSON."""
    item = open_item(found, name)
    if isinstance(item, JsonItem):
        raise UnsupportedFormat(f"item {item.name!r} of {found.path} is JSON, not a tree")
    return item


def choose_item(found: Found, item: str | None) -> str:
    """Returns the name of the item to read: the given one, or the main one."""
    items = found.items
    if found.deleting is not None and (item == found.deleting or not items):
        raise found.being_deleted()
    if item is not None:
        if item in found.removed:
            raise CheckpointNotFound(found.was_removed(item))
        if item not in items:
            raise CheckpointNotFound(
                f"{found.path} has no item {item!r}; its items are {', '.join(items)}"
            )
        return item
    for name in lost_trees(found):
        text = f"is missing, but {names.CHECKPOINT_METADATA} lists it. For others, give item"
        raise corrupt(f"{found.path}/{name}", text)
    if (main := main_item(found)) not in items:
        raise CheckpointNotFound(
            f"{found.path} has several items, none named {names.STATE_ITEM!r}: {', '.join(items)}. "
            "Choose one with `item`."
        )
    return main


def main_item(found: Found) -> str:
    """Returns the only item, or the main tree; it is none of the items if that is unclear."""
    if len(found.items) == 1:
        return next(iter(found.items))
    return names.main_tree(find_trees(found), found.record.item if found.record else "")


def stand_in(found: Found, name: str) -> str | None:
    """Returns None, for the main item, if that may be read for a run's item that is not there."""
    # Not if it is main only as the last tree left: the named one may have been deleted.
    clear = ("", names.STATE_ITEM, names.DEFAULT_ITEM, found.record.item if found.record else "")
    return None if name == names.STATE_ITEM or main_item(found) in clear else name


def lost_trees(found: Found) -> list[str]:
    """Returns the trees without which a checkpoint is no use: lost, by its metadata."""
    if found.record is not None:
        return []
    there, handlers = {*found.entries(found.path), found.deleting, ""}, found.metadata.handlers
    left = [kind for name, kind in handlers.items() if name in there]
    lost = [n for n, kind in handlers.items() if kind != step.JSON_HANDLER and n not in there]
    return [n for n in lost if n == names.STATE_ITEM or {*left} == {step.JSON_HANDLER}]
