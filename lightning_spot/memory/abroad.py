"""Snapshots that several hosts bring to one memory node, each its portion: what the node of each of these hosts does.

The first host begins an upload at the memory node; the others join it by the snapshot's name. The ranks of each host
fill a slot of its own node, which holds that host's portion only. When all of these are done, the portion is sent; when
all portions are there, the first host has the memory node commit the snapshot. No host has all of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lightning_spot.errors import Fenced, SettingsError, ShareMissing, SnapshotNotFound, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Portion, PortionImage, Portions
from lightning_spot.image.written import Ranges
from lightning_spot.memory import portions as held_portions
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import parse_run
from lightning_spot.memory.slots import HeldPortion
from lightning_spot.memory.tier import Gathering, HasJoint, JointTier, Sent
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.store import Store

if TYPE_CHECKING:
    from lightning_spot.memory.uploads import Uploads

logger = logging.getLogger(__name__)

_OPEN_S = 30.0
_JOIN_S = 120.0
_WAIT_FOR_SLOT_S = 5.0

Heard = Callable[[str, Manifest, float, Sent | None, Exception | None], None]
"""Told of each snapshot that this host has led: URL, manifest of its portion, seconds, what was sent, the error."""


@dataclass(eq=False, slots=True)
class _Lead:
    """An upload that this host leads.

    Attributes:
        ranges: that this host brings.
        nbytes: of the image.
        hosts: how many bring it.
        portion: how the ranges lie in the slot; ``None`` where that holds the whole image.
        tier: where it goes; ``None`` if that cannot be asked.
        gathering: at the memory node, once it has begun there.
    """

    ranges: Ranges
    nbytes: int
    hosts: int
    portion: Portion | None = None
    tier: JointTier | None = None
    gathering: Future[Gathering] = field(default_factory=Future)

    @classmethod
    def of(cls, upload: Upload, shared: Shared) -> _Lead:
        """The lead of an upload.

        Raises:
            SettingsError: if its layout does not say what each host brings, or its slot is none for that.
        """
        nbytes = shared.image_nbytes or upload.nbytes
        portions = Portions.read(shared.layout, nbytes)
        ranges = portions.rest(nbytes)
        portion = Portion(ranges) if shared.image_nbytes else None
        if portion is not None and portion.nbytes != upload.nbytes:
            raise SettingsError(
                f"the first host brings {portion.nbytes} bytes of {shared.name}, its slot is for {upload.nbytes}"
            )
        return cls(ranges, nbytes, portions.hosts, portion)

    def image(self, upload: Upload) -> PortionImage | memoryview:
        """The image, as far as it lies in the slot."""
        memory = upload.slot.view(upload.nbytes)
        return PortionImage(self.portion, memory, self.nbytes) if self.portion is not None else memory


class Abroad:
    """The joint uploads of a host to memory nodes. Methods may be called from any thread.

    Args:
        uploads: of this host's node.
        ring: likewise.
        registry: likewise.
        open_store: makes the stores of memory nodes.
        heard: see :data:`Heard`.
    """

    def __init__(
        self, uploads: Uploads, ring: Ring, registry: Registry, open_store: Callable[[str], Store], heard: Heard
    ) -> None:
        self._uploads, self._ring, self._registry = uploads, ring, registry
        self._open_store, self._heard = open_store, heard
        self._lock = threading.Lock()
        self._leads: dict[str, _Lead] = {}
        self._guests: set[tuple[str, str]] = set()
        self._tiers: dict[str, JointTier] = {}

    # -- the first host -------------------------------------------------------------------------------------------

    def begin(self, upload: Upload) -> None:
        """Have an upload begun at the memory node, in the background: the other hosts wait for that.

        Raises:
            SettingsError: if its layout does not say what each host brings.
        """
        assert upload.joint is not None
        lead = _Lead.of(upload, upload.joint.shared)
        with self._lock:
            self._leads[upload.id] = lead
        threading.Thread(target=self._begin, args=(upload, lead), name="spot-joint", daemon=True).start()

    def seal(self, upload: Upload, manifest: Manifest) -> Manifest:
        """Send what this host brings, and have the snapshot committed once the others have brought theirs.

        Raises:
            ShareMissing: if it is not committed in the end; the slot is freed, here and there.
            Fenced: if a later attempt holds the run.
        """
        assert upload.joint is not None
        shared, began_s = upload.joint.shared, time.monotonic()
        lead = self._leads.get(upload.id)
        if lead is None:
            raise SnapshotNotFound(f"upload {upload.id!r} does not exist (any more)")
        self._uploads.bring(upload)
        own = replace(manifest, nbytes=sum(nbytes for _, nbytes in lead.ranges))
        try:
            if manifest.nbytes != lead.nbytes:
                raise SettingsError(f"{manifest.name} has {manifest.nbytes} bytes, and was begun for {lead.nbytes}")
            gathering = lead.gathering.result(_OPEN_S)
            assert lead.tier is not None
            sent = self._bring(lead.tier, gathering, upload, lead.ranges, lead.portion, lead.image(upload))
            sealed = lead.tier.seal(gathering, _named(manifest, shared.at), lambda: _check(upload))
        except Exception as error:
            self._uploads.brought(upload, whole=False)
            self._heard(shared.at, own, 0.0, None, error)
            if isinstance(error, Fenced) or not isinstance(error, SpotError | futures.TimeoutError):
                raise
            why = str(error) or "it did not begin there in time"
            raise ShareMissing(f"{manifest.name} did not come together at {shared.at}: {why}") from error
        sealed = replace(sealed, run=manifest.run)
        self._done(upload, lead.ranges)
        held_portions.surpass(self._ring, upload.run, sealed)
        self._heard(shared.at, own, time.monotonic() - began_s, sent, None)
        return sealed

    def end(self, upload: Upload) -> None:
        """An upload is over. If it was given up, so it is there. Nothing happens if this host does not lead it."""
        with self._lock:
            lead = self._leads.pop(upload.id, None)
        if lead is not None and upload.given_up:

            def give_up() -> None:
                if lead.gathering.exception() is None and lead.tier is not None:  # which waits until it is known
                    lead.tier.give_up(lead.gathering.result())

            threading.Thread(target=give_up, name="spot-joint-end", daemon=True).start()

    def decline(self, at: str, name: str, attempt: int, why: str) -> None:
        """Tell the other hosts, in the background, that there will be no snapshot of a name."""

        def tell() -> None:
            try:
                self._tier(at).decline(name, attempt=attempt, why=why)
            except SpotError as error:  # they wait in vain for a while
                logger.debug("%s could not be told: %s", at, error)

        threading.Thread(target=tell, name="spot-joint-end", daemon=True).start()

    def _begin(self, upload: Upload, lead: _Lead) -> None:
        assert upload.joint is not None
        shared = upload.joint.shared
        try:
            tier = self._tier(shared.at)
            gathering = tier.begin(shared, lead.nbytes, attempt=upload.attempt, hosts=lead.hosts)
        except BaseException as error:
            lead.gathering.set_exception(error)
            self._uploads.shares.fail(upload, f"{shared.at}: {error}")
        else:
            lead.tier = tier
            lead.gathering.set_result(gathering)

    # -- the other hosts ------------------------------------------------------------------------------------------

    def join(self, run: str, attempt: int, name: str, at: str, host: int) -> None:
        """Take part in a snapshot that another host leads: a slot for this host's portion is there in a moment.

        Args:
            run: as in URLs.
            attempt: that writes.
            name: of the snapshot.
            at: URL of the run at the memory node.
            host: number of this host, from 1.
        """
        with self._lock:
            if (run, name) in self._guests:
                return
            self._guests.add((run, name))
        visit = threading.Thread(target=self._visit, args=(run, attempt, name, at, host), name="spot-joint")
        visit.daemon = True
        visit.start()

    def _visit(self, run: str, attempt: int, name: str, at: str, host: int) -> None:
        upload: Upload | None = None
        tier: JointTier | None = None
        gathering: Gathering | None = None
        try:
            tier = self._tier(at)
            gathering = tier.join(name, attempt=attempt, host=host, wait_s=_JOIN_S)
            portions = Portions.read(gathering.shared.layout, gathering.nbytes)
            if host > len(portions.ranks):
                raise SettingsError(f"{name} is brought by {portions.hosts} hosts; there is none of number {host}")
            portion = Portion(portions.ranges[host - 1])
            shared = replace(gathering.shared, shares=1 + portions.ranks[host - 1], by_hosts=False)
            upload = self._uploads.lease(
                run, attempt, portion.nbytes, name=name, wait_s=_WAIT_FOR_SLOT_S, shared=shared
            )
            self._uploads.make_another(upload)
            self._uploads.shares.wait(upload)
            self._uploads.bring(upload)
            image = PortionImage(portion, upload.slot.view(portion.nbytes), gathering.nbytes)
            self._bring(tier, gathering, upload, portion.ranges, portion, image)
            tier.placed(gathering, host)
            self._done(upload, portion.ranges)
        except BaseException as error:
            self._failed(run, attempt, name, upload, error)
            if tier is not None and gathering is not None:
                self._tell(tier, gathering, host, error)
            if not isinstance(error, SpotError):
                raise
        finally:
            with self._lock:
                self._guests.discard((run, name))

    def _failed(self, run: str, attempt: int, name: str, upload: Upload | None, error: BaseException) -> None:
        """Free the slot, and let no rank wait for it."""
        logger.info("this host brings nothing to %s: %s", name, error)
        try:
            if upload is not None:
                self._uploads.brought(upload, whole=False)
            else:
                self._uploads.shares.decline(run, attempt, name, str(error) or type(error).__name__)
        except SpotError as problem:  # a later attempt has begun, or the run is not known any more
            logger.debug("nobody waits for %s: %s", name, problem)

    def _tell(self, tier: JointTier, gathering: Gathering, host: int, error: BaseException) -> None:
        try:
            tier.placed(gathering, host, f"host {host}: {error or type(error).__name__}")
        except SpotError as problem:  # it was given up there, or does not answer: the first host notices
            logger.debug("%s could not be told that it is torn: %s", gathering.upload, problem)

    # -- both -----------------------------------------------------------------------------------------------------

    def _bring(
        self,
        tier: JointTier,
        gathering: Gathering,
        upload: Upload,
        ranges: Ranges,
        portion: Portion | None,
        image: PortionImage | memoryview,
    ) -> Sent:
        earlier = None
        if (base := gathering.base) is not None:
            is_apart = portion is not None
            earlier = held_portions.find(self._ring, upload.run, ranges, base, is_apart=is_apart)
        info = self._registry.info(upload.run)
        compression = info.compression if info is not None else "auto"
        return tier.bring(gathering, image, ranges, earlier, lambda: _check(upload), compression)

    def _done(self, upload: Upload, ranges: Ranges) -> None:
        if self._uploads.brought(upload, whole=True):
            held = HeldPortion(upload.run, upload.name, ranges)
            held_portions.hold(self._ring, upload.slot, held, upload.id)

    def _tier(self, at: str) -> JointTier:
        with self._lock:
            if at not in self._tiers:
                store = self._open_store(at)
                if not isinstance(store, HasJoint):
                    raise SettingsError(f"{at} is no memory node, so no hosts can bring a snapshot together there")
                self._tiers[at] = store.joint  # it has learned how fast the node is
            return self._tiers[at]


def _check(upload: Upload) -> None:
    if upload.ended:
        raise ShareMissing(f"{upload.name} was given up")


def _named(manifest: Manifest, at: str) -> Manifest:
    """The manifest as the memory node knows its run."""
    name, identity = parse_run(at.rpartition("/")[2])
    return replace(manifest, run=name, run_id=identity or manifest.run_id, checksums=())
