"""How the tiers below are doing, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_spot.errors import FencedError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.runs import key_of
from lightning_spot.memory.tier import Sent

_SMOOTHING = 0.3


@dataclass(slots=True)
class TierHealth:
    """How a tier below is doing.

    Attributes:
        kind: ``"node"`` or ``"durable"``.
        carried: whether nothing goes there from here at present, because a node behind this one writes there.
        error: what fails there at present, ``""`` while everything works.
        refused: why the tier refused something for good (a later attempt has taken over), ``""`` if it never did.
        refused_run, refused_attempt: whose that was: a run's key, and the attempt that was taken over.
        silent: that no byte has moved on a connection to the store, see :mod:`~lightning_spot.tiers.connections`.
        dropped, dropped_name: why a snapshot was dropped last instead of being brought there, since it was damaged in
            memory, and its name.
        failures: failures in a row.
        failures_total: failures so far, of every kind.
        flushed: snapshots and files brought there so far.
        inexact: approximations of snapshots brought there so far; they do not count as these.
        flushed_bytes: bytes of what was flushed.
        flush_s: seconds that took.
        drain_s: seconds that one snapshot takes at present (a moving average); 0 before the first.
        whole_bytes, delta_bytes, same_bytes: at a node, see :class:`~lightning_spot.memory.tier.Sent`.
    """

    kind: str = "durable"
    carried: bool = False
    error: str = ""
    refused: str = ""
    refused_run: str = ""
    refused_attempt: int = 0
    silent: str = ""
    dropped: str = ""
    dropped_name: str = ""
    failures: int = 0
    failures_total: int = 0
    flushed: int = 0
    inexact: int = 0
    flushed_bytes: int = 0
    flush_s: float = 0.0
    drain_s: float = 0.0
    whole_bytes: int = 0
    delta_bytes: int = 0
    same_bytes: int = 0

    @classmethod
    def of(cls, url: str) -> TierHealth:
        """Of a tier at which nothing was done yet."""
        return cls(kind="node" if url.startswith("spot://") else "durable")

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> TierHealth:
        """As a node tells it; what a newer one tells besides is left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in figures.items() if name in known})

    def refuses(self, error: FencedError, run: str, attempt: int) -> None:
        """Note that the tier takes nothing of an attempt any more.

        Args:
            error: as which the tier said so.
            run: key of the attempt's run.
            attempt: that was taken over.
        """
        self.refused, self.refused_run, self.refused_attempt = str(error), run, attempt

    def took(self, put: Manifest, seconds: float, sent: Sent | None) -> None:
        """Note that something was brought there.

        Args:
            put: what is there now.
            seconds: that took.
            sent: how its parts, and those of everything before it, went to a node.
        """
        if self.refused_run == key_of(put):  # what was refused while its trainer lived is brought when that is gone
            self.refused = ""
        if put.exact:  # from these it is told how long an urgent snapshot will take
            self.flushed += 1
            self.flushed_bytes += put.nbytes
            self.flush_s += seconds
        else:
            self.inexact += 1
        self.drain_s += (_SMOOTHING if self.drain_s else 1.0) * (seconds - self.drain_s)
        if sent is not None:
            self.whole_bytes, self.delta_bytes, self.same_bytes = sent.whole_bytes, sent.delta_bytes, sent.same_bytes
