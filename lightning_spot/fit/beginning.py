"""How an attempt begins, on rank 0: its ring is opened, all tiers are asked what they hold, it takes its number."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import RingSettings, leave, open_host
from lightning_spot.config import read_environment, why_weak
from lightning_spot.errors import ServerUnreachableError
from lightning_spot.fit.in_shards import InShards
from lightning_spot.fit.resume import Resume
from lightning_spot.memory.host import Host
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey
from lightning_spot.staging.schedule import Schedule

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


class Beginning:
    """The begin of the attempt of one ``fit``.

    Args:
        trainer: that fits.
        location: where the run is.
        settings: how the ring on this host is opened.
        resume: what the ``fit`` goes on from.
        in_shards: has every rank write its part, where each has a part of the model; else ``None``.

    Attributes:
        found: what the tiers hold; ``None`` before they were asked.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        location: Location,
        settings: RingSettings,
        resume: Resume,
        in_shards: InShards | None,
    ) -> None:
        self.found: Survey | None = None
        self._trainer, self._location, self._settings = trainer, location, settings
        self._resume, self._in_shards = resume, in_shards
        self._host: Host | None = None

    def look(self) -> Survey:
        """Open the ring, and ask all tiers what they hold."""
        self._location.check()
        if why := why_weak(read_environment().token):
            logger.warning("lightning_spot: %s", why)
        if self._in_shards is not None:
            self._in_shards.check()
        # First: it takes over what a killed node left in memory.
        self._host = open_host(self._location, self._settings)
        self.found = self._resume.look(self._location)
        return self.found

    def attempt(self, schedule: Schedule | None) -> Attempt:
        """Begin the next attempt of the run, once it is decided what it goes on from.

        Args:
            schedule: when what only the optimizer changes is copied.
        """
        host, self._host = self._host, None
        assert host is not None
        try:
            return self._attempt_at(host, schedule)
        except ServerUnreachableError as error:  # the tiers were asked since it was opened
            if not self._location.has_local_server:
                raise
            logger.warning("lightning_spot: the snapshot server on this host is lost (%s); starting a new one", error)
            return self._attempt_at(open_host(self._location, self._settings), schedule)

    def _attempt_at(self, host: Host, schedule: Schedule | None) -> Attempt:
        assert self.found is not None
        return Attempt(
            self.found,
            host,
            self._settings,
            self._resume.trial(),
            schedule=schedule,
            sharded_over=self._trainer.world_size if self._in_shards is not None else 0,
        )

    def let_go(self) -> None:
        """Let go of what was found, whose connections stay open else, and of the ring if no attempt has begun."""
        self.found = None
        host, self._host = self._host, None
        if host is not None:
            leave(host)
