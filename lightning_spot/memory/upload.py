"""One upload: a slot on its way to become a snapshot."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from lightning_spot.image.coming import Coming
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.written import Before, Ranges
from lightning_spot.memory.bases import Base
from lightning_spot.memory.joint import Joint
from lightning_spot.memory.slots import Slot


@dataclass(slots=True)
class Upload:
    """A slot on its way to become a snapshot.

    Attributes:
        id: names it in requests.
        run: key of its run.
        attempt: its writer.
        name: of the snapshot it was opened for, ``""`` if that was not said.
        slot: being filled.
        nbytes: size announced.
        session: the trainer's connection, if it is on this host.
        touched_s: when something was heard of it last (monotonic).
        received: ``offset -> (nbytes, xxh3-128)`` of parts that came over the network.
        held: the upload as which the slot was filled before, if nothing else was written into it since; else ``""``.
        base: from which parts may be made, if it comes over the network and an earlier snapshot is here.
        coming: hands these parts to whoever sends them on, if it was said what they are of.
        host: whose portion of a snapshot it is, if it is that of one of several hosts.
        joint: who fills it, if several ranks do.
        streams: connections that receive into the slot at the moment.
        sealing: whether it is being checksummed, which also writes the zip's CRCs.
        ended: whether it was committed or given up.
        given_up: whether its slot is to be freed once nothing writes into it any more.
    """

    id: str
    run: str
    attempt: int
    slot: Slot
    nbytes: int
    name: str
    session: str
    touched_s: float
    received: dict[int, tuple[int, str]] = field(default_factory=dict)
    held: str = ""
    base: Base | None = None
    streams: set[socket.socket] = field(default_factory=set)
    coming: Coming | None = None
    host: int | None = None
    joint: Joint | None = None
    sealing: bool = False
    ended: bool = False
    given_up: bool = False

    @property
    def is_gathered(self) -> bool:
        """Whether several hosts send it."""
        return self.joint is not None and self.joint.shared.by_hosts

    @property
    def in_use(self) -> bool:
        """Whether something still writes into the slot; other hosts do so by streams only."""
        writing = self.joint is not None and bool(self.joint.writing) and not self.is_gathered
        return self.sealing or bool(self.streams) or writing

    def before(self, manifest: Manifest, written: Ranges | None) -> Before | None:
        """What is known of the slot, which is about to be sealed; ``None`` if nothing is.

        Args:
            manifest: as which it will be.
            written: what was written since it was filled as :attr:`held`, ``None`` for all.
        """
        was = self.slot.held_as
        self.slot.seals += 1
        if written is None or not self.held or was is None or self.joint is not None:
            return None
        if not was.is_sealed:
            return None
        if was.part_bytes != manifest.part_bytes:
            return None
        whole = min(was.nbytes, manifest.nbytes) // manifest.part_bytes
        return Before(written, was.checksums[:whole], self.slot.seals)

    def let_go(self) -> None:
        """Let the base go, if nothing reads it any more and nothing will."""
        if self.base is not None and self.ended and not self.in_use:
            self.base.let_go()
            self.base = None
