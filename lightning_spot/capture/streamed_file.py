"""A snapshot that fits no memory: its file is made part by part, in order, from the tensors where they are.

Nothing may change the tensors meanwhile, so training waits. The zip's CRCs are those of the bytes that were sent: a
record's own lies behind its data (or is computed beforehand, where the archive keeps it in front), the directory at the
end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_spot.image.layout import Layout
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.pieces import Piece
from lightning_spot.tiers.store import Store

_CRC = struct.Struct("<L")
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
    crcs: dict[int, int] = {}  # place in the file -> CRC-32 that belongs there
    for piece in layout.pieces:
        if not _behind(piece):
            crc = 0
            for chunk in _bytes_of(piece):
                crc = zlib.crc32(chunk, crc)
            crcs.update(dict.fromkeys(piece.crc_at, crc))
    items: list[tuple[int, bytes | bytearray | Piece]] = [
        *layout.frame,
        *((piece.offset, piece) for piece in layout.pieces),
    ]
    for offset, item in sorted(items, key=lambda found: found[0]):
        if isinstance(item, Piece):
            crc = 0
            for chunk in _bytes_of(item):
                crc = zlib.crc32(chunk, crc)
                yield chunk
            crcs.update(dict.fromkeys(item.crc_at, crc))
        else:
            yield _patched(offset, item, crcs)


def _behind(piece: Piece) -> bool:
    """Whether every place of the CRC comes after the data, so that it is known by then."""
    return all(place >= piece.offset + piece.nbytes for place in piece.crc_at)


def _patched(offset: int, data: bytes | bytearray, crcs: dict[int, int]) -> memoryview:
    inside = {place: crc for place, crc in crcs.items() if offset <= place < offset + len(data)}
    if not inside:
        return memoryview(data)
    changed = bytearray(data)
    for place, crc in inside.items():
        _CRC.pack_into(changed, place - offset, crc & 0xFFFFFFFF)
    return memoryview(changed)


def _bytes_of(piece: Piece) -> Iterator[memoryview]:
    """The bytes of a storage, chunk by chunk in one buffer; from a GPU they are copied first."""
    source = torch.empty(0, dtype=torch.uint8, device=piece.storage.device).set_(piece.storage)
    buffer = bytearray(min(_CHUNK_BYTES, piece.nbytes))
    target = torch.frombuffer(buffer, dtype=torch.uint8)
    for start in range(0, piece.nbytes, _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, piece.nbytes - start)
        target[:count].copy_(source[start : start + count])
        yield memoryview(buffer)[:count]
