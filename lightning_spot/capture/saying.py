"""Warnings that are said once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning_spot.memory.health import TierHealth

logger = logging.getLogger(__name__)


class SayOnce:
    """Warns, but only the first time for each key. Whoever warns through it need not know whose warnings they are."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, key: str, message: str, *facts: Any) -> None:
        """Warn, but only the first time for ``key``."""
        if key not in self._said:
            self._said.add(key)
            logger.warning("lightning_spot: " + message, *facts)


def say_failing(say_once: SayOnce, tiers: Mapping[str, TierHealth]) -> None:
    """Say what a node says in its own log only: a tier fails, refuses this attempt, or was not brought a snapshot."""
    for url, tier in tiers.items():
        if tier.error:
            say_once(f"{url} fails", "%s fails (%s); the node on this host goes on trying", url, tier.error)
        if tier.refused:
            say_once(f"{url} refuses", "%s takes nothing of this attempt any more: %s", url, tier.refused)
        if tier.dropped:
            say_once(tier.dropped, "a snapshot was damaged in memory and dropped: %s", tier.dropped)
