"""A TCP proxy whose far end is far away: ``python -m benchmarks.far PORT DELAY_MS``, each way. No bytes are lost.

A connection takes the time of its handshake. A process of its own, as ``benchmarks.throttle``; prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from benchmarks.beside import Beside

CHUNK_BYTES = 64 * 1024


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Move bytes one way, each so much later."""
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    clock = asyncio.get_running_loop().time

    async def bring() -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, data = await held.get()
                await asyncio.sleep(due_s - clock())
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    bringing = asyncio.create_task(bring())
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            held.put_nowait((clock() + delay_s, data))
    held.put_nowait((clock() + delay_s, b""))
    await bringing


async def serve(port: int, delay_s: float) -> None:
    """Accept until the process ends."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * delay_s)  # until the other end's answer is here, nothing is sent
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, far_writer, delay_s), pump(far_reader, writer, delay_s))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, backlog=128)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Far(Beside):
    """The proxy as a process of its own."""

    def __init__(self, port: int, delay_ms: float) -> None:
        super().__init__("benchmarks.far", port, delay_ms)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
