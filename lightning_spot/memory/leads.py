"""The snapshots that a host leads, and whose turn it is at each place.

A snapshot counts when the memory node that carries the run on has it; the next one may begin then. To another node, the
one before may still be on its way: at such a node the newest waits for its turn, in its slot, and what had waited there
before passes. So of a row of snapshots that come faster than a node takes them, that node has the last one, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from lightning_spot.errors import SettingsError, ShareMissing, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Portion, PortionImage, Portions
from lightning_spot.image.written import Ranges
from lightning_spot.memory.joint import Shared, is_by_itself, urls_of
from lightning_spot.memory.tier import Gathering, JointTier
from lightning_spot.memory.upload import Upload

_LOOK_S = 1.0  # how often what waits for its turn looks whether it is still wanted

Begun = tuple[JointTier, Gathering]


class Passed(ShareMissing):
    """A snapshot is not brought to a place, for no fault of that place."""


@dataclass(eq=False, slots=True)
class Lead:
    """An upload that this host leads.

    Attributes:
        upload: that.
        shared: what was said of it.
        ranges: that this host brings.
        nbytes: of the image.
        hosts: how many bring it.
        portion: how the ranges lie in the slot; ``None`` where that holds the whole image.
        begun: for each place, by the URL of the run there, what was begun there, once it has.
        left: those of them at which it is not over.
        waits: those of them at which it waits for its turn.
        brought: as one of them has committed it.
    """

    upload: Upload
    shared: Shared
    ranges: Ranges
    nbytes: int
    hosts: int
    portion: Portion | None
    begun: dict[str, Future[Begun]]
    left: set[str]
    waits: set[str] = field(default_factory=set)
    brought: Manifest | None = None

    @classmethod
    def of(cls, upload: Upload) -> Lead:
        """The lead of an upload that several hosts bring to some places.

        Raises:
            SettingsError: if its layout does not say what each host brings, or its slot is none for that.
        """
        assert upload.joint is not None
        shared = upload.joint.shared
        nbytes = shared.image_nbytes or upload.nbytes
        portions = Portions.read(shared.layout, nbytes)
        ranges = portions.rest(nbytes)
        portion = Portion(ranges) if shared.image_nbytes else None
        if portion is not None and portion.nbytes != upload.nbytes:
            raise SettingsError(
                f"the first host brings {portion.nbytes} bytes of {shared.name}, its slot is for {upload.nbytes}"
            )
        urls = urls_of(shared.at)
        return cls(upload, shared, ranges, nbytes, portions.hosts, portion, {url: Future() for url in urls}, set(urls))

    @property
    def carrier(self) -> str:
        """URL of the run at the place that carries it on."""
        return next(iter(self.begun))

    @property
    def image(self) -> PortionImage | memoryview:
        """The image, as far as it lies in the slot."""
        memory = self.upload.slot.view(self.upload.nbytes)
        return PortionImage(self.portion, memory, self.nbytes) if self.portion is not None else memory


class Ended(NamedTuple):
    """What it means that a snapshot is over at a place.

    Attributes:
        brought: as some place has committed it; ``None`` if none has so far.
        counts: whether it is over at the place that carries the run on.
        is_last: whether it is over at all places now.
    """

    brought: Manifest | None
    counts: bool
    is_last: bool


class Leads:
    """The uploads that a host leads, in the order in which they began. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leads: dict[str, Lead] = {}

    def find(self, upload: Upload) -> Lead | None:
        """The lead of an upload, if it is not over."""
        return self._leads.get(upload.id)

    def busy(self) -> set[str]:
        """URLs of runs to which a snapshot is on its way, or waits for its turn."""
        with self._changed:
            return {url for lead in self._leads.values() for url in lead.left}

    def add(self, lead: Lead) -> None:
        """One begins: at other places than the one that carries the run on, after those that are on their way there."""
        with self._changed:
            lead.waits = (lead.left & self.busy()) - {lead.carrier}
            self._leads[lead.upload.id] = lead
            self._changed.notify_all()

    def end(self, upload: Upload) -> Lead | None:
        """An upload is over, here and everywhere; its lead, if it had one."""
        with self._changed:
            lead = self._leads.pop(upload.id, None)
            self._changed.notify_all()
            return lead

    def ended(self, lead: Lead, url: str, sealed: Manifest | None) -> Ended:
        """It is over at a place, as ``sealed`` if it was committed there. To say it again means nothing."""
        with self._changed:
            is_new = url in lead.left
            lead.left.discard(url)
            lead.waits.discard(url)
            lead.brought = lead.brought or sealed
            self._changed.notify_all()
            return Ended(lead.brought, lead.carrier not in lead.left, is_new and not lead.left)

    def wait(self, run: str | None, wait_s: float) -> list[str]:
        """Wait until nothing is on its way to durable tiers; what is in the end, one line each.

        Args:
            run: key of the run; ``None`` for any.
            wait_s: how long to wait.
        """

        def late() -> list[str]:
            leads = [lead for lead in self._leads.values() if run in (None, lead.upload.run)]
            return [
                f"{url}: {lead.shared.name} is on its way" for lead in leads for url in lead.left if is_by_itself(url)
            ]

        with self._changed:
            self._changed.wait_for(lambda: not late(), wait_s)
            return late()

    # -- whose turn it is -----------------------------------------------------------------------------------------

    def wait_turn(self, lead: Lead, url: str, goes_on: Callable[[], None]) -> None:
        """Wait until nothing earlier is on its way to a place.

        Args:
            lead: what is to begin there.
            url: of the place.
            goes_on: called now and then; what it raises ends this.

        Raises:
            Passed: if it is not to begin there any more.
        """
        try:
            while not self._has_turn(lead, url):
                goes_on()
        except SpotError as error:
            raise error if isinstance(error, Passed) else Passed(str(error)) from error
        finally:
            with self._changed:
                lead.waits.discard(url)
                self._changed.notify_all()

    def await_turn(self, lead: Lead, url: str) -> None:
        """Wait until :meth:`wait_turn` has ended."""
        with self._changed:
            self._changed.wait_for(lambda: url not in lead.waits)

    def make_way(self) -> list[Lead]:
        """Those that count already, and only wait for their turn, begin nowhere any more: they are over."""
        with self._changed:
            passing = [lead for lead in self._leads.values() if lead.brought and lead.left and lead.left <= lead.waits]
            for lead in passing:
                lead.left.clear()
                lead.waits.clear()
            self._changed.notify_all()
            return passing

    # -- inside ---------------------------------------------------------------------------------------------------

    def _has_turn(self, lead: Lead, url: str) -> bool:
        """Whether one may begin at a place, after a look at what is there before it.

        Raises:
            Passed: if it is not to begin there any more.
        """
        with self._changed:
            if url in lead.waits and self._is_awaited(lead, url):
                self._changed.wait(_LOOK_S)
            if url not in lead.left:
                raise Passed(f"its slot was needed before {url} had its turn")
            if url not in lead.waits:
                return True
            carrier = lead.begun[lead.carrier]
            if carrier.done() and carrier.exception() is not None:  # ranks of other hosts wait for it
                raise Passed(f"it has begun nowhere, and {url} has another one on its way")
            later = list(self._leads.values())[len(self._before(lead)) + 1 :]
            if overtaken := [other for other in later if url in other.left]:
                raise Passed(f"{overtaken[-1].shared.name} came before {url} had its turn")
            if self._is_awaited(lead, url):
                return False
            lead.waits.discard(url)  # from now on its slot does not make way
            return True

    def _is_awaited(self, lead: Lead, url: str) -> bool:
        return any(url in other.left for other in self._before(lead))

    def _before(self, lead: Lead) -> list[Lead]:
        """Those that began before one. Called under the lock."""
        return list(takewhile(lambda other: other is not lead, self._leads.values()))
