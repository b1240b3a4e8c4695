"""A snapshot server as a store: the local server sends to it, and a trainer recovers from it.

:class:`Telling` retries small requests that several servers have to get, such as that a snapshot is complete.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_spot.client.encoding import (
    ApproximateEncoder,
    Approximation,
    CompressionRule,
    OutgoingPart,
    Part,
    PartEncoder,
    packers,
)
from lightning_spot.client.node_client import NodeClient, quoted
from lightning_spot.client.part_lanes import CONNECTIONS, PartLanes
from lightning_spot.config import LARGEST, PART_BYTES
from lightning_spot.errors import (
    CorruptSnapshotError,
    FencedError,
    ServerUnreachableError,
    SettingsError,
    ShareFault,
    SnapshotNotFoundError,
    SpotError,
)
from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.packing import Compression
from lightning_spot.image.parts import checksum
from lightning_spot.image.portion import Image, cut
from lightning_spot.image.sealing import seal_parts
from lightning_spot.image.written import Ranges
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.joint import KnownLayout, Shared
from lightning_spot.memory.ring import FindEarlier, Glance, nothing_earlier
from lightning_spot.memory.runs import Opened, RunInfo, key_of, parse_run
from lightning_spot.memory.tier import Gathering, Listed, Sent
from lightning_spot.protocol.wire import BaseInfo, answered, fault_body, parse_spot_url
from lightning_spot.retry import growing, retried
from lightning_spot.say import say
from lightning_spot.threads import all_at_once
from lightning_spot.tiers.fences import Claim, Owner
from lightning_spot.tiers.store import Holdings, Progress, highest_attempt, newest_first
from lightning_spot.untrusted import LONGEST_TEXT, flag, integer, plain

logger = logging.getLogger(__name__)

_ASK_S = 5.0
_TRY_S = 5.0  # so long is a request for an upload that has not begun yet on its way, before it is sent again
_PAUSES_S = (0.2, 0.5, 1.0)  # between tries of a server that does not answer
_WAIT_FOR_SLOT_S = 10.0
_LOST_PINGS = 1  # in a row, while a snapshot is put together
_SEAL_S = 3600.0  # as long as the server answers meanwhile

_TOLD = (
    "location",
    "attempt",
    "token",
    "keep",
    "durable_url",
    "min_upload_interval_s",
    "compression",
    "carry",
    "spread",
    "left",
    "pid",
    "host",
)


class JointUploads:
    """Implements :class:`~lightning_spot.memory.tier.JointTier` for one run at a server.

    Args:
        client: of the server.
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
            # It may have begun, and only its answer be lost. Another server may have the snapshot, if this one is gone.
            threading.Thread(target=_abort, args=(self._client, upload), name="spot-joint", daemon=True).start()
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

        A server that is silent, and stays so, is not asked again: ranks wait for the slot of what would begin there.
        """
        path, pauses = f"/v1/runs/{quoted(self._run)}/joint/join", iter(_PAUSES_S)  # for all requests together
        left_s = 0.0

        def ask() -> dict[str, Any]:
            nonlocal left_s
            left_s = max(0.0, deadline_s - time.monotonic())
            wait_s = min(left_s, _TRY_S)
            return self._ask(path, {**request, "wait_s": wait_s, "again": wait_s < left_s}, wait_s + _ASK_S)

        def note(error: Exception, _pause_s: float) -> None:
            if isinstance(error.__cause__, TimeoutError):
                self._client.ping()
            logger.debug("%s is asked again for %s: %s", self._url, request["name"], error)

        while True:
            joined = retried(ask, pauses, lambda error: isinstance(error, ServerUnreachableError) and left_s > 0, note)
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
        rule, always = self._rule if compression != "off" else None, compression == "always"
        encoder = PartEncoder(image, PART_BYTES, gathering.base, earlier, threads, rule, always=always)
        try:
            self._rule.begin()
            sent = self._lanes.send(gathering.upload, parts(), len(pieces), encoder)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        self.sent.add(sent)
        logger.debug("%s: %d of %d bytes went to %s", gathering.shared.name, sent.bytes, len(image), self._url)
        return replace(self.sent)

    def placed(self, gathering: Gathering, host: int, torn: str = "", fault: ShareFault | None = None) -> None:
        """See :meth:`JointTier.placed`. Said again and again: if it were lost, all hosts would have sent in vain."""
        path = f"/v1/uploads/{gathering.upload}/joint/placed"
        body = {"host": host, "torn": torn[:2000], "fault": fault_body(fault)}
        lost: list[Exception] = []

        def note(error: Exception, _pause_s: float) -> None:
            logger.debug("%s is told again that %s is in place: %s", self._url, gathering.shared.name, error)
            lost.append(error)

        try:
            retried(
                lambda: self._ask(path, body, _ASK_S),
                _PAUSES_S,
                lambda error: isinstance(error, ServerUnreachableError),
                note,
            )
        except SnapshotNotFoundError:
            # Only an answer was lost, and the upload is over since: committed, if all is well.
            if not lost or not (torn or self._is_committed(gathering.shared.name)):
                raise

    def _asked_again(self, ask: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
        """Ask, and again where a connection broke: the server does once what it is asked for more than once.

        One that is silent is not asked again, since other hosts, and another server, would wait for that.
        """

        def has_broken(error: Exception) -> bool:
            return isinstance(error, ServerUnreachableError) and not isinstance(error.__cause__, TimeoutError)

        def note(error: Exception, _pause_s: float) -> None:
            logger.debug("%s is asked again for %s: %s", self._url, name, error)

        return retried(ask, _PAUSES_S, has_broken, note)

    def _is_committed(self, name: str) -> bool:
        """Whether the server has a snapshot of the run, as it lists them."""
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
            except ServerUnreachableError as error:  # one may be lost on a link that is lossy for a moment
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
        _abort(self._client, gathering.upload)

    def decline(self, name: str, *, attempt: int, why: str, host: int = 0) -> None:
        """See :meth:`JointTier.decline`."""
        body = {"attempt": attempt, "name": name, "why": why[:2000], "host": host}
        self._ask(f"/v1/runs/{quoted(self._run)}/joint/decline", body, _ASK_S)

    def _ask(
        self, path: str, body: dict[str, Any], timeout_s: float, pulse: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        return self._client.call("POST", path, body, timeout_s=timeout_s, pulse=pulse)


class NodeStore:
    """Snapshots of one run at a server; implements :class:`~lightning_spot.tiers.store.Store`.

    Args:
        url: ``spot://host:port/NAME@ID``, or ``…/NAME`` where only one run has that name.

    Attributes:
        sent: how the parts of snapshots went which were committed there.
    """

    owner: Owner | None = None

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        address, path = parse_spot_url(url)
        self.run = path.rpartition("/")[2]
        self.client = NodeClient(address)
        self.sent = Sent()
        self._rule = CompressionRule()
        self._approximation = Approximation()
        self._lanes = PartLanes(self.client, self.url)
        self._info: RunInfo | None = None

    # -- as a store -----------------------------------------------------------------------------------------------

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        """See :meth:`Store.put`; the server must have a slot within 30 s."""
        self.send(Coming(manifest, image), attempt=attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`Store.put_parts`."""
        manifest = self._named(manifest)
        upload, _ = self._lease(manifest, attempt)
        checksums: list[str] = []
        sizes: list[int] = []
        try:
            stream = self.client.stream(upload)
            try:
                for part in parts:
                    checksums.append(checksum(part))
                    whole = OutgoingPart.whole(sum(sizes), part, checksums[-1])
                    for sent, arrived in stream.send([whole] if len(part) else []):
                        if arrived != sent.digest:
                            raise CorruptSnapshotError(
                                f"bytes {sent.start}… arrive damaged at {self.url}", where=self.url
                            )
                    sizes.append(len(part))
            finally:
                stream.close()
            sealed = seal_parts(manifest, checksums, sizes)
            self.client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": sealed.to_dict()})
        except BaseException:
            _abort(self.client, upload)
            raise
        return sealed

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        attempt, listed = self._asked(_ASK_S)
        held = newest_first([item.manifest for item in listed if not item.manifest.is_file])
        highest = highest_attempt(attempt, (), held)
        manifests = [manifest for manifest in held if manifest.portion is None]
        portions = [manifest for manifest in held if manifest.portion is not None]
        return Holdings(manifests=manifests, highest_attempt=highest, portions=portions)

    def has(self, manifest: Manifest) -> bool:
        """See :meth:`Store.has`."""
        return any(replace(item.manifest, run=manifest.run) == manifest for item in self.listing())

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        fetch_ranges(self.read, manifest, manifest.ranges(), into, progress, CONNECTIONS)

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read one of ``manifest.ranges()``, and check it; from any thread. Errors are those of :meth:`fetch`."""
        path = f"/v1/files/{quoted(self.run, manifest.data_path)}"
        self.client.receive(path, start, into)
        try:
            manifest.verify_range(start, into, self.url)
        except CorruptSnapshotError:  # perhaps on its way
            self.client.receive(path, start, into)
            manifest.verify_range(start, into, self.url)

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        try:
            self.client.call("DELETE", f"/v1/files/{quoted(self.run, manifest.name)}")
        except SnapshotNotFoundError:
            return

    def sweep(self, current: Manifest, seen: Holdings | None = None) -> None:
        """Nothing to do: a server frees unfinished uploads by itself."""

    def sweep_files(self) -> None:
        """See :meth:`sweep`."""

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        return self._asked(_ASK_S)[0]

    def newest_claim(self) -> Claim | None:
        """A server keeps the number of the attempt that holds a run, and no claim."""
        attempt = self.claimed()
        return Claim(attempt=attempt, run_id="", digest="", location="", started_unix_s=0.0) if attempt else None

    def check_owner(self) -> None:
        """Nothing to do: a server knows who has opened a run."""

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`."""
        name, identity = parse_run(self.run)
        self.open_run(
            RunInfo(
                name=name,
                id=identity,
                location=claim.location,
                attempt=claim.attempt,
                token=claim.digest,
                keep=claim.keep,
                pid=claim.pid,
                host=claim.host,
            )
        )

    @functools.cached_property
    def joint(self) -> JointUploads:
        """See :class:`~lightning_spot.memory.tier.HasJoint`."""
        return JointUploads(self.client, self.url, self.run)

    # -- portions of snapshots that are spread over several servers -------------------------------------------------

    def look(self, name: str = "", wait_s: float = _ASK_S) -> dict[str, Any]:
        """What is there of the run's snapshots, see :meth:`~lightning_spot.memory.held_portions.Spread.look`."""
        path = f"/v1/runs/{quoted(self.run)}/portions"
        return self.client.call("GET", path, {"name": name}, timeout_s=wait_s)

    def whole(self, told: Told, *, attempt: int) -> None:
        """Say that all portions of a snapshot are at servers, see :meth:`.Spread.whole`."""
        body = {"attempt": attempt, **asdict(told)}
        path = f"/v1/runs/{quoted(self.run)}/portions/whole"
        self.client.call("POST", path, body, timeout_s=_ASK_S, again=True)

    def torn(self, name: str, why: str, *, attempt: int, over: bool = False) -> None:
        """Say that a snapshot will never be whole, see :meth:`~lightning_spot.memory.held_portions.Spread.torn`."""
        body = {"attempt": attempt, "name": name, "why": why[:2000], "over": over}
        path = f"/v1/runs/{quoted(self.run)}/portions/torn"
        self.client.call("POST", path, body, timeout_s=_ASK_S, again=True)

    # -- as a server that carries snapshots on -----------------------------------------------------------------------

    def open_run(self, info: RunInfo) -> Opened:
        """See :meth:`NodeTier.open_run`."""
        body = {name: getattr(info, name) for name in _TOLD}
        opened = self.client.call("POST", f"/v1/runs/{quoted(self.run)}/open", body, timeout_s=_ASK_S)
        self.know(info)
        with answered(self.url):
            why_not, leaves = plain(opened["why_not"], LONGEST_TEXT), flag(opened, "leaves")
            return Opened(integer(opened, "attempt", None, 0, LARGEST), flag(opened, "carries", None), why_not, leaves)

    def know(self, info: RunInfo) -> None:
        """See :meth:`NodeTier.know`."""
        self._info = info
        self.client.speak_for(info.attempt, info.token)

    def listing(self) -> list[Listed]:
        """See :meth:`NodeTier.listing`."""
        return self._asked(_ASK_S)[1]

    def holds(self, name: str, wait_s: float) -> bool:
        """Whether a snapshot is in the server's memory, asked for ``wait_s`` seconds at most."""
        return any(item.manifest.name == name for item in self._asked(wait_s)[1])

    def settle(self, manifest: Manifest, attempt: int) -> None:
        """See :meth:`NodeTier.settle`."""
        body = {"attempt": attempt, "name": manifest.name, "lineage": manifest.lineage}
        self.client.call("POST", f"/v1/runs/{quoted(self.run)}/settle", body, timeout_s=_ASK_S, again=True)

    def flush(self, wait_s: float) -> list[str]:
        """See :meth:`NodeTier.flush`."""
        body = {"run": self.run, "wait_s": wait_s}
        answer = self.client.call("POST", "/v1/flush", body, timeout_s=wait_s + _ASK_S)
        with answered(self.url):
            return [plain(line, LONGEST_TEXT) for line in answer["unreached"]]

    def send(
        self,
        coming: Coming,
        *,
        attempt: int,
        earlier: FindEarlier = nothing_earlier,
        floats: Sequence[Floats] = (),
    ) -> Manifest:
        """See :meth:`NodeTier.send`."""
        began_s = time.perf_counter()
        if floats and self._approximation.leads_to(coming.manifest, floats):
            exact = coming.committed()
            upload, base = self._lease(self._named(exact.inexact()), attempt)
            if base is not None and self._approximation.glance(base) is not None:
                manifest = self._send(upload, functools.partial(self._approximate, exact, coming.image, base))
                self._approximation.took(manifest, time.perf_counter() - began_s)
                return manifest
            _abort(self.client, upload)
        upload, base = self._lease(self._named(coming.manifest), attempt)
        manifest = self._send(upload, lambda threads: (coming, self._encoder(coming, base, earlier, threads)))
        if floats:
            self._approximation.took(manifest, time.perf_counter() - began_s)
            self._approximation.begin(manifest, coming.image, floats)
        return manifest

    # -- inside ---------------------------------------------------------------------------------------------------

    def _send(self, upload: str, prepare: Callable[[Executor], tuple[Coming, PartEncoder]]) -> Manifest:
        """Send what is prepared as an upload, and commit it there."""
        threads = packers()
        try:
            coming, encoder = prepare(threads)
            count = -(-coming.manifest.nbytes // coming.manifest.part_bytes)
            self._rule.begin()
            sent = self._lanes.send(upload, coming.sealed_parts(), count, encoder)
            manifest = coming.committed()
            self.client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": self._named(manifest).to_dict()})
        except BaseException:
            threads.shutdown()
            _abort(self.client, upload)
            raise
        threads.shutdown(wait=False, cancel_futures=True)  # what is packed still is thrown away
        self.sent.add(sent)
        logger.debug("%s went to %s as %d of %d bytes", manifest.name, self.url, sent.bytes, manifest.nbytes)
        return manifest

    def _approximate(
        self, exact: Manifest, image: memoryview, base: BaseInfo, threads: Executor
    ) -> tuple[Coming, PartEncoder]:
        coming, changes = self._approximation.advance(exact, image, threads)
        return coming, ApproximateEncoder(coming, changes, base, threads)

    def _asked(self, wait_s: float) -> tuple[int, list[Listed]]:
        """The attempt that holds the run at the server, and what is there."""
        answer = self.client.call("GET", f"/v1/runs/{quoted(self.run)}/snapshots", timeout_s=wait_s)
        with answered(self.url):
            return integer(answer, "attempt", None, 0, LARGEST), Listed.all_of(answer)

    def _named(self, manifest: Manifest) -> Manifest:
        """The manifest as the server knows its run."""
        name, identity = parse_run(self.run)
        return replace(manifest, run=name, run_id=identity or manifest.run_id)

    def _lease(self, manifest: Manifest, attempt: int) -> tuple[str, BaseInfo | None]:
        """Begin an upload, and learn the base; a server that was restarted and forgot the run is told of it again."""
        path = f"/v1/runs/{quoted(self.run)}"
        upload = uuid.uuid4().hex
        request: dict[str, Any] = {
            "upload": upload,
            "attempt": max(1, attempt),
            "nbytes": manifest.nbytes,
            "name": manifest.name,
            "manifest": replace(manifest, checksums=()).to_dict(),
            "wait_s": _WAIT_FOR_SLOT_S,
        }
        ask = functools.partial(
            self.client.call,
            "POST",
            f"{path}/uploads",
            timeout_s=_WAIT_FOR_SLOT_S + 4 * _ASK_S,
            again=True,
            pulse=self.client.ping,
        )
        try:
            try:
                leased = ask(request)
            except SnapshotNotFoundError:
                name, identity = parse_run(self.run)
                info = self._info or RunInfo(name=name, id=identity, location="", attempt=max(1, attempt), token="")
                self.open_run(info)
                leased = ask(request)
        except BaseException:
            _abort(self.client, upload)  # it may have begun, and only its answer be lost
            raise
        with answered(self.url):
            return upload, BaseInfo.read(leased.get("base"))

    def _encoder(self, coming: Coming, base: BaseInfo | None, earlier: FindEarlier, threads: Executor) -> PartEncoder:
        compression: Compression = self._info.compression if self._info is not None else "auto"
        held = self._approximation.glance(base)
        if base is not None and held is None:
            held = earlier(key_of(coming.manifest), base.name)
        return PartEncoder(
            coming.image,
            coming.manifest.part_bytes,
            base,
            held,
            threads,
            self._rule if compression != "off" else None,
            always=compression == "always",
        )


def _abort(client: NodeClient, upload: str) -> None:
    """Take an upload back, if the server can be reached."""
    try:
        client.call("DELETE", f"/v1/uploads/{upload}", timeout_s=_ASK_S)
    except SpotError as error:
        logger.debug("an upload could not be taken back (%s); the server frees its slot by itself", error)


def fetch_ranges(
    read: Callable[[Manifest, int, memoryview], None],
    manifest: Manifest,
    ranges: Iterable[tuple[int, int]],
    into: memoryview,
    progress: Progress | None,
    connections: int,
) -> None:
    """Read ranges of a snapshot side by side.

    Args:
        read: see :meth:`~lightning_spot.tiers.store.ReadsRanges.read`.
        manifest: of the snapshot.
        ranges: first byte, and the one behind the last.
        into: memory of the whole snapshot.
        progress: called with the number of bytes that have just come.
        connections: how many are read at a time.
    """

    def fetch(bounds: tuple[int, int]) -> None:
        start, stop = bounds
        read(manifest, start, into[start:stop])
        if progress is not None:
            progress(stop - start)

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(fetch, ranges))


