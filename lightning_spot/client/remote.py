"""A snapshot server: the local server sends to it, and a trainer recovers from it."""

from __future__ import annotations

import functools
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from typing import Any

from lightning_spot.client.encoding import (
    LEAST_PACKED_BYTES,
    SLOW_BYTES_PER_S,
    ApproximateEncoder,
    Approximation,
    PartEncoder,
    packers,
)
from lightning_spot.client.part_streams import CONNECTIONS, send_parts
from lightning_spot.client.server_client import ServerClient, quoted
from lightning_spot.config import LARGEST
from lightning_spot.errors import CorruptSnapshotError, SnapshotNotFoundError, SpotError
from lightning_spot.protocol.wire import PartKind, answered, parse_spot_url
from lightning_spot.server.ring import FindEarlier, nothing_earlier
from lightning_spot.server.runs import Opened, RunInfo, key_of, parse_run
from lightning_spot.server.tier import Listed
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.packing import Compression
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.snapshot.shards import Image
from lightning_spot.store.fences import read_twice
from lightning_spot.store.store import Holdings, Progress, Target, fetch_ranges
from lightning_spot.untrusted import LONGEST_TEXT, flag, integer, plain

logger = logging.getLogger(__name__)

ASK_S = 5.0
"""A server has so long to answer a request that moves no snapshot."""
WAIT_FOR_SLOT_S = 10.0
"""A server may keep a new upload waiting so long for a free slot."""

ONLY_NEAR = ("servers", "replicas", "apart", "session", "is_claimed")
"""What of a run its trainer says to the server of its host, and no other does."""


