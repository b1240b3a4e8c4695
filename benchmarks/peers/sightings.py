"""Sees from outside when our snapshots become safe: by the files that say so, and when these were written."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from benchmarks.baselines.baseline import DURABLE

POLL_S = 0.05


class Sightings:
    """Snapshots seen so far. Looks at modification times, so that looking late does not make anything later.

    Args:
        watched: directory of each tier: the durable run, or where a node keeps its slots.

    Attributes:
        safe: step, tier and when, on the monotonic clock.
    """

    def __init__(self, watched: dict[str, str]) -> None:
        self._watched = {tier: Path(folder) for tier, folder in watched.items()}
        self._offset_s = time.time() - time.monotonic()
        self._seen: set[tuple[str, int]] = set()
        self.safe: list[tuple[int, str, float]] = []

    def look(self) -> None:
        """Look once; every :data:`POLL_S`, or what is replaced soon is missed."""
        for tier, folder in self._watched.items():
            with contextlib.suppress(OSError):
                self._durable(tier, folder) if tier == DURABLE else self._in_memory(tier, folder)

    def _durable(self, tier: str, folder: Path) -> None:
        for manifest in folder.glob("step-*/manifest.json"):
            self._note(tier, int(manifest.parent.name.split("-")[1]), manifest)

    def _in_memory(self, tier: str, folder: Path) -> None:
        for record in folder.glob("lightning-spot-*/slot-*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._note(tier, int(json.loads(record.read_bytes())["manifest"]["step"]), record)

    def _note(self, tier: str, step: int, path: Path) -> None:
        if (tier, step) not in self._seen:
            self.safe.append((step, tier, path.stat().st_mtime - self._offset_s))
            self._seen.add((tier, step))
