"""GPUs that are lists of work, done in any order that streams and events allow: what is not ordered comes out wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class FakeEvent:
    stream: FakeStream
    number: int
    """It is over when so many pieces of work of its stream are done."""

    @property
    def is_over(self) -> bool:
        return self.stream.done >= self.number


@dataclass(eq=False)
class FakeStream:
    index: int
    work: list[tuple[FakeEvent | None, Callable[[], None]]] = field(default_factory=list)
    done: int = 0

    @property
    def is_ready(self) -> bool:
        if self.done >= len(self.work):
            return False
        awaited = self.work[self.done][0]
        return awaited is None or awaited.is_over

    def advance(self) -> None:
        self.work[self.done][1]()
        self.done += 1


class FakeDevice:
    """Storages of the CPU that count as a GPU's. Nothing is done before somebody waits, or :meth:`run` is called.

    Attributes:
        seed: of the order in which streams go on; ``"late"`` lets the others run before side streams do.
        capturing: whether a graph is being recorded.
        synchronized: how often the host waited.
        written: copies that kernels made.
        sees: whether kernels may write into slots.
        room: bytes that can be allocated.
        pinned: slots that are page-locked: bytes by address.
        pinned_by: names of the threads that have page-locked some: it takes long.
        unpinned_copies: into memory of the host that is not: for these, the host waits.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.training = FakeStream(0)
        self.streams = [self.training]
        self.storages: set[int] = set()
        self.capturing = False
        self.synchronized = 0
        self.warmed: list[FakeStream] = []
        self.written = 0
        self.sees = True
        self.room = 2**40
        self.allocated = 0
        self.pinned: dict[int, int] = {}
        self.pinned_by: set[str] = set()
        self.unpinned_copies = 0
        self._own: list[torch.Tensor] = []
        self._lock = threading.RLock()  # nothing is done twice where several threads wait

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        self.storages |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def do(self, work: Callable[[], None]) -> None:
        """Training orders some work."""
        self.training.work.append((None, work))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let streams go on in an order of chance, until there is nothing left."""
        with self._lock:
            while not until():
                ordered = [(stream, len(stream.work)) for stream in self.streams]  # others order more meanwhile
                ready = [stream for stream in self.streams if stream.is_ready]
                if not ready:
                    assert until() or all(stream.done >= count for stream, count in ordered), "a deadlock"
                    return
                self.random.choice(ready).advance()

    def kind(self, storage: torch.UntypedStorage) -> str:
        return "cuda" if storage.data_ptr() in self.storages else storage.device.type

    def kinds(self, storages: Sequence[torch.UntypedStorage]) -> list[str]:
        return list(map(self.kind, storages))

    def index(self, storage: torch.UntypedStorage) -> int:
        return 0

    def current(self, index: int) -> FakeStream:
        return self.training

    def stream(self, index: int) -> FakeStream:
        made = FakeStream(index)
        self.streams.append(made)  # other threads make some, too
        return made

    def warm(self, stream: FakeStream) -> None:
        self.warmed.append(stream)

    def record(self, stream: FakeStream, *, timed: bool = False) -> FakeEvent:
        assert not self.capturing, "an event of ours in the graph of a user"
        return FakeEvent(stream, len(stream.work))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        assert not self.capturing
        stream.work.append((event, lambda: None))

    def copy(self, stream: FakeStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            self.unpinned_copies += not self._is_fast(target)
            stream.work.append((None, lambda target=target, source=source: target.copy_(source)))

    def _is_fast(self, target: torch.Tensor) -> bool:
        """Whether a target lies on the device, or is page-locked."""
        first, last = target.data_ptr(), target.data_ptr() + target.nbytes
        places = [*self.pinned.copy().items(), *((own.data_ptr(), own.nbytes) for own in self._own)]
        return any(at <= first and last <= at + nbytes for at, nbytes in places)

    def write(self, stream: FakeStream, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.written += len(targets)
        self.copy(stream, zip(targets, sources, strict=True))

    def seen(self, slot: torch.Tensor, index: int) -> torch.Tensor | None:
        return slot if self.sees else None

    def to_host(self, number: torch.Tensor) -> tuple[torch.Tensor, FakeEvent]:
        here = torch.empty_like(number)
        stream = self.current(0)
        self.copy(stream, [(here, number)])
        return here, self.record(stream)

    def is_over(self, event: FakeEvent) -> bool:
        return event.is_over

    def seconds(self, first: FakeEvent, last: FakeEvent) -> float:
        return float(last.number - first.number)

    def synchronize(self, event: FakeEvent) -> None:
        self.synchronized += 1
        self.run(lambda: event.is_over)
        assert event.is_over

    def allocate(self, index: int, nbytes: int) -> torch.Tensor | None:
        if nbytes > self.room:
            return None
        self.allocated += nbytes
        made = torch.zeros(nbytes, dtype=torch.uint8)
        self._own.append(made)
        return made

    def is_capturing(self) -> bool:
        return self.capturing

    def pin(self, slot: torch.Tensor, index: int) -> int:
        first, last = slot.data_ptr(), slot.data_ptr() + slot.nbytes
        overlaps = any(at < last and first < at + nbytes for at, nbytes in self.pinned.copy().items())
        assert not overlaps, "this memory, or some of it, is page-locked already"
        self.pinned[first] = slot.nbytes
        self.pinned_by.add(threading.current_thread().name)
        return 0

    def unpin(self, slot: torch.Tensor) -> int:
        del self.pinned[slot.data_ptr()]
        return 0


class StreamOfEachThread(FakeDevice):
    """The thread that trains has a stream of its own; all others have the default one."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.trains = threading.get_ident()
        self.default = self.stream(0)

    def current(self, index: int) -> FakeStream:
        return self.training if threading.get_ident() == self.trains else self.default


class Emulated(FakeDevice):
    """Two GPUs under a real training: what that orders is done at once, as its results are read; side streams lag.

    Attributes:
        waited: the threads that waited for one.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.waited: list[threading.Thread] = []

    def kind(self, storage: torch.UntypedStorage) -> str:
        return "cuda" if storage.nbytes() >= 64 else "cpu"  # counters of optimizers stay there

    def index(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes() // 64 % 2

    def record(self, stream: FakeStream, *, timed: bool = False) -> FakeEvent:
        with self._lock:
            return super().record(stream, timed=timed)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            if stream is self.training:
                self.run(lambda: event.is_over)
            else:
                super().wait(stream, event)

    def copy(self, stream: FakeStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self._lock:
            if stream is self.training:
                for target, source in pairs:
                    self.unpinned_copies += not self._is_fast(target)
                    target.copy_(source)
                return
            super().copy(stream, pairs)
            for _ in range(self.random.randrange(3)):  # some of it, or of what was ordered before
                if ready := [other for other in self.streams if other.is_ready]:
                    self.random.choice(ready).advance()

    def synchronize(self, event: FakeEvent) -> None:
        with self._lock:
            self.waited.append(threading.current_thread())
            super().synchronize(event)
