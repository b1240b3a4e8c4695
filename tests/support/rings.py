"""One ring of a server in this process for several ranks, each of which may lose it."""

from __future__ import annotations

from lightning_spot.errors import ServerUnreachableError
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.snapshot_server import IN_PROCESS, SnapshotServer
from lightning_spot.store.local import LocalStore
from tests.support.server import named_run


def ring() -> SnapshotServer:
    """The server, at which a run is open."""
    made = SnapshotServer(slots=3, memory_bytes=2**30, open_store=LocalStore, allow=None)
    made.registry.begin_session(IN_PROCESS)
    made.open_run(named_run("run", session=IN_PROCESS))
    return made


class RankRing(InProcessHost):
    """That ring as one rank sees it.

    Args:
        server: that all of them see.

    Attributes:
        is_lost: whether it is, for this rank.
    """

    server_call_timeout_s = 5.0
    memory_bytes = 2**30

    def __init__(self, server: SnapshotServer) -> None:
        self.run, self.attempt, self.released, self.is_lost = "run", 1, None, False
        self._seen = server

    @property
    def _server(self) -> SnapshotServer:  # type: ignore[override] # there it is an attribute
        if self.is_lost:
            raise ServerUnreachableError("the ring is lost")
        return self._seen

    def check(self) -> None:
        assert self._server is self._seen

    def leave(self, *, complete: bool) -> None:
        """The others still have it."""
