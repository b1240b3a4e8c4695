"""Chooses the newest good snapshot: asks all tiers, checks the newest, falls back to the one before if it is bad."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_spot.errors import CorruptSnapshot, SnapshotNotFound, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.run.sources import OpenSnapshot, Source

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Survey:
    """What all tiers hold of a run.

    Attributes:
        candidates: snapshots with the tiers that hold them, best first: newest, then nearest.
        unanswered: tiers that did not answer, with the reason.
    """

    candidates: list[tuple[Manifest, Source]] = field(default_factory=list)
    unanswered: dict[str, str] = field(default_factory=dict)


def survey(sources: Sequence[Source]) -> Survey:
    """Ask every tier what it holds. A tier that does not answer is noted, not fatal."""
    found = Survey()
    for source in sources:
        try:
            found.candidates.extend((manifest, source) for manifest in source.manifests())
        except SpotError as error:
            found.unanswered[source.tier] = str(error)
    # Stable: at equal age the order of the sources decides, and memory comes first.
    found.candidates.sort(key=lambda item: item[0].order, reverse=True)
    return found


def open_newest(sources: Sequence[Source]) -> OpenSnapshot | None:
    """Open the newest snapshot whose checksums hold, or ``None`` when there is none.

    Each one that is passed over is named, with the reason, and so is each tier that did not answer.

    Raises:
        CorruptSnapshot: if there are snapshots but none of them is good: going on would silently start afresh.
    """
    found = survey(sources)
    for tier, reason in found.unanswered.items():
        logger.warning("lightning_spot: %s does not answer (%s); looking at the other tiers", tier, reason)
    passed_over = ""
    for manifest, source in found.candidates:
        try:
            snapshot = source.open(manifest)
        except (CorruptSnapshot, SnapshotNotFound) as error:
            passed_over = str(error)
            logger.warning("lightning_spot: snapshot %s at %s is passed over: %s", manifest.name, source.tier, error)
        except SpotError as error:
            passed_over = str(error)
            logger.warning("lightning_spot: %s fails (%s); trying the next tier", source.tier, error)
        else:
            if passed_over:
                logger.warning("lightning_spot: falling back to %s from %s", manifest.name, source.tier)
            return snapshot
    if passed_over:
        raise CorruptSnapshot(
            f"no snapshot of the run can be used; the last problem was: {passed_over}. To start afresh all the same,"
            " pass resume=False or another dirpath"
        )
    return None
