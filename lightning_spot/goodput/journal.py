"""Keeps the record of the attempt that runs: on this host once a second, at the durable tier every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from lightning_spot.errors import SettingsError, TierError
from lightning_spot.goodput.ledger import Account, AttemptRecord, Spent, account_after
from lightning_spot.goodput.reached import completed, forget_reached, keep_reached
from lightning_spot.goodput.records import newest_record, write_record
from lightning_spot.image.manifest import Manifest
from lightning_spot.say import recovered, say

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long the end of ``fit`` waits for a record to be written, where the tier is slow."""
KEEP_S = 1.0
"""So much of a killed attempt may be missing, and the step that it was in."""


class Journal:
    """The record of one attempt, and the account of those before it. Of the training thread, on rank 0.

    Args:
        run_url: durable directory or URL of the run.
        attempt: its number; ``None`` for one more than the newest record's.
        snapshots: of earlier attempts, at whatever tier: they tell how far one got whose machine is gone.
        heartbeat_s: seconds between two writes to the durable tier.
        begun_unix_s: when ``fit`` began.

    Attributes:
        record: of this attempt.
        earlier: account of those before it.
    """

    def __init__(
        self,
        run_url: str,
        attempt: int | None,
        *,
        snapshots: Iterable[Manifest] = (),
        heartbeat_s: float,
        begun_unix_s: float,
        replicas: int = 0,
    ) -> None:
        self._url = run_url
        self._heartbeat_s = heartbeat_s
        self._ahead_s = time.time() - time.monotonic()  # days by which a clock is set meanwhile are no training
        self._mended: AttemptRecord | None = None
        previous = self._previous(attempt, list(snapshots))
        self._before = previous
        self.earlier: Account = account_after(previous)
        number = attempt if attempt is not None else previous.attempt + 1 if previous is not None else 1
        self.record = AttemptRecord(
            attempt=number, begun_unix_s=begun_unix_s, unix_s=self._now(), replicas=replicas, earlier=self.earlier
        )
        self._is_kept, self._kept_s = True, 0.0  # on this host
        self._keep()
        self._wake, self._stopping = threading.Event(), False
        self._wake.set()
        self._thread = threading.Thread(target=self._beat, name="spot-goodput", daemon=True)
        self._thread.start()

    @property
    def spent(self) -> Spent:
        """Where the time of the run went so far."""
        return self.earlier.spent(self.record)

    def train(self, step: int, restore_s: float) -> None:
        """Training begins.

        Args:
            step: where it begins.
            restore_s: seconds that the resume took.
        """
        record = self.record
        record.trained_unix_s = record.unix_s = self._now()
        record.from_step = record.step = step
        record.restore_s = restore_s
        if self._before is not None:  # it is known now what of it is done again, and since when that was trained
            self.earlier.carry_snapshot(self._before, step)
        self._keep()
        self._wake.set()

    def note(self, step: int, blocked_s: float, begun_step: int) -> None:
        """Note where training is; costs microseconds, and once a second some more.

        Args:
            step: of the optimizer.
            blocked_s: seconds that training has waited for snapshots.
            begun_step: of the newest snapshot that was begun, -1 for none.
        """
        record = self.record
        record.step, record.unix_s, record.blocked_s = step, self._now(), blocked_s
        if begun_step >= 0 and (not record.snapshots or record.snapshots[-1][0] != begun_step):
            record.begin_snapshot(begun_step, record.unix_s)
        if time.monotonic() - self._kept_s >= KEEP_S:
            self._keep()

    def close(self, end: str) -> None:
        """Note how the attempt ended, and wait for that to be written."""
        self.record.end = end
        self._keep()
        self._stopping = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def leave(self) -> None:
        """Keep the record no longer, and wait for nothing: what was noted last stands."""
        self._stopping = True
        self._wake.set()

    def _now(self) -> float:
        return self._ahead_s + time.monotonic()

    def _previous(self, attempt: int | None, snapshots: list[Manifest]) -> AttemptRecord | None:
        """The record of the attempt before, which carries the account of all before it."""
        try:
            written = newest_record(self._url, before=attempt)
        except TierError as error:
            text = "goodput counts from this attempt on: {error}"
            say(logging.WARNING, "goodput-restarted", text, about=self._url, error=error)
            return None
        if written is None:
            return None
        seen = [(item.step, item.created_unix_s) for item in snapshots if item.attempt == written.attempt]
        previous = completed(self._url, written, seen)
        if previous.end == "running":
            previous.end = "killed"  # there is one trainer of a run at a time
        self._mended = previous if previous != written else None
        return previous

    def _keep(self) -> None:
        if not self._is_kept:
            return
        self._kept_s = time.monotonic()
        try:
            keep_reached(self._url, self.record)
        except (SettingsError, OSError) as error:
            self._is_kept = False
            say(
                logging.WARNING,
                "goodput-coarse",
                "if this trainer is killed, up to {seconds:.0f} s of its work count as down ({error})",
                about=self._url,
                seconds=self._heartbeat_s,
                error=error,
            )

    def _beat(self) -> None:
        stopping = False
        while not stopping:
            self._wake.wait(self._heartbeat_s)
            self._wake.clear()
            stopping = self._stopping
            try:
                write_record(self._url, self.record.attempt, self.record.as_dict())
                self._mend()
            except TierError as error:
                logger.debug("lightning_spot: %s", error)  # the flusher tells of a tier that fails
            except Exception as error:  # such as want of memory: there may be some again at the next beat
                why = f"{type(error).__name__}: {error}"
                say(logging.WARNING, "goodput-failing", "goodput is not noted now: {why}", about=self._url, why=why)
            else:
                recovered("goodput-failing", "goodput is noted again", about=self._url)
                if stopping:
                    forget_reached(self._url, self.record.attempt)

    def _mend(self) -> None:
        """Write what was found out of the attempt before in place of what it could write itself."""
        mended, self._mended = self._mended, None
        if mended is not None:
            write_record(self._url, mended.attempt, mended.as_dict())
            forget_reached(self._url, mended.attempt)
