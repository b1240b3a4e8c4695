"""One rank's part of a snapshot, on its way into a slot that rank 0 has leased."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lightning_spot.capture.split import Number
from lightning_spot.staging.copier import CopyJob, Marks

What = TypeVar("What")


@dataclass(eq=False, slots=True)
class Task(Generic[What]):
    """A part on its way.

    Attributes:
        name: of the snapshot.
        who: writes it, for messages.
        number: which share of it is this rank's.
        at: URL of the run at the memory node, or durable tier, to which this host brings it; ``""`` on that of rank 0.
        what: is written, as at the seam; ``None`` once it is, so that nothing is kept alive.
        wait_s: how long rank 0 may wait for a clean slot.
        still: whether no tensor changes until it is there. Then nothing is left for training to copy, or to order.
        told: at a durable tier: what the node of this host has to know of the snapshot, and a checksum of all of it.
        after: what that had ordered on GPUs at the seam.
        job: the copies, once the slot is there.
        look: compares what the slot had already with the tensors, which must not change before; how many differ.
        begun: whether the copies have begun, or never will.
        late: whether training has gone on without them.
        done: becomes ``None`` when the bytes are in place.
    """

    name: str
    who: str
    number: Number
    at: str
    what: What | None
    wait_s: float
    still: bool = False
    told: tuple[str, str] = ("", "")
    after: Marks = field(default_factory=dict)
    job: CopyJob | None = None
    look: Callable[[], int] = int
    begun: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    late: bool = False
    done: Future[None] = field(default_factory=Future)

    def give_up(self, error: Exception | None) -> None:
        """Training goes on without the copies: they do not begin any more.

        Args:
            error: for which nobody may use those that have begun; ``None`` if training waits for these.
        """
        with self.lock:
            job = self.job
            self.late = job is None
        if job is not None and error is not None:
            job.fail(error)
