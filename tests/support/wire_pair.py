"""A sender and a receiver of snapshots in this process, over real connections, and states to send."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_spot.client.encoding import OutgoingPart
from lightning_spot.client.part_streams import PartStream
from lightning_spot.client.remote import ServerStore
from lightning_spot.protocol.wire import PartKind
from lightning_spot.snapshot import packing
from lightning_spot.store.local import LocalStore
from tests.support.server import MIB, RUN, RUN_ID, Bench, committed, is_kept, manifest_of, served
from tests.support.waiting import until

needs_zstd = pytest.mark.skipif(not packing.can_pack(), reason="this Python has no zstd")


class Sender(Bench):
    """The server on a trainer's host, which sends to a snapshot server."""

    def __init__(self, root: Path, url: str, **settings: Any) -> None:
        super().__init__(root, memory_bytes=512 * MIB, open_store=self._open, **{"slots": 4, **settings})
        self.stores_behind: list[ServerStore] = []
        self.url = url

    def _open(self, url: str) -> ServerStore | LocalStore:
        if not url.startswith("spot://"):
            return LocalStore(url)
        made = ServerStore(url)
        self.stores_behind.append(made)  # several threads open some
        return made

    @property
    def sent_bytes(self) -> int:
        return sum(store.sent.total() - store.sent[PartKind.SAME] for store in self.stores_behind)

    def bring(self, step: int, image: bytes, **fields: Any) -> int:
        """Commit a snapshot here and have it sent; the bytes that took."""
        before = self.sent_bytes
        committed(self.server, RUN, manifest_of(step, 1, len(image), **fields), image, wait_s=60)
        assert self.flush() == []
        return self.sent_bytes - before


class Pair:
    """A sender and a receiver, both in this process."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.far = Bench(root / "far", slots=None, memory_bytes=512 * MIB)
        self.url = f"spot://127.0.0.1:{stack.enter_context(served(self.far.server))}"
        self.near = Sender(root / "near", self.url)
        stack.callback(self.near.close)

    def open(self, url: str = "", **more: Any) -> None:
        self.near.open(durable=False, servers=(url or self.url,), **more)
        until(lambda: is_kept(self.near.server.route(RUN_ID)), "the server")

    def check(self, step: int, image: bytes) -> None:
        """The receiver holds exactly this, and pins nothing any more."""
        held = [(slot, slot.manifest) for slot in self.far.server.ring.contents(RUN_ID)]
        slot, manifest = next((slot, found) for slot, found in held if found is not None and found.step == step)
        assert bytes(slot.view()) == image
        manifest.verify(slot.view(), "the receiver")
        until(lambda: not any(slot.readers for slot in self.far.server.ring.slots), "nothing to be pinned")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many parts were sent in which way."""
    counted: Counter[str] = Counter()
    send, lock = PartStream.send, threading.Lock()

    def noted(parts: Iterable[OutgoingPart]) -> Iterator[OutgoingPart]:
        for part in parts:
            with lock:  # several threads send
                is_packed = part.kind is PartKind.DELTA and part.content[0] == 1  # the coding of the delta
                counted["PACKED" if is_packed else part.kind.name] += 1
            yield part

    monkeypatch.setattr(PartStream, "send", lambda stream, parts: send(stream, noted(parts)))
    return counted


def state(seed: int, nbytes: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(nbytes))


def trained(image: bytes, share: float = 1e-3) -> bytes:
    """The image after a small step of every float in it."""
    floats = np.frombuffer(image[: len(image) // 4 * 4], np.float32)
    moved = (floats * np.float32(1 + share)).astype(np.float32).tobytes()
    return moved + image[len(moved) :]


def floats(seed: int, nbytes: int) -> bytes:
    return trained(np.random.default_rng(seed).standard_normal(nbytes // 4).astype(np.float32).tobytes())
