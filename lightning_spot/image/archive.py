"""Reads the record table of a checkpoint file (a ZIP64 archive with stored records), and where its CRCs are.

``torch.save`` writes a zip whose records are never compressed, so every tensor lies in one run of bytes. This module
finds those runs, and the places of the CRC fields, with the published zip format alone (APPNOTE.TXT 4.3): it needs no
private torch reader, and no torch at all, so that a memory node can use it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_spot.errors import LayoutUnsupported

Buffer = memoryview | bytearray | bytes

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL_CRC = 16  # offset of the CRC in a central record
_LOCAL_CRC = 14  # and in a local header
_STREAMED = 0x08  # flag: CRC and sizes follow the data in a descriptor


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One record of the archive.

    Attributes:
        name: path inside the archive, such as ``model/data/0``.
        offset: first byte of its data in the file.
        nbytes: length of its data.
        crc_at: places of the 4-byte little-endian CRC-32 fields that describe it.
    """

    name: str
    offset: int
    nbytes: int
    crc_at: tuple[int, ...]


def read_entries(image: Buffer) -> list[ZipEntry]:
    """List the records of a stored (uncompressed) zip archive, in the order of its directory.

    Args:
        image: the whole file; holes may be unfilled, headers must be there.

    Raises:
        LayoutUnsupported: if this is no such archive.
    """
    try:
        return list(_walk(memoryview(image)))
    except struct.error as error:
        raise LayoutUnsupported(f"the checkpoint file's record table cannot be read: {error}") from error


def _walk(image: memoryview) -> Iterator[ZipEntry]:
    count, position = _directory(image)
    for _ in range(count):
        fields = _CENTRAL.unpack_from(image, position)
        signature, flags, method = fields[0], fields[3], fields[4]
        if signature != b"PK\x01\x02" or method != 0:
            raise LayoutUnsupported("a record of the checkpoint file is compressed or damaged")
        stored_bytes, nbytes = fields[8], fields[9]
        name_bytes, extra_bytes, comment_bytes, header = fields[10], fields[11], fields[12], fields[16]
        start = position + _CENTRAL.size
        name = bytes(image[start : start + name_bytes]).decode("utf-8", "replace")
        extra = image[start + name_bytes : start + name_bytes + extra_bytes]
        nbytes, stored_bytes, header = _zip64(extra, nbytes, stored_bytes, header)
        yield _record(image, name, flags, header, nbytes, position)
        position = start + name_bytes + extra_bytes + comment_bytes


def _record(image: memoryview, name: str, flags: int, header: int, nbytes: int, central: int) -> ZipEntry:
    local = _LOCAL.unpack_from(image, header)
    if local[0] != b"PK\x03\x04":
        raise LayoutUnsupported(f"record {name!r} has no local header where the directory says")
    offset = header + _LOCAL.size + local[9] + local[10]
    places = [central + _CENTRAL_CRC]
    if flags & _STREAMED:
        after = offset + nbytes
        # The descriptor's signature is optional in the format; torch writes it.
        places.append(after + 4 if bytes(image[after : after + 4]) == b"PK\x07\x08" else after)
    else:
        places.append(header + _LOCAL_CRC)
    return ZipEntry(name, offset, nbytes, tuple(places))


def _directory(image: memoryview) -> tuple[int, int]:
    """Number of records and offset of the central directory."""
    end = len(image) - _END.size
    if end < 0 or bytes(image[end : end + 4]) != b"PK\x05\x06":
        raise LayoutUnsupported("the file does not end like a checkpoint written by torch.save (zip format)")
    _, _, _, _, count, _, position, _ = _END.unpack_from(image, end)
    locator = end - _END64_LOCATOR.size
    if locator >= 0 and bytes(image[locator : locator + 4]) == b"PK\x06\x07":
        end64 = _END64_LOCATOR.unpack_from(image, locator)[2]
        fields = _END64.unpack_from(image, end64)
        count, position = fields[7], fields[9]
    return count, position


def _zip64(extra: memoryview, nbytes: int, stored_bytes: int, header: int) -> tuple[int, int, int]:
    """Replace fields that overflowed 32 bits by those of the ZIP64 extra field, which lists only the overflowed."""
    place = 0
    while place + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, place)
        if tag == 1:
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, place + 4))
            full = 0xFFFFFFFF
            nbytes = next(values) if nbytes == full else nbytes
            stored_bytes = next(values) if stored_bytes == full else stored_bytes
            header = next(values) if header == full else header
        place += 4 + size
    return nbytes, stored_bytes, header
