"""A snapshot that one process has opened is shared with others: what those who give it and those who take it agree on.

The first rank of each host opens the snapshot, once; the others of the host map the same memory. A host that finds the
snapshot at no tier of its own asks the first rank of all. Sockets of the host have no path (Linux' abstract names), so
nothing is left behind, whoever dies. Messages are lines of JSON; an empty line says that the giver lives and is not
ready yet.
"""

from __future__ import annotations

import logging
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

CONNECTIONS = 4
"""At which one host fetches a snapshot from another: clouds bound what one connection carries."""

CONNECT_S = 10.0
SILENCE_S = 60.0
"""A giver that lives says so every second."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_LONGEST_LINE = 65536


@dataclass(frozen=True, slots=True)
class Card:
    """How a giver is reached.

    Attributes:
        host: the same for processes that can share memory.
        name: of its socket on that host, ``""`` if it has none.
        secret: to greet it with.
    """

    host: str
    name: str
    secret: str = field(repr=False)

    @property
    def address(self) -> str:
        """Of that socket."""
        return address_of(self.name)


def address_of(name: str) -> str:
    """Address of the socket of that name: one without a path."""
    return f"\0lightning-spot-{name}"


def this_host() -> str:
    """Tells hosts apart, whatever their names: one boot of one kernel, and one network of it.

    Containers of one machine that share its network count as one host; those which do not, cannot meet at a socket.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NETWORK.stat().st_ino}"
    except OSError as error:
        logger.debug("it cannot be told which processes share a host: %s", error)
        return secrets.token_hex(16)


class Lines:
    """Lines from a connection, with the descriptors that come along."""

    def __init__(self, connection: socket.socket, descriptors: int = 0) -> None:
        self.fds: list[int] = []
        self._connection = connection
        self._descriptors = descriptors
        self._data = b""

    def next(self) -> bytes:
        """The next line without its end, ``b""`` also for an empty one; ``ConnectionError`` if it ends before."""
        while b"\n" not in self._data:
            if len(self._data) > _LONGEST_LINE:
                raise ValueError("a message is too long")
            if self._descriptors:
                piece, fds, _, _ = socket.recv_fds(self._connection, _LONGEST_LINE, self._descriptors)
                self.fds += fds
            else:
                piece = self._connection.recv(_LONGEST_LINE)
            if not piece:
                raise ConnectionError("the other end has hung up")
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return line
