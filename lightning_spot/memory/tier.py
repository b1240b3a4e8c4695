"""What a node asks of the node behind it in the chain, beyond what every store can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.bases import FindEarlier, nothing_earlier
from lightning_spot.memory.runs import Opened, RunInfo


@dataclass(slots=True)
class Sent:
    """How the parts went of snapshots that were committed at a node.

    Attributes:
        whole_bytes: of parts that were sent whole.
        delta_bytes: that were sent for parts of which only what changed was.
        same_bytes: of parts that were not sent, since the node had them.
    """

    whole_bytes: int = 0
    delta_bytes: int = 0
    same_bytes: int = 0

    def add(self, other: Sent) -> None:
        """Count more."""
        self.whole_bytes += other.whole_bytes
        self.delta_bytes += other.delta_bytes
        self.same_bytes += other.same_bytes

    @property
    def bytes(self) -> int:
        """All that was sent."""
        return self.whole_bytes + self.delta_bytes


@runtime_checkable
class NodeTier(Protocol):
    """The node behind, for one run. Methods may be called from any thread; each ends within bounds of its own.

    Attributes:
        sent: how the parts of snapshots went so far.
    """

    sent: Sent

    def open_run(self, info: RunInfo) -> Opened:
        """Let an attempt write the run there; once more by the same attempt does nothing, and tells how things are.

        Raises:
            Fenced: if a later attempt holds the run.
            TierError: if the node does not answer, or refuses.
        """

    def check_flush_to(self, via: Sequence[str]) -> None:
        """Have it ask what it flushes to, see :meth:`~lightning_spot.memory.node.Node.check_flush_to`."""

    def know(self, info: RunInfo) -> None:
        """Take note of the run, so that a node which was restarted, and knows it no more, is told all of it again."""

    def listing(self) -> list[tuple[Manifest, list[str], list[str]]]:
        """Everything it holds of the run: manifest, tiers it is dirty for, tiers it is safe at."""

    def settle(self, manifest: Manifest, attempt: int) -> None:
        """Say that a snapshot is durable which it did not bring there: it, and older ones of its lineage, may go."""

    def send(
        self,
        coming: Coming,
        *,
        attempt: int,
        earlier: FindEarlier = nothing_earlier,
        floats: Sequence[Floats] = (),
    ) -> Manifest:
        """Send a file part by part as each becomes final, and commit it there once it is committed here.

        Args:
            coming: the file.
            attempt: on whose behalf.
            earlier: finds earlier snapshots that are here: of those that are there too, only changes are sent.
            floats: where in it numbers lie that may be approximated; none for a file that is to be there exactly.

        Returns:
            the sealed manifest of what is there now: its own, or that of an approximation.

        Raises:
            SnapshotNotFound: if the file was given up meanwhile.
        """

    def flush(self, wait_s: float) -> list[str]:
        """Have everything of the run brought further down; what was not reached in time, one line each."""
