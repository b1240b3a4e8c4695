"""The seam every tier implements: put a snapshot, list what is committed, fetch it, delete it, claim an attempt.

How a tier lays a run out below its URL::

    run-1/
      attempts/attempt-0001.json           who wrote, so that a later attempt fences an earlier one
      step-000000400-attempt-0001/
        model.ckpt                         an ordinary Lightning checkpoint
        manifest.json                      written last: without it the snapshot does not exist
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_spot.errors import Fenced
from lightning_spot.image.manifest import Manifest

Progress = Callable[[int], None]
"""Called with the number of bytes just moved."""

ATTEMPTS_DIR = "attempts"
_CLAIM = re.compile(r"attempt-(\d+)\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What an attempt notes at a tier before it writes: the fence, the run's identity, and what is needed of the past.

    Attributes:
        attempt: its number, from 1.
        run_id: identity of the run.
        token: random, of this attempt: tells two claims of one number apart.
        location: durable directory of the run: ``file:///abs/path`` or the fsspec URL.
        inode: of the attempts directory where the tier is a directory, 0 elsewhere; a copied directory has another.
        started_unix_s: when the attempt began, seconds since 1970.
        host: name of its machine.
        pid: its process.
        keep: snapshots each tier keeps.
        past: what later attempts need of earlier ones, as plain values.
    """

    attempt: int
    run_id: str
    token: str
    location: str
    started_unix_s: float
    inode: int = 0
    host: str = ""
    pid: int = 0
    keep: int = 2
    past: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Holdings:
    """What a tier that answered holds of a run; all empty when nothing is there.

    Attributes:
        manifests: of committed snapshots, newest first.
        unreadable: name of each snapshot whose manifest is there but cannot be used, and why.
        highest_attempt: over claims, manifests and the names of snapshots, committed or not; 0 if there is none.
    """

    manifests: list[Manifest] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    highest_attempt: int = 0


class Store(Protocol):
    """A tier for one run. Every implementation passes ``tests/test_stores.py``.

    Methods may be called from any thread. Errors are :class:`~lightning_spot.errors.TierError` (the tier failed),
    :class:`~lightning_spot.errors.SnapshotNotFound` or :class:`~lightning_spot.errors.CorruptSnapshot`.
    """

    url: str

    def put(self, manifest: Manifest, image: memoryview, *, writer: int) -> None:
        """Store a snapshot; when this returns it is committed and as durable as the tier is.

        Args:
            manifest: sealed manifest of the snapshot.
            image: its file; not kept.
            writer: attempt on whose behalf it is written; refused if a later one has claimed the run.

        Raises:
            Fenced: if a later attempt holds the run.
        """

    def manifests(self) -> list[Manifest]:
        """Manifests of all committed snapshots of the run, newest first. Damaged ones are left out and logged."""

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """Read the file of a snapshot into ``into`` (``manifest.nbytes`` long). Does not check it."""

    def delete(self, manifest: Manifest) -> None:
        """Remove a snapshot: first its manifest, then its bytes. Nothing happens if it is gone already."""

    def sweep(self, current: Manifest) -> None:
        """Remove what crashes left behind: uncommitted snapshots older than ``current``."""

    def claimed(self) -> int:
        """Highest attempt that has claimed the run, 0 if none."""

    def claim(self, attempt: int, record: dict[str, Any]) -> None:
        """Record that ``attempt`` writes the run from now on.

        Args:
            attempt: its number.
            record: what to note: who writes and since when, and ``keep``, which a tier that is a node goes by.
        """


def check_fence(run: str, writer: int, current: int) -> None:
    """Refuse a writer whose attempt is not the latest.

    Raises:
        Fenced: if ``current`` is later than ``writer``.
    """
    if current > writer:
        raise Fenced(
            f"attempt {writer} of run {run!r} may no longer write: attempt {current} has taken over."
            " Stop this trainer, or give it another dirpath",
            run=run,
            attempt=writer,
            current=current,
        )


def claim_name(attempt: int) -> str:
    """File name of an attempt's claim."""
    return f"attempt-{attempt:04d}.json"


def highest_claim(names: Sequence[str]) -> int:
    """Highest attempt among claim file names; other names are ignored."""
    return max((int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))), default=0)


def newest_first(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Sort manifests by attempt, then step, newest first."""
    return sorted(manifests, key=lambda manifest: manifest.order, reverse=True)


def retain(store: Store, keep: int, current: Manifest) -> None:
    """Delete all but the newest ``keep`` snapshots, and what crashes left.

    Call it only after ``current`` was committed to ``store``: that one is good, so the newest good one always stays.
    """
    kept = newest_first(store.manifests())
    if current.name not in [manifest.name for manifest in kept]:
        return  # what was just written cannot be seen: delete nothing on such a tier
    for manifest in kept[max(1, keep) :]:
        if manifest.name != current.name:
            store.delete(manifest)
    store.sweep(current)
