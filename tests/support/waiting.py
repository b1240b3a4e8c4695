"""What tests wait for: a state, a process, a port."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from lightning_spot import say

DEADLINE_S = 120.0  # what holds on a machine that does much else; pytest ends a test after 300 s


def new_process() -> None:
    """Have what follows be as in a process that has trained nothing yet, and has logged nothing."""
    say.forget()
    say.logger.setLevel(logging.NOTSET)
    say.logger.handlers.clear()
    if (run_lookup := sys.modules.get("lightning_spot.session.run_lookup")) is not None:
        run_lookup.forget()


def until(holds: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until ``holds()`` is true and return it; fail with ``what`` otherwise.

    The thread waits for a lock: of one that sleeps, a snapshot cannot tell that it writes to no tensor, and waits.
    """
    end, never = time.monotonic() + deadline_s, threading.Event()
    while time.monotonic() < end:
        if value := holds():
            return value
        never.wait(0.02)
    raise AssertionError(f"waited {deadline_s:.0f} s in vain for: {what}")


def lives(pid: int) -> bool:
    """Whether there is a process of that number, and it is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A port of loopback that nobody else is given meanwhile; who asks for it by its number can listen there."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield int(kept.getsockname()[1])