Word = Callable[[NodeStore], None]
"""Tells one server something."""

_AGAIN_S = (1.0, 10.0, 1.5)  # the first pause, the longest, and by what they grow
_MOST_UNHEARD = 64  # words at one server


@dataclass(slots=True)
class _OnItsWay:
    """What servers are being told, of one thing.

    Attributes:
        word: the newest.
        tellers: threads that tell it, or an older one.
    """

    word: Word
    tellers: int = 0


class Telling:
    """Words to the servers of one run. Methods may be called from any thread.

    Attributes:
        stops: whether nothing is told again any more; so it is until somebody says how long it is to be.
        unheard: what each server has not heard: by its URL and by what it is about.
    """

    def __init__(self) -> None:
        self.stops: Callable[[], bool] = lambda: True
        self.unheard: dict[str, dict[str, tuple[NodeStore, Word]]] = {}
        self._on_its_way: dict[str, _OnItsWay] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def tell(self, nodes: Iterable[NodeStore], about: str, word: Word) -> list[SpotError]:
        """Tell all servers something at the same time; what went wrong. Who does not hear it is told again.

        Args:
            nodes: to tell.
            about: what it is about: of two such words, only the newer one is told again, also at other servers.
            word: tells one.
        """
        nodes = list(nodes)
        with self._lock:
            told = self._on_its_way.setdefault(about, _OnItsWay(word))
            told.word, told.tellers = word, told.tellers + 1
        try:
            problems = at_all(nodes, word)
        finally:
            with self._lock:
                told.tellers -= 1
                if not told.tellers:
                    del self._on_its_way[about]
        with self._lock:
            for words in self.unheard.values():
                if about in words:
                    words[about] = (words[about][0], told.word)
            for node in nodes:
                problem = problems.get(node.url)
                if told.word is word or not _is_heard(problem):  # else a newer one may be on its way there
                    self._note(node, about, told.word, problem)
            self._begin()
        return list(problems.values())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _note(self, node: NodeStore, about: str, word: Word, problem: SpotError | None) -> None:
        """Note whether a server has heard a word, or never will; under the lock."""
        if isinstance(problem, FencedError):  # a later attempt speaks for the run: all servers would refuse it
            for url, words in list(self.unheard.items()):
                if about in words and words[about][1] is word:
                    self._forget(url, about)
        elif _is_heard(problem):
            self._forget(node.url, about)
        else:
            words = self.unheard.setdefault(node.url, {})
            words[about] = (node, word)
            while len(words) > _MOST_UNHEARD:
                del words[next(iter(words))]

    def _forget(self, url: str, about: str) -> None:
        """Tell a server nothing of that any more; under the lock."""
        words = self.unheard.get(url, {})
        words.pop(about, None)
        if not words:
            self.unheard.pop(url, None)

    def _begin(self) -> None:
        """Have a thread tell again what was not heard; under the lock."""
        if self._thread is not None or not self.unheard or self.stops():
            return
        self._thread = threading.Thread(target=self._again, name="spot-telling", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads can be had now: with the next word
            logger.debug("nothing is told again now: %s", error)
            self._thread = None

    def _again(self) -> None:
        for pause_s in growing(*_AGAIN_S):
            time.sleep(pause_s)
            with self._lock:
                if not self.unheard or self.stops():
                    self._thread = None
                    return
                nodes = [next(iter(words.values()))[0] for words in self.unheard.values()]
            try:
                at_all(nodes, self._tell_all_again)
            except Exception:  # whatever fails, such as want of memory, nobody else tells them again
                text = "snapshot servers could not be updated. Retrying"
                say(logging.ERROR, "servers-not-told", text, exc_info=True)

    def _tell_all_again(self, node: NodeStore) -> None:
        with self._lock:
            words = dict(self.unheard.get(node.url, {}))
        for about, (_, word) in words.items():
            self._tell_again(node, about, word)

    def _tell_again(self, node: NodeStore, about: str, word: Word) -> None:
        problem = at_all([node], word).get(node.url)
        with self._lock:
            known = self.unheard.get(node.url, {}).get(about)
            if known is not None and known[1] is word:  # else there is a newer one, or it has heard that
                self._note(node, about, word, problem)
        if problem is not None:
            raise problem  # it does not hear the others either


def _is_heard(problem: SpotError | None) -> bool:
    """Whether a server need not be told again: it has heard, or has nothing of that run."""
    return problem is None or isinstance(problem, FencedError | SnapshotNotFoundError | SettingsError)


def at_all(nodes: Iterable[NodeStore], ask: Word) -> dict[str, SpotError]:
    """Ask all servers at the same time; what went wrong, by the URL."""

    def one(node: NodeStore) -> SpotError | None:
        try:
            ask(node)
        except SpotError as error:
            return error
        return None

    nodes = list(nodes)
    found = zip(
        nodes, all_at_once([functools.partial(one, node) for node in nodes], "spot-ask", len(nodes)), strict=True
    )
    return {node.url: error for node, error in found if error is not None}
