"""What goes over the wire to a snapshot server: only what changed; packed where that pays."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from pathlib import Path

import pytest

from lightning_spot import SpotCheckpoint
from lightning_spot.client import remote
from lightning_spot.client.stores import open_store
from lightning_spot.errors import SettingsError
from lightning_spot.protocol.wire import PartKind
from lightning_spot.run.location import Location, RingSettings
from lightning_spot.server.host import InProcessHost
from lightning_spot.snapshot import packing
from lightning_spot.store.retention import Keep
from tests.support.ranks import begun
from tests.support.server import MIB
from tests.support.wire_pair import Pair, floats, kinds, needs_zstd, pair, state, trained

__all__ = ["kinds", "pair"]


def test_what_has_not_changed_is_not_sent(pair: Pair, kinds: Counter[str]) -> None:
    pair.open()
    image = state(1, 40 * MIB + 1000)
    assert pair.near.bring(1, bytes(image)) >= len(image)
    assert kinds == {"WHOLE": 6}
    assert pair.near.bring(2, bytes(image)) < 1000
    assert kinds == {"WHOLE": 6, "SAME": 6}
    pair.check(2, bytes(image))


def test_of_what_has_changed_little_only_that_is_sent(pair: Pair) -> None:
    """Adapters of 24 kB in every layer, and a pickled part at the end that grows: the layout of a fine-tuning."""
    pair.open()
    image = state(1, 40 * MIB)
    pair.near.bring(1, bytes(image))
    for step in (2, 3):
        changed = 0
        for place in range(64 * 1000, 40 * MIB - 10**6, 5 * MIB):
            image[place : place + 24576] = random.Random(step * place).randbytes(24576)
            changed += 24576
        image[-20_000:] = random.Random(step).randbytes(20_123)
        changed += 20_123
        assert changed < 0.006 * len(image)
        assert pair.near.bring(step, bytes(image)) <= 1.1 * changed
        pair.check(step, bytes(image))


def test_it_is_counted_what_was_sent_and_what_was_not(pair: Pair) -> None:
    pair.open(compression="off")
    image = state(1, 24 * MIB)  # three parts
    pair.near.bring(1, bytes(image))
    image[:1000] = random.Random(2).randbytes(1000)
    changed = pair.near.bring(2, bytes(image))
    store = max(pair.near.stores_behind, key=lambda each: each.sent.total())
    assert (store.sent[PartKind.WHOLE], store.sent[PartKind.SAME]) == (24 * MIB, 16 * MIB)
    assert 1000 <= store.sent[PartKind.DELTA] == changed < 1100


@needs_zstd
def test_deltas_are_packed_when_asked_for(pair: Pair, kinds: Counter[str]) -> None:
    pair.open(compression="always")
    image = floats(1, 20 * MIB)
    pair.near.bring(1, image)
    image = trained(image)
    assert pair.near.bring(2, image) < len(image) / 1.2
    assert kinds == {"WHOLE": 3, "PACKED": 3}
    pair.check(2, image)


def test_without_zstd_auto_sends_as_it_is_and_delta_is_refused(
    pair: Pair, kinds: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("lightning_spot.snapshot.delta")  # else it would have none for all tests to come
    monkeypatch.setattr(packing, "zstd", None)
    with pytest.raises(SettingsError, match=r"'always' .*zstd"):
        packing.chosen_compression("always", None)
    pair.open(compression="always")  # of a trainer whose Python has zstd
    image = floats(1, MIB)
    pair.near.bring(1, image)
    pair.near.bring(2, trained(image))
    pair.check(2, trained(image))
    assert kinds == {"WHOLE": 2}


def test_the_compression_setting_reaches_the_local_server(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'zip': .*'auto', 'always'"):
        SpotCheckpoint(str(tmp_path), compression="zip")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="servers="):
        SpotCheckpoint(str(tmp_path), lossy="topk")
    host = InProcessHost(slots=2, memory_bytes=2**24, open_store=open_store)
    ring = RingSettings(
        slots=2, memory_bytes=2**24, server_idle_timeout_s=9.0, keep=Keep(newest=1), strict=True, compression="off"
    )
    attempt = begun(Location.of(str(tmp_path / "run-1"), local_server=False), host, ring)
    known = host._server.registry.info(attempt.info.key)
    attempt.finish(5.0, complete=False)
    assert known.compression == "off"


@needs_zstd
def test_a_link_that_becomes_slow_or_fast_is_noticed(
    pair: Pair, kinds: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.open()
    image, packed = floats(1, MIB), []
    for step, fast_bytes_per_s in enumerate((1e15, 1e15, 0.0, 0.0), 1):  # as which a link counts as fast
        monkeypatch.setattr(remote, "SLOW_BYTES_PER_S", fast_bytes_per_s)
        pair.near.bring(step, image := trained(image))
        packed.append(kinds["PACKED"])
    pair.check(4, image)
    assert packed == [0, 1, 2, 2]
