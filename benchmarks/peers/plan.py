"""Which cells are measured, in which order; what a comparison has found, and what it has not."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.cell import Cell


def blocks(
    models: list[str], intervals: list[int], ways: list[str], rounds: int, *, seed: int, **settings: Any
) -> Iterator[list[Cell]]:
    """Blocks of cells that are compared with each other: one model, one interval, one round, all ways in random order.

    The models of a round come in the order given, so that a budget that is too small leaves out the last ones.

    Args:
        models: see :class:`Cell`.
        intervals: likewise.
        ways: likewise.
        rounds: blocks of each model and interval.
        seed: of the random order.
        settings: of every cell.
    """
    rng = random.Random(seed)
    for number in range(rounds):
        for model in models:
            for interval in rng.sample(intervals, len(intervals)):
                cells = [Cell(model=model, interval=interval, way=way, round=number, **settings) for way in ways]
                rng.shuffle(cells)
                yield cells


@dataclass
class Found:
    """A comparison.

    Attributes:
        about: machine, commit, versions, scale, load; bytes of the state of each model.
        turns: what was measured in turns, one dictionary for each turn of a way.
        cells: what was measured of ways in processes of their own: the cell's fields with its values.
        failed: ways, trainings and cells that ended with an error, with its last line.
        missing: cells and trainings that are not begun: not yet, or not within the budget.
    """

    about: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def keys(self) -> set[tuple[str, int]]:
        """Models and intervals of which there is anything."""
        return {(one["model"], one["interval"]) for one in [*self.turns, *self.cells, *self.failed, *self.missing]}


def together(comparisons: list[Found]) -> list[Found]:
    """Those of one scale and commit as one, where they are of different models or intervals: they share tables then."""
    found: list[Found] = []
    for one in comparisons:
        kind = [one.about[name] for name in ("scale", "commit", "device")]
        for other in found:
            if kind == [other.about[name] for name in ("scale", "commit", "device")] and not one.keys() & other.keys():
                other.about["load_after"] = one.about["load_after"]
                other.about["state_bytes"] |= one.about["state_bytes"]
                for name in ("turns", "cells", "failed", "missing"):
                    getattr(other, name).extend(getattr(one, name))
                break
        else:
            found.append(copy.deepcopy(one))
    return found
