"""Whether a thread is still at what it was doing: an operation of torch shows its effects when it ends, not before."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import operator
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

LONGEST_S = 2.0
"""An operation that takes longer is not waited for: nothing that writes to one tensor does."""

_FIRST_LOOK_S, _LATER_LOOKS_S = 0.001, 0.05

_MAY_STOP_FOR_EVER = (3, 11) <= sys.version_info < (3, 11, 9)
"""Whether to collect garbage while Python lists its frames can hang the process (python/cpython issue 106883)."""

_IN_MIDST_OF_A_FRAME = sys.version_info[:2] == (3, 11)
"""Whether garbage is collected in the middle of making the object of a frame. That may let another thread run, whose
frame is gone then: its memory is written to, and what is found in it is no frame. If a longer function was called in
its place, Python copies that one's frame into an object too small for it, over what lies behind: the C library aborts
later on (``malloc(): unaligned tcache chunk detected``, ``double free or corruption``)."""

_call: Any = getattr(operator, "call", None)  # Python 3.11 has it


class Operation:
    """What a thread is doing now, as far as Python sees it: one call of one function.

    Args:
        thread: its number, see ``threading.get_ident``.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        frame = _frame_of(thread)
        # No frame is kept: it would keep all tensors alive that its function has.
        self._place = (id(frame), frame.f_lasti) if frame is not None else None
        if frame is not None and frame.f_code.co_filename == threading.__file__:
            self._place = None  # it waits for a lock

    @property
    def is_over(self) -> bool:
        """Whether the thread has gone on, or has ended, since."""
        if self._place is None:
            return True
        frame = _frame_of(self._thread)
        while frame is not None:  # what it was doing may call back into Python
            if (id(frame), frame.f_lasti) == self._place:
                return False
            frame = _caller_of(frame)
        return True

    def outlast(self, told: threading.Event) -> None:
        """Wait until it is over, or ``told`` is set, for :data:`LONGEST_S` at most."""
        deadline_s, look_s = time.monotonic() + LONGEST_S, _FIRST_LOOK_S
        while not self.is_over and time.monotonic() < deadline_s and not told.wait(look_s):
            look_s = min(2 * look_s, _LATER_LOOKS_S)


def _frame_of(thread: int) -> FrameType | None:
    """What a thread is in, as far as Python sees it; ``None`` if it has ended."""
    # To list them holds a lock that a thread needs in order to end.
    frames = _alone(sys._current_frames) if _MAY_STOP_FOR_EVER else sys._current_frames()
    return frames.get(thread)


def _caller_of(frame: FrameType) -> FrameType | None:
    """What has called a function of another thread."""
    return _alone(functools.partial(getattr, frame, "f_back")) if _IN_MIDST_OF_A_FRAME else frame.f_back


def _alone(function: Callable[[], Result]) -> Result:
    """What a function of C returns, called while no garbage is collected: that may let other threads run.

    All steps are taken by one call of C, in which no other thread gets its turn: a program that has its garbage left
    alone just now does so before or after them, and not in between, where it would be undone.
    """
    was_on: list[int] = []
    turn_off = functools.partial(was_on.extend, map(_call, [ctypes.pythonapi.PyGC_Disable]))
    steps = itertools.chain((turn_off, function), itertools.compress([gc.enable], was_on))
    try:
        _, found, *_ = list(map(_call, steps))
    except BaseException:  # of the steps, only this function fails, where there is no memory
        if any(was_on):
            gc.enable()
        raise
    return found  # type: ignore[no-any-return] # see _call
