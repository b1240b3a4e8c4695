"""What a node keeps on its books: the runs it knows and the uploads under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_spot.memory.ring import Slot


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
    """A slot on its way to become a snapshot."""

    id: str
    run: str
    attempt: int
    slot: Slot
    nbytes: int
    session: str
    touched_s: float
    received: dict[int, tuple[int, str]] = field(default_factory=dict)
