"""What was measured of each way, against the training without checkpoints that it is compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.peers.plan import Found

NONE = "none"
WITHOUT = (NONE, "none again")
TIERS = ("host", "peer", "durable")
Key = tuple[str, int]
"""A model, and steps between snapshots."""


@dataclass(frozen=True)
class Spread:
    """Values of several rounds."""

    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def median_text(self, form: Callable[[float], str]) -> str:
        """The median; a dash where there are no values."""
        return form(self.median) if self.values else "–"

    def text(self, form: Callable[[float], str]) -> str:
        """The median, with quartiles where there are several values."""
        if len(self.values) < 2:
            return self.median_text(form)
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return f"{form(self.median)} ({form(low)} to {form(high)})"


class Times:
    """Turns of one training. Each is compared with those that took no checkpoints in the same round.

    Args:
        turns: those that count, and whole rounds of them or not.
        state_bytes: of the training.
    """

    def __init__(self, turns: list[dict[str, Any]], state_bytes: float) -> None:
        self._turns, self.state_bytes = turns, state_bytes
        self.ways = list(dict.fromkeys(turn["way"] for turn in turns))

    @classmethod
    def of(cls, found: Found, key: Key) -> Times:
        """What was found for a model and an interval; the first turn of each way does not count."""
        turns = [turn for turn in found.turns if (turn["model"], turn["interval"]) == key and turn["round"] >= 0]
        return cls(turns, found.about["state_bytes"].get(key[0], 0))

    @cached_property
    def _base(self) -> dict[int, dict[str, float]]:
        without: dict[int, list[dict[str, Any]]] = {}
        for turn in self._turns:
            if turn["way"] == NONE:
                without.setdefault(turn["round"], []).append(turn)
        values = ("wall_s", "left_s", "cpu_s")
        return {
            number: {value: statistics.mean(turn[value] / turn["steps"] for turn in turns) for value in values}
            for number, turns in without.items()
        }

    @property
    def rounds(self) -> list[int]:
        return sorted(self._base)

    @property
    def step_s(self) -> float:
        """Of a step without checkpoints: the median of all rounds."""
        return statistics.median(base["wall_s"] for base in self._base.values()) if self._base else float("nan")

    def longer(self, way: str) -> Spread:
        """Share by which a step is longer, with what is still to do at the end of a turn, at the interval asked for."""
        return self._each(
            way, lambda turn, base: _added_s(turn, base) / (_due(turn) * turn["interval"] * base["wall_s"])
        )

    def added(self, way: str) -> Spread:
        """Seconds that a snapshot takes from training, likewise."""
        return self._each(way, lambda turn, base: _share(_added_s(turn, base), turn["taken"]))

    def left(self, way: str) -> Spread:
        """Seconds of these that were waited for at the end of a turn."""
        if way in WITHOUT:
            return Spread([])
        return self._each(way, lambda turn, base: turn["left_s"] - base["left_s"] * turn["steps"])

    def waits(self, way: str) -> Spread:
        """Seconds that the training thread is in hooks, for each snapshot."""
        return self._each(way, lambda turn, base: _share(turn["blocked_s"], turn["taken"]))

    def cpu(self, way: str) -> Spread:
        """CPU seconds of all processes, for each snapshot."""
        return self._each(way, lambda turn, base: _share(turn["cpu_s"] - base["cpu_s"] * turn["steps"], turn["taken"]))

    def safe_after(self, way: str, tier: str) -> Spread:
        """Seconds until each snapshot that got to a tier was whole there."""
        return Spread([value for turn in self._of(way) for value in turn["safe_after_s"][tier]])

    def remarks(self, way: str) -> list[str]:
        turns = self._of(way)
        due, taken = sum(map(_due, turns)), sum(turn["taken"] for turn in turns)
        if way in WITHOUT or not turns:
            return []
        unseen = taken and not any(turn["safe_after_s"][tier] for turn in turns for tier in TIERS)
        return [f"{taken} of {due} snapshots taken"] * (taken < due) + ["none seen safe"] * bool(unseen)

    def _of(self, way: str) -> list[dict[str, Any]]:
        return [turn for turn in self._turns if turn["way"] == way]

    def _each(self, way: str, value: Callable[[dict[str, Any], dict[str, float]], float | None]) -> Spread:
        turns = [turn for turn in self._of(way) if turn["round"] in self._base and way != NONE]
        values = [value(turn, self._base[turn["round"]]) for turn in turns]
        return Spread([found for found in values if found is not None])


def _due(turn: dict[str, Any]) -> int:
    return -(-int(turn["steps"]) // int(turn["interval"]))


def _added_s(turn: dict[str, Any], base: dict[str, float]) -> float:
    return float(turn["wall_s"] + turn["left_s"] - turn["steps"] * (base["wall_s"] + base["left_s"]))


def _share(value: float, count: int) -> float | None:
    return value / count if count else None


class Cells:
    """What only a process of its own can tell of a way: memory, bytes, and the restore.

    Args:
        found: a comparison.
        key: the model and interval that is asked about; cells of the same model at another interval do as well.
    """

    def __init__(self, found: Found, key: Key) -> None:
        own = [cell for cell in found.cells if cell["model"] == key[0]]
        self._cells = [cell for cell in own if cell["interval"] == key[1]] or own

    def of(self, way: str) -> list[dict[str, Any]]:
        return [cell for cell in self._cells if cell["way"] == way]

    def memory(self, way: str) -> Spread:
        """Bytes at the peak beyond those of the training without checkpoints."""
        return self._against_none(way, lambda cell, none: cell["peak_bytes"] - none["peak_bytes"])

    def sent(self, way: str) -> Spread:
        """Bytes over loopback, for each snapshot."""
        return self._against_none(way, _sent_more)

    def written(self, way: str) -> Spread:
        """Bytes to the disk, for each snapshot."""
        return self._own(way, lambda cell: _share(cell["written_bytes"], cell["snapshots"]))

    def restore(self, way: str) -> Spread:
        """Seconds until the newest snapshot is read."""
        return self._own(way, lambda cell: cell["restore_s"])

    def remarks(self, way: str, *, exact: bool) -> list[str]:
        cells = self.of(way)
        return ["**restored another state**"] * any(cell["equal"] is False and exact for cell in cells) + [
            "processes had to be killed"
        ] * any(cell["killed"] for cell in cells)

    def _own(self, way: str, value: Callable[[dict[str, Any]], float | None]) -> Spread:
        return Spread([found for cell in self.of(way) if (found := value(cell)) is not None])

    def _against_none(self, way: str, value: Callable[[dict[str, Any], dict[str, Any]], float | None]) -> Spread:
        none = {cell["round"]: cell for cell in self.of(NONE)}
        return self._own(way, lambda cell: value(cell, none[cell["round"]]) if cell["round"] in none else None)


def _sent_more(cell: dict[str, Any], none: dict[str, Any]) -> float | None:
    if cell["sent_bytes"] is None or none["sent_bytes"] is None:
        return None
    return _share(cell["sent_bytes"] - none["sent_bytes"], cell["after_begin"])
