"""Page-locks slots for GPUs, and shows them to their kernels: all that is asked of CUDA itself, not of torch.

Only a copy into page-locked memory runs beside kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device's context
PAGE_LOCKED_BYTES = 64 * 1024 * 1024
"""What is page-locked at once, from the beginning of a slot. No copy may go from one such piece into the next.

While CUDA page-locks memory, nothing is launched: 0.76 s for 12 GB at once (H100), 3 ms at most for so much.
"""
_UNKNOWN = 999  # cudaErrorUnknown
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_locked: dict[int, tuple[int, int]] = {}
"""What this process has page-locked, as CUDA knows it: address, bytes, and the device it was asked of."""
_locking = threading.Lock()
_seen: dict[int, torch.Tensor] = {}
"""Slots as tensors of the device by which they were page-locked, if its kernels see them where they are here."""


def lock(address: int, nbytes: int, index: int) -> int:
    """Page-lock memory of the host, from which a device is copied to; 0, or CUDA's error.

    It goes piece by piece: training goes on between them. What was page-locked where this memory lies now was unmapped
    without being let go: CUDA would go on copying to the pages that were there before.
    """
    end = address + nbytes
    pieces = [(at, min(PAGE_LOCKED_BYTES, end - at)) for at in range(address, end, PAGE_LOCKED_BYTES)]
    with _locking:
        _let_go(address, end)
        calls = [functools.partial(_lock, *piece, index) for piece in pieces]
        code = _apart(index, [*calls, functools.partial(_see, pieces)])
        if code != 0:
            _let_go(address, end)
    return code


def let_go(address: int, nbytes: int) -> int:
    """Undo :func:`lock`; 0, or CUDA's error."""
    with _locking:
        return _let_go(address, address + nbytes)


def seen(address: int, index: int) -> torch.Tensor | None:
    """Page-locked memory as a tensor of a device: what is written there is here. ``None`` if it doesn't see it."""
    found = _seen.get(address)
    return found if found is not None and found.device.index == index else None


def _lock(address: int, nbytes: int, index: int) -> int:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
    if (code := int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))) == 0:
        _locked[address] = nbytes, index
    return code


class _Bytes:
    """Memory that a device sees, as torch and others ask for it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _see(pieces: Sequence[tuple[int, int]]) -> int:
    """Note a slot of these page-locked pieces, if the device sees each of them where it is for the host."""
    driver, address = _driver(), pieces[0][0]
    if driver is None:
        return 0
    for at, _ in pieces:
        there = ctypes.c_void_p()
        code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(there), ctypes.c_void_p(at), 0)
        if code != 0 or there.value != at:
            logger.debug("the GPU does not see a slot where it is: %s, CUDA error %d", there.value, code)
            return 0
    try:
        found = torch.as_tensor(_Bytes(address, sum(nbytes for _, nbytes in pieces)))
    except (RuntimeError, TypeError) as error:
        logger.debug("a slot is no tensor of the GPU: %s", error)
        return 0
    if found.data_ptr() == address and found.is_cuda:
        _seen[address] = found
    return 0


def _let_go(first: int, end: int) -> int:
    """Undo :func:`_lock` for all that lies there in part; 0, or CUDA's error."""
    gone = [at for at, (nbytes, _) in _locked.items() if at < end and first < at + nbytes]
    if not gone:
        return 0
    index = _locked[gone[0]][1]
    return _apart(index, [functools.partial(_unlock, address) for address in gone])


def _unlock(address: int) -> int:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
    del _locked[address]
    _seen.pop(address, None)
    return int(cudart.cudaHostUnregister(address))


@functools.cache
def _driver() -> Any:
    """CUDA's driver; ``None`` if there is none of that name."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        logger.debug("a CUDA graph may be recorded in the default mode only while no slot is made: %s", error)
        return None


@contextlib.contextmanager
def beside_recordings() -> Iterator[None]:
    """Call CUDA on this thread, whatever others do.

    While one records a graph in the mode that is torch's default, CUDA refuses most calls on all threads, and the graph
    is lost by them. It does neither to a thread that has said that it knows.
    """
    mode = ctypes.c_int(_RELAXED)
    driver = _driver()
    if driver is None or driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _apart(index: int, calls: Sequence[Callable[[], int]]) -> int:
    """Call CUDA's runtime on a thread of its own, whose device is ``index``, until a call fails; 0, or its error.

    CUDA keeps an error for the thread that made it, and torch raises it at whatever that thread launches next. After
    each call training has as much time as it took.
    """
    codes = [0]

    def work() -> None:
        try:
            with torch.cuda.device(index), beside_recordings():
                for call in calls:
                    began_s = time.perf_counter()
                    codes.append(call())
                    if codes[-1] != 0:
                        return
                    time.sleep(time.perf_counter() - began_s)
        except RuntimeError as error:  # the device is lost
            logger.debug("GPU %d has failed: %s", index, error)
            codes.append(_UNKNOWN)

    thread = threading.Thread(target=work, name="spot-page-lock", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and nothing is launched any more
        work()
    else:
        thread.join()
    return codes[-1]
