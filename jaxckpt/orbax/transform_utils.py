"""Transforms: how the leaves of a target come from the saved leaves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxckpt import open as open_checkpoint
from jaxckpt.orbax import _trees
from jaxckpt.orbax.tree import from_flat_dict, to_flat_dict


@dataclass
class Transform:
    r"""Names where the value of a leaf comes from.

    Attributes:
        original_key: The saved path, in which `\1` is a group of the regular expression over the
            path in the target; None for the same path.
        use_fallback: Whether the target gives the value.
        value_fn: Makes the value of the saved one.
        multi_value_fn: Makes the value of the path and of the saved tree.
    """

    original_key: str | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool | None = True
) -> Any:
    """Returns the new tree with values that the transforms take from the original one."""
    original, rules = to_flat_dict(original_tree, "/"), to_flat_dict(transformations, "/")

    def value(names: _trees.Names, leaf: Any) -> Any:
        key = "/".join(names)
        found = _rule(key, rules)
        if found is None:
            return original[key] if key in original and default_to_original else leaf
        rule, source = found
        if rule.use_fallback:
            return leaf if default_to_original else _get(original, key)
        if rule.multi_value_fn is not None:
            return rule.multi_value_fn(key, original_tree)
        result = _get(original, source)
        return result if rule.value_fn is None else rule.value_fn(result)

    return _trees.map_named(value, new_tree)


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """Returns the leaves of all trees, of the last that has each: dicts, or like the target."""
    return from_flat_dict({k: x for tree in trees for k, x in to_flat_dict(tree).items()}, target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """Returns the leaves of the last tree whose paths all trees have, likewise."""
    *others, last = map(to_flat_dict, trees)
    common = {k: leaf for k, leaf in last.items() if all(k in other for other in others)}
    return from_flat_dict(common, target)


def _rule(key: str, rules: Mapping[str, Any]) -> tuple[Any, str] | None:
    """Returns the transform of a path, the last that matches, and the path of its source."""
    for pattern, rule in reversed([*rules.items()]):
        if match := re.fullmatch(pattern, key):
            return rule, key if rule.original_key is None else match.expand(rule.original_key)
    return None


def _get(leaves: Mapping[str, Any], key: str) -> Any:
    if key not in leaves:
        raise ValueError(f'Transformation key "{key}" not found in origin tree.')
    return leaves[key]


def restore_transformed(path: str, given: Any) -> Any:
    """Restores a target with transforms; each leaf has the restore args of the target's leaf.

    Raises:
        NotImplementedError: a `multi_value_fn` wants more than jaxckpt restores.
        ValueError: the target or its restore args are missing.
    """
    if given.item is None or given.restore_args is None:
        raise ValueError(
            "If providing `transforms`, must provide `item` and `restore_args` matching structure "
            "of expected result."
        )
    found = open_checkpoint(path)
    rules, saved = to_flat_dict(given.transforms, "/"), _trees.by_name(_trees.abstract(found))
    if any(rule.multi_value_fn is not None for rule in rules.values()):
        raise NotImplementedError(
            "multi_value_fn: restore with jaxckpt.restore(path), then compute the new tree"
        )
    paths = {"/".join(names): names for names in saved}  # a name may contain a `/`
    args, sources = to_flat_dict(given.restore_args, "/"), {}
    for key in to_flat_dict(given.item, "/"):
        rule, source = _rule(key, rules) or (Transform(), key)
        names = paths.get(source)
        if names is not None and not (rule.use_fallback and given.transforms_default_to_original):
            sources[names] = _trees.wanted_leaf(saved[names], args.get(key))
    values = found.restore(_trees.nested(sources), extra="ignore") if sources else {}
    default = given.transforms_default_to_original
    return apply_transformations(values, given.transforms, given.item, default)
