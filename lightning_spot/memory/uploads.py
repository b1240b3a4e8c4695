"""An upload: a slot on its way to become a snapshot."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from lightning_spot.memory.ring import Slot


@dataclass(slots=True)
class Upload:
    """A slot on its way to become a snapshot.

    Attributes:
        id: names it in requests.
        run: its run.
        attempt: its writer.
        slot: being filled.
        nbytes: size announced.
        session: the trainer's connection, if it is on this host.
        touched_s: when something was heard of it last (monotonic).
        received: ``offset -> (nbytes, xxh3-128)`` of parts that came over the network.
        streams: connections that receive into the slot at the moment.
        sealing: whether it is being checksummed, which also writes the zip's CRCs.
        given_up: whether its slot is to be freed once nothing writes into it any more.
    """

    id: str
    run: str
    attempt: int
    slot: Slot
    nbytes: int
    session: str
    touched_s: float
    received: dict[int, tuple[int, str]] = field(default_factory=dict)
    streams: set[socket.socket] = field(default_factory=set)
    sealing: bool = False
    given_up: bool = False

    @property
    def in_use(self) -> bool:
        """Whether something still writes into the slot."""
        return self.sealing or bool(self.streams)
