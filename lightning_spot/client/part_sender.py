"""The client's end of a stream of parts. The other end is ``part_receiver``; the frames are described in ``wire``."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator

from lightning_spot.client.encoding import OutgoingPart
from lightning_spot.config import PROTOCOL_VERSION, SEND_BYTES
from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.protocol.wire import (
    DIGEST_BYTES,
    PROTOCOL_HEADER,
    SENDER_HEADER,
    TARGET_HEADER,
    UPGRADE,
    Address,
    Frame,
    error_from_body,
    fill,
    target_of,
)
from lightning_spot.untrusted import plain

_CONNECT_TIMEOUT_S = 5.0
_UPGRADE_TIMEOUT_S = 10.0  # a node answers before it does anything; meanwhile a slot is held, and nothing sent
_TIMEOUT_S = 60.0
_WINDOW = 2  # parts under way on one connection before an answer is waited for
_LONGEST_HEAD = 65536


class PartStream:
    """One upgraded connection for the parts of one upload. Use from one thread; close it.

    Args:
        address: the node (TCP).
        token: secret to send, if any.
        upload: id of the upload.
        sender: of several hosts that send it: names this one, which has a stream in any case.

    Raises:
        NodeUnreachable: if no node answers.
        SpotError: whatever the node answered with.
    """

    def __init__(self, address: Address, token: str | None, upload: str, sender: str = "") -> None:
        self._busy_s = self._lap_s = 0.0
        self._name = str(address)
        path = f"/v1/uploads/{upload}/stream"
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {address.host}:{address.port}",
            "Connection: Upgrade",
            f"Upgrade: {UPGRADE}",
            f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}",
            f"{TARGET_HEADER}: {target_of('POST', path)}",
            "Content-Length: 0",
            *([f"{SENDER_HEADER}: {sender}"] if sender else []),
            *([f"Authorization: Bearer {token}"] if token else []),
        ]
        try:
            self._socket = socket.create_connection(
                (address.host.strip("[]"), address.port), timeout=_CONNECT_TIMEOUT_S
            )
        except OSError as error:
            raise self._unreachable(error) from error
        try:
            self._socket.settimeout(_UPGRADE_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
            self._expect_upgrade()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, SpotError):
                raise self._unreachable(error) from error
            raise

    def send(self, parts: Iterable[OutgoingPart]) -> Iterator[tuple[OutgoingPart, str]]:
        """Send parts, and yield each with the xxh3-128 of what lies there now.

        Raises:
            NodeUnreachable: if the connection breaks.
        """
        waiting: list[OutgoingPart] = []
        try:
            for part in parts:
                self._send(part)
                waiting.append(part)
                if len(waiting) >= _WINDOW:
                    yield waiting.pop(0), self._digest()
            for part in waiting:
                yield part, self._digest()
        except OSError as error:
            raise self._unreachable(error) from error

    def lap(self) -> float:
        """Seconds that were spent on sending, and on waiting for answers, since this was asked last."""
        lap_s, self._lap_s = self._busy_s - self._lap_s, self._busy_s
        return lap_s

    def cut(self) -> None:
        """End the connection from another thread: what waits for it fails at once."""
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, part: OutgoingPart) -> None:
        began_s = time.perf_counter()
        content = memoryview(part.content)
        frame = Frame(part.kind, part.start, part.nbytes, len(content), part.digest).pack()
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.sendall(frame)
        for start in range(0, len(content), SEND_BYTES):
            self._socket.sendall(content[start : start + SEND_BYTES])
        self._busy_s += time.perf_counter() - began_s

    def _digest(self) -> str:
        began_s = time.perf_counter()
        buffer = bytearray(DIGEST_BYTES)
        fill(self._socket, memoryview(buffer), _TIMEOUT_S)
        self._busy_s += time.perf_counter() - began_s
        return buffer.hex()

    def _expect_upgrade(self) -> None:
        answer, deadline_s = b"", time.monotonic() + _UPGRADE_TIMEOUT_S
        while b"\r\n\r\n" not in answer:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            data = self._socket.recv(4096)
            if not data:
                raise ConnectionError("the connection was closed")
            answer += data
            if len(answer) > _LONGEST_HEAD:
                raise ConnectionError("its answer has no end")
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1:2]
        if status != [b"101"]:
            code = int(status[0]) if status and status[0].isdigit() else 0
            raise error_from_body(code, body, self._name)

    def _unreachable(self, error: OSError) -> NodeUnreachable:
        return NodeUnreachable(f"the connection to {self._name} broke ({plain(error)})", tier=self._name)