class ServerStore:
    """Snapshots of one run at a server; implements :class:`~lightning_spot.server.tier.ServerTier`.

    Args:
        url: ``spot://host:port/NAME@ID``, or ``…/NAME`` where only one run has that name.

    Attributes:
        sent: bytes of the snapshots that were committed there, by how their parts went.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        address, path = parse_spot_url(url)
        self.run = path.rpartition("/")[2]
        self.client = ServerClient(address)
        self.sent = Counter[PartKind]()
        self._is_slow = self._unpacks = False
        self._approximation = Approximation()
        self._info: RunInfo | None = None

    # -- what is there ----------------------------------------------------------------------------------------------

    def put(self, manifest: Manifest, image: Image, *, attempt: int) -> None:
        """See :meth:`Store.put`; the server must have a slot within :data:`WAIT_FOR_SLOT_S`."""
        self.send(manifest, image[: len(image)], attempt=attempt)

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        attempt, listed = self._asked()
        return Listed.holdings(listed, attempt)

    def fetch(self, manifest: Manifest, into: Target, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        fetch_ranges(functools.partial(self.read, manifest), manifest.ranges(), into, progress, CONNECTIONS)

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read one of ``manifest.ranges()``, and check it; from any thread. Errors are those of :meth:`fetch`."""
        path = f"/v1/files/{quoted(self.run, manifest.data_path)}"

        def received() -> None:
            self.client.receive(path, start, into)
            manifest.verify_range(start, into, self.url)

        read_twice(received)  # what is damaged is perhaps so since it came

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        try:
            self.client.call("DELETE", f"/v1/files/{quoted(self.run, manifest.name)}")
        except SnapshotNotFoundError:
            return

    # -- what goes there -------------------------------------------------------------------------------------------

    def open_run(self, info: RunInfo) -> Opened:
        """See :meth:`ServerTier.open_run`."""
        body = {name: value for name, value in asdict(info).items() if name not in ONLY_NEAR}
        opened = self.client.call("POST", f"/v1/runs/{quoted(self.run)}/open", body, timeout_s=ASK_S)
        self.know(info)
        with answered(self.url):
            why_not, leaves = plain(opened["why_not"], LONGEST_TEXT), flag(opened, "leaves")
            return Opened(integer(opened, "attempt", None, 0, LARGEST), flag(opened, "carries", None), why_not, leaves)

    def know(self, info: RunInfo) -> None:
        """See :meth:`ServerTier.know`."""
        self._info = info
        self.client.speak_for(info.attempt, info.token)

    def listing(self) -> list[Listed]:
        """See :meth:`ServerTier.listing`."""
        return self._asked()[1]

    def flush(self, wait_s: float) -> list[str]:
        """See :meth:`ServerTier.flush`."""
        body = {"run": self.run, "wait_s": wait_s}
        answer = self.client.call("POST", "/v1/flush", body, timeout_s=wait_s + ASK_S)
        with answered(self.url):
            return [plain(line, LONGEST_TEXT) for line in answer["unreached"]]

    def send(
        self,
        manifest: Manifest,
        image: memoryview,
        *,
        attempt: int,
        earlier: FindEarlier = nothing_earlier,
        floats: Sequence[Floats] = (),
    ) -> Manifest:
        """See :meth:`ServerTier.send`."""
        if manifest.shard is not None:
            floats = ()  # of several writers, some would send an approximation, and others not
        if floats and self._approximation.leads_to(manifest, floats):
            upload, base = self._lease(self._named(manifest.inexact()), attempt)
            if base is not None and self._approximation.glance(base) is not None:
                return self._send(upload, functools.partial(self._approximate, manifest, image, base))
            _abort(self.client, upload)
        upload, base = self._lease(self._named(manifest), attempt)
        self._send(upload, lambda threads: (manifest, self._encoder(manifest, image, base, earlier, threads)))
        if floats:
            self._approximation.begin(manifest, image, floats)
        return manifest

    def fail(self, manifest: Manifest) -> None:
        """See :meth:`ServerTier.fail`."""
        attempt = self._info.attempt if self._info is not None else manifest.attempt
        body = {"attempt": attempt, "manifest": self._named(manifest).to_dict()}
        path = f"/v1/runs/{quoted(self.run)}/fail"
        self._known(attempt, lambda: self.client.call("POST", path, body, timeout_s=ASK_S, again=True))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _send(self, upload: str, prepare: Callable[[Executor], tuple[Manifest, PartEncoder]]) -> Manifest:
        """Send what is prepared as an upload, and commit it there."""
        try:
            with packers() as threads:
                manifest, encoder = prepare(threads)
                sent, wire_s = send_parts(self.client, self.url, upload, manifest, encoder)
            self.client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": self._named(manifest).to_dict()})
        except BaseException:
            _abort(self.client, upload)
            raise
        self.sent.update(sent)
        if (nbytes := sent[PartKind.WHOLE] + sent[PartKind.DELTA]) >= LEAST_PACKED_BYTES:
            self._is_slow = wire_s * SLOW_BYTES_PER_S > nbytes
        logger.debug("%s went to %s as %d of %d bytes", manifest.name, self.url, nbytes, manifest.nbytes)
        return manifest

    def _approximate(
        self, exact: Manifest, image: memoryview, base: Manifest, threads: Executor
    ) -> tuple[Manifest, PartEncoder]:
        manifest, approximated, changes = self._approximation.advance(exact, image, threads)
        return manifest, ApproximateEncoder(manifest, approximated, changes, base, threads)

    def _asked(self) -> tuple[int, list[Listed]]:
        """The attempt that holds the run at the server, and what is there."""
        answer = self.client.call("GET", f"/v1/runs/{quoted(self.run)}/snapshots", timeout_s=ASK_S)
        with answered(self.url):
            return integer(answer, "attempt", None, 0, LARGEST), Listed.all_of(answer)

    def _named(self, manifest: Manifest) -> Manifest:
        """The manifest as the server knows its run."""
        name, identity = parse_run(self.run)
        return replace(manifest, run=name, run_id=identity or manifest.run_id)

    def _lease(self, manifest: Manifest, attempt: int) -> tuple[str, Manifest | None]:
        """Begin an upload, and learn the base."""
        path, upload = f"/v1/runs/{quoted(self.run)}/uploads", uuid.uuid4().hex
        body = {
            "upload": upload,
            "attempt": max(1, attempt),
            "nbytes": manifest.nbytes,
            "manifest": replace(manifest, checksums=()).to_dict(),
            "wait_s": WAIT_FOR_SLOT_S,
            "committed": self._info.committed if self._info is not None else "",
        }
        timeout_s, ping = WAIT_FOR_SLOT_S + 4 * ASK_S, self.client.ping
        try:
            leased = self._known(
                attempt, lambda: self.client.call("POST", path, body, timeout_s=timeout_s, again=True, pulse=ping)
            )
        except BaseException:
            _abort(self.client, upload)  # it may have begun, and only its answer be lost
            raise
        self._unpacks = leased.get("unpacks") is True
        try:
            return upload, Manifest.from_dict(leased.get("base"))
        except CorruptSnapshotError:  # or there is none
            return upload, None

    def _known(self, attempt: int, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Ask a server; one that was restarted and forgot the run is told of it again."""
        try:
            return ask()
        except SnapshotNotFoundError:
            name, identity = parse_run(self.run)
            self.open_run(self._info or RunInfo(name=name, id=identity, location="", attempt=max(1, attempt), token=""))
            return ask()

    def _encoder(
        self, manifest: Manifest, image: memoryview, base: Manifest | None, earlier: FindEarlier, threads: Executor
    ) -> PartEncoder:
        compression: Compression = self._info.compression if self._info is not None else "auto"
        packs = self._unpacks and (compression == "always" or (compression == "auto" and self._is_slow))
        here = self._approximation.glance(base)
        if base is not None and here is None:
            here = earlier(key_of(manifest), base.name)
        return PartEncoder(image, manifest.part_bytes, base, here, threads, packs=packs)


def _abort(client: ServerClient, upload: str) -> None:
    """Take an upload back, if the server can be reached."""
    try:
        client.call("DELETE", f"/v1/uploads/{upload}", timeout_s=ASK_S)
    except SpotError as error:
        logger.debug("an upload could not be taken back (%s); the server frees its slot by itself", error)
