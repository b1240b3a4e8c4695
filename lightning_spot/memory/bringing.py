"""How a host brings its portion of a snapshot to a memory node, whether it leads that snapshot or takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spot.errors import SettingsError, ShareMissing
from lightning_spot.image.portion import Portion, PortionImage
from lightning_spot.image.written import Ranges
from lightning_spot.memory import portions as held_portions
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import HeldPortion
from lightning_spot.memory.tier import Gathering, HasJoint, JointTier, Sent
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.store import Store

if TYPE_CHECKING:
    from lightning_spot.memory.uploads import Uploads


class Bringing:
    """The way from the slots of a host to memory nodes. Methods may be called from any thread.

    Args:
        uploads: of this host's node.
        ring: likewise.
        registry: likewise.
        open_store: makes the stores of memory nodes.
    """

    def __init__(self, uploads: Uploads, ring: Ring, registry: Registry, open_store: Callable[[str], Store]) -> None:
        self.uploads, self.ring = uploads, ring
        self._registry, self._open_store = registry, open_store
        self._lock = threading.Lock()
        self._tiers: dict[str, JointTier] = {}

    def tier(self, url: str) -> JointTier:
        """A memory node, by the URL of the run there.

        Raises:
            SettingsError: if it is none.
        """
        with self._lock:
            if url not in self._tiers:
                store = self._open_store(url)
                if not isinstance(store, HasJoint):
                    raise SettingsError(f"{url} is no memory node, so no hosts can bring a snapshot together there")
                self._tiers[url] = store.joint  # it has learned how fast the node is
            return self._tiers[url]

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
        info = self._registry.info(upload.run)
        compression = info.compression if info is not None else "auto"
        return tier.bring(gathering, image, ranges, earlier, lambda: check(upload), compression)

    def done(self, upload: Upload, ranges: Ranges) -> None:
        """All that was to be sent of a slot was: it is free, and what is in it remembered."""
        if self.uploads.brought(upload, whole=True):
            held = HeldPortion(upload.run, upload.name, ranges)
            held_portions.hold(self.ring, upload.slot, held, upload.id)


def check(upload: Upload) -> None:
    """Raise if an upload was given up meanwhile."""
    if upload.ended:
        raise ShareMissing(f"{upload.name} was given up")
