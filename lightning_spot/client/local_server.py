"""The local server as its trainer sees it.

No call lasts longer than ``server_call_timeout_s``, unless the server goes on answering meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning_spot.client.connection import forgetting
from lightning_spot.client.server_client import ServerClient, quoted
from lightning_spot.config import SERVER_CALL_TIMEOUT_S, environment_to_hand_over
from lightning_spot.errors import (
    FailureReason,
    ServerUnreachableError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
    TierReason,
)
from lightning_spot.protocol.process import wait_readable
from lightning_spot.protocol.record import ServerRecord
from lightning_spot.protocol.slot import map_shared
from lightning_spot.protocol.wire import Address
from lightning_spot.server.host import Lease, newest_safe_step
from lightning_spot.server.runs import Figures, Opened, RunInfo
from lightning_spot.server.slots import Making
from lightning_spot.server.tier import Listed, TierHealth
from lightning_spot.snapshot.manifest import Manifest, snapshot_order
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.snapshot.shards import Status, failed
from lightning_spot.store.store import newest_first
from lightning_spot.untrusted import read_object

_LONGEST_LINE = 65536

_OPEN_TIMEOUT_S = 15.0  # a server may have to ask the tiers below
_SEAL_TIMEOUT_S = 3600.0  # as long as the server answers pings meanwhile
_MAY_HAVE_BEGUN = (TierReason.FAILED, TierReason.SERVER_FAILED)
_PING_SHARE = 0.75  # of server_call_timeout_s: pings are a second apart


class Session:
    """A connection that says that this process lives, and by which it gets at slots. May be used from any thread.

    A forked child does not have it: its copy of the connection is closed at the fork.

    Args:
        client: of the server.
        server_call_timeout_s: bound on every call, seconds.

    Raises:
        ServerUnreachableError: if the server does not answer in time (then its ``__cause__`` is a ``TimeoutError``), or
            at all.
        ServerRefusedError: if it is another user's: to wait for it would not help.

    Attributes:
        id: names this session in HTTP requests.
    """

    def __init__(self, client: ServerClient, server_call_timeout_s: float) -> None:
        self._call_timeout_s = server_call_timeout_s
        self._lock = threading.Lock()
        try:
            self._socket = client.upgraded("/v1/sessions", server_call_timeout_s)
        except ServerUnreachableError as error:
            if isinstance(error.__cause__, BlockingIOError):  # nobody accepts connections any more
                raise error from TimeoutError(str(error.__cause__))
            raise
        answer, _ = self._ask({})
        self.id = str(answer.get("session"))
        forgetting.add(self)

    def map_slot(self, index: int, generation: int) -> mmap.mmap:
        """Map the memory of a leased slot into this process, shared and writable.

        Args:
            index: of the slot.
            generation: of its memory; what is written into another one is somebody else's snapshot.

        Raises:
            TierError: if this process may not map so much.
        """
        answer, fd = self._ask({"slot": index})
        if fd is None or answer.get("generation") != generation:
            if fd is not None:
                os.close(fd)
            raise ServerUnreachableError(f"the local server no longer has slot {index} as it was leased")
        try:
            return map_shared(fd, int(answer["capacity"]))
        except (OSError, ValueError) as error:  # such as ``ulimit -v``, too many mappings, or a memory that is shorter
            raise TierError(f"this process cannot map a slot of {answer['capacity']} bytes: {error}") from error
        finally:
            os.close(fd)

    def open_snapshot(self, run: str, name: str) -> int:
        """Descriptor of a committed snapshot's memory, which stays as it is until this session closes.

        Args:
            run: the run, as ``NAME@ID``.
            name: of the snapshot.

        Raises:
            SnapshotNotFoundError: if the server holds none of that name.
        """
        _, fd = self._ask({"run": run, "name": name})
        if fd is None:
            raise SnapshotNotFoundError(f"snapshot {name!r} of run {run!r} has left the memory of the local server")
        return fd

    def check(self) -> None:
        """Raise if it is over: what was told in it is not known to a server that has come in the place of this one.

        Raises:
            ServerUnreachableError: if the server has gone, or has closed it.
        """
        with self._lock:  # the server says nothing unasked: what can be read while nobody asks is the end
            fd = self._socket.fileno()
            if fd < 0 or wait_readable([fd], 0.0):
                raise ServerUnreachableError("the local server has gone")

    def close(self) -> None:
        """Leave: what was pinned is let go, and a call under way on another thread fails at once."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone wakes no thread that waits for an answer
        self._socket.close()

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        deadline_s = time.monotonic() + self._call_timeout_s
        if not self._lock.acquire(timeout=self._call_timeout_s):
            raise ServerUnreachableError("the local server does not answer") from TimeoutError()
        fds: list[int] = []
        try:
            self._socket.deadline_s = deadline_s
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            data, fds, _, _ = socket.recv_fds(self._socket, _LONGEST_LINE, 1)
            while not data.endswith(b"\n"):
                self._socket.settimeout(self._socket.left_s)
                if not (piece := self._socket.recv(_LONGEST_LINE)):
                    raise ConnectionError("it has closed the connection")
                data += piece
            return read_object(data), fds[0] if fds else None
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            self._socket.close()  # an answer that comes late, or after Ctrl-C, must not be taken for the next one's
            if not isinstance(error, (OSError, ValueError)):
                raise
            raise ServerUnreachableError(f"the local server has gone, or does not answer: {error}") from error
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Drop the connection in a forked child; its parent goes on with it."""
        self._lock = threading.Lock()
        self._socket.close()


class LocalServer:
    """The local server as its trainer sees it; implements :class:`~lightning_spot.server.host.Host`.

    Args:
        record: where it is.
        run: the run, as ``NAME@ID`` or ``NAME``.
        server_call_timeout_s: how long a call may take, see :class:`~lightning_spot.server.host.Host`.

    Raises:
        ServerUnreachableError: if it does not answer now.

    Attributes:
        released: called with the memory of a slot that is not used any more, before it is unmapped: whoever has made
            views of it lets them go.
    """

    def __init__(self, record: ServerRecord, run: str, server_call_timeout_s: float = SERVER_CALL_TIMEOUT_S) -> None:
        self.run = run
        self.attempt = 0
        self.server_call_timeout_s = server_call_timeout_s
        self.memory_bytes = int(record.settings().get("memory_bytes", sys.maxsize))
        self.released: Callable[[mmap.mmap], None] | None = None
        self.client = ServerClient(Address(socket_path=str(record.http)))
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        self.session = Session(self.client, server_call_timeout_s)

    def open_run(self, info: RunInfo) -> Opened:
        """See :meth:`Host.open_run`."""
        body = {**asdict(info), "session": self.session.id}
        body["environment"] = environment_to_hand_over()  # a server that an earlier attempt began has that one's keys
        opened = self._call("POST", f"/v1/runs/{quoted(info.text)}/open", body, limit_s=_OPEN_TIMEOUT_S, again=True)
        self.run, self.attempt = info.text, int(opened["attempt"])
        return Opened(self.attempt, bool(opened["carries"]), str(opened["why_not"]))

    def lease(
        self, nbytes: int, wait_s: float, *, limit_s: float | None = None, making: Making = Making.NOW, writer: int = 0
    ) -> Lease:
        """See :meth:`Host.lease`."""
        upload = uuid.uuid4().hex
        body = {"attempt": self.attempt, "nbytes": nbytes, "wait_s": wait_s, "session": self.session.id}
        body |= {"upload": upload, "making": making.value, "writer": writer}
        limit_s = limit_s or self.server_call_timeout_s
        try:
            return self._mapped(self._wait_for_slot(upload, body, wait_s, limit_s), nbytes)
        except BaseException as error:
            if not isinstance(error, SpotError) or getattr(error, "reason", None) in _MAY_HAVE_BEGUN:
                # It cannot be mapped, the server failed after that, or Ctrl-C came with its answer under way.
                with contextlib.suppress(SpotError):
                    self._call("DELETE", f"/v1/uploads/{upload}")
            raise

    def _wait_for_slot(self, upload: str, body: dict[str, Any], wait_s: float, limit_s: float) -> dict[str, Any]:
        try:
            return self._call("POST", f"/v1/runs/{quoted(self.run)}/uploads", body, limit_s=wait_s + limit_s)
        except ServerUnreachableError as error:
            if limit_s <= self.server_call_timeout_s or not isinstance(error.__cause__, TimeoutError):
                raise
            self._ping()  # a busy server is not lost; it takes the slot back by itself, unless it is there by now
            self._call("DELETE", f"/v1/uploads/{upload}")
            raise SnapshotFailedError(
                f"the slot for it is still being made after {wait_s + limit_s:.0f} s", reason=FailureReason.RING_FULL
            ) from error

    def _mapped(self, leased: dict[str, Any], nbytes: int) -> Lease:
        self._let_go({int(slot): int(generation) for slot, generation in leased["generations"].items()})
        key = (int(leased["slot"]), int(leased["generation"]))
        if key not in self._maps:
            self._maps[key] = self.session.map_slot(*key)
        return Lease(str(leased["upload"]), self._maps[key], nbytes, str(leased["backing"]), key[0])

    def seal(
        self,
        lease: Lease,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
    ) -> bool:
        """See :meth:`Host.seal`."""
        body = {"manifest": manifest.to_dict(), "destinations": destinations, "floats": floats}
        sealed = self._call("POST", f"/v1/uploads/{lease.id}/commit", body, limit_s=_SEAL_TIMEOUT_S)
        return sealed["short"] is True

    def fail(self, manifest: Manifest, why: str) -> None:
        """See :meth:`Host.fail`."""
        body = {"attempt": self.attempt, "manifest": failed(manifest, why).to_dict()}
        self._call("POST", f"/v1/runs/{quoted(self.run)}/fail", body, again=True)

    def wait_for(self, name: str, wait_s: float) -> tuple[Status, str]:
        """See :meth:`Host.wait_for`."""
        path, limit_s = f"/v1/runs/{quoted(self.run)}/awaited", wait_s + self.server_call_timeout_s
        answer = self._call("POST", path, {"name": name, "wait_s": wait_s}, limit_s=limit_s, again=True)
        return Status(answer["status"]), str(answer["why"])

    def abort(self, lease: Lease) -> None:
        """See :meth:`Host.abort`."""
        self._call("DELETE", f"/v1/uploads/{lease.id}")

    def flush(self, wait_s: float) -> list[str]:
        """See :meth:`Host.flush`."""
        body = {"run": None, "wait_s": wait_s}
        answer = self._call("POST", "/v1/flush", body, limit_s=wait_s + self.server_call_timeout_s, again=True)
        return [str(line) for line in answer["unreached"]]

    def check(self) -> None:
        """See :meth:`Host.check`. Requests do not tell: another server answers them at the same place."""
        self.session.check()
        self._ping()

    def remove(self, name: str) -> None:
        """See :meth:`Host.remove`."""
        self._call("DELETE", f"/v1/files/{quoted(self.run, name)}", {"unseen": True})

    def tiers(self) -> dict[str, TierHealth]:
        """See :meth:`Host.tiers`."""
        return {url: TierHealth.from_dict(health) for url, health in self._call("GET", "/v1/status")["tiers"].items()}

    def kept_at(self) -> list[str]:
        """See :meth:`Host.kept_at`."""
        runs = self._call("GET", "/v1/status")["runs"]
        return [str(url) for url in runs.get(self.run, {}).get("kept_at", [])]

    def refused(self) -> list[Manifest]:
        """See :meth:`Host.refused`."""
        return [Manifest.from_dict(fields) for fields in self._snapshots()["refused"]]

    def safe_step(self) -> int | None:
        """See :meth:`Host.safe_step`."""
        listed = self._snapshots()
        safe = ((item.manifest, item.safe) for item in Listed.all_of(listed))
        return newest_safe_step(safe, self.attempt, snapshot_order(str(listed["committed"])))

    def listing(self) -> list[Listed]:
        """Everything the server holds of the run."""
        return Listed.all_of(self._snapshots())

    def owes(self) -> bool:
        """Whether the server has something, of any run, that is still to be brought to a tier below."""
        return any(slot["dirty"] for slot in self._call("GET", "/v1/status")["slots"])

    def manifests(self) -> list[Manifest]:
        """Committed snapshots of the run in this server's memory, newest first."""
        return newest_first([item.manifest for item in self.listing() if not item.manifest.is_file])

    def open_snapshot(self, manifest: Manifest) -> int:
        """See :meth:`Session.open_snapshot`."""
        return self.session.open_snapshot(self.run, manifest.name)

    def report(self, figures: Figures) -> None:
        """See :meth:`Host.report`."""
        self._call("POST", f"/v1/runs/{quoted(self.run)}/figures", asdict(figures), again=True)

    def leave(self, *, complete: bool) -> None:
        """See :meth:`Host.leave`."""
        try:
            body = {"session": self.session.id, "complete": complete}
            self._call("POST", f"/v1/runs/{quoted(self.run)}/close", body, again=True)
        finally:
            self.disconnect()

    def disconnect(self) -> None:
        """See :meth:`Host.disconnect`."""
        self.session.close()
        self.client.close()
        self._let_go({})

    # -- inside ---------------------------------------------------------------------------------------------------

    def _snapshots(self) -> dict[str, Any]:
        return self._call("GET", f"/v1/runs/{quoted(self.run)}/snapshots")

    def _call(
        self, method: str, path: str, body: Any = None, *, limit_s: float = 0.0, again: bool | None = None
    ) -> dict[str, Any]:
        """Ask the server.

        Beyond ``server_call_timeout_s`` the answer is waited for as long as the server answers pings meanwhile.
        """
        longer = limit_s > self.server_call_timeout_s
        return self.client.call(
            method,
            path,
            body,
            timeout_s=max(limit_s, self.server_call_timeout_s),
            again=again,
            pulse=self._ping if longer else None,
        )

    def _ping(self) -> None:
        self.client.ping(_PING_SHARE * self.server_call_timeout_s)

    def _let_go(self, generations: dict[int, int]) -> None:
        """Unmap slots that the server has replaced or given up."""
        for key in [item for item in list(self._maps) if generations.get(item[0]) != item[1]]:  # other threads add some
            shared = self._maps.pop(key, None)  # a ring may be found lost and be left at the same time
            if shared is not None and self.released is not None:
                self.released(shared)
            # Not closed here: tensors that look at it hold no buffer, only a reference, and would look at nothing.
