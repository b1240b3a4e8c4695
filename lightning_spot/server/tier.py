"""What a server asks of another one, beyond what every store can do, and how the tiers below are doing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lightning_spot.errors import SettingsError
from lightning_spot.server.ring import FindEarlier, nothing_earlier
from lightning_spot.server.runs import Opened, RunInfo, key_of
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.store.store import Holdings, Store, highest_attempt, newest_first, put_together
from lightning_spot.untrusted import texts


class Listed(NamedTuple):
    """What a server says of a snapshot or file that it holds.

    Attributes:
        manifest: of the snapshot; or of a shard, or why there will be none, of one of which not all is there.
        owed: URLs of the destinations to which it is still to be brought.
        safe: URLs of those that have it.
    """

    manifest: Manifest
    owed: list[str]
    safe: list[str]

    @classmethod
    def all_of(cls, listing: dict[str, Any]) -> list[Listed]:
        """All that a server has answered."""
        return [
            cls(Manifest.from_dict(item["manifest"]), texts(item, "dirty"), texts(item, "safe"))  # dirty: owed
            for item in listing["snapshots"]
        ]

    @classmethod
    def holdings(cls, listed: list[Listed], claimed: int = 0) -> Holdings:
        """What a server holds of a run, shards also put together; ``claimed`` is the highest attempt it knows."""
        snapshots = [item.manifest for item in listed if not item.manifest.is_file]
        shards = [manifest for manifest in snapshots if manifest.shard is not None]
        whole = [manifest for manifest in snapshots if manifest.shard is None]
        found = Holdings(newest_first([*whole, *put_together(shards)]), shards=shards)
        found.highest_attempt = highest_attempt(claimed, (), snapshots)
        found.copies = {item.manifest.name: (bool(item.owed), bool(item.safe)) for item in listed}
        return found


def state_in_memory(copies: Iterable[tuple[bool, bool]]) -> str:
    """State of a snapshot in memory, by its shards: see :attr:`Holdings.copies`."""
    found = [*copies]
    if any(is_owed for is_owed, _ in found):
        return "uploading"
    return "replicated" if all(is_safe for _, is_safe in found) else "local"


@runtime_checkable
class ServerTier(Protocol):
    """Another server, for one run. Methods may be called from any thread; each ends within bounds of its own."""

    def open_run(self, info: RunInfo) -> Opened:
        """Let an attempt write the run there; once more by the same attempt does nothing, and tells how things are.

        Raises:
            FencedError: if a later attempt writes the run.
            TierError: if the server does not answer, or refuses.
        """

    def know(self, info: RunInfo) -> None:
        """Take note of the run: its token is shown, and a restarted server, which has forgotten it, is told all."""

    def listing(self) -> list[Listed]:
        """Everything it holds of the run."""

    def send(
        self,
        manifest: Manifest,
        image: memoryview,
        *,
        attempt: int,
        earlier: FindEarlier = nothing_earlier,
        floats: Sequence[Floats] = (),
    ) -> Manifest:
        """Send a file part by part, and commit it there.

        Args:
            manifest: sealed.
            image: its file.
            attempt: on whose behalf.
            earlier: finds earlier snapshots that are here: of those that are there too, only changes are sent.
            floats: where in it numbers lie that may be approximated; none for a file that is to be there exactly.

        Returns:
            the sealed manifest of what is there now: its own, or that of an approximation.
        """

    def fail(self, manifest: Manifest) -> None:
        """Note there why a shard will never be, see :attr:`ShardOf.failed`. Nothing happens if that is known there."""

    def flush(self, wait_s: float) -> list[str]:
        """Have everything of the run brought further down; what was not reached in time, one line each."""

    def delete(self, manifest: Manifest) -> None:
        """Remove what it holds of that name. Nothing happens if that is gone."""


Tier = Store | ServerTier
"""Where snapshots go from a ring."""


def as_storage(tier: Tier, url: str) -> Store:
    """What is to be the storage of a run.

    Raises:
        SettingsError: if it is a server.
    """
    if isinstance(tier, ServerTier):
        raise no_storage(url)
    return tier


def no_storage(url: str) -> SettingsError:
    """Why a URL of a server is not that of a storage."""
    return SettingsError(f"{url} is at a snapshot server: it is no storage. Give a directory, or a URL of a bucket")


_SMOOTHING = 0.3


@dataclass(slots=True)
class TierHealth:
    """How a tier below is doing.

    Attributes:
        kind: ``"server"`` or ``"durable"``.
        carried: whether nothing goes there from here at present, because a server behind this one writes there.
        error: what fails there at present, ``""`` while everything works.
        refused: why the tier refused something for good (a later attempt has taken over), ``""`` if it never did.
        refused_run, refused_attempt: whose that was: a run's key, and the attempt that was taken over.
        silent: that no byte has moved on a connection to the store, see :mod:`~lightning_spot.store.fsspec_client`.
        dropped, dropped_name: why a snapshot was dropped last instead of being brought there, since it was damaged in
            memory, and its name.
        failures_total: failures so far, of every kind.
        flushed: snapshots and files brought there so far.
        inexact: approximations of snapshots brought there so far; they do not count as these.
        flushed_bytes: bytes of what was flushed.
        flush_s: seconds that took.
        drain_s: seconds that one snapshot takes at present (a moving average); 0 before the first.
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
    failures_total: int = 0
    flushed: int = 0
    inexact: int = 0
    flushed_bytes: int = 0
    flush_s: float = 0.0
    drain_s: float = 0.0

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> TierHealth:
        """As a server tells it; what a newer one tells besides is left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in figures.items() if name in known})

    def took(self, put: Manifest, seconds: float) -> None:
        """Note that something was brought there.

        Args:
            put: what is there now.
            seconds: that took.
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
