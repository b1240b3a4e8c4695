"""A checkpoint file's archive (ZIP64, stored records): its record table read, and the bytes around its records written.

The records of such a file are never compressed, so every tensor lies in one run of bytes. This module finds those runs
and the places of the CRC fields, and writes headers and directory, with the published zip format alone (APPNOTE.TXT
4.3): it needs no private torch reader, and no torch at all, so that a memory node can use it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_spot.errors import LayoutUnsupported
from lightning_spot.untrusted import plain

Buffer = memoryview | bytearray | bytes

ALIGNMENT = 64
"""Bytes of which the offset of every record's data is a multiple, as in files of ``torch.save``."""

CRC_IN_DESCRIPTOR = 4
"""Offset of the CRC in what follows a record's data."""

CRC_IN_DIRECTORY = 16
"""Offset of the CRC in a record's entry in the directory."""

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2sH")  # tag and length of a field of one's own
_SIZES64 = struct.Struct("<2sH2Q")
_LOCAL_CRC = 14  # in a local header
_STREAMED = 0x08  # flag: CRC and sizes follow the data in a descriptor
_UTF8 = 0x800
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF  # the number is in a ZIP64 field
_MADE_BY, _MADE_BY64 = 20, 45  # versions of the format that a reader needs
_CRC_BYTES = 4
_MOST_RECORDS = 2**18
_FIRST_DAY = 0x21  # 1980-01-01: the same bytes give the same file at any time


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


# -- writing ----------------------------------------------------------------------------------------------------------


def header(name: str, nbytes: int, at: int) -> bytes:
    """What stands in front of a record's data, padded so that the data begins at a multiple of :data:`ALIGNMENT`.

    Args:
        name: path inside the archive, ASCII.
        nbytes: length of the data.
        at: where in the file the header begins.
    """
    path = name.encode("ascii")
    large = nbytes >= _FULL
    sizes = _SIZES64.pack(b"\1\0", 16, nbytes, nbytes) if large else b""
    padding = -(at + _LOCAL.size + len(path) + len(sizes) + _EXTRA.size) % ALIGNMENT
    extra = sizes + _EXTRA.pack(b"FB", padding) + bytes(padding)
    size = _FULL if large else 0
    fields = (_version(large), _flags(nbytes), 0, 0, _FIRST_DAY, 0, size, size, len(path), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + path + extra


def descriptor(nbytes: int, crc: int = 0) -> bytes:
    """What stands behind a record's data. An empty record has none.

    Args:
        nbytes: length of the data.
        crc: its CRC-32; zero to have it filled in later.
    """
    if not nbytes:
        return b""
    return struct.pack("<4sL2Q" if nbytes >= _FULL else "<4s3L", b"PK\7\x08", crc, nbytes, nbytes)


def directory_entry(name: str, nbytes: int, header_at: int, crc: int = 0) -> bytes:
    """A record's entry in the directory; see :func:`header` and :func:`descriptor`."""
    path = name.encode("ascii")
    large, far = nbytes >= _FULL, header_at >= _FULL
    numbers = [*([nbytes, nbytes] if large else []), *([header_at] if far else [])]
    extra = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    size, version = _FULL if large else nbytes, _version(large or far)
    fields = (version, version, _flags(nbytes), 0, 0, _FIRST_DAY, crc, size, size, len(path), len(extra), 0, 0, 0, 0)
    return _CENTRAL.pack(b"PK\1\2", *fields, _FULL if far else header_at) + path + extra


def directory(entries: Sequence[bytes], at: int) -> bytes:
    """The directory, which ends the file.

    Args:
        entries: of all records, see :func:`directory_entry`.
        at: where in the file it begins.
    """
    table = b"".join(entries)
    count, end = len(entries), at + len(table)
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY64, _MADE_BY64, 0, 0, count, count, len(table), at)
    counted = min(count, _FULL16)
    last = _END.pack(b"PK\5\6", 0, 0, counted, counted, min(len(table), _FULL), min(at, _FULL), 0)
    return table + end64 + _END64_LOCATOR.pack(b"PK\6\7", 0, end, 1) + last


def _flags(nbytes: int) -> int:
    return _UTF8 | (_STREAMED if nbytes else 0)


def _version(large: bool) -> int:
    return _MADE_BY64 if large else _MADE_BY


# -- reading ----------------------------------------------------------------------------------------------------------


