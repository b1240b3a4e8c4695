"""Ranks that are told of an event at different times agree on one place after which all of them act on it.

Nothing is sent while nothing happens: a thread of each rank waits at the key-value channel, and the training thread
looks at one flag at each place it passes. Once a rank calls, the thread of every rank posts where its training is; from
then on training holds at the next place until the first rank has published the stop, one place past the farthest. So no
rank can have gone past it, however late the news reached it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lightning_spot.preemption.key_value import KeyValueClient, RankZeroEnded
from lightning_spot.say import say

logger = logging.getLogger(__name__)

POLL_S = 0.2
DECIDE_S = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place in training that all ranks pass in the same order.

    Attributes:
        batch: training batches done in this ``fit``.
        evaluated: validation batches done since.
        evaluating: whether a validation follows ``batch`` or is under way.
    """

    batch: int
    evaluated: int = 0
    evaluating: bool = False

    def next(self) -> Place:
        """The next place at which training can stop."""
        return Place(self.batch, self.evaluated + 1) if self.evaluating else Place(self.batch + 1)


class StopAgreement:
    """One event that all ranks act on after the same place.

    Args:
        rank: of this process.
        world_size: number of ranks.
        channel: reached by all ranks, and this agreement's alone; ``None`` for a single rank.
        called: what this rank knows of the event, as plain values, or ``None``; must be cheap.

    Attributes:
        facts: of the event, once it was called.
        called_s: when that was heard here, on the monotonic clock.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        channel: KeyValueClient | None,
        called: Callable[[], dict[str, Any] | None],
    ) -> None:
        self.facts: dict[str, Any] | None = None
        self.called_s = 0.0
        self._rank = rank
        self._world_size = world_size
        self._channel = channel
        self._called = called
        self._place = Place(0)
        self._posted = False
        self._stop: Place | None = None
        self._decided = threading.Event()
        self._closed = False
        if channel is not None:
            threading.Thread(target=self._watch, name="spot-stop", daemon=True).start()

    def passed(self, place: Place) -> bool:
        """Tell that training is at ``place``; whether it is to act on the event here. Called by the training thread.

        Holds, for at most ``DECIDE_S``, while the ranks agree.
        """
        self._place = place  # before the next line: see _decide
        if self._channel is None:
            if (facts := self._called()) is not None:
                self.facts, self.called_s = facts, time.monotonic()
            return facts is not None
        if not self._posted:
            return False
        if not self._decided.wait(DECIDE_S):
            text = "ranks did not agree where to stop within {limit_s:.0f} s. This rank stops now"
            say(logging.WARNING, "stop-not-agreed", text, limit_s=DECIDE_S)
            return True
        return self._stop is not None and (place.batch, place.evaluated) >= (self._stop.batch, self._stop.evaluated)

    def close(self) -> None:
        """Stop waiting."""
        self._closed = True

    def _watch(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            while not self._closed:
                if (facts := self._called()) is not None:
                    self._set("called", facts)
                if (facts := channel.get("called", POLL_S)) is not None:
                    self._decide(facts)
                    return
        except RankZeroEnded as end:  # this rank is about to come to its end, too
            logger.debug("%s", end)
        except OSError as error:  # rank 0 has gone, and with it the run
            if not self._closed:
                text = "the connection to the other ranks is lost ({error}). They may stop at another step"
                say(logging.WARNING, "ranks-unreachable", text, error=error)
        finally:
            channel.close()

    def _decide(self, facts: dict[str, Any]) -> None:
        self.facts, self.called_s = facts, time.monotonic()
        self._posted = True  # from here on training holds at its next place, so that what is posted stays true
        self._set(f"at/{self._rank}", asdict(self._place))
        if self._rank == 0:
            posts = [Place(**self._get(f"at/{rank}")) for rank in range(self._world_size)]
            self._set("stop", asdict(max(posts).next()))
        self._stop = Place(**self._get("stop"))
        self._decided.set()

    def _set(self, key: str, value: dict[str, Any]) -> None:
        assert self._channel is not None
        self._channel.set(key, value)

    def _get(self, key: str) -> dict[str, Any]:
        assert self._channel is not None
        value: dict[str, Any] | None = self._channel.get(key, DECIDE_S)
        if value is None:
            raise TimeoutError(f"a rank did not answer within {DECIDE_S:.0f} s ({key})")
        return value
