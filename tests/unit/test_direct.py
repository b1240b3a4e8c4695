"""Writing past the page cache: every byte arrives, whatever the memory, the file system or the kernel make of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_spot.store import posix
from lightning_spot.store.posix import write_aside, write_parts

pytestmark = pytest.mark.guarantee("G22")

MIB = 2**20
NBYTES = 3 * MIB + 1234  # neither a multiple of a page nor of a part


class Recorded:
    """A file that notes of each write whether it goes past the cache, and how many bytes it takes."""

    def __init__(self, path: Path, takes: Callable[[bool, int], int] = lambda _past, nbytes: nbytes) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed below
        self._takes = takes
        self.writes: list[tuple[bool, int]] = []

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: memoryview, /) -> int:
        past_cache = bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)
        count = self._file.write(data[: self._takes(past_cache, len(data))])
        self.writes.append((past_cache, count))
        return count

    def close(self) -> None:
        self._file.close()


def memory_of(nbytes: int, seed: int = 7) -> memoryview:
    """Memory whose first byte is at the beginning of a page, as a slot's."""
    shared = mmap.mmap(-1, nbytes)
    shared[:] = bytes((index * seed) % 251 for index in range(4096)) * (nbytes // 4096) + bytes(nbytes % 4096)
    return memoryview(shared)


def parts_of(image: memoryview, size: int = MIB) -> list[memoryview]:
    return [image[start : start + size] for start in range(0, len(image), size)]


def written(path: Path, parts: list[memoryview], **more: Callable[[bool, int], int]) -> list[tuple[bool, int]]:
    with contextlib.closing(Recorded(path, **more)) as file:
        write_parts(file, parts)
    assert path.read_bytes() == b"".join(parts)
    return file.writes


def test_pages_go_past_the_cache_and_the_rest_through_it(tmp_path: Path) -> None:
    assert written(tmp_path / "file", parts_of(memory_of(NBYTES))) == [(True, MIB)] * 3 + [(False, 1234)]
    # One part: its whole pages, then what is left of it.
    whole = NBYTES // 4096 * 4096
    assert written(tmp_path / "one", [memory_of(NBYTES)]) == [(True, whole), (False, NBYTES - whole)]


@pytest.mark.parametrize(
    "parts",
    [
        [memory_of(2 * MIB)[1:]],  # not at the beginning of a page in memory
        [memory_of(100), memory_of(MIB)],  # not at the beginning of a page in the file
        [memory_of(MIB).toreadonly()],  # tells no address
        [memory_of(4096)] * 3,  # small
    ],
)
def test_what_is_not_aligned_goes_through_the_cache(tmp_path: Path, parts: list[memoryview]) -> None:
    assert not any(past_cache for past_cache, _ in written(tmp_path / "file", parts))


def test_a_short_write_is_carried_on_at_any_place(tmp_path: Path) -> None:
    def odd(past_cache: bool, nbytes: int) -> int:
        return nbytes // 2 // 4096 * 4096 if past_cache and nbytes > MIB else max(1, nbytes - 1)

    writes = written(tmp_path / "file", [memory_of(4 * MIB)], takes=lambda past, n: odd(past, n) if past else n)
    assert writes[0][0]
    assert len(writes) > 2


@pytest.mark.parametrize(
    "number", [errno.EINVAL, errno.EOPNOTSUPP, 0, -1], ids=["EINVAL", "EOPNOTSUPP", "flag", "none"]
)
def test_a_system_that_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As a write, as the flag is set, or where there is no such flag."""
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(real(fd, command, argument))

    def takes(past_cache: bool, nbytes: int) -> int:
        if past_cache:
            raise OSError(number, os.strerror(number))
        return nbytes

    if number == 0:
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    elif number == -1:
        monkeypatch.setattr(posix, "DIRECT_FLAG", 0)
    writes = written(tmp_path / "file", parts_of(memory_of(NBYTES)), takes=takes)
    assert writes == [(False, MIB)] * 3 + [(False, 1234)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_is_no_refusal_is_an_error(tmp_path: Path, number: int) -> None:
    def fail(past_cache: bool, _nbytes: int) -> int:
        assert past_cache
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        written(tmp_path / "file", parts_of(memory_of(NBYTES)), takes=fail)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder that is not in memory, where the other temporary files may be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_slot_leaves_nothing_in_the_page_cache(on_disk: Path) -> None:
    image = memory_of(8 * MIB)
    path = write_aside(on_disk, parts_of(image), attempt=1, run_id="")
    probe = on_disk / "probe"
    refused = not written(probe, parts_of(memory_of(MIB)))[0][0]
    if refused:
        pytest.skip("the file system of the tests has no O_DIRECT")
    assert resident_pages(path) < 100  # of 2048; buffered they are all there
    assert path.read_bytes() == bytes(image)


def resident_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        found = (ctypes.c_ubyte * (len(mapped) // 4096))()
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), found
        )
        del first
        assert not failed
        return sum(page & 1 for page in found)
