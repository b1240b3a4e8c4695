"""The ways in which the copying of a snapshot can be spread over the next iteration, and which of them costs least."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal, get_args

from lightning_spot.errors import SettingsError

Mode = Literal["eager", "asymmetric", "backward"]
Partitions = Literal["auto", "asymmetric", "backward", "eager"]

MODES: tuple[Mode, ...] = get_args(Mode)

_ROUNDS = 5
_DRIFT = 1.5
_LATEST = 16
_FIRST_PATIENCE, _LAST_PATIENCE = 64, 4096


def check_partitions(value: str) -> Partitions:
    """A user's setting.

    Raises:
        SettingsError: if it is none of those that there are.
    """
    if value not in get_args(Partitions):
        allowed = ", ".join(map(repr, get_args(Partitions)))
        raise SettingsError(f"partitions={value!r}: it is one of {allowed}")
    return value  # type: ignore[return-value] # one of them


class ModeTrial:
    """Tries modes in turn, each for some iterations, and then knows which of them took the least time.

    In turn, so that what else changes meanwhile touches all alike; the median, so that one odd iteration does not.

    Args:
        modes: to try; of equal ones the first is taken.
        rounds: iterations of each.
    """

    def __init__(self, modes: Sequence[Mode] = MODES, rounds: int = _ROUNDS) -> None:
        self.found: dict[Mode, list[float]] = {mode: [] for mode in modes}
        self._rounds = rounds
        self._turn = 0

    def take(self) -> Mode:
        """The mode whose turn it is."""
        mode = list(self.found)[self._turn % len(self.found)]
        self._turn += 1
        return mode

    def add(self, mode: Mode, seconds: float) -> None:
        """An iteration with a snapshot in this mode took so long."""
        self.found[mode].append(seconds)

    @property
    def best(self) -> Mode | None:
        """The mode with the shortest iterations; ``None`` while too few are known."""
        if min(map(len, self.found.values())) < self._rounds:
            return None
        return min(self.found, key=lambda mode: median(self.found[mode]))


class Drift:
    """Tells when iterations take another time than they did: then what was measured holds no more.

    It grows more patient each time, so that a training whose iterations differ anyway is not measured for ever.
    """

    def __init__(self) -> None:
        self._patience = _FIRST_PATIENCE
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._usual_s: float | None = None
        self._seen = 0

    def add(self, seconds: float) -> bool:
        """An iteration took so long; whether they have changed since the first ones."""
        self._latest.append(seconds)
        self._seen += 1
        if len(self._latest) < _LATEST:
            return False
        now_s = median(self._latest)
        if self._usual_s is None:
            self._usual_s = now_s
        apart = now_s > _DRIFT * self._usual_s or _DRIFT * now_s < self._usual_s
        if not apart or self._seen < self._patience:
            return False
        self._patience = min(2 * self._patience, _LAST_PATIENCE)
        self._latest.clear()
        self._usual_s, self._seen = None, 0
        return True
