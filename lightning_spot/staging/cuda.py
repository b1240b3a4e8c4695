"""Copies CUDA storages into pinned slots on a side stream. Only touches CUDA when it is given a CUDA storage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from lightning_spot.image.layout import Piece

logger = logging.getLogger(__name__)


class CudaCopier:
    """Orders device-to-host copies on one side stream per device.

    A slot is pinned (page-locked, ``cudaHostRegister``) the first time it is copied to, because only a copy into
    pinned memory runs beside kernels.
    """

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._last: dict[int, torch.cuda.Event] = {}
        self._pinned: set[int] = set()

    def copy(self, pieces: Sequence[Piece], slot: torch.Tensor) -> Callable[[], None]:
        """Order the copies of ``pieces`` into ``slot`` and return a function that waits until they are done.

        Args:
            pieces: CUDA storages and their places.
            slot: uint8 CPU tensor of shape ``(capacity,)`` over the slot.
        """
        self.pin(slot)
        devices = sorted({piece.storage.device.index or 0 for piece in pieces})
        events = [self._copy_device(index, pieces, slot) for index in devices]
        kept = list(pieces)

        def finish() -> None:
            for event in events:
                event.synchronize()
            kept.clear()

        return finish

    def fence(self) -> None:
        """Make each device's current stream wait for the copies ordered so far (no host wait)."""
        for index, event in self._last.items():
            torch.cuda.current_stream(index).wait_event(event)

    def _copy_device(self, index: int, pieces: Sequence[Piece], slot: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.device(index):
            stream = self._streams.get(index)
            if stream is None:
                stream = self._streams[index] = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's
            stream.wait_stream(torch.cuda.current_stream())  # what training ordered so far comes first
            with torch.cuda.stream(stream):
                for piece in pieces:
                    if (piece.storage.device.index or 0) == index:
                        source = torch.empty(0, dtype=torch.uint8, device=piece.storage.device).set_(piece.storage)
                        slot[piece.offset : piece.offset + piece.nbytes].copy_(source, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
                event.record(stream)
        self._last[index] = event
        return event

    def pin(self, slot: torch.Tensor) -> None:
        """Page-lock a slot, once."""
        address = slot.data_ptr()
        if address in self._pinned:
            return
        self._pinned.add(address)
        # 1 = cudaHostRegisterPortable: pinned for every device's context
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
        code = cudart.cudaHostRegister(address, slot.numel(), 1)
        if int(code) != 0:
            logger.warning(
                "a slot of %d bytes could not be page-locked (CUDA error %d); snapshots are right but slower:"
                " raise the container's memlock limit (docker: --ulimit memlock=-1)",
                slot.numel(),
                int(code),
            )

    def unpin(self, slot: torch.Tensor) -> None:
        """Undo :meth:`pin` once the copies under way are done; call it before the slot is unmapped.

        Another slot may be mapped at the same address later: with this one's registration left, copies would go to
        pages that are no longer mapped there.
        """
        address = slot.data_ptr()
        if address not in self._pinned:
            return
        for event in self._last.values():
            event.synchronize()
        self._pinned.discard(address)
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
        if int(cudart.cudaHostUnregister(address)) != 0:
            logger.debug("a slot was not page-locked")
