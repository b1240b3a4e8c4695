"""A restore that takes long shows how far it is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import sys

import pytest

from lightning_spot.run.progress_bar import RestoreProgress
from tests.support.said import informed
from tests.support.waiting import until


class Terminal:
    """What standard error is while it is entered; pytest captures it until a test begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._shown = monkeypatch, b""
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.stream = os.fdopen(theirs, "w")

    def __enter__(self) -> Terminal:
        self._monkeypatch.setenv("TERM", "xterm-256color")
        self._monkeypatch.setenv("COLUMNS", "160")
        self._monkeypatch.setattr(sys, "stderr", self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        self._monkeypatch.undo()
        self.stream.close()
        os.close(self._ours)

    def shows(self, what: bytes = b"") -> bool:
        with contextlib.suppress(BlockingIOError):
            self._shown += os.read(self._ours, 65536)
        return what in self._shown if what else bool(self._shown)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.spot_facts["done"]) for record in caplog.records if record.spot_key == "restoring"]  # type: ignore[attr-defined]


def test_one_that_is_done_at_once_shows_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    with Terminal(monkeypatch) as terminal:
        with RestoreProgress("step-1 from storage", 10) as progress:
            progress(10)
        assert not terminal.shows()
    assert progress.done == 10
    assert not lines(caplog)


def test_a_terminal_shows_a_bar_with_bytes_and_speed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    with (
        Terminal(monkeypatch) as terminal,
        RestoreProgress("step-1 from storage", 8_000_000, after_s=0.0) as progress,
    ):
        progress(2_000_000)
        until(lambda: terminal.shows(b"step-1 from storage"), "the bar")
        until(lambda: terminal.shows(b"2.0/8.0 MB"), "the bytes")
        progress(2_000_000)
        until(lambda: terminal.shows(b"B/s"), "the speed")
    assert not lines(caplog)


def test_elsewhere_a_line_says_it_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for every_s, said in ((0.0, ["2.00 MB", "4.00 MB"]), (1000.0, ["2.00 MB"])):
        caplog.clear()
        with RestoreProgress("step-1 from storage", 8_000_000, after_s=0.0, every_s=every_s) as progress:
            progress(2_000_000)
            progress(2_000_000)
        assert lines(caplog) == said
    assert informed(caplog)["restoring"]["about"] == "step-1 from storage"


def test_a_terminal_that_is_gone_ends_no_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(monkeypatch) as terminal:
        terminal.stream.close()
        with RestoreProgress("step-1 from storage", 8, after_s=0.0) as progress:
            progress(8)
    assert progress.done == 8
