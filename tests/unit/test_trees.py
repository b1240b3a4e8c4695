"""Nested values are walked, changed and laid over each other."""

from __future__ import annotations

from typing import Any

from lightning_spot.trees import at, laid_over, leaves, mapped, walk

TREE = {"a": [1, (2, {"b": 3})], "c": "text", 4: {}, "d": ()}


def test_everything_is_found_once_with_its_path() -> None:
    found = list(walk(TREE))
    assert found == [(("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1, "b"), 3), (("c",), "text")]
    assert all(at(TREE, path) == item for path, item in found)
    assert sorted(leaves(TREE, int)) == [1, 2, 3]
    assert list(leaves(TREE, str)) == ["text"]
    assert dict(walk(7)) == {(): 7}


def test_what_holds_itself_has_an_end() -> None:
    tree: dict[str, Any] = {"a": [1]}
    tree["a"] += [tree, tree["a"]]
    assert list(walk(tree)) == [(("a", 0), 1)]
    assert list(leaves(tree, int)) == [1]


def test_nothing_is_at_a_path_that_leads_nowhere() -> None:
    for path in (("b",), ("a", 2), ("c", 0), ("a", 0, 0), ("a", "b"), ([],)):
        assert at(TREE, path) is None


def test_leaves_are_changed_and_containers_stay() -> None:
    assert mapped(str, TREE) == {"a": ["1", ("2", {"b": "3"})], "c": "text", 4: {}, "d": ()}
    assert mapped(str, 1) == "1"


def test_one_value_is_laid_over_another() -> None:
    base = {"a": [1, (2, {"b": 3, "only": 4})], "c": [1], "d": 1}
    top = {"a": [10, (20, {"b": 30})], "c": [1, 2], "e": [5]}
    merged = laid_over(base, top, lambda old, new: (old, new))
    assert merged == {
        "a": [(1, 10), ((2, 20), {"b": (3, 30), "only": 4})],
        "c": ([1], [1, 2]),
        "d": 1,
        "e": [5],
    }
