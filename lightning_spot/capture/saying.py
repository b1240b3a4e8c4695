"""Warnings that are said once."""

from __future__ import annotations

import logging
from typing import Any

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
