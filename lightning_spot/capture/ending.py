"""The end of an attempt: what is committed becomes durable before ``fit`` returns, or is named.

A node that is lost on the way is waited for; what was lost with it is written again from the state at hand. "Durable"
is said of what the durable tier has shown only.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from lightning_spot.capture.host_link import leave, within
from lightning_spot.capture.past_memory import PastMemory
from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.tensors import tensors_in
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.runs import RunInfo
from lightning_spot.run.survey import ask_all
from lightning_spot.staging.copier import Watch, watch
from lightning_spot.tiers.store import Holdings

logger = logging.getLogger(__name__)

_LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class LastState:
    """The state of the finished run, kept until it is durable. Holds references to its tensors, no copies.

    Attributes:
        checkpoint: the state; ``None`` where this rank has a part of it only.
        manifest: of its snapshot, not sealed.
        watches: of its tensors, to know whether they have changed since.
    """

    checkpoint: dict[str, Any] | None
    manifest: Manifest
    watches: list[Watch]

    @classmethod
    def of(cls, checkpoint: dict[str, Any] | ShardedCheckpoint, manifest: Manifest) -> LastState:
        """Keep a state."""
        whole = None if isinstance(checkpoint, ShardedCheckpoint) else checkpoint
        return cls(whole, manifest, watch(tensors_in(whole)))

    @property
    def can_be_written(self) -> bool:
        """Whether it is there, and no tensor of it has changed."""
        return self.checkpoint is not None and all(item.tensor._version == item.version for item in self.watches)


class Ending:
    """Brings what is committed to safety at the end of an attempt.

    Args:
        writer: of the snapshots.
        past_memory: where those went that fit no memory here.
        url: durable directory of the run.
        info: of the attempt.
        last: the state of the finished run, ``None`` if it is not finished.
        untrained: whether the run was finished before: nothing was left to train, so nobody needs the node any more.

    Attributes:
        is_durable: whether all that was committed is durable; known after :meth:`bring`.
    """

    def __init__(
        self,
        writer: SnapshotWriter,
        past_memory: PastMemory,
        url: str,
        info: RunInfo,
        last: LastState | None,
        *,
        untrained: bool = False,
    ) -> None:
        self._writer = writer
        self._past_memory = past_memory
        self._url = url
        self._info = info
        self._last = last
        self._untrained = untrained
        self.is_durable = False

    def bring(self, wait_s: float) -> bool | None:
        """Commit and flush what is under way, within ``wait_s``, and leave the ring.

        Returns:
            whether the snapshot of the finished run was seen at the durable tier; ``None`` if the run is not finished.
        """
        deadline_s = time.monotonic() + wait_s
        self._writer.settle(wait_s)
        if self._last is not None and not self._is_committed(self._last):
            self._commit_again(self._last, deadline_s)
        left = self._flush(deadline_s)
        elsewhere = self._past_memory.flush(within(deadline_s))
        durable: bool | None = None
        if self._last is not None:
            durable = self._see(self._last.manifest.name, deadline_s)
            if not durable and not any(self._url in line for line in (*left, *elsewhere)):
                durable = self._write_here(self._last)
        elif not left and not elsewhere and not self._newest_is_safe(deadline_s):
            left = ["the newest snapshot was lost with the memory node that had it"]
        self.is_durable = bool(durable) or not (left or elsewhere)
        for line in left if durable else [*left, *elsewhere]:
            self._writer.say_once(line, "not everything is durable yet: %s. The node that has it goes on trying", line)
        # What another thread is asking now breaks off: that is no loss, and no reason to start a new node.
        self._writer.link.close()
        if (host := self._writer.host) is not None:
            leave(host, complete=bool(durable) or (self._untrained and not left))
        return durable

    def _newest_is_safe(self, deadline_s: float) -> bool:
        """Whether what was committed last is durable: in doubt only where a ring, or a node, may have lost it."""
        newest = self._writer.committed
        in_doubt = bool(self._writer.link.losses) or self._past_memory.is_at_a_node
        return newest is None or not in_doubt or self._see(newest.name, deadline_s)

    def _is_committed(self, last: LastState) -> bool:
        committed = self._writer.committed
        return committed is not None and committed.name == last.manifest.name

    def _commit_again(self, last: LastState, deadline_s: float) -> None:
        """Take the snapshot of the end once more: there was no ring, or it was lost before it had committed."""
        if self._writer.link.wait(within(deadline_s)) is None or not last.can_be_written:
            return
        try:
            self._writer.begin(last.checkpoint, last.manifest, wait_s=within(deadline_s))
            self._writer.settle(within(deadline_s))
        except SpotError as error:
            logger.warning("lightning_spot: the last snapshot goes past the memory of this host: %s", error)

    def _flush(self, deadline_s: float) -> list[str]:
        """Flush; a ring that is lost meanwhile is waited for, since it takes over what the lost one left."""
        while True:
            host = self._writer.link.wait(within(deadline_s))
            if host is None:
                return []
            try:
                return host.flush(within(deadline_s))
            except NodeUnreachable as error:
                self._writer.link.lose(host, error)
                if self._writer.host is host:  # there is no way to another
                    raise

    def _see(self, name: str, deadline_s: float) -> bool:
        """Whether the durable tier lists a snapshot now."""
        answers, problems = ask_all({self._url: open_store(self._url).survey}, max(_LOOK_S, within(deadline_s)))
        for reason in problems.values():
            logger.warning("lightning_spot: %s cannot be asked for the last snapshot (%s)", self._url, reason)
        holdings: Holdings = answers.get(self._url, Holdings())
        return any(manifest.name == name and manifest.run_id == self._info.id for manifest in holdings.manifests)

    def _write_here(self, last: LastState) -> bool:
        """Store the state of the end from this process: no ring has it."""
        if not last.can_be_written:
            return False
        try:
            self._past_memory.write_durably(last.checkpoint, last.manifest)
        except SpotError as error:
            logger.warning("lightning_spot: the last snapshot could not be written to %s: %s", self._url, error)
            return False
        return True
