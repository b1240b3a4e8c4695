"""Which snapshots storage keeps: the newest, and those that the rules of a policy name."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_spot.config import KEEP, check_number, parse_seconds
from lightning_spot.errors import MalformedError, SettingsError
from lightning_spot.snapshot.manifest import Manifest, is_metric_name
from lightning_spot.store.store import Holdings, Store, newest_first
from lightning_spot.untrusted import as_object


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which snapshots storage keeps: those that any of these rules names.

    All others are deleted, once a newer one is stored. The rules apply to what reaches storage, which with a short
    interval is not every snapshot, see ``min_upload_interval_s``. Of steps that a later attempt has trained again, the
    last three rules keep those of the later one. Snapshot servers keep the newest in memory.

    Args:
        newest: number of newest snapshots, at least 1; default 2.
        every_n_steps: distance in optimizer steps of snapshots that are kept for good: the first one at or after each
            multiple of it. Default ``None``: none.
        newer_than: age up to which all are kept, such as ``"2d"`` or ``"90min"``, or in seconds. Default ``None``.
        best: number of snapshots with the best value of ``monitor``; default 0.
        monitor: name of a logged metric. A snapshot has the value that was logged last before it; of several with the
            same value, the first one counts. One without a finite value is never among the best.
        mode: whether the smallest value is the best (``"min"``, default) or the largest (``"max"``).

    Raises:
        SettingsError: if an argument cannot be used.

    Example::

        from lightning_spot import Keep, SpotCheckpoint

        SpotCheckpoint("s3://bucket/run-1", keep=Keep(newest=3, every_n_steps=1000, best=2, monitor="val_loss"))
    """

    newest: int = KEEP
    every_n_steps: int | None = None
    newer_than: str | float | None = None
    best: int = 0
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name, least in (("newest", 1), ("every_n_steps", 1), ("best", 0)):
            if (value := getattr(self, name)) is not None or name != "every_n_steps":
                check_number(name, value, least, whole=True)
                object.__setattr__(self, name, int(value))
        if isinstance(self.newer_than, str):
            object.__setattr__(self, "newer_than", parse_seconds(self.newer_than, "newer_than="))
        if self.newer_than is not None:
            check_number("newer_than", self.newer_than, 0)
            object.__setattr__(self, "newer_than", float(self.newer_than))
        if self.mode not in ("min", "max"):
            raise SettingsError(f"mode={self.mode!r}: it is 'min' or 'max'")
        if (self.best > 0) is not bool(self.monitor):
            raise SettingsError("best= and monitor= go together: a number of snapshots, and the metric that ranks them")
        if self.monitor is not None and not is_metric_name(self.monitor):
            raise SettingsError(f"monitor={self.monitor!r} is no name of a metric")

    @classmethod
    def of(cls, given: object) -> Keep:
        """What a user gave as ``keep=``: a number of newest snapshots, a policy, or its arguments as a mapping.

        Raises:
            SettingsError: if it is none of these.
        """
        if isinstance(given, Keep):
            return given
        if not isinstance(given, Mapping):
            check_number("keep", given, 1, whole=True)
            return cls(newest=given)  # type: ignore[arg-type] # a whole number
        if not given or given.keys() - {each.name for each in fields(cls)}:
            raise SettingsError(f"keep={given!r}: it has some of {', '.join(each.name for each in fields(cls))}")
        return cls(**given)


def read_keep(read: Mapping[str, Any], name: str, _default: object) -> Keep:
    """The policy in a JSON object; what a later version may have added is left out.

    Raises:
        MalformedError: if it cannot be used.
    """
    given = as_object(read[name])
    try:
        return Keep.of({each.name: given[each.name] for each in fields(Keep) if each.name in given})
    except SettingsError as error:
        raise MalformedError(str(error)) from error


