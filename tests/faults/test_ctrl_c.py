"""Ctrl-C at every line of what copies: nobody waits without end, and nothing comes into a slot that was given back."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from lightning_spot.capture import batch as batch_module
from lightning_spot.capture.batch import CopyJob
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.partitions import Span
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.server.host import InProcessHost, Lease
from tests.support.copies import Desk as Copies
from tests.support.copies import Fixed
from tests.support.ranks import Desk, same
from tests.unit.test_copier import IN_TURN

pytestmark = pytest.mark.guarantee("G22")

_ENOUGH_S = 30.0


class CtrlC:
    """Comes when the calling thread reaches one line of a function for the first time.

    At a line of a ``with`` it comes before that is entered: on the way out Python lets no signal come in between.
    """

    def __init__(self, code: CodeType, line: int) -> None:
        self._at = (code, line)
        self.came = False

    def __enter__(self) -> CtrlC:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _what: Any) -> Any:
        return self._reached if frame.f_code is self._at[0] else None

    def _reached(self, frame: FrameType, event: str, _what: Any) -> Any:
        if event == "line" and frame.f_lineno == self._at[1] and not self.came:
            self.came = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._reached


def lines_of(function: Callable[..., Any]) -> list[tuple[CodeType, int]]:
    code = function.__code__
    return [(code, line) for line in sorted({line for *_, line in code.co_lines() if line} - {code.co_firstlineno})]


def in_time(train: Callable[[], None]) -> bool:
    """Whether a training ends, on a thread of its own: all that follows a Ctrl-C comes on the thread it came to."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            train()
        except BaseException as error:
            failures.append(error)

    training = threading.Thread(target=run, daemon=True)
    training.start()
    training.join(_ENOUGH_S)
    if failures:
        raise failures[0]
    return not training.is_alive()


HELPING = [CopyJob.wait_cpu, CopyJob._step, CopyJob._end_if_done]


@pytest.mark.parametrize("plan", [IN_TURN, [(9, 0.0, [Span(2, 0, 50_000)])]], ids=["many-pieces", "one-piece"])
def test_ctrl_c_at_any_line_of_a_copy_loses_none_of_it(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece that was taken was neither copied nor waited for, or the last one was never said to be there."""
    monkeypatch.setattr(batch_module, "LEAST_BATCH_BYTES", 64)
    came = 0
    for code, line in [place for function in HELPING for place in lines_of(function)]:
        desk, copier, pressed = Copies(), Copier(threads=0), CtrlC(code, line)

        def train(desk: Copies = desk, copier: Copier = copier, pressed: CtrlC = pressed) -> None:
            job = copier.start(desk.pieces, desk.view, schedule=Fixed(plan, limit_s=1e9))
            with contextlib.suppress(KeyboardInterrupt), pressed:
                job.wait_cpu()
            job.wait_cpu()  # as is done when training ends
            job.wait()

        assert in_time(train), f"waits without end after Ctrl-C at {code.co_name}:{line}"
        assert all(desk.copied(span.piece) for _, _, spans in plan for span in spans)
        came += pressed.came
        copier.close()
    assert came > 10


class Held(Schedule):
    """Holds everything until the optimizer steps."""

    def timetable(self, addresses: Any, sizes: Any) -> Any:
        return Fixed([(9, 0.0, [Span(number, 0, nbytes) for number, nbytes in enumerate(sizes)])], 1e9).made


class Watching(InProcessHost):
    """Fills slots that are given back with a mark: who writes into them after that is seen."""

    given: list[Lease]

    def abort(self, lease: Lease) -> None:
        lease.map[: lease.nbytes] = b"\xee" * lease.nbytes
        self.given.append(lease)
        super().abort(lease)


BEGINNING = [
    SnapshotWriter.begin,
    SnapshotWriter._copy,
    Copier.start,
    Copier._planned,
    CopyJob.release,
    CopyJob.wait_cpu,
    CopyJob._step,
]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, host=Watching)
    made.host.given = []  # type: ignore[attr-defined]
    yield made
    made.close()


def test_ctrl_c_at_any_line_of_begin_leaves_no_copy_and_no_slot(desk: Desk) -> None:
    copier = Copier(threads=0)  # what its threads would do is done below
    desk.writer._copier.close()
    desk.writer._copier, desk.writer._schedule = copier, Held("eager")
    desk.writer._slots.look_ahead = lambda *_, **__: None  # type: ignore[method-assign]
    desk.weights = [torch.randn(30, 10) for _ in range(3)]
    given: list[Lease] = desk.host.given  # type: ignore[attr-defined]
    came, step = 0, 0
    for code, line in [place for function in BEGINNING for place in lines_of(function)]:
        step, pressed = step + 1, CtrlC(code, line)
        for weight in desk.weights:
            weight.add_(1)
        given.clear()

        def train(step: int = step, pressed: CtrlC = pressed) -> None:
            with contextlib.suppress(KeyboardInterrupt), pressed:
                desk.begin(step, desk.checkpoint())
            for job in list(copier._jobs) if given else []:  # as threads in the background go on
                job.release_to_background()
                for _ in range(100):
                    job.step_in_background()
            desk.writer.wait_all(_ENOUGH_S)

        assert in_time(train), f"waits without end after Ctrl-C at {code.co_name}:{line}"
        for lease in given:
            marked = lease.map[: lease.nbytes] == b"\xee" * lease.nbytes
            assert marked, f"copied into a slot that was given back, after Ctrl-C at {code.co_name}:{line}"
        assert all(slot["state"] != "filling" for slot in desk.host._server.status()["slots"]), f"{code.co_name}:{line}"
        came += pressed.came
    desk.begin(step + 1, desk.checkpoint())
    expected = [weight.clone() for weight in desk.weights]
    desk.writer.wait_all(_ENOUGH_S)
    assert same(desk.saved(step + 1), expected, desk.buffer)
    assert came > 60
