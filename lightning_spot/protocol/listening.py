"""A server of a few connections within a trainer: on a thread of its own, for who knows its port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Listening:
    """Listens on all interfaces until it is closed.

    Args:
        talk: with whoever connects, on that thread. When this is closed it is cancelled, and must not raise that.
        name: of the thread.

    Attributes:
        port: it listens at.
    """

    def __init__(self, talk: Talk, name: str) -> None:
        self._talk = talk
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server(("", 0))
        self.port: int = listener.getsockname()[1]
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listener, ready.set), name=name, daemon=True)
        self._thread.start()
        ready.wait()

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Close all connections. A second call does nothing.

        Args:
            last: called before that, on the thread of the connections.
        """
        with self._closing:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(last)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def _serve(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._talk, sock=listener))
        ready()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()