def worth_keeping(line: Sequence[Manifest]) -> list[Manifest]:
    """Snapshots, newest first, but last those whose state is there as the end of the run, too."""
    ends = {(end.lineage, end.attempt, end.step) for end in line if end.complete}
    twice = [item for item in line if not item.complete and (item.lineage, item.attempt, item.step) in ends]
    return [*(item for item in line if item not in twice), *twice]


def kept(manifests: Sequence[Manifest], keep: Keep, now_unix_s: float) -> set[str]:
    """Names of the snapshots of one lineage that a policy keeps. Of those that are not exact, only the newest count.

    Args:
        manifests: of all of them.
        keep: the policy.
        now_unix_s: the time.
    """
    line = worth_keeping(newest_first(manifests))
    found = [*line[: keep.newest], *[manifest for manifest in line if manifest.exact][: keep.newest]]
    trained = _trained_once(manifests)
    if keep.every_n_steps is not None:
        firsts: dict[int, Manifest] = {}
        for manifest in trained:
            if manifest.step >= keep.every_n_steps:
                firsts.setdefault(manifest.step // keep.every_n_steps, manifest)
        found += firsts.values()
    if keep.newer_than is not None:
        oldest_s = now_unix_s - float(keep.newer_than)
        found += [manifest for manifest in trained if manifest.created_unix_s >= oldest_s]
    if keep.monitor is not None:
        ranked: dict[float, Manifest] = {}
        for manifest in trained:
            if math.isfinite(value := manifest.metrics.get(keep.monitor, math.nan)):
                ranked.setdefault(value, manifest)
        found += [ranked[value] for value in sorted(ranked, reverse=keep.mode == "max")[: keep.best]]
    return {manifest.name for manifest in found}


def _trained_once(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The exact snapshots of one lineage, the first first; of a step that a later attempt trained again, that one's."""
    found: list[Manifest] = []
    for manifest in newest_first(manifests):
        if manifest.exact and (not found or manifest.step < found[-1].step):
            found.append(manifest)
    return found[::-1]


def expired(held: Holdings, current: Manifest, keep: Keep, now_unix_s: float) -> list[Manifest]:
    """The snapshots of the lineage of one that go, since that is stored, and a policy does not keep them.

    What a rewind has set aside stays until something newer than that is stored, and goes then. Every exact snapshot
    stays until another exact one is stored.

    Args:
        held: what storage holds.
        current: a snapshot that is committed there.
        keep: the policy.
        now_unix_s: the time.
    """
    if held.sets_aside(current.order):
        return []
    older = [each for each in held.manifests if each.lineage == current.lineage and each.order < current.order]
    names = kept([current, *(each for each in older if not held.sets_aside(each.order))], keep, now_unix_s)
    return [each for each in older if each.name not in names and (current.exact or not each.exact)]


def retain(store: Store, keep: Keep, current: Manifest) -> str:
    """Delete the older snapshots of the lineage of ``current`` that a policy does not keep, and what writers left.

    Nothing is deleted before the tier has shown that ``current`` is committed there: it is listed, its manifest, read
    back, is equal, and its file has its size (that its bytes arrived, the tier has acknowledged: directories by fsync,
    object stores by the checksum of each request). Snapshots of another lineage, newer ones and those that cannot be
    read stay; see :func:`expired`.

    Args:
        store: the tier.
        keep: the policy.
        current: a snapshot just put there.

    Returns:
        why nothing older was deleted, for people; ``""`` if the tier shows ``current``.

    Raises:
        TierError: if the tier fails; what was not deleted is deleted next time.
    """
    held = store.survey()
    if current.name not in [manifest.name for manifest in held.manifests]:
        return f"what is written to {store.url} is not listed there at once: nothing older is deleted until it is"
    if not store.has(current):
        return f"what is written to {store.url} is not seen there as it was written: nothing older is deleted"
    known = set(held.rewinds)
    for manifest in expired(held, current, keep, time.time()):
        if not store.delete(manifest, wanted=lambda: set(store.rewinds()) != known):
            break  # a rewind was asked for meanwhile, which may go back to one of them
    store.sweep(current, held)
    return ""
