"""Clients of a snapshot server, as many in one process as are asked for; no torch. Prints one JSON object.

``python -m benchmarks.scale_clients URL FIRST CLIENTS NBYTES PART_BYTES SECONDS [DURABLE]``: each client is a run of
its own. All commit as many snapshots as they get slots, and then, when they are told to, one after the other; no part
is as it was before. With a directory, the server brings each run on to one of its own in there.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import SpotError
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.manifest import Manifest, snapshot_name

SLOTS = 3
"""That a run has at a server at once, at most."""


class Client:
    """One run at the server.

    Args:
        url: of the server.
        number: of the run.
        nbytes: of a snapshot.
        part_bytes: of its parts.
        durable: directory that the server brings it on to, ``""`` for none.

    Attributes:
        commits: for each snapshot, when it began and when it was committed (Unix seconds).
        errors: what went wrong, one text each.
    """

    def __init__(self, url: str, number: int, nbytes: int, part_bytes: int, durable: str = "") -> None:
        self.commits: list[tuple[float, float]] = []
        self.errors: list[str] = []
        self._run = f"{number + 1:012x}"
        self._store = ServerStore(f"{url}/run@{self._run}")
        self._image, self._part_bytes = bytearray(nbytes), part_bytes
        self._step = int(1000 * time.time())  # later than those of this run in an earlier measurement
        below = f"{durable}/{self._run}" if durable else None
        self._store.open_run(
            RunInfo(name="run", id=self._run, location=f"file:///{self._run}", attempt=1, token="t", durable_url=below)
        )

    def warm(self) -> None:
        """Have the server make its slots, while others do: what goes wrong here counts, too.

        Each of many clients needs one to fill beside those that it holds. One after the other, they would share it.
        """
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
        for start in range(0, len(image), self._part_bytes):
            image[start : start + 8] = step.to_bytes(8, "little")
        plain = Manifest(
            run="run",
            run_id=self._run,
            lineage=self._run,
            name=snapshot_name(step, 1),
            step=step,
            attempt=1,
            nbytes=len(image),
            part_bytes=self._part_bytes,
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
    url, seconds, durable = sys.argv[1], float(sys.argv[6]), "".join(sys.argv[7:])
    first, count, nbytes, part_bytes = map(int, sys.argv[2:6])
    clients = [Client(url, first + number, nbytes, part_bytes, durable) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(Client.warm, clients))
        print("ready", flush=True)
        sys.stdin.readline()
        cpu_s, until_s = time.process_time(), time.time() + seconds
        list(pool.map(lambda client: client.work(until_s), clients))
    found = [{"commits": client.commits, "errors": client.errors} for client in clients]
    print(json.dumps({"cpu_s": time.process_time() - cpu_s, "clients": found}))


if __name__ == "__main__":
    main()
