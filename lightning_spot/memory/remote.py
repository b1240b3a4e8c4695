"""A node as a store: the tier that a node on this host flushes to, and from which a trainer recovers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from lightning_spot.errors import CorruptSnapshot, NodeUnreachable, SnapshotNotFound, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import checksum, part_ranges
from lightning_spot.memory.client import NodeClient, quoted
from lightning_spot.memory.wire import Address, parse_spot_url
from lightning_spot.tiers.store import Claim, Holdings, Progress, highest_attempt, newest_first, seal_parts

logger = logging.getLogger(__name__)

CONNECTIONS = 4
"""Connections a snapshot is sent over: a cloud VM gets about 5 Gbit/s per flow outside a placement group."""

_WAIT_FOR_SLOT_S = 30.0
_SENDS_OF_A_PART = 3


class NodeStore:
    """Snapshots of one run at a node; implements :class:`~lightning_spot.tiers.store.Store`.

    Args:
        url: ``spot://host:port/run``.
        address: overrides the URL's address (for a Unix socket).
    """

    def __init__(self, url: str, address: Address | None = None) -> None:
        self.url = url.rstrip("/")
        parsed, path = parse_spot_url(url)
        self.run = path.rpartition("/")[2]
        self.client = NodeClient(address or parsed)

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        """See :meth:`Store.put`; the node must have a clean slot within 30 s."""
        manifest = replace(manifest, run=self.run.partition("@")[0])
        upload = self._lease({"attempt": max(1, attempt), "nbytes": manifest.nbytes, "wait_s": _WAIT_FOR_SLOT_S})
        try:
            parts = list(enumerate(part_ranges(manifest.nbytes, manifest.part_bytes)))
            lanes = [parts[lane::CONNECTIONS] for lane in range(CONNECTIONS)]
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                jobs = [pool.submit(self._send_lane, upload, lane, image, manifest) for lane in lanes if lane]
                for job in jobs:
                    job.result()
            self.client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": asdict(manifest)})
        except BaseException:
            self._give_up(upload)
            raise

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`Store.put_parts`."""
        manifest = replace(manifest, run=self.run.partition("@")[0])
        upload = self._lease({"attempt": max(1, attempt), "nbytes": manifest.nbytes, "wait_s": _WAIT_FOR_SLOT_S})
        checksums: list[str] = []
        sizes: list[int] = []
        try:
            with closing(self.client.stream(upload)) as stream:
                for part in parts:
                    checksums.append(checksum(part))
                    arrived = list(stream.send([(sum(sizes), part)])) if len(part) else []
                    if any(digest != checksums[-1] for _, digest in arrived):
                        raise CorruptSnapshot(f"bytes {sum(sizes)}… arrive damaged at {self.url}", where=self.url)
                    sizes.append(len(part))
            sealed = seal_parts(manifest, checksums, sizes)
            self.client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": asdict(sealed)})
        except BaseException:
            self._give_up(upload)
            raise
        return sealed

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        manifests = newest_first([held[0] for held in self.held() if not held[0].is_file])
        return Holdings(manifests=manifests, highest_attempt=highest_attempt(self.claimed(), (), manifests))

    def holds(self, manifest: Manifest) -> bool:
        """See :meth:`Store.holds`."""
        return any(replace(held[0], run=manifest.run) == manifest for held in self.held())

    def held(self) -> list[tuple[Manifest, list[str], list[str]]]:
        """Everything the node holds of the run: manifest, tiers it is dirty for, tiers it is safe at."""
        listed = self.client.call("GET", f"/v1/runs/{quoted(self.run)}/snapshots")["snapshots"]
        return [(Manifest.from_dict(item["manifest"]), item["dirty"], item["safe"]) for item in listed]

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        path = f"/v1/files/{quoted(self.run, manifest.data_path)}"

        def read(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            self.client.receive(path, start, into[start:stop])
            if progress is not None:
                progress(stop - start)

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(read, part_ranges(manifest.nbytes)))

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        try:
            self.client.call("DELETE", f"/v1/files/{quoted(self.run, manifest.name)}")
        except SnapshotNotFound:
            return

    def sweep(self, current: Manifest) -> None:
        """Nothing to do: a node frees unfinished uploads by itself."""

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        return int(self.client.call("GET", f"/v1/runs/{quoted(self.run)}/claimed")["attempt"])

    def newest_claim(self) -> Claim | None:
        """A node keeps the number of the attempt that holds a run, and no claim."""
        attempt = self.claimed()
        return Claim(attempt=attempt, run_id="", token="", location="", started_unix_s=0.0) if attempt else None

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`."""
        names = ("location", "attempt", "token", "keep", "host", "pid")
        body = {name: getattr(claim, name) for name in names}
        self.client.call("POST", f"/v1/runs/{quoted(self.run)}/open", body)

    def _send_lane(
        self, upload: str, lane: list[tuple[int, tuple[int, int]]], image: memoryview, manifest: Manifest
    ) -> None:
        """Send the parts of one connection; what arrives damaged, or not at all, is sent again a few times."""
        expected = {start: (manifest.checksums[index], image[start:stop]) for index, (start, stop) in lane}
        for last_try in (False,) * (_SENDS_OF_A_PART - 1) + (True,):
            try:
                stream = self.client.stream(upload)
                try:
                    for start, arrived in stream.send([(start, part) for start, (_, part) in expected.items()]):
                        if arrived == expected[start][0]:
                            del expected[start]
                finally:
                    stream.close()
            except NodeUnreachable:
                if last_try:
                    raise
            if not expected:
                return
        raise CorruptSnapshot(
            f"bytes {min(expected)}… arrive damaged at {self.url}, {_SENDS_OF_A_PART} times", where=self.url
        )

    def _lease(self, request: dict[str, Any]) -> str:
        path = f"/v1/runs/{quoted(self.run)}"
        try:
            return str(self.client.call("POST", f"{path}/uploads", request)["upload"])
        except SnapshotNotFound:  # a node that was restarted knows the run no more
            self.client.call("POST", f"{path}/open", {"attempt": request["attempt"]})
            return str(self.client.call("POST", f"{path}/uploads", request)["upload"])

    def _give_up(self, upload: str) -> None:
        try:
            self.client.call("DELETE", f"/v1/uploads/{upload}", timeout_s=5.0)
        except SpotError as error:
            logger.debug("an upload could not be taken back (%s); the node frees its slot by itself", error)
