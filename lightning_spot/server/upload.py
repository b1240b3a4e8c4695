"""One upload: a slot on its way to become a snapshot, and what has come of it. See ``uploads`` for what is done."""

from __future__ import annotations

import contextlib
import socket
import threading
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from lightning_spot.errors import CorruptSnapshotError, SnapshotNotFoundError
from lightning_spot.server.ring import Base
from lightning_spot.server.slots import Slot
from lightning_spot.snapshot.manifest import Manifest

_OTHER_ENDS_S = 10.0


class Received:
    """Which ranges of an upload came over the network: a range is checked once its last write is, and not before.

    Ranges never overlap: what was checked is written again as a whole, or not at all. Any thread may call it.

    Attributes:
        checked: ``offset -> (nbytes, xxh3-128)`` of those that are here.
    """

    def __init__(self) -> None:
        self.checked: dict[int, tuple[int, str]] = {}
        self._stops: dict[int, int] = {}  # of all ranges that were ever begun
        self._starts: list[int] = []  # of these, in order
        self._writers: dict[int, socket.socket | None] = {}
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        """Bytes that are here and checked."""
        with self._changed:
            return sum(nbytes for nbytes, _ in self.checked.values())

    def begin(self, start: int, stop: int, connection: socket.socket | None = None) -> None:
        """A range is about to be written: it is not checked any more. A connection that still writes it is closed.

        Raises:
            CorruptSnapshotError: if it overlaps another range.
            SnapshotNotFoundError: if nothing more may come.
        """
        with self._changed:
            self._admit(start, stop)
            while start in self._writers:  # its sender has lost that connection, and we have not heard of it yet
                other = self._writers[start]
                with contextlib.suppress(OSError):
                    if other is not None:
                        other.shutdown(socket.SHUT_RDWR)
                if not self._changed.wait(_OTHER_ENDS_S):
                    raise CorruptSnapshotError(f"bytes {start}–{stop} still come over another connection")
            if self._closed:
                raise SnapshotNotFoundError("this upload is being committed: nothing more may come")
            self.checked.pop(start, None)
            self._writers[start] = connection

    def end(self, start: int, digest: str | None) -> None:
        """A range is written no more; with its checksum, if that is what was announced."""
        with self._changed:
            self._writers.pop(start, None)
            if digest is not None:
                self.checked[start] = (self._stops[start] - start, digest)
            self._changed.notify_all()

    def close(self) -> dict[int, tuple[int, str]]:
        """Let nothing more come; what is here and checked."""
        with self._changed:
            self._closed = True
            return dict(self.checked)

    def _admit(self, start: int, stop: int) -> None:
        if self._stops.get(start) == stop:
            return
        at = bisect_left(self._starts, start)
        before = self._stops[self._starts[at - 1]] if at else 0
        after = self._starts[at] if at < len(self._starts) else stop
        if before > start or after < stop or after == start:
            raise CorruptSnapshotError(f"bytes {start}–{stop} overlap another part of this upload, which came before")
        insort(self._starts, start)
        self._stops[start] = stop


@dataclass(slots=True)
class Upload:
    """A slot on its way to become a snapshot, a shard of one, or a user's file.

    Attributes:
        id: names it in requests.
        run: key of its run.
        attempt: its writer.
        slot: being filled.
        nbytes: size announced.
        session: the trainer's connection, if it is on this host.
        touched_s: when something was heard of it last (monotonic).
        writer: number of the rank that writes it; 0 where one writes all.
        announced: manifest without checksums, if it comes over the network: nothing else can be committed then.
        received: what came over the network.
        base: from which parts may be made, if it comes over the network and an earlier snapshot is here.
        streams: connections that receive into the slot at the moment.
        sealing: whether it is being checksummed.
        ended: whether it was committed or given up.
        given_up: whether its slot is to be freed once nothing writes into it any more.
    """

    id: str
    run: str
    attempt: int
    slot: Slot
    nbytes: int
    session: str
    touched_s: float
    writer: int = 0
    announced: Manifest | None = None
    received: Received = field(default_factory=Received)
    base: Base | None = None
    streams: set[socket.socket] = field(default_factory=set)
    sealing: bool = False
    ended: bool = False
    given_up: bool = False

    @property
    def name(self) -> str:
        """What it was announced as, for people."""
        return self.announced.name if self.announced is not None else self.id

    @property
    def in_use(self) -> bool:
        """Whether something still writes into the slot."""
        return self.sealing or bool(self.streams)

    def let_go(self) -> None:
        """Let the base go, if nothing reads it any more and nothing will."""
        if self.base is not None and self.ended and not self.in_use:
            self.base.let_go()
            self.base = None


def writer_of(manifest: Manifest) -> int:
    """Number of the rank that writes a snapshot, file or shard; 0 where one writes all."""
    return manifest.shard.writer if manifest.shard is not None else 0
