"""Warnings that are said once, and what is said where snapshots are missed or waited for."""

from __future__ import annotations

import logging
from typing import Any

from lightning_spot.capture.host_link import HostLink
from lightning_spot.errors import SnapshotFailedError
from lightning_spot.memory.tier import TierHealth

logger = logging.getLogger(__name__)

SAY_S = 10.0
"""Who waits longer is told what for."""


class SayOnce:
    """Warns, but only the first time for each key. Whoever warns through it need not know whose warnings they are."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, key: str, message: str, *facts: Any) -> None:
        """Warn, but only the first time for ``key``."""
        if key not in self._said:
            self._said.add(key)
            logger.warning("lightning_spot: " + message, *facts)


class SayWhyNot:
    """Warns of each snapshot that is not committed; of several in a row, for one reason, only of the first two.

    Args:
        say_once: of the same writer.
    """

    def __init__(self, say_once: SayOnce) -> None:
        self._say_once = say_once
        self._why = ""

    def __call__(self, name: str, why: str) -> None:
        """Warn of a snapshot."""
        if why != self._why:
            logger.warning("lightning_spot: snapshot %s was not committed: %s", name, why)
        else:
            self._say_once(f"nor {why}", "nor was snapshot %s, for the same reason: that is not said again", name)
        self._why = why

    def committed(self) -> None:
        """One was: what keeps the next one from being so is said again."""
        self._why = ""


def say_waiting(say_once: SayOnce, link: HostLink, full: SnapshotFailedError, left_s: float) -> None:
    """Say that training waits for a slot, and what fails meanwhile."""
    say_once("waits", "training waits for a slot, for up to %.0f s more: %s", left_s, full)
    say_failing(say_once, link)


def say_failing(say_once: SayOnce, link: HostLink) -> None:
    """Say what a server says in its own log only: a tier fails, refuses this attempt, or was not brought a snapshot."""
    nothing: dict[str, TierHealth] = {}
    for url, tier in link.ask(lambda host: host.tiers(), nothing).items():
        if tier.error:
            say_once(f"{url} fails", "%s fails (%s); the local server goes on trying", url, tier.error)
        if tier.refused:
            say_once(f"{url} refuses", "%s takes nothing of this attempt any more: %s", url, tier.refused)
        if tier.silent:
            why = "%s; the local server has given that connection up and goes on"
            say_once(f"{url} is silent", why, tier.silent)
        if tier.dropped:
            say_once(tier.dropped, "a snapshot was damaged in memory and dropped: %s", tier.dropped)
