"""A laid-out file, filled the slow way: what copiers and streams are compared with; and what its archive has to be."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import torch

from lightning_spot.snapshot.layout import Layout


def fill(layout: Layout) -> bytearray:
    """The whole file."""
    image = bytearray(b"\xaa" * layout.nbytes)  # dirty memory: every byte must be written
    for offset, data in layout.frame:
        image[offset : offset + len(data)] = data
    for piece in layout.pieces:
        source = torch.empty(0, dtype=torch.uint8).set_(piece.storage)[piece.start :][: piece.nbytes]
        image[piece.offset : piece.offset + piece.nbytes] = source.numpy().tobytes()
    return image


def check_archive(file: Path | bytes | bytearray | memoryview) -> None:
    """Fail unless Python's ``zipfile`` reads every record, but for tensors' bytes, which have no CRC."""
    with zipfile.ZipFile(file if isinstance(file, Path) else io.BytesIO(file)) as archive:
        for record in archive.infolist():
            if record.CRC or "/data/" not in record.filename:
                archive.read(record)
