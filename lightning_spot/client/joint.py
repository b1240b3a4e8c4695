"""Snapshots that several hosts bring to a node together, as each of these hosts sees it."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning_spot.client.encoding import CompressionRule, Part, PartEncoder, packers
from lightning_spot.client.node_client import NodeClient, quoted
from lightning_spot.client.part_lanes import PartLanes
from lightning_spot.config import PART_BYTES
from lightning_spot.errors import NodeRefused, NodeUnreachable, SettingsError, SnapshotNotFound, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.packing import Compression
from lightning_spot.image.parts import checksum
from lightning_spot.image.portion import Image, cut
from lightning_spot.image.written import Ranges
from lightning_spot.memory.bases import Glance
from lightning_spot.memory.joint import KnownLayout, Shared
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.tier import Gathering, Sent
from lightning_spot.protocol.wire import BaseInfo
from lightning_spot.retry import retried

logger = logging.getLogger(__name__)

_ASK_S = 5.0
_TRY_S = 5.0  # so long is a request for an upload that has not begun yet on its way, before it is sent again
_PAUSES_S = (0.2, 0.5, 1.0)  # between tries of a node that does not answer
_WAIT_FOR_SLOT_S = 10.0
_LOST_PINGS = 1  # in a row, while a snapshot is put together
_SEAL_S = 3600.0  # as long as the node answers meanwhile


class JointUploads:
    """Implements :class:`~lightning_spot.memory.tier.JointTier` for one run at a node.

    Args:
        client: of the node.
        url: of the run there, for messages.
        run: as in URLs.

    Attributes:
        sent: how went what this host has brought.
    """

    def __init__(self, client: NodeClient, url: str, run: str) -> None:
        self._client, self._url, self._run = client, url, run
        self._lanes, self._rule = PartLanes(client, url), CompressionRule()
        self._layout = KnownLayout()
        self.sent = Sent()

    def know(self, info: RunInfo) -> None:
        """See :meth:`JointTier.know`."""
        self._client.speak_for(info.attempt, info.token)

    def begin(self, shared: Shared, nbytes: int, *, attempt: int, hosts: int) -> Gathering:
        """See :meth:`JointTier.begin`."""
        upload = uuid.uuid4().hex
        request: dict[str, Any] = {"upload": upload, "attempt": attempt, "nbytes": nbytes, "name": shared.name}
        request |= {"hosts": hosts, "digest": shared.digest, "wait_s": _WAIT_FOR_SLOT_S}
        known, ping = self._layout, self._client.ping
        path, timeout_s = f"/v1/runs/{quoted(self._run)}/joint", _WAIT_FOR_SLOT_S + 4 * _ASK_S
        try:

            def ask(layout: dict[str, str]) -> dict[str, Any]:
                return self._asked_again(lambda: self._ask(path, {**request, **layout}, timeout_s, ping), shared.name)

            try:
                begun = ask(known.to_send(shared.layout))
            except SettingsError:
                if shared.layout != known.text:
                    raise
                begun = ask({"layout": shared.layout})  # it has forgotten it
        except BaseException:
            # It may have begun, and only its answer be lost. Another node may have the snapshot, if this one is gone.
            threading.Thread(target=self._give_up, args=(upload,), name="spot-joint", daemon=True).start()
            raise
        self._layout = KnownLayout.of(shared.layout)
        return Gathering(upload, nbytes, BaseInfo.read(begun.get("base")), shared)

    def join(self, name: str, *, attempt: int, host: int, wait_s: float) -> Gathering:
        """See :meth:`JointTier.join`."""
        known = self._layout
        request = {"attempt": attempt, "name": name, "host": host, "layout_id": known.id}
        joined = self._joined(request, time.monotonic() + wait_s)
        if joined["layout"] is not None:
            known = self._layout = KnownLayout(str(joined["layout_id"]), str(joined["layout"]))
        shares, digest = int(joined["shares"]), str(joined["digest"])
        shared = Shared(name=name, shares=shares, digest=digest, layout=known.text, by_hosts=True)
        return Gathering(str(joined["upload"]), int(joined["nbytes"]), BaseInfo.read(joined.get("base")), shared)

    def _joined(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Ask again and again: if a request or its answer were lost, all hosts would wait for this one.

        A node that is silent, and stays so, is not asked again: ranks wait for the slot of what would begin there.
        """
        pauses = list(_PAUSES_S)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            wait_s = min(left_s, _TRY_S)
            try:
                path, tried = f"/v1/runs/{quoted(self._run)}/joint/join", {"wait_s": wait_s, "again": wait_s < left_s}
                joined = self._ask(path, {**request, **tried}, wait_s + _ASK_S)
            except NodeUnreachable as error:
                if not pauses or not left_s:
                    raise
                if isinstance(error.__cause__, TimeoutError):
                    self._client.ping()
                logger.debug("%s is asked again for %s: %s", self._url, request["name"], error)
                time.sleep(pauses.pop(0))
                continue
            if joined.get("upload"):
                return joined

    def bring(
        self,
        gathering: Gathering,
        image: Image,
        ranges: Ranges,
        earlier: Glance | None,
        goes_on: Callable[[], None],
        compression: Compression = "auto",
    ) -> Sent:
        """See :meth:`JointTier.bring`."""
        pieces = list(cut(ranges, PART_BYTES))
        if not pieces:
            return replace(self.sent)

        def parts() -> Iterator[Part]:
            for start, stop in pieces:
                goes_on()
                yield start, stop, checksum(image[start:stop])

        threads = packers()
        rule, always = self._rule if compression is not None else None, compression == "delta"
        encoder = PartEncoder(image, PART_BYTES, gathering.base, earlier, threads, rule, always=always)
        try:
            self._rule.begin()
            sent = self._lanes.send(gathering.upload, parts(), len(pieces), encoder)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        self.sent.add(sent)
        logger.debug("%s: %d of %d bytes went to %s", gathering.shared.name, sent.bytes, len(image), self._url)
        return replace(self.sent)

    def placed(self, gathering: Gathering, host: int, torn: str = "") -> None:
        """See :meth:`JointTier.placed`. Said again and again: if it were lost, all hosts would have sent in vain."""
        path, body = f"/v1/uploads/{gathering.upload}/joint/placed", {"host": host, "torn": torn[:2000]}
        lost: list[Exception] = []

        def note(error: Exception, _pause_s: float) -> None:
            logger.debug("%s is told again that %s is in place: %s", self._url, gathering.shared.name, error)
            lost.append(error)

        try:
            retried(
                lambda: self._ask(path, body, _ASK_S), _PAUSES_S, lambda error: isinstance(error, NodeUnreachable), note
            )
        except SnapshotNotFound:
            # Only an answer was lost, and the upload is over since: committed, if all is well.
            if not lost or not (torn or self._is_committed(gathering.shared.name)):
                raise

    def _asked_again(self, ask: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
        """Ask, and again where a connection broke: the node does once what it is asked for more than once.

        One that is silent is not asked again, since other hosts, and another node, would wait for that.
        """

        def has_broken(error: Exception) -> bool:
            return isinstance(error, NodeUnreachable) and not isinstance(error.__cause__, TimeoutError)

        def note(error: Exception, _pause_s: float) -> None:
            logger.debug("%s is asked again for %s: %s", self._url, name, error)

        return retried(ask, _PAUSES_S, has_broken, note)

    def _is_committed(self, name: str) -> bool:
        """Whether the node has a snapshot of the run, as it lists them."""
        listed = self._client.call("GET", f"/v1/runs/{quoted(self._run)}/snapshots", timeout_s=_ASK_S)
        return any(Manifest.from_dict(item["manifest"]).name == name for item in listed["snapshots"])

    def seal(self, gathering: Gathering, manifest: Manifest, goes_on: Callable[[], None]) -> Manifest:
        """See :meth:`JointTier.seal`."""
        failed = 0

        def pulse() -> None:
            nonlocal failed
            goes_on()
            try:
                self._client.ping()
            except NodeUnreachable as error:  # one may be lost on a link that is lossy for a moment
                failed += 1
                if failed > _LOST_PINGS:
                    raise
                logger.debug("%s is asked again whether it is there: %s", self._url, error)
            else:
                failed = 0

        path = f"/v1/uploads/{gathering.upload}/joint/seal"
        body = {"manifest": replace(manifest, checksums=()).to_dict()}
        sealed = self._asked_again(
            lambda: self._client.call("POST", path, body, timeout_s=_SEAL_S, pulse=pulse), gathering.shared.name
        )
        return replace(manifest, checksums=tuple(map(str, sealed["checksums"])))

    def give_up(self, gathering: Gathering) -> None:
        """See :meth:`JointTier.give_up`."""
        self._give_up(gathering.upload)

    def decline(self, name: str, *, attempt: int, why: str, host: int = 0) -> None:
        """See :meth:`JointTier.decline`."""
        body = {"attempt": attempt, "name": name, "why": why[:2000], "host": host}
        self._ask(f"/v1/runs/{quoted(self._run)}/joint/decline", body, _ASK_S)

    def _ask(
        self, path: str, body: dict[str, Any], timeout_s: float, pulse: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        try:
            return self._client.call("POST", path, body, timeout_s=timeout_s, pulse=pulse)
        except NodeRefused as error:
            if error.status in (404, 405):
                raise NodeRefused(
                    f"{self._url} runs an earlier version of lightning_spot, at which hosts cannot put a snapshot"
                    " together: install the same version there",
                    tier=self._url,
                    status=error.status,
                ) from error
            raise

    def _give_up(self, upload: str) -> None:
        try:
            self._client.call("DELETE", f"/v1/uploads/{upload}", timeout_s=_ASK_S)
        except SpotError as error:
            logger.debug("an upload could not be taken back (%s); the node frees its slot by itself", error)
