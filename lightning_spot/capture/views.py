"""The slots of this host's rings as the writer sees them: mapped once, pinned for a GPU, let go with their ring."""

from __future__ import annotations

import functools
import mmap
from weakref import WeakKeyDictionary

from lightning_spot.capture.contents import Content
from lightning_spot.memory.host import Host, Lease
from lightning_spot.staging.batch import SlotView
from lightning_spot.staging.copier import Copier


class SlotViews:
    """Views of slots, by ring and place in it. One slot is used by one thread at a time, which leased it.

    Args:
        copier: pins slots, and unpins them before they are unmapped.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._views: dict[Host, dict[int, SlotView]] = {}
        self._contents: WeakKeyDictionary[SlotView, Content] = WeakKeyDictionary()

    def of(self, host: Host, lease: Lease) -> SlotView:
        """The view of a leased slot; made anew if the slot has other memory than last time."""
        if host not in self._views:
            self._views[host] = {}
            host.released = functools.partial(self._release, host)
        views = self._views[host]
        view = views.get(lease.slot)
        if view is None or view.map is not lease.map:
            if view is not None:
                self._copier.unpin(view)
            view = views[lease.slot] = SlotView(lease.map)
        return view

    def content(self, view: SlotView) -> Content:
        """What a slot holds, as far as it is known."""
        return self._contents.setdefault(view, Content())

    def others(self, host: Host | None) -> list[Host]:
        """Rings beside ``host`` of which there are views: they were lost."""
        return [other for other in list(self._views) if other is not host]

    def drop(self, host: Host) -> None:
        """Let the slots of a ring go; nothing may be copied into them any more."""
        host.released = None
        for view in self._views.pop(host, {}).values():
            self._copier.unpin(view)

    def _release(self, host: Host, shared: mmap.mmap) -> None:
        """The ring has replaced a slot: let its memory go before it is unmapped."""
        views = self._views.get(host, {})
        for slot in [slot for slot, view in list(views.items()) if view.map is shared]:  # another thread may add one
            self._copier.unpin(views.pop(slot))
