"""When to try again what failed: each thing on its own, and a tier as a whole once several of its things fail."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


@dataclass(slots=True)
class _Failure:
    count: int = 0
    last_s: float = 0.0

    @property
    def due_s(self) -> float:
        return self.last_s + min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self.count - 1, 10))


class BackOff:
    """Failures at one tier. Times are monotonic seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._items: dict[Hashable, _Failure] = {}
        self._tier = _Failure()
        self._since_success: set[Hashable] = set()

    @property
    def failing(self) -> bool:
        """Whether nothing succeeded since the last failure."""
        return bool(self._since_success)

    def due_s(self, item: Hashable) -> float:
        """When an item may be tried, 0 for at once: one that did not fail waits only if the whole tier fails."""
        own = self._items[item].due_s if item in self._items else 0.0
        others = self._since_success - {item}
        return max(own, self._tier.due_s if others and self._tier.count else 0.0)

    def failed(self, item: Hashable, now_s: float) -> None:
        """An item failed."""
        failure = self._items.setdefault(item, _Failure())
        failure.count, failure.last_s = failure.count + 1, now_s
        self._since_success.add(item)
        if len(self._since_success) > 1:
            self._tier.count, self._tier.last_s = self._tier.count + 1, now_s

    def succeeded(self, item: Hashable) -> None:
        """An item succeeded."""
        self._items.pop(item, None)
        self._since_success.clear()
        self._tier = _Failure()

    def forget(self, items: set[Hashable]) -> None:
        """Forget all items but these: the others are not wanted any more."""
        for item in [item for item in self._items if item not in items]:
            del self._items[item]

    def shorten(self) -> None:
        """Let everything be tried again soon, but not at once: who hurries may do so many times a second."""
        for failure in [*self._items.values(), self._tier]:
            failure.count = min(failure.count, 1)
