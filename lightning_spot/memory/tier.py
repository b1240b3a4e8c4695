"""What a server asks of another one, beyond what every store can do, and how the tiers below are doing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lightning_spot.errors import FencedError, ShareFault
from lightning_spot.image.coming import Coming
from lightning_spot.image.files import FileSpan
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.packing import Compression
from lightning_spot.image.portion import Image
from lightning_spot.image.written import Ranges
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.ring import FindEarlier, Glance, nothing_earlier
from lightning_spot.memory.runs import Opened, RunInfo, key_of
from lightning_spot.protocol.wire import BaseInfo
from lightning_spot.tiers.store import ReadsRanges


@dataclass(slots=True)
class Sent:
    """How the parts went of snapshots that were committed at a server.

    Attributes:
        whole_bytes: of parts that were sent whole.
        delta_bytes: that were sent for parts of which only what changed was.
        same_bytes: of parts that were not sent, since the server had them.
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


class Listed(NamedTuple):
    """What a server says of a snapshot or file that it holds.

    Attributes:
        manifest: of the snapshot.
        dirty: URLs of the tiers to which it is still to be brought.
        safe: URLs of those that have it.
    """

    manifest: Manifest
    dirty: list[str]
    safe: list[str]

    @classmethod
    def all_of(cls, listing: dict[str, Any]) -> list[Listed]:
        """All that a server has answered."""
        return [cls(Manifest.from_dict(item["manifest"]), item["dirty"], item["safe"]) for item in listing["snapshots"]]


@runtime_checkable
class NodeTier(Protocol):
    """Another server, for one run. Methods may be called from any thread; each ends within bounds of its own.

    Attributes:
        sent: how the parts of snapshots went so far.
    """

    sent: Sent

    def open_run(self, info: RunInfo) -> Opened:
        """Let an attempt write the run there; once more by the same attempt does nothing, and tells how things are.

        Raises:
            FencedError: if a later attempt holds the run.
            TierError: if the server does not answer, or refuses.
        """

    def know(self, info: RunInfo) -> None:
        """Take note of the run: its token is shown, and a restarted server, which has forgotten it, is told all."""

    def listing(self) -> list[Listed]:
        """Everything it holds of the run."""

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
            SnapshotNotFoundError: if the file was given up meanwhile.
        """

    def flush(self, wait_s: float) -> list[str]:
        """Have everything of the run brought further down; what was not reached in time, one line each."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """An upload at a snapshot server to which several hosts send.

    Attributes:
        upload: its id.
        nbytes: size of the image.
        base: the snapshot that the server has, and from which it can make ranges of this one.
        shared: what the first host has said of it.
        files: that this host writes by itself; empty for those that the layout says.
        manifest: of the snapshot, without checksums, as the first host knows it.
        earlier: finds a portion that this host has brought to snapshot servers before, as far as it is here.
    """

    upload: str
    nbytes: int
    base: BaseInfo | None
    shared: Shared
    files: tuple[FileSpan, ...] = ()
    manifest: Manifest | None = None
    earlier: Callable[[Manifest], Glance | None] = lambda _portion: None


class JointTier(Protocol):
    """A snapshot server at which several hosts put one snapshot together. Methods may be called from any thread."""

    def know(self, info: RunInfo) -> None:
        """Take note of the attempt that brings what comes next: servers ask for its token."""

    def begin(self, shared: Shared, nbytes: int, *, attempt: int, hosts: int) -> Gathering:
        """Begin a snapshot that so many hosts will send; called by the first of them.

        Raises:
            TierError: if the server does not answer, has no slot, or cannot do it.
        """

    def join(self, name: str, *, attempt: int, host: int, wait_s: float) -> Gathering:
        """Take part in one, as host number ``host`` from 1 on, once it has begun.

        Raises:
            SnapshotFailedError: if there will be none, or not within ``wait_s`` seconds.
        """

    def bring(
        self,
        gathering: Gathering,
        image: Image,
        ranges: Ranges,
        earlier: Glance | None,
        goes_on: Callable[[], None],
        compression: Compression = "auto",
    ) -> Sent:
        """Send ranges of the image; how these, and all that was brought before, went.

        Args:
            gathering: where to.
            image: of which these ranges are here.
            ranges: what to send.
            earlier: the base, as far as it is here.
            goes_on: called now and then; what it raises ends this.
            compression: how what changed is sent, see :class:`RunInfo`.
        """

    def placed(self, gathering: Gathering, host: int, torn: str = "", fault: ShareFault | None = None) -> None:
        """Say that all a host brings is there, or, with ``torn`` and what rank 0 has to know, why it never will be."""

    def seal(self, gathering: Gathering, manifest: Manifest, goes_on: Callable[[], None]) -> Manifest:
        """Commit it there once all hosts have said so; called by the first host. The sealed manifest.

        Raises:
            SnapshotFailedError: if what another host brings will not come.
        """

    def give_up(self, gathering: Gathering) -> None:
        """There will be no such snapshot. Nothing happens if the server does not answer: it notices by itself."""

    def decline(self, name: str, *, attempt: int, why: str, host: int = 0) -> None:
        """Say that none of that name will be.

        Args:
            name: of the snapshot.
            attempt: that would have written it.
            why: for people.
            host: whose server was lost that was to bring its portion; at storage nothing is said if that is there.
        """


@runtime_checkable
class Changes(Protocol):
    """A joint tier of servers, of which there is another one when other servers work."""

    def follow(self, earlier: JointTier) -> None:
        """Go on with what another one of that run has learned, and decided; called before it is used."""

    def tells_until(self, stops: Callable[[], bool]) -> None:
        """Have servers told again what they did not hear, until ``stops`` says that it is not to be any more."""


@runtime_checkable
class HasParts(ReadsRanges, Protocol):
    """A tier from which, and to which, a snapshot is copied part by part."""

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`Store.put_parts`."""


@runtime_checkable
class HasJoint(Protocol):
    """A tier at which several hosts can put a snapshot together."""

    @property
    def joint(self) -> JointTier:
        """Where they do."""


_SMOOTHING = 0.3


@dataclass(slots=True)
class TierHealth:
    """How a tier below is doing.

    Attributes:
        kind: ``"node"`` or ``"durable"``.
        carried: whether nothing goes there from here at present, because a server behind this one writes there.
        error: what fails there at present, ``""`` while everything works.
        refused: why the tier refused something for good (a later attempt has taken over), ``""`` if it never did.
        refused_run, refused_attempt: whose that was: a run's key, and the attempt that was taken over.
        silent: that no byte has moved on a connection to the store, see :mod:`~lightning_spot.tiers.fsspec_client`.
        dropped, dropped_name: why a snapshot was dropped last instead of being brought there, since it was damaged in
            memory, and its name.
        failures: failures in a row.
        failures_total: failures so far, of every kind.
        flushed: snapshots and files brought there so far.
        inexact: approximations of snapshots brought there so far; they do not count as these.
        flushed_bytes: bytes of what was flushed.
        flush_s: seconds that took.
        drain_s: seconds that one snapshot takes at present (a moving average); 0 before the first.
        whole_bytes, delta_bytes, same_bytes: at a server, see :class:`~lightning_spot.memory.tier.Sent`.
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
        """As a server tells it; what a newer one tells besides is left out."""
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
            sent: how its parts, and those of everything before it, went to a server.
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
