"""What a restarted node must know of its runs: noted beside the slots, where these outlive the node."""

from __future__ import annotations

import time
from dataclasses import replace

from lightning_spot.memory.area import Left
from lightning_spot.memory.flusher import Flusher
from lightning_spot.memory.registry import MOST_RUNS, Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.route import Routes
from lightning_spot.memory.runs import Run


class Remembered:
    """Notes of runs, and of the deletions that are still to be done for them.

    Called with the registry's lock, as soon as the node is made.

    Args:
        ring: of the node. Where its slots do not outlive the node, nothing is noted.
        registry: the runs.
        flusher: that deletes.
        routes: of the runs.
    """

    def __init__(self, ring: Ring, registry: Registry, flusher: Flusher, routes: Routes) -> None:
        self._ring, self._registry, self._flusher, self._routes = ring, registry, flusher, routes
        self._area = ring.area
        self._deleting: set[str] = set()  # runs of which deletions are noted

    def note(self, run: Run) -> None:
        """Note a run as it is now."""
        if self._area is None:
            return
        key = run.info.key
        deletions = self._flusher.deletions(key)
        self._area.keep_run(run.info, run.complete, deletions)
        if deletions:
            self._deleting.add(key)
        else:
            self._deleting.discard(key)

    def note_deletions(self) -> None:
        """Note anew those runs of which a deletion may be done by now."""
        for key in list(self._deleting):
            if (run := self._registry.runs.get(key)) is not None:
                self.note(run)

    def forget(self, key: str) -> None:
        """Keep nothing of a run."""
        if self._area is not None:
            self._area.forget_run(key)

    def take_over(self) -> None:
        """Go on with what a killed node left; of runs of which it left nothing else, with no more than there may be."""
        runs = list(self._area.runs()) if self._area is not None else []
        for left in sorted(runs, key=self._is_empty):
            if self._is_empty(left) and len(self._registry.runs) >= MOST_RUNS:
                self.forget(left.info.key)
                continue
            run = Run(replace(left.info, session=""), left.complete, time.monotonic())  # no trainer is connected yet
            self._registry.runs[left.info.key] = run
            self._routes.open(left.info)
            self._ring.forget_refusals(left.info.key)
            for url, manifest in left.deletions:
                self._flusher.delete(url, manifest)

    def _is_empty(self, left: Left) -> bool:
        return not left.deletions and not self._ring.committed(left.info.key)
