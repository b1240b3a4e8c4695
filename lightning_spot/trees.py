"""Walks nested dicts, lists and tuples, such as a checkpoint; each of them once, since it may hold itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

Path = tuple[Any, ...]
"""Keys and places in lists that lead to an item."""


def leaves(tree: Any, kind: type[T] | tuple[type[T], ...]) -> Iterator[T]:
    """Yield everything of a class in a nested value; the last first.

    Args:
        tree: the value.
        kind: the class, or several; no containers.
    """
    stack, seen = [tree], set[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, kind):
            yield item
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item.values() if isinstance(item, dict) else item)


def walk(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield everything in a nested value that is no dict, list or tuple, in its order, with the path to it."""
    stack: list[tuple[Path, Any]] = [((), tree)]
    seen = set[int]()
    while stack:
        path, item = stack.pop()
        if not isinstance(item, (dict, list, tuple)):
            yield path, item
        elif id(item) not in seen:
            seen.add(id(item))
            below = list(item.items() if isinstance(item, dict) else enumerate(item))
            stack.extend(((*path, key), each) for key, each in reversed(below))


def at(tree: Any, path: Path) -> Any:
    """What a path leads to; ``None`` if there is nothing."""
    for key in path:
        try:
            tree = tree[key] if isinstance(tree, (dict, list, tuple)) else None
        except (LookupError, TypeError):
            return None
    return tree


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same dicts, lists and tuples, with what ``change`` returns in place of everything else in them."""
    if isinstance(tree, dict):
        return {key: mapped(change, item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [mapped(change, item) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    return change(tree)


def laid_over(base: Any, top: Any, merge: Callable[[Any, Any], Any]) -> Any:
    """One nested value over another: what both have is merged, what only one of them has is as it has it.

    Args:
        base: a nested value.
        top: another; lists and tuples are put together item by item where these are of one class and length.
        merge: returns what becomes of an item of ``base`` and the one of ``top`` in its place.
    """
    if isinstance(base, dict) and isinstance(top, dict):
        both = {key: laid_over(base[key], item, merge) if key in base else item for key, item in top.items()}
        return {**base, **both}
    if isinstance(top, (list, tuple)) and type(base) is type(top) and len(base) == len(top):
        return type(top)(laid_over(*pair, merge) for pair in zip(base, top, strict=True))
    return merge(base, top)
