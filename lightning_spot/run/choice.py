"""Chooses the newest good snapshot of a survey: checks it, and falls back to the one before if it is bad.

A resume that could not read is no fresh start: unless all that matters was read, and there is nothing, it is an error.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, TypeVar

from lightning_spot import retry
from lightning_spot.config import format_bytes
from lightning_spot.errors import CorruptSnapshotError, SettingsError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.retry import RetryPolicy, growing, retried
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.sources import Source
from lightning_spot.run.survey import Survey, of_tier
from lightning_spot.say import say
from lightning_spot.snapshot.manifest import Manifest, Order, snapshot_order
from lightning_spot.store.store import Progress

WAY_ON = "pass resume=False to start afresh all the same (nothing that is there is deleted), or another dirpath"

T = TypeVar("T")

OpenAt = Callable[[Source, Manifest, Progress], OpenSnapshot]
"""Opens a snapshot at a tier, and is told how many bytes were just checked."""


def doubt(found: Survey) -> SpotError | None:
    """Why it cannot be decided between a resume and a fresh start, an error to raise; ``None`` if it can.

    Returns:
        a ``TierError`` if storage could not be read, or if no tier has a snapshot and one could not be asked;
        a ``SettingsError`` if a snapshot server holds a run of this path, but of another machine.
    """
    reason = "; ".join(of_tier(tier, why) for tier, why in found.problems.items())
    if found.durable is None:
        return TierError(
            f"it is not known what to resume from: {found.location.url} could not be read ({reason}). Start again when"
            f" it can be, or {WAY_ON}",
            tier=found.location.url,
        )
    if found.candidates or found.unreadable:
        return None
    if (other := found.identity.unsure) is not None:
        return SettingsError(
            f"{found.location.url} holds nothing, but a server holds a run of this path, {other.name}@{other.id},"
            f" that was trained on another machine, {other.host} (attempt {other.attempt}). If it is this one, whose"
            f" disk was lost, say so with run_name={other.name!r}; if not, choose another dirpath, or pass resume=False"
        )
    if found.problems:
        return TierError(
            f"it is not known what to resume from: {found.location.url} holds no snapshot of run"
            f" {found.location.name!r}, and a snapshot server that may hold one cannot be asked ({reason}). Start again"
            f" when it can be, or {WAY_ON}",
            tier=next(iter(found.problems)),
        )
    return None


def open_newest(
    found: Survey,
    use: Callable[[OpenSnapshot], T],
    policy: RetryPolicy | None = None,
    *,
    stays: bool = True,
    open_at: OpenAt = lambda source, manifest, progress: source.open(manifest, progress),
) -> tuple[OpenSnapshot, T] | None:
    """Use the newest snapshot whose checksums hold; ``None`` when the tiers were read and there is none.

    Each one that is passed over is named, with the reason.

    Args:
        found: what the tiers hold.
        use: reads the snapshot; where it raises ``CorruptSnapshotError`` or ``TierError``, the next one is tried.
        policy: how often a tier that fails is tried again.
        stays: whether a snapshot that has left its tier since it was listed is passed over: where the tiers are asked
            once more, it may be at another one by now.
        open_at: opens a snapshot at the tier that has it.

    Returns:
        the snapshot, closed, and what ``use`` made of it.

    Raises:
        TierError, SettingsError: see :func:`doubt`.
        SnapshotNotFoundError: if one has left its tier, unless it is passed over.
        CorruptSnapshotError: if there are snapshots but none can be used: going on would silently start afresh.
    """
    error = doubt(found)
    goes_on = ". The run resumes from the newest snapshot of those that answer"
    so = goes_on if error is None else ""
    for tier, reason in found.problems.items():
        say(logging.WARNING, "not-read", "{why}{so}", about=tier, why=retry.unread(tier, reason), so=so)
    if error is not None:
        raise error
    if aside := found.set_aside:
        text = "a rewind has set {count} newer snapshots aside, {about} among them"
        say(logging.INFO, "rewound", text, about=aside[-1], count=len(aside))
    policy = policy or retry.DEFAULT_POLICY
    pauses = itertools.islice(growing(policy.first_pause_s), policy.tries - 1)  # for all of them together
    tries: list[tuple[Order, str, Callable[[], tuple[OpenSnapshot, T]]]] = [
        (manifest.order, f"{manifest.name} at {source.tier}", partial(_try, manifest, source, open_at, use, pauses))
        for manifest, source in found.candidates
    ]
    tries += [(_order(what), what, partial(_refuse, why)) for what, why in found.unreadable.items()]
    reasons: list[str] = []
    for _, where, attempt in sorted(tries, key=lambda each: each[0], reverse=True):
        try:
            opened = attempt()
        except (CorruptSnapshotError, SnapshotNotFoundError, TierError) as error:
            if isinstance(error, SnapshotNotFoundError) and not stays:
                raise
            reasons.append(f"{where}: {error}")
            text = "snapshot {about} skipped: {reason}"
            say(logging.WARNING, "snapshot-skipped", text, about=where, reason=error)
            continue
        if reasons:
            say(logging.WARNING, "resume-fell-back", "the run resumes from {about} instead", about=where)
        return opened
    reasons += [f"{name}: a rewind has set it aside" for name in aside]
    if reasons:
        raise CorruptSnapshotError(
            f"there are snapshots of run {found.location.name!r}, but none can be used: {'; '.join(reasons)}. Fix what"
            f" is broken and start again, or {WAY_ON}"
        )
    return None


def _order(what: str) -> Order:
    """Where a snapshot that cannot be read would come, by its name; one whose name says nothing, first."""
    return snapshot_order(what.partition(" ")[0]) or (sys.maxsize, 0, 0)


def _refuse(why: str) -> NoReturn:
    """Take the place of :func:`_try` for a snapshot whose manifest cannot be used."""
    raise CorruptSnapshotError(why)


def _try(
    manifest: Manifest, source: Source, open_at: OpenAt, use: Callable[[OpenSnapshot], T], pauses: Iterator[float]
) -> tuple[OpenSnapshot, T]:
    """Open and use one snapshot; a tier that fails is tried again a few times in all, before an older one is taken."""

    def once() -> tuple[OpenSnapshot, T]:
        snapshot = open_at(source, manifest, RestoreProgress(f"{manifest.name} from {source.tier}", manifest.nbytes))
        try:
            return snapshot, use(snapshot)
        finally:
            snapshot.close()

    def note(error: Exception, pause_s: float) -> None:
        text = "{error}. Retrying in {pause_s:.1f} s"
        say(logging.WARNING, "read-retried", text, about=source.tier, error=error, pause_s=pause_s)

    return retried(once, pauses, lambda error: isinstance(error, TierError), note)


class RestoreProgress:
    """Logs how far a restore is, once it takes long, and then now and then. Any thread may call it.

    Args:
        what: is restored.
        nbytes: of it.
        after_s: seconds after which the first line comes.
        every_s: seconds between two lines.
    """

    def __init__(self, what: str, nbytes: int, *, after_s: float = 3.0, every_s: float = 10.0) -> None:
        self._what, self._nbytes, self._every_s, self._done = what, nbytes, every_s, 0
        self._lock, self._begun_s = threading.Lock(), time.monotonic()
        self._due_s = self._begun_s + after_s

    def __call__(self, nbytes: int) -> None:
        """So many bytes more are there."""
        with self._lock:
            self._done += nbytes
            if (now_s := time.monotonic()) < self._due_s:
                return
            self._due_s = now_s + self._every_s
            say(
                logging.INFO,
                "restoring",
                "restoring {about}: {done} of {size}, {speed}/s",
                about=self._what,
                done=format_bytes(self._done),
                size=format_bytes(self._nbytes),
                speed=format_bytes(int(self._done / max(1e-3, now_s - self._begun_s))),
            )


def say_what_is_left(found: Survey) -> None:
    """Say once that a fresh start leaves the snapshots that are there."""
    names = {manifest.name for manifest, _ in found.candidates}
    if names:
        newest = found.candidates[0][0]
        say(
            logging.WARNING,
            "snapshots-left",
            "run {name!r} starts afresh. Its {count} snapshots, the newest of step {step}, stay. Delete {about} if you"
            " do not want them",
            about=found.location.url,
            name=found.location.name,
            count=len(names),
            step=newest.step,
        )
