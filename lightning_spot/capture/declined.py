"""What a rank writes nothing of, as long as the node has not heard it: others wait there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning_spot.errors import NodeFailed, NodeUnreachable, SpotError
from lightning_spot.memory.host import Host

logger = logging.getLogger(__name__)

_MOST = 8  # newer ones count: what came before is over by then


class Declined:
    """Snapshots of which the node of this host has not heard that a rank writes nothing. Not thread-safe."""

    def __init__(self) -> None:
        self._untold: dict[str, Callable[[Host], None]] = {}  # by the name of the snapshot, the oldest first

    def __bool__(self) -> bool:
        return bool(self._untold)

    def note(self, name: str, say: Callable[[Host], None]) -> None:
        """Note one that is to be said; of two for one snapshot, the first."""
        self._untold.setdefault(name, say)
        if len(self._untold) > _MOST:
            del self._untold[next(iter(self._untold))]

    def forget(self) -> None:
        """Nobody waits for any of them any more."""
        self._untold.clear()

    def say(self, host: Callable[[], Host]) -> bool:
        """Tell the node; what it does not hear now is told again.

        Args:
            host: its connection, made if need be.

        Returns:
            whether the connection is still good.
        """
        for name, say in list(self._untold.items()):
            try:
                say(host())
            except (NodeUnreachable, NodeFailed, OSError) as error:
                logger.debug("it is told again that a rank writes nothing: %s", error)
                return not isinstance(error, NodeUnreachable)
            except SpotError as error:  # it is another node, or another attempt's: nobody waits there
                logger.debug("nobody waits for what a rank does not write: %s", error)
            self._untold.pop(name, None)
        return True
