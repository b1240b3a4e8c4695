"""What is said where a rank's own state has no room in a snapshot, and how many bytes it needs, read from that.

It is the reason why a snapshot was missed, and comes to rank 0 as every such reason does: past nodes, or by mail.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SAID = re.compile(r"(?:rank (\d+): )?its own state has (\d+) bytes, there is room for")


class Outgrown(NamedTuple):
    """A state that has no room.

    Attributes:
        rank: whose it is; ``None`` if nobody says so.
        nbytes: of it.
    """

    rank: int | None
    nbytes: int


def outgrown(nbytes: int, room: int) -> str:
    """Why a rank writes nothing whose state has more bytes than there is room for; who passes it on names the rank."""
    return f"its own state has {nbytes} bytes, there is room for {room}"


def read_outgrown(because: str) -> Outgrown | None:
    """The first state that has no room, if that is why a snapshot was missed; else ``None``."""
    if (said := _SAID.search(because)) is None:
        return None
    return Outgrown(int(said[1]) if said[1] is not None else None, int(said[2]))
