"""How a host brings its portion of a snapshot where all hosts do, whether it leads that snapshot or takes part."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_spot.errors import ShareMissing, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Portion, PortionImage
from lightning_spot.image.written import Ranges
from lightning_spot.memory import portions as held_portions
from lightning_spot.memory.joint import is_durable
from lightning_spot.memory.joint_store import JointStore
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import HeldPortion
from lightning_spot.memory.tier import Changes, Gathering, HasJoint, JointTier, Sent
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.claims import Owner, check_fence
from lightning_spot.tiers.store import Store

if TYPE_CHECKING:
    from lightning_spot.memory.uploads import Uploads


_MOST_PLACES = 8  # of a run, over other nodes each time one is lost, or comes back


@dataclass(frozen=True, slots=True)
class Below:
    """What a node is asked, and told, of durable tiers to which hosts bring snapshots by themselves.

    Attributes:
        refuses: why it may not write to a URL, ``""`` if it may.
        committed: that it has committed a snapshot: URL, key of the run, manifest.
        owner: on whose behalf it acts there: URL, key of the run.
    """

    refuses: Callable[[str], str]
    committed: Callable[[str, str, Manifest], None]
    owner: Callable[[str, str], Owner | None]


class Bringing:
    """The way from the slots of a host to memory nodes and durable tiers. Methods may be called from any thread.

    Args:
        uploads: of this host's node.
        ring: likewise.
        registry: likewise.
        open_store: makes the stores of memory nodes and durable tiers.
        below: what the node does for it.
    """

    def __init__(
        self,
        uploads: Uploads,
        ring: Ring,
        registry: Registry,
        open_store: Callable[[str], Store],
        below: Below,
    ) -> None:
        self.uploads, self.ring, self.registry = uploads, ring, registry
        self._open_store, self._below = open_store, below
        self._lock = threading.Lock()
        self._tiers: dict[tuple[str, str], JointTier] = {}

    def tier(self, url: str, run: str) -> JointTier:
        """A place to which hosts bring snapshots together.

        Args:
            url: of the run there.
            run: its key.

        Raises:
            SettingsError: if no hosts can.
            TierError: if this node may not write there.
        """
        tier = self._tier(url, run)
        if isinstance(tier, JointStore):
            tier.store.owner = self._below.owner(url, run)
        if (info := self.registry.info(run)) is not None:
            tier.know(replace(info, nodes=(), session=""))
        return tier

    def _tier(self, url: str, run: str) -> JointTier:
        with self._lock:
            known = self._tiers.get((url, run))
        if known is not None:
            return known
        if is_durable(url) and (why := self._below.refuses(url)):
            raise TierError(f"this node may not write to {url}: {why}", tier=url)
        store = self._open_store(url)  # for seconds, with libraries to import: who asks how the tiers are does not wait
        tier: JointTier
        if isinstance(store, HasJoint):
            tier = store.joint  # it has learned how fast the node is
        else:
            tier = JointStore(store, run, functools.partial(self._below.committed, url, run))
        with self._lock:
            for (_url, key), earlier in self._tiers.items():
                if key == run and isinstance(tier, Changes):
                    tier.follow(earlier)
            if isinstance(tier, Changes):
                tier.tells_until(lambda: self.uploads.closing)
            tier = self._tiers.setdefault((url, run), tier)
            places = [place for place, each in self._tiers.items() if place[1] == run and isinstance(each, Changes)]
            for place in places[:-_MOST_PLACES]:  # what they have learned, all others of that run know
                del self._tiers[place]
            return tier

    def forget(self, run: str) -> None:
        """Keep nothing of a run."""
        with self._lock:
            for place in [place for place in self._tiers if place[1] == run]:
                del self._tiers[place]

    def calm(self, run: str) -> None:
        """Forget what kept an earlier attempt of a run from the durable tiers: this one may do without this way."""
        with self._lock:
            tiers = [tier for (_url, key), tier in self._tiers.items() if key == run]
        for tier in tiers:
            if isinstance(tier, JointStore):
                tier.why = ""

    def failing(self) -> dict[str, str]:
        """URLs of the durable tiers that fail at present, and why."""
        with self._lock:
            tiers = list(self._tiers.items())
        return {url: tier.why for (url, _run), tier in tiers if isinstance(tier, JointStore) and tier.why}

    def bring(
        self,
        tier: JointTier,
        gathering: Gathering,
        upload: Upload,
        ranges: Ranges,
        portion: Portion | None,
        image: PortionImage | memoryview,
    ) -> Sent:
        """Send ranges of an image that lie in a slot.

        Args:
            tier: where to.
            gathering: what is brought together there.
            upload: whose slot it is.
            ranges: what this host brings.
            portion: how they lie in the slot; ``None`` where that holds the whole image.
            image: as far as it is in the slot.
        """
        earlier = None
        if (base := gathering.base) is not None:
            is_apart = portion is not None
            earlier = held_portions.find(self.ring, upload.run, ranges, base, is_apart=is_apart)
        find = functools.partial(held_portions.find_alone, self.ring, upload.run)
        gathering = replace(gathering, earlier=find)
        info = self.registry.info(upload.run)
        compression = info.compression if info is not None else "auto"
        return tier.bring(gathering, image, ranges, earlier, lambda: self.check(upload), compression)

    def done(self, upload: Upload, ranges: Ranges) -> None:
        """All that was to be sent of a slot was: it is free, and what is in it remembered."""
        if self.uploads.brought(upload, whole=True):
            held = HeldPortion(upload.run, upload.name, ranges)
            held_portions.hold(self.ring, upload.slot, held, upload.id)

    def check(self, upload: Upload) -> None:
        """Raise if an upload was given up meanwhile, or a later attempt has begun; else it is alive."""
        if upload.ended:
            raise ShareMissing(f"{upload.name} was given up")
        self.check_attempt(upload.run, upload.attempt, upload.name)
        upload.touched_s = time.monotonic()

    def check_attempt(self, run: str, attempt: int, name: str) -> None:
        """Raise if nothing more is to be done for a snapshot: a later attempt has begun, or this node ends."""
        check_fence(run, attempt, self.registry.highest(run))
        if self.uploads.closing:
            raise ShareMissing(f"{name} is not brought further: this node is shutting down")
