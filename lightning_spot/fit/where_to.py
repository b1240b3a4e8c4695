"""Where the hosts of a model in shards bring its snapshots: memory nodes, or the durable tier. Not how."""

from __future__ import annotations

import time

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import RingSettings
from lightning_spot.capture.saying import say_failing
from lightning_spot.errors import SettingsError
from lightning_spot.fit.together import ACROSS, ALONE
from lightning_spot.image.portion import MOST_HOSTS
from lightning_spot.run.location import Location

_LOOK_S = 0.05
_CARRIER_S = 60.0
_HEALTH_S = 5.0
_ASKED_S = 10.0  # so long may it take at a start until nodes were asked and carry the run on
_NO_CARRIER = (
    "no snapshot now, training goes on: each host has a part of the model, and no memory node that carries the run on"
    " is there to put them together (%s); it may be starting, or lack --allow for the durable tier"
)


class WhereTo:
    """Knows it of each snapshot, on rank 0, and says why there is no place.

    Args:
        location: where the run is.
        ring: how the ring on this host is opened.
    """

    def __init__(self, location: Location, ring: RingSettings) -> None:
        self._location, self._ring = location, ring
        self._missed, self._brought_s, self._looked_s = 0, float("-inf"), float("-inf")
        self._begun_s = float("-inf")

    def begin(self) -> None:
        """An attempt has begun: its memory nodes are asked from now on."""
        self._begun_s = time.monotonic()

    def check(self, hosts: int) -> None:
        """Refuse several hosts whose parts of a snapshot would come together nowhere.

        Args:
            hosts: how many there are.

        Raises:
            SettingsError: if it is so.
        """
        why = ""
        if hosts > MOST_HOSTS:
            why = f"more than {MOST_HOSTS} hosts. Take fewer, larger ones"
        elif self._location.nodes and self._ring.compression == "topk":
            why = "compression='topk'. Leave compression= as it is"
        if why:
            raise SettingsError(
                f"a model that is sharded over {hosts} hosts is saved at one place, to which each host brings the"
                f" parts of its own ranks; this run has {why}; or use DDP, or Lightning's ModelCheckpoint"
            )

    def how(self, attempt: Attempt, *, waits: bool) -> str:
        """How the next snapshot is written, ``""`` if there is none now.

        Args:
            attempt: that writes it.
            waits: whether what is on its way to a memory node is waited for.
        """
        writer, across = attempt.writer, attempt.writer.across
        missed = writer.missed > self._missed
        at = ""
        if across.hosts:
            if across.is_under_way and not waits:
                writer.say_once("under way", "a snapshot that is due while the one before is on its way is skipped")
                self._say_why(attempt)
                return ""
            if not self._location.nodes:
                now_s = time.monotonic()
                if now_s - self._brought_s < (self._ring.durable_every_s or 0.0):
                    return ""
                self._brought_s = now_s
            if not (at := self._carrier(attempt, anew=missed)):
                if time.monotonic() - self._begun_s >= _ASKED_S:
                    self._say_no_carrier(attempt)
                return ""
        self._missed = writer.missed
        return ALONE + (ACROSS + at if at else "")

    def awaited(self, attempt: Attempt, wait_s: float) -> str:
        """Where several hosts bring an urgent snapshot, or that of the end; ``""`` if there is no place.

        Args:
            attempt: that writes it.
            wait_s: how long to wait for a memory node; a minute at most.
        """
        if not attempt.writer.across.hosts or attempt.fenced:
            return ""
        deadline_s = time.monotonic() + min(wait_s, _CARRIER_S)
        while not (at := self._carrier(attempt, anew=True)):
            if time.monotonic() >= deadline_s:
                self._say_no_carrier(attempt)
                break
            time.sleep(_LOOK_S)
        return at

    def _carrier(self, attempt: Attempt, *, anew: bool) -> str:
        """URL of the run at the memory node that carries it on; ``""`` if none does.

        Where no memory node is named, that of its durable tier.
        """
        across = attempt.writer.across
        if not self._location.nodes:
            return self._location.url
        if anew or not across.carrier:
            across.look()
        return across.carrier

    def _say_no_carrier(self, attempt: Attempt) -> None:
        attempt.writer.say_once("no carrier", _NO_CARRIER, ", ".join(self._location.nodes))

    def _say_why(self, attempt: Attempt) -> None:
        """Say if a tier fails: then the one before is on its way for long."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _HEALTH_S:
            self._looked_s = now_s
            say_failing(attempt.writer.say_once, attempt.writer.link)
