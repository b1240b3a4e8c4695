"""Clients of a memory node, as many in one process as are asked for; no torch. Prints one JSON object.

``python -m benchmarks.scale_clients URL FIRST CLIENTS NBYTES SECONDS``: each client is a run of its own. It commits as
many snapshots as it gets slots, and then, when it is told to, one after the other; no part is as it was before.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import SpotError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.runs import RunInfo

PARTS = 8
"""Of a snapshot: as many as keep four connections busy."""

SLOTS = 3
"""That a run has at a node at once, at most."""


class Client:
    """One run at the node.

    Attributes:
        commits: for each snapshot, when it began and when it was committed (Unix seconds).
        errors: what went wrong, one text each.
    """

    def __init__(self, url: str, number: int, nbytes: int) -> None:
        self.commits: list[tuple[float, float]] = []
        self.errors: list[str] = []
        self._run = f"{number + 1:012x}"
        self._store = NodeStore(f"{url}/run@{self._run}")
        self._image = bytearray(nbytes)
        self._step = 0
        self._store.open_run(RunInfo(name="run", id=self._run, location=f"file:///{self._run}", attempt=1, token="t"))

    def warm(self) -> None:
        """Have the node make its slots; what goes wrong here counts, too."""
        for _ in range(SLOTS):
            self._put()
        self.commits.clear()

    def work(self, until_s: float) -> None:
        """Commit snapshots for so long (Unix seconds)."""
        while time.time() < until_s:
            self._put()

    def _put(self) -> None:
        self._step = step = self._step + 1
        image = memoryview(self._image)
        part_bytes = len(image) // PARTS
        for start in range(0, len(image), part_bytes):
            image[start : start + 8] = step.to_bytes(8, "little")
        plain = Manifest(
            run="run",
            run_id=self._run,
            lineage=self._run,
            name=snapshot_name(step, 1),
            step=step,
            attempt=1,
            nbytes=len(image),
            part_bytes=part_bytes,
        )
        manifest = plain.sealed(image)
        began_s = time.time()
        try:
            self._store.put(manifest, image, attempt=1)
        except SpotError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        self.commits.append((began_s, time.time()))


def main() -> None:
    url, first, count, nbytes, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    clients = [Client(url, first + number, nbytes) for number in range(count)]
    for client in clients:
        client.warm()
    print("ready", flush=True)
    sys.stdin.readline()
    until_s = time.time() + seconds
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda client: client.work(until_s), clients))
    print(json.dumps([{"commits": client.commits, "errors": client.errors} for client in clients]))


if __name__ == "__main__":
    main()
