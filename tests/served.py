"""A node of this process on a TCP port of loopback, over the same service that a node's program runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from lightning_spot.memory.node import Node
from lightning_spot.service.http import Service

_LAST_S = 60.0  # of what never takes so long


@contextlib.contextmanager
def served(node: Node, port: int = 0) -> Iterator[int]:
    """Serve ``node`` as long as the context lasts; its port, which is any that is free by default."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ends = contextlib.AsyncExitStack()

    async def begin() -> int:
        service = Service(node, None)
        runner = service.runner(shutdown_timeout_s=0.0)
        await runner.setup()
        ends.push_async_callback(runner.cleanup)
        assert runner.server is not None
        server = await loop.create_server(service.connections(runner.server), "127.0.0.1", port)
        ends.callback(server.close)
        return int(server.sockets[0].getsockname()[1])

    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(_LAST_S)
    finally:
        asyncio.run_coroutine_threadsafe(ends.aclose(), loop).result(_LAST_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        node.close()
