"""Puts that wait for what others do: when each is looked at again, and since when nothing has come."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from lightning_spot.errors import SpotError

FORSAKEN_S = 3600.0
"""What a node has of a snapshot gives way to others when no more of it has come to the durable tier for so long."""

SURPASSED_S = 30.0
"""The same, where the tier has something newer of that run: who has the rest of it brings that at the same time."""

_FIRST_S, _LAST_S = 1.0, 30.0


class PutOff(SpotError):
    """A put waits for what others do; its tier works.

    Attributes:
        there: files of the snapshot that are there, of all nodes.
        is_final: whether it is waited for in vain.
        is_surpassed: whether the tier has something newer.
    """

    def __init__(self, why: str, there: int = 0, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.there, self.is_final, self.is_surpassed = there, is_final, False


@dataclass(frozen=True, slots=True)
class _Wait:
    """A put that waits.

    Attributes:
        since_s: since when nothing more has come there, and nothing failed (monotonic).
        due_s: when it is looked at again.
        there: files that were there then.
    """

    since_s: float
    due_s: float
    there: int


class Later:
    """The puts of all tiers that wait, each by the URL of its tier and its own key. Not thread-safe."""

    def __init__(self) -> None:
        self._waits: dict[tuple[str, Hashable], _Wait] = {}

    def __contains__(self, at: tuple[str, Hashable]) -> bool:
        """Whether a put waits."""
        return at in self._waits

    def due_s(self, at: tuple[str, Hashable]) -> float:
        """When a put is looked at again (monotonic), 0 for at once."""
        return wait.due_s if (wait := self._waits.get(at)) is not None else 0.0

    def wait(self, at: tuple[str, Hashable], now_s: float, there: int) -> float:
        """Look at a put again soon, and less and less often; since when nothing more has come.

        Args:
            at: the put.
            now_s: the time (monotonic).
            there: files that are there now, of all nodes.
        """
        known = self._waits.get(at)
        since_s = known.since_s if known is not None and known.there == there else now_s
        pause_s = min(_LAST_S, max(_FIRST_S, (now_s - since_s) / 4))
        self._waits[at] = _Wait(since_s, now_s + pause_s, there)
        return since_s

    def failed(self, at: tuple[str, Hashable], now_s: float) -> None:
        """A look failed: other nodes may not reach the tier either."""
        if (known := self._waits.get(at)) is not None:
            self._waits[at] = replace(known, since_s=now_s)

    def forget(self, url: str, wanted: set[Hashable]) -> None:
        """Forget all puts of a tier but these: the others are not wanted any more."""
        self._waits = {at: wait for at, wait in self._waits.items() if at[0] != url or at[1] in wanted}
