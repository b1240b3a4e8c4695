"""Comparing the benchmarks of an older tree with this one's: which figures belong together, and what is worse."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.measure import Result
from benchmarks.regressions import as_json, matched, rows, worse


def test_reworded_figures_match_by_unit_direction_and_order() -> None:
    old = [
        Result("server over TCP", [1.0], 2),
        Result("same", [2.0], 2),
        Result("server's rate", [3.0], 2, at_most=False),
        Result("server, seconds", [4.0], None, unit="s"),
        Result("gone", [5.0], None, unit="MiB"),
    ]
    new = [
        Result("added", [6.0], None, unit="%"),
        Result("server's rate", [3.0], 2, at_most=False),
        Result("same", [2.0], 2),
        Result("server over TCP", [1.0], 2),
        Result("server, seconds", [4.0], None, unit="s"),
    ]
    assert [(before.name, now.name) for before, now in matched(old, new)] == [
        ("server over TCP", "server over TCP"),
        ("same", "same"),
        ("server's rate", "server's rate"),
        ("server, seconds", "server, seconds"),
    ]


def test_no_figure_is_matched_twice() -> None:
    old = [Result("one", [1.0], None), Result("two", [1.0], None)]
    assert len(matched(old, [Result("another", [1.0], None)])) == 1


@pytest.mark.parametrize(
    ("old", "new", "at_most", "expected"),
    [(2.0, 3.0, True, 1.5), (2.0, 3.0, False, 2 / 3), (-0.1, 3.0, True, None), (2.0, 0.0, False, None)],
)
def test_above_one_is_worse_in_either_direction(old: float, new: float, at_most: bool, expected: float | None) -> None:
    assert worse(Result("a", [old], None, at_most), Result("a", [new], None, at_most)) == expected


def test_a_row_has_the_ratio_of_each_round() -> None:
    def side(value: float) -> dict[str, Any]:
        return {"results": [asdict(Result("a", [value, value], 2))]}

    failed: dict[str, Any] = {"results": []}
    rounds = [{"old": side(1), "new": side(2)}, {"old": side(2), "new": side(1)}, {"old": side(1), "new": failed}]
    found = {"b": rounds}
    assert json.loads(as_json(found))["rounds"] == found
    (row,) = rows(found)
    assert (row.old, row.new, row.worse) == (1.5, 1.5, [2.0, 0.5])
