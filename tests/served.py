"""A node of this process on a TCP port of loopback, over the same service that a node's program runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from lightning_spot.memory.node import Node
from lightning_spot.service.handlers import Service


@contextmanager
def served(node: Node) -> Iterator[int]:
    """Serve ``node`` as long as the context lasts; its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> int:
        service = Service(node, None)
        runner = web.AppRunner(service.application())
        await runner.setup()
        assert runner.server is not None
        server = await loop.create_server(service.connections(runner.server), "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        node.close()
