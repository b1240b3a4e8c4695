"""A copier's tensors, their places in a slot, and plans for it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.partitions import Partition, Span
from lightning_spot.capture.schedule import Schedule, Timetable
from lightning_spot.snapshot.pieces import Piece

SIZES = (3000, 1, 50_000, 700)


class Fixed(Schedule):
    """Gives every snapshot the same plan."""

    def __init__(self, parts: Sequence[tuple[int, float, Sequence[Span]]], limit_s: float) -> None:
        super().__init__("eager")
        self.made = Timetable(
            tuple(Partition(point, after_s, tuple(spans)) for point, after_s, spans in parts), limit_s
        )
        self.releases: list[Callable[[int], None]] = []

    @classmethod
    def still(cls) -> Fixed:
        """One for which training stands still."""
        schedule = cls([], 0.0)
        schedule.made = Timetable((), 0.0, stands_still=True)
        return schedule

    def timetable(self, addresses: Sequence[int], sizes: Sequence[int]) -> Timetable | None:
        return self.made

    def attach(self, release: Callable[[int], None]) -> None:
        self.releases.append(release)


class Desk:
    """Some tensors, their places in a slot, and a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tensors = [torch.full((size,), number + 1, dtype=torch.uint8) for number, size in enumerate(SIZES)]
        self.view = SlotView(mmap.mmap(-1, 2**17))
        places = [64, 4096, 8192, 2**16]
        self.pieces = [
            Piece(tensor.untyped_storage(), place, tensor.numel())
            for tensor, place in zip(self.tensors, places, strict=True)
        ]

    def read(self, number: int) -> torch.Tensor:
        piece = self.pieces[number]
        return self.view.tensor[piece.offset : piece.offset + piece.nbytes]

    def copied(self, number: int) -> bool:
        return bool((self.read(number) == number + 1).all())

    def untouched(self, number: int) -> bool:
        return bool((self.read(number) == 0).all())
