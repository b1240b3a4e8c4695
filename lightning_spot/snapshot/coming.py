"""A file that is being sealed here, and whose parts become final one after another.

Whoever sends the file on takes each part as soon as it is final, and waits for the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lightning_spot.errors import CorruptSnapshotError, SnapshotNotFoundError
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import checksum, part_ranges
from lightning_spot.threads import in_turn, processors

QUIET_S = 30.0
"""Who waits for parts waits no longer when none became final for so long: the file is sent on once it is committed."""

_FEW, _MOST_THREADS = 4, 16


class Coming:
    """A file whose parts become final one after another. Methods may be called from any thread.

    Args:
        manifest: of the file; with checksums it counts as committed, and every part is final.
        image: the whole file. It must stay in place while anybody uses this object, and a part that is final does not
            change.
    """

    def __init__(self, manifest: Manifest, image: memoryview) -> None:
        self.manifest = manifest
        self.image = image
        self._parts = list(part_ranges(manifest.nbytes, manifest.part_bytes))
        self._checksums: list[str] = list(manifest.checksums) or [""] * len(self._parts)
        self._order = list(range(len(self._parts))) if manifest.checksums else []
        self._committed = bool(manifest.checksums) or not self._parts
        self._given_up = False
        self._changed = threading.Condition()

    def commit(self, manifest: Manifest) -> None:
        """Say that the file is committed, with this sealed manifest."""
        with self._changed:
            self.manifest, self._committed = manifest, True
            self._changed.notify_all()

    @property
    def given_up(self) -> bool:
        """Whether the file will not be committed, or is not to be sent on before it is."""
        return self._given_up

    def give_up(self) -> None:
        """Say that the file will not be committed, or not be sent on before; nothing happens if it was committed."""
        with self._changed:
            self._given_up = self._given_up or not self._committed
            self._changed.notify_all()

    def sealed_parts(self) -> Iterator[tuple[int, int, str]]:
        """Yield ``(start, stop, checksum)`` of every part, in the order in which they become final; waits for each.

        Raises:
            SnapshotNotFoundError: if the file was given up.
        """
        for place in range(len(self._parts)):
            self._wait(lambda place=place: len(self._order) > place)  # type: ignore[misc]
            index = self._order[place]
            yield *self._parts[index], self._checksums[index]

    def committed(self) -> Manifest:
        """Wait until the file is committed on this host; its sealed manifest.

        Raises:
            SnapshotNotFoundError: if it was given up.
        """
        self._wait(lambda: self._committed)
        return self.manifest

    # -- inside ---------------------------------------------------------------------------------------------------

    def _final(self, index: int, digest: str) -> None:
        with self._changed:
            self._checksums[index] = digest
            self._order.append(index)
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            while not self._given_up and not ready():
                before = len(self._order)
                if not self._changed.wait(QUIET_S) and before == len(self._order) and not ready():
                    self._given_up = not self._committed
            if self._given_up:
                raise SnapshotNotFoundError(f"{self.manifest.name} was given up while it was sent on")


def sealing_threads() -> int:
    """Threads to seal with: one for each of this host's processors, up to a few; of many processors half.

    A training that computes on all processors waits for the one that is busy with something else: where one thread
    seals, it loses the time of that thread, and where all processors seal, their share of it. Where a host has many,
    training is on GPUs, whose snapshots are large: one is to be sealed before the next one comes.
    """
    count = processors()
    return min(count, max(_FEW, count // 2), _MOST_THREADS)


class Sealing(Coming):
    """A file that is being sealed here. See :class:`Coming`, which says what its arguments are."""

    def run(self, threads: int) -> Manifest:
        """Seal the file on ``threads`` threads at most, this one among them; its sealed manifest."""
        todo = iter(range(len(self._parts)))
        in_turn(lambda: next(todo, None), self._seal, max(1, min(threads, len(self._parts))), "spot-seal")
        return replace(self.manifest, checksums=tuple(self._checksums))

    def _seal(self, index: int) -> None:
        start, stop = self._parts[index]
        self._final(index, checksum(self.image[start:stop]))


class NotedParts:
    """Parts on their way through ``Store.put_parts``, their checksums noted for the manifest.

    Args:
        manifest: not sealed.
        parts: of its file, in order; each is valid until the next one is asked for.
    """

    def __init__(self, manifest: Manifest, parts: Iterable[memoryview]) -> None:
        self._manifest, self._parts = manifest, parts
        self._checksums: list[str] = []
        self._sizes: list[int] = []

    def __iter__(self) -> Iterator[memoryview]:
        for part in self._parts:
            self._checksums.append(checksum(part))
            self._sizes.append(len(part))
            yield part

    def sealed(self) -> Manifest:
        """The manifest, once all parts have passed.

        Raises:
            CorruptSnapshotError: if the parts are not those that the manifest announced.
        """
        manifest, sizes = self._manifest, self._sizes
        wanted = [stop - start for start, stop in part_ranges(manifest.nbytes, manifest.part_bytes)]
        if sizes != wanted:
            raise CorruptSnapshotError(
                f"{manifest.name} came as {sum(sizes)} bytes in {len(sizes)} parts, not as {manifest.nbytes} bytes in"
                f" {len(wanted)}; it is not committed"
            )
        return replace(manifest, checksums=tuple(self._checksums))
