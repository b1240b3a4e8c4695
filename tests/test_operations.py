"""What a thread is at, as Python sees it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from lightning_spot.staging import operations
from lightning_spot.staging.operations import Operation


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.enable()


alone = pytest.mark.skipif(operations._call is None, reason="Python 3.10, which does not need it, cannot")


@alone
@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_listed_where_that_may_hang(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    seen: list[bool] = []
    frames = sys._current_frames

    def listed() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", listed)
    monkeypatch.setattr(operations, "_MAY_STOP_FOR_EVER", True)
    if not collects:
        gc.disable()
    assert Operation(threading.get_ident()).is_over  # this thread has gone on since
    assert seen == [False, False]
    assert gc.isenabled() is collects


@alone
def test_no_garbage_is_collected_while_a_frame_is_asked_for_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may let the thread run: Python then wrote beyond an object, and the C library aborted (Python 3.11)."""
    seen: list[bool] = []

    class Frame:
        f_lasti = 0

        def __init__(self) -> None:
            self.f_code = sys._getframe().f_code

        @property
        def f_back(self) -> None:
            seen.append(gc.isenabled())

    kept = [Frame(), Frame()]  # two places, so that the second one is asked who has called it
    frames = iter(kept)
    monkeypatch.setattr(operations, "_frame_of", lambda _thread: next(frames))
    monkeypatch.setattr(operations, "_IN_MIDST_OF_A_FRAME", True)
    assert Operation(0).is_over
    assert seen == [False]
    assert gc.isenabled()


@alone
def test_garbage_is_collected_again_where_the_frames_could_not_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> dict[int, FrameType]:
        raise MemoryError

    monkeypatch.setattr(sys, "_current_frames", fails)
    monkeypatch.setattr(operations, "_MAY_STOP_FOR_EVER", True)
    with pytest.raises(MemoryError):
        Operation(threading.get_ident())
    assert gc.isenabled()


@alone
def test_a_program_that_has_its_garbage_left_alone_is_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever another thread may have its turn, it turns the collection off: that holds."""
    monkeypatch.setattr(operations, "_MAY_STOP_FOR_EVER", True)
    turns = 0

    def another_thread(_frame: FrameType, _event: str, _what: object) -> None:
        nonlocal turns
        turns += 1
        if turns == when:
            gc.disable()

    when = 0
    while turns >= when:
        when, turns = when + 1, 0
        gc.enable()
        sys.setprofile(another_thread)
        operations._frame_of(0)
        sys.setprofile(None)
        assert gc.isenabled() is (turns < when), f"undone in turn {when}"
    assert when > 3


_HAMMER = """
import gc, sys, threading, time
from lightning_spot.staging.operations import Operation

class Bad:
    def __init__(self): self.me = self
    def __del__(self): time.sleep(0.0005)  # others run

def first(n, x=1, y=2):
    z = [n]; q = (x, y); w = {1: 2}; r = s = u = v = n
    def inner(): return len((x, y, z, q, w, r, s, u, v))
    return second(n - 1) if n else inner()

def second(n):
    p = n
    return third(n - 1) if n else p

def third(n, *args, **more):
    a = b = c = d = e = f = g = n
    h = lambda: len((a, b, c))
    return first(n - 1) if n else h()

def work():
    i = 0
    while True:
        i += 1
        first(25 + i % 7); third(20 + i % 5); second(15 + i % 11)

thread = threading.Thread(target=work, daemon=True)
thread.start()
sys.setswitchinterval(1e-5)
gc.set_threshold(5, 1, 1)
end_s = time.monotonic() + 20
while time.monotonic() < end_s:
    operation = Operation(thread.ident)
    for _ in range(3):
        Bad()
        operation.is_over
"""


@pytest.mark.soak
def test_frames_of_a_thread_that_runs_are_walked_whatever_garbage_lets_run() -> None:
    """On Python 3.11 two of three such processes died of a segmentation fault within 8 s."""
    subprocess.run([sys.executable, "-c", _HAMMER], check=True, timeout=120)
