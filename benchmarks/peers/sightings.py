"""Sees from outside when our snapshots become safe: by the files that say so, and when these were written."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.baselines.baseline import DURABLE

POLL_S = 0.05


class Sightings:
    """Snapshots seen so far. Looks at modification times, so that looking late does not make anything later.

    Args:
        watched: tiers and directories: the durable run, or where a server keeps its slots.

    Attributes:
        safe: step, tier and when, on the monotonic clock.
    """

    def __init__(self, watched: Sequence[tuple[str, Path | str]]) -> None:
        self._watched = [(tier, Path(folder)) for tier, folder in watched]
        self._read_at: dict[Path, int] = {}
        self._offset_s = time.time() - time.monotonic()
        self._seen: set[tuple[str, int]] = set()
        self.safe: list[tuple[int, str, float]] = []

    def look(self) -> None:
        """Look once; every :data:`POLL_S`, or what is replaced soon is missed."""
        for tier, folder in self._watched:
            with contextlib.suppress(OSError):
                self._durable(tier, folder) if tier == DURABLE else self._in_memory(tier, folder)

    def _durable(self, tier: str, folder: Path) -> None:
        for manifest in folder.glob("step-*/manifest.json"):
            self._note(tier, int(manifest.parent.name.split("-")[1]), manifest)

    def _in_memory(self, tier: str, folder: Path) -> None:
        for record in folder.glob("lightning-spot-*/slot-*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                written_at = record.stat().st_mtime_ns
                if self._read_at.get(record) != written_at:
                    self._note(tier, int(json.loads(record.read_bytes())["manifest"]["step"]), record)
                    self._read_at[record] = written_at

    def _note(self, tier: str, step: int, path: Path) -> None:
        if (tier, step) not in self._seen:
            self.safe.append((step, tier, path.stat().st_mtime - self._offset_s))
            self._seen.add((tier, step))
