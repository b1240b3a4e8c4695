"""An local server ends when nobody needs it: told so by what changes, and looking seldom where nothing does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spot.http import program


class Asked:
    """Stands for a node that a trainer uses, and counts how often it is asked whether it is busy."""

    def __init__(self) -> None:
        self.is_busy, self.finished = True, False
        self.asked, self.ring = 0, self
        self.changed: Callable[[], None] = lambda: None
        self.watched = threading.Event()

    @property
    def busy(self) -> bool:
        self.asked += 1
        return self.is_busy

    def watch(self, callback: Callable[[], None]) -> None:
        self.changed = callback
        self.watched.set()


async def until_unneeded(node: Any, server_idle_timeout_s: float = 600.0) -> None:
    service: Any = SimpleNamespace(last_request_s=0.0)
    await asyncio.wait_for(program._until_unneeded(node, service, server_idle_timeout_s, program._Signals()), 60)


def test_an_unneeded_server_ends_as_soon_as_it_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_LOOK_S", 600.0)
    monkeypatch.setattr(program, "_CHECK_S", 0.0)
    node = Asked()

    def ends() -> None:
        assert node.watched.wait(30)
        node.is_busy, node.finished = False, True
        node.changed()

    other = threading.Thread(target=ends)
    other.start()
    asyncio.run(until_unneeded(node))
    other.join()


def test_the_idle_time_begins_when_the_last_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the node was last seen busy, which may be long before."""
    now_s = [1000.0]
    node = Asked()

    async def passes(_event: asyncio.Event, within_s: float) -> None:
        now_s[0] += within_s
        node.is_busy = now_s[0] < 1007

    monkeypatch.setattr(program, "_wait", passes)
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    asyncio.run(until_unneeded(node, server_idle_timeout_s=20.0))
    assert 1027 <= now_s[0] <= 1027 + program._LOOK_S + 1
