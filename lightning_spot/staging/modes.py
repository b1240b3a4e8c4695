"""The ways in which the copying of a snapshot can be spread over the next iteration, and which of them costs least."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal, get_args

from lightning_spot.errors import SettingsError
from lightning_spot.renamed import refuse_old

Mode = Literal["eager", "asymmetric", "backward", "blocking"]
CopyMode = Literal["auto", "asymmetric", "backward", "eager", "blocking"]

MODES: tuple[Mode, ...] = get_args(Mode)
BESIDE: tuple[Mode, ...] = tuple(mode for mode in MODES if mode != "blocking")
"""The modes in which training goes on beside the copies: all that there are where it cannot stand still."""

_ROUNDS = 4
_CLEAR_ROUNDS = 2  # are enough if one was faster each time than all others ever were
_WINDOW = 2  # iterations: what copies leave to do, such as sealing, falls on the next one as well
_DRIFT = 1.5
_LATEST = 16
_FIRST_PATIENCE, _LAST_PATIENCE = 64, 4096


def check_copy_mode(value: str) -> CopyMode:
    """A user's setting.

    Raises:
        SettingsError: if it is none of those that there are.
    """
    refuse_old(f"copy_mode={value!r}")
    if value not in get_args(CopyMode):
        allowed = ", ".join(map(repr, get_args(CopyMode)))
        raise SettingsError(f"copy_mode={value!r}: it is one of {allowed}")
    return value  # type: ignore[return-value] # one of them


class ModeTrial:
    """Tries modes in turn, each for some snapshots, and then knows with which of them iterations took the least time.

    In turn, so that what else changes meanwhile touches all alike; the median, so that one odd iteration does not. A
    snapshot is measured by the iteration that it begins, and by the next one if that begins no other. Each mode is
    used twice in a row, and measured the second time: the iteration after a snapshot pays for what is left of that.

    Args:
        modes: to try; of equal ones the first is taken.
        rounds: snapshots of each that are measured.
        usual_s: what an iteration without a snapshot takes, about.
    """

    def __init__(self, modes: Sequence[Mode] = BESIDE, rounds: int = _ROUNDS, usual_s: float = 0.0) -> None:
        self.found: dict[Mode, list[float]] = {mode: [] for mode in modes}
        self._rounds, self._usual_s = rounds, usual_s
        self._turn = 0
        self._before: Mode | None = None
        self._measured: Mode | None = None
        self._window: list[float] = []

    def take(self) -> Mode:
        """The mode whose turn it is."""
        mode = list(self.found)[self._turn // 2 % len(self.found)]
        self._turn += 1
        return mode

    def add(self, mode: Mode | None, seconds: float | None) -> None:
        """An iteration is over.

        Args:
            mode: of the snapshot that it began with; ``None`` if it began with none.
            seconds: that it took; ``None`` if something else than training took time in it.
        """
        if mode is not None:
            self._close()
            self._measured, self._before = mode if mode == self._before else None, mode
        if seconds is None:
            self._measured = None
            self._window.clear()
        elif self._measured is not None:
            self._window.append(seconds - self._usual_s)
            if len(self._window) == _WINDOW:
                self._close()

    def _close(self) -> None:
        if self._measured is not None and self._window:
            self.found[self._measured].append(sum(self._window))
        self._measured = None
        self._window.clear()

    @property
    def best(self) -> Mode | None:
        """The mode with the shortest iterations; ``None`` while too few are known."""
        fewest = min(map(len, self.found.values()))
        if fewest >= self._rounds:
            return min(self.found, key=lambda mode: median(self.found[mode]))
        return self._clearly_best() if fewest >= _CLEAR_ROUNDS else None

    def _clearly_best(self) -> Mode | None:
        best = min(self.found, key=lambda mode: max(self.found[mode]))
        others = [took_s for mode, took in self.found.items() if mode != best for took_s in took]
        return best if max(self.found[best]) < min(others, default=0.0) else None


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
