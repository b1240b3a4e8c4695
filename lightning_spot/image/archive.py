"""A checkpoint file's archive (ZIP64, stored records): the bytes around its records.

The records of such a file are never compressed, so every tensor lies in one run of bytes. Headers and directory are
written by the published zip format (APPNOTE.TXT 4.3). The CRC-32 of a tensor's bytes is 0 in them, as in files that
torch writes after ``torch.serialization.set_crc32_options(False)``: a snapshot's manifest has checksums of every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

ALIGNMENT = 64
"""Bytes of which the offset of every record's data is a multiple, as in files of ``torch.save``."""

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2sH")  # tag and length of a field of one's own
_SIZES64 = struct.Struct("<2sH2Q")
_STREAMED = 0x08  # flag: CRC and sizes follow the data in a descriptor
_UTF8 = 0x800
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF  # the number is in a ZIP64 field
_MADE_BY, _MADE_BY64 = 20, 45  # versions of the format that a reader needs
_FIRST_DAY = 0x21  # 1980-01-01: the same bytes give the same file at any time


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
        crc: its CRC-32; 0 for none.
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
