"""Several ranks, hosts and servers, where no further thread or descriptor can be had for a moment: they go on."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import TierError
from lightning_spot.run import export
from lightning_spot.run.export import Exporter, NotExportedError, import_snapshot
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.selection import SharedOpening
from lightning_spot.store.local import LocalStore
from tests.distributed.test_restore import put
from tests.support.ranks import Group, Rank
from tests.support.server import FIRST, SECOND, WithServers

pytestmark = pytest.mark.guarantee("G24")

Lacking = Callable[[str, int], None]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_whose_servers_no_thread_asked_is_asked_for_later(
    tmp_path: Path, lacking: Lacking, replicas: int
) -> None:
    """Nothing of it went anywhere."""
    with contextlib.closing(WithServers(tmp_path, [str(tmp_path)])) as bench:
        lacking("spot-asker", 1)
        bench.open(servers=(FIRST, SECOND), replicas=replicas)
        assert bench.open(servers=(FIRST, SECOND), replicas=replicas).carries
        bench.save(1)
        assert bench.flush() == []
        assert [manifest.step for manifest in LocalStore(bench.tier().url).survey().manifests] == [1]


# -- descriptors ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_descriptor(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, no connection can be accepted."""
    accept, lacks = socket.socket.accept, threading.Event()

    def limited(listener: socket.socket) -> Any:
        found = accept(listener)
        if lacks.is_set():
            found[0].close()
            lacks.clear()
            raise OSError(errno.EMFILE, "Too many open files")
        return found

    monkeypatch.setattr(socket.socket, "accept", limited)
    return lacks


def test_snapshots_are_exported_after_a_descriptor_shortage(tmp_path: Path, no_descriptor: threading.Event) -> None:
    """The others waited for a minute, and read it themselves."""
    manifest = put(LocalStore(str(tmp_path / "run")), 3)
    with contextlib.closing(Exporter()) as exporter:
        exporter.export(1, TierError("x"))
        no_descriptor.set()
        with pytest.raises(TierError, match="x"):
            import_snapshot(exporter.address, 1, manifest)


def test_without_a_descriptor_to_give_ranks_read_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = put(store := LocalStore(str(tmp_path / "run")), 3)

    def no_descriptor(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with contextlib.closing(Exporter()) as exporter, open(Path(store.root) / manifest.data_path, "rb") as file:
        with monkeypatch.context() as patch:
            patch.setattr(export.os, "dup", no_descriptor)
            exporter.export(1, OpenSnapshot(manifest, "durable", "x", [file.fileno()]))
        with pytest.raises(NotExportedError):
            import_snapshot(exporter.address, 1, manifest)


# -- an error of one rank is one of all -------------------------------------------------------------------------------


def on_two_ranks(action: Callable[[Any], Any]) -> list[Any]:
    """What it gives on each of two ranks, or the error that it raises."""
    group = Group(2)

    def on(rank: int) -> Any:
        try:
            return action(Rank(group, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(on, range(2)))


def test_without_a_thread_to_give_each_rank_reads_for_itself(tmp_path: Path, lacking: Lacking) -> None:
    """Rank 0 ended with an error, and the others waited for it."""
    lacking("spot-exporter", 1)
    location = Location.of(tmp_path / "run", local_server=False)

    def begin(trainer: Any) -> None:
        SharedOpening(Agreement(trainer), location).close()

    assert on_two_ranks(begin) == [None, None]