def read_entries(image: Buffer) -> list[ZipEntry]:
    """List the records of a stored (uncompressed) zip archive, in the order of its directory.

    Args:
        image: the whole file; holes may be unfilled, headers must be there.

    Raises:
        LayoutUnsupported: if this is no such archive, or two records have a byte in common.
    """
    view = memoryview(image)
    count, position = _directory(view)
    if count > _MOST_RECORDS:
        raise LayoutUnsupported(f"{count} records are more than a checkpoint file has")
    entries: list[ZipEntry] = []
    extents: list[tuple[int, int]] = []
    at = position
    for _ in range(count):
        entry, begin, at = _record(view, at)
        entries.append(entry)
        extents.append((begin, max(entry.offset + entry.nbytes, entry.crc_at[1] + _CRC_BYTES)))
    extents.sort()
    for (_, end), (begin, _) in pairwise([*extents, (position, at)]):
        if begin < end:  # who reads all records would read such bytes as often as the directory likes
            raise LayoutUnsupported("two records of the checkpoint file overlap, or one and the directory")
    return entries


def _unpack(form: struct.Struct, image: memoryview, at: int) -> tuple[Any, ...]:
    """Numbers at a place that the file itself names."""
    if not 0 <= at <= len(image) - form.size:
        raise LayoutUnsupported(f"the checkpoint file's record table names byte {at} of {len(image)}")
    return form.unpack_from(image, at)


def _record(image: memoryview, central: int) -> tuple[ZipEntry, int, int]:
    """A record by its entry in the directory; where its header begins, and where the next entry does."""
    fields = _unpack(_CENTRAL, image, central)
    signature, flags, method, stored_bytes, nbytes = fields[0], fields[3], fields[4], fields[8], fields[9]
    if signature != b"PK\x01\x02" or method != 0:
        raise LayoutUnsupported("a record of the checkpoint file is compressed or damaged")
    name_bytes, extra_bytes, comment_bytes, header = fields[10], fields[11], fields[12], fields[16]
    start = central + _CENTRAL.size
    name = bytes(image[start : start + name_bytes]).decode("utf-8", "replace")
    extra = image[start + name_bytes : start + name_bytes + extra_bytes]
    nbytes, stored_bytes, header = _zip64(extra, nbytes, stored_bytes, header)
    local = _unpack(_LOCAL, image, header)
    if local[0] != b"PK\x03\x04":
        raise LayoutUnsupported(f"record {plain(name)} has no local header where the directory says")
    offset = header + _LOCAL.size + local[9] + local[10]
    crc_at = header + _LOCAL_CRC
    if flags & _STREAMED:
        crc_at = offset + nbytes
        # The descriptor's signature is optional in the format; torch writes it.
        crc_at += 4 if bytes(image[crc_at : crc_at + 4]) == b"PK\x07\x08" else 0
    end = start + name_bytes + extra_bytes + comment_bytes
    if max(offset + nbytes, crc_at + _CRC_BYTES, end) > len(image):
        raise LayoutUnsupported(f"record {plain(name)} reaches beyond the end of the checkpoint file")
    return ZipEntry(name, offset, nbytes, (central + CRC_IN_DIRECTORY, crc_at)), header, end


def _directory(image: memoryview) -> tuple[int, int]:
    """Number of records and offset of the central directory."""
    end = len(image) - _END.size
    if end < 0 or bytes(image[end : end + 4]) != b"PK\x05\x06":
        raise LayoutUnsupported("the file does not end like a checkpoint written by torch.save (zip format)")
    _, _, _, _, count, _, position, _ = _END.unpack_from(image, end)
    locator = end - _END64_LOCATOR.size
    if locator >= 0 and bytes(image[locator : locator + 4]) == b"PK\x06\x07":
        fields = _unpack(_END64, image, _END64_LOCATOR.unpack_from(image, locator)[2])
        count, position = fields[7], fields[9]
    return count, position


def _zip64(extra: memoryview, nbytes: int, stored_bytes: int, header: int) -> tuple[int, int, int]:
    """Replace fields that overflowed 32 bits by those of the ZIP64 extra field, which lists only the overflowed."""
    found = [nbytes, stored_bytes, header]
    place = 0
    while place + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, place)
        place += 4
        if tag == 1:
            for index in [index for index, value in enumerate(found) if value == _FULL]:
                if size < 8 or place + 8 > len(extra):
                    raise LayoutUnsupported("a record of the checkpoint file has its size or place cut short")
                (found[index],) = struct.unpack_from("<Q", extra, place)
                place, size = place + 8, size - 8
        place += size
    return found[0], found[1], found[2]
