"""What a rank has written for the node of its host to bring to others: if that node is lost, these wait in vain."""

from __future__ import annotations

import logging
from typing import Any

from lightning_spot.capture.task import Task
from lightning_spot.errors import SpotError
from lightning_spot.memory.host import Host

logger = logging.getLogger(__name__)


class Entrusted:
    """The last such part of a rank; the one before it was brought, or given up."""

    def __init__(self) -> None:
        self._task: Task[Any] | None = None

    def __bool__(self) -> bool:
        """Whether the node may have something to bring."""
        return self._task is not None

    def note(self, task: Task[Any]) -> None:
        """A part is in the slot; where it goes nowhere from there, there is nothing to look after."""
        self._task = task if task.at else None

    def forget(self) -> None:
        """Look after it no longer."""
        self._task = None

    def lost(self, host: Host) -> None:
        """Another node is there now: let the other hosts know that nothing will come."""
        task, self._task = self._task, None
        if task is None:
            return
        why, number = f"{task.who}: the node of its host was lost", task.number
        try:
            host.decline(task.name, why, task.at, number.host, number.here)
        except SpotError as error:
            logger.debug("nobody could be told that the node on this host was lost: %s", error)
