"""A link with delay, jitter, loss and a rate: frames are moved, each held back.

``python -m tests.support.link NEAR FAR`` moves what comes at one device to the other one. What goes to the far one is
held back as a line of JSON says, read from the standard input; what comes from there is not. It ends when that input
does, so with whoever has started it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _SO_RCVBUFFORCE = 263, 15, 23, 33
_ETH_P_ALL = 3
_FRAME_BYTES, _BUFFER_BYTES = 2**16 + 64, 2**23
_AT_ONCE = 64
_MOST_BYTES, _MOST_S = 2**23, 0.2  # as long as a frame may wait for its turn, but never more than so many bytes
_GONE = (errno.ENETDOWN, errno.ENXIO, errno.ENODEV)


@dataclass(frozen=True)
class Link:
    """How what one end sends gets to the other one.

    Attributes:
        bits_per_s: that go at once; 0 for as many as come.
        delay_ms: of each frame.
        jitter_ms: by how much that is more, or less. Frames stay in order.
        loss: part of the frames that are lost.
    """

    bits_per_s: int = 0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0

    def to_json(self) -> str:
        """As it is told to a running one."""
        return json.dumps(asdict(self))


FAR = Link(delay_ms=40.0, jitter_ms=10.0, loss=0.005)
"""Another continent, by a line that loses packets."""


@dataclass
class Held:
    """The frames on their way to the far end.

    Attributes:
        link: how they get there.
        dice: that decide.
    """

    link: Link
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    _frames: deque[tuple[float, bytes]] = field(default_factory=deque)
    _nbytes: int = 0
    _free_s: float = 0.0
    _last_s: float = 0.0

    def put(self, frame: bytes, now_s: float) -> None:
        """A frame has come."""
        link = self.link
        most = min(_MOST_BYTES, max(2 * _FRAME_BYTES, int(link.bits_per_s / 8 * _MOST_S))) if link.bits_per_s else 0
        in_front = max(0.0, self._free_s - now_s) * link.bits_per_s / 8
        if self.dice.random() < link.loss or (most and in_front > most) or self._nbytes > _MOST_BYTES:
            return
        if link.bits_per_s:
            self._free_s = max(self._free_s, now_s) + 8 * len(frame) / link.bits_per_s
        wait_ms = link.delay_ms + self.dice.uniform(-link.jitter_ms, link.jitter_ms)
        due_s = max(now_s, self._free_s if link.bits_per_s else now_s) + max(0.0, wait_ms) / 1000
        self._last_s = max(self._last_s, due_s)
        self._frames.append((self._last_s, frame))
        self._nbytes += len(frame)

    def due(self, now_s: float) -> list[bytes]:
        """The frames that are to leave now."""
        found = []
        while self._frames and self._frames[0][0] <= now_s:
            found.append(self._frames.popleft()[1])
            self._nbytes -= len(found[-1])
        return found

    def next_in_s(self, now_s: float) -> float:
        """Seconds until another one is, -1 if none is on its way."""
        return max(0.0, self._frames[0][0] - now_s) if self._frames else -1.0


def opened(device: str) -> socket.socket:
    """What gets the frames that come at a device, as they are: one of several packets is not cut, sums may be open."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    found.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    found.bind((device, _ETH_P_ALL))
    return found


def _come(end: socket.socket) -> list[bytes]:
    frames: list[bytes] = []
    try:
        while len(frames) < _AT_ONCE:
            frames.append(end.recv(_FRAME_BYTES))
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno not in _GONE:
            raise
    return frames


def _send(end: socket.socket, frame: bytes) -> None:
    try:
        end.send(frame)
    except OSError as error:  # the link is cut, or its queue is full: the frame is lost
        if error.errno not in (*_GONE, errno.ENOBUFS, errno.EAGAIN, errno.EMSGSIZE):
            raise


def main() -> int:
    near, far = map(opened, sys.argv[1:])
    held, told = Held(Link()), b""
    waits = select.epoll()
    for file in (sys.stdin, near, far):
        waits.register(file, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        come = [number for number, _ in waits.poll(held.next_in_s(time.monotonic()))]
        now_s = time.monotonic()
        if sys.stdin.fileno() in come:
            data = os.read(sys.stdin.fileno(), 4096)
            if not data:
                return 0
            *lines, told = (told + data).split(b"\n")
            for line in lines:
                held.link = Link(**json.loads(line))
                print("taken", flush=True)
        if far.fileno() in come:
            for frame in _come(far):
                _send(near, frame)
        if near.fileno() in come:
            for frame in _come(near):
                held.put(frame, now_s)
        for frame in held.due(time.monotonic()):
            _send(far, frame)


if __name__ == "__main__":
    sys.exit(main())
