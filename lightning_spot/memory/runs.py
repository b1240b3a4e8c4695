"""What a node keeps on its books: the runs it knows and the uploads under way."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from lightning_spot.memory.ring import Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a trainer, or the node before this one in the chain, says of a run when it opens it.

    Attributes:
        name: of the run, for people.
        id: its identity.
        location: its durable directory, see :class:`~lightning_spot.tiers.store.Claim`.
        attempt: the attempt that writes from now on.
        token: of the attempt.
        keep: snapshots each tier keeps.
        durable_url: durable directory as a store's URL; ``None`` if the node is not to write there.
        durable_every_s: least seconds between two snapshots brought to the durable tier; 0 for as often as it can.
        nodes: ``spot://host:port`` of the memory nodes behind this one, in order of preference.
        session: live connection of the trainer, if it is on this host.
        pid: its process id, for messages.
        host: name of its machine, for messages.
    """

    name: str
    id: str
    location: str
    attempt: int
    token: str
    keep: int = 2
    durable_url: str | None = None
    durable_every_s: float = 0.0
    nodes: tuple[str, ...] = ()
    session: str = ""
    pid: int = 0
    host: str = ""


@dataclass(slots=True)
class Run:
    """A run this node knows.

    Attributes:
        name: its name.
        attempt: the attempt that may write.
        destinations: URLs of the run's directories at the tiers below.
        keep: snapshots each tier keeps.
        session: id of the live connection of its trainer on this host, ``""`` if there is none.
        pid: process id of that trainer.
        complete: whether its trainer said that the run has ended.
    """

    name: str
    attempt: int = 0
    destinations: list[str] = field(default_factory=list)
    keep: int = 2
    session: str = ""
    pid: int = 0
    complete: bool = False


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
