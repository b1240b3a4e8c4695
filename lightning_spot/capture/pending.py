"""A snapshot on its way from the training state into a slot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_spot.capture.contents import Plan
from lightning_spot.errors import TornSnapshot
from lightning_spot.image.floats import Floats
from lightning_spot.image.layout import Layout
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.host import Lease
from lightning_spot.staging.batch import SlotView
from lightning_spot.staging.job import CopyJob


class Opened(NamedTuple):
    """A snapshot whose slot is there.

    Attributes:
        layout: what rank 0 copies.
        lease: the slot.
        manifest: with its size.
        whole: the layout of the whole file.
        sent: first byte and length of the room for what other ranks send, by rank.
    """

    layout: Layout
    lease: Lease
    manifest: Manifest
    whole: Layout
    sent: Mapping[int, tuple[int, int]]


@dataclass(slots=True)
class Pending:
    """A snapshot on its way.

    Attributes:
        manifest: what it will be.
        lease: its slot.
        job: copies that may go on until the next optimizer step.
        done: becomes the manifest when committed, or the error.
        destinations: tiers below, if not the run's.
        outline: of its file, without the tensors.
        plan: what is copied.
        view: its slot, as the writer sees it.
        sent: first byte and length of the room for what other ranks send, by rank.
        floats: where in it numbers lie that may be approximated on their way to a memory node.
        followed: whether another one is to follow in a moment, see :meth:`Host.seal`.
    """

    manifest: Manifest
    lease: Lease
    job: CopyJob
    done: Future[Manifest]
    destinations: list[str] | None
    outline: Layout
    plan: Plan
    view: SlotView
    sent: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    floats: tuple[Floats, ...] = ()
    followed: bool = False

    @contextlib.contextmanager
    def rooms(self) -> Iterator[dict[int, memoryview]]:
        """The room for what other ranks send, by rank. It is let go of behind this: the slot may be closed then."""
        with contextlib.ExitStack() as held:
            whole = held.enter_context(memoryview(self.view.map))
            yield {
                rank: held.enter_context(whole[start : start + nbytes]) for rank, (start, nbytes) in self.sent.items()
            }

    def torn(self, found: int) -> TornSnapshot | None:
        """Why what was copied is worthless, if it is.

        Args:
            found: how many tensors were left out, and are not as they were thought to be.
        """
        name = self.manifest.name
        if self.job.moved:
            return TornSnapshot(
                f"snapshot {name} was dropped: {len(self.job.moved)} tensors changed between two optimizer steps while"
                " they were copied. From now on these are copied before the step goes on"
            )
        if found:
            return TornSnapshot(f"snapshot {name} was dropped: {found} tensors were not as they were thought to be")
        return None

    @property
    def is_here(self) -> bool:
        """Whether no other host takes part in it."""
        return self.lease.shared is None or not self.lease.shared.at

    @property
    def tried(self) -> Layout:
        """What of it is tried to be read back: of a sharded one, the rest of the checkpoint, which lies behind."""
        if not self.manifest.files:
            return self.outline
        rest = self.outline.frame[-1][1][: self.manifest.files[-1].nbytes]
        return Layout(len(rest), ((0, rest),), ())
