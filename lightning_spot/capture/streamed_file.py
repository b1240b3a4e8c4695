"""A snapshot that fits no memory: its file is made part by part, in order, from the tensors where they are.

Nothing may change the tensors meanwhile, so training waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_spot.image.layout import Layout
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.pieces import Piece
from lightning_spot.tiers.store import Store

_CHUNK_BYTES = 4 * 1024 * 1024


def store_streamed(layout: Layout, manifest: Manifest, store: Store) -> Manifest:
    """Bring a laid-out checkpoint to a tier, part by part; its sealed manifest, once it is committed there.

    Args:
        layout: of the checkpoint; nothing changes it meanwhile.
        manifest: what it is; size and checksums are filled in.
        store: the tier.

    Raises:
        SpotError: if it is not there in the end.
    """
    manifest = replace(manifest, nbytes=layout.nbytes)
    return store.put_parts(manifest, stream_parts(layout, manifest.part_bytes), attempt=manifest.attempt)


def stream_parts(layout: Layout, part_bytes: int) -> Iterator[memoryview]:
    """Yield the file of a laid-out checkpoint in parts of ``part_bytes`` each, but the last.

    Args:
        layout: of the checkpoint; its storages may be on any device.
        part_bytes: size of a part.

    Yields:
        the next part; it is valid until the one after it is asked for.
    """
    part = bytearray(min(part_bytes, layout.nbytes))
    filled, sent = 0, 0
    for data in _in_order(layout):
        place = 0
        while place < len(data):
            count = min(len(part) - filled, len(data) - place)
            part[filled : filled + count] = data[place : place + count]
            filled, place = filled + count, place + count
            if filled == len(part):
                yield memoryview(part)
                sent, filled = sent + filled, 0
                if layout.nbytes - sent < len(part):
                    part = bytearray(layout.nbytes - sent)


def _in_order(layout: Layout) -> Iterator[memoryview]:
    """The bytes of the file from its first to its last, in pieces of any size."""
    items: list[tuple[int, bytes | bytearray | Piece]] = [
        *layout.frame,
        *((piece.offset, piece) for piece in layout.pieces),
    ]
    for _, item in sorted(items, key=lambda found: found[0]):
        if isinstance(item, Piece):
            yield from _bytes_of(item)
        else:
            yield memoryview(item)


def _bytes_of(piece: Piece) -> Iterator[memoryview]:
    """The bytes of a storage, chunk by chunk in one buffer; from a GPU they are copied first."""
    source = torch.empty(0, dtype=torch.uint8, device=piece.storage.device).set_(piece.storage)
    buffer = bytearray(min(_CHUNK_BYTES, piece.nbytes))
    target = torch.frombuffer(buffer, dtype=torch.uint8)
    for start in range(0, piece.nbytes, _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, piece.nbytes - start)
        target[:count].copy_(source[start : start + count])
        yield memoryview(buffer)[:count]
