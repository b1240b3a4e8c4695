"""What a notice is, and the interface of its sources."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lightning_spot.config import LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """News that this machine, or this process, will end.

    Attributes:
        source: who said so: ``"aws"``, ``"signal"``, ...
        kind: ``"stop"`` (default), or ``"advice"`` when it is only more likely than before.
        text: one line for people.
        seen_s: when it was first seen, on the monotonic clock; default now.
        grace_period_s: seconds from then until the end; ``None`` if nobody knows. What is infinite, or no number of
            seconds that a clock could wait for, such as a date, counts as unknown.
    """

    source: str
    kind: Literal["stop", "advice"] = "stop"
    text: str
    seen_s: float = field(default_factory=time.monotonic)
    grace_period_s: float | None = None

    def __post_init__(self) -> None:
        if self.grace_period_s is not None and not -LARGEST <= self.grace_period_s <= LARGEST:
            object.__setattr__(self, "grace_period_s", None)

    @property
    def deadline_s(self) -> float | None:
        """When the end comes, on the monotonic clock."""
        return self.seen_s + self.grace_period_s if self.grace_period_s is not None else None


class NoticeSource(Protocol):
    """Somebody who knows of preemptions beforehand.

    Attributes:
        name: for messages.
        every_s: seconds to wait between two polls.
    """

    name: str
    every_s: float

    def poll(self) -> Notice | None:
        """Ask once; called on a thread of its own, may take some seconds.

        Raises:
            NoticeUnavailableError: if there was no answer, or none that makes sense.
        """

    def close(self) -> None:
        """Let go of connections, if there are any. A second call does nothing."""
        return
