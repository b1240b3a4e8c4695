"""Several ranks, hosts and servers, where no further thread or descriptor can be had for a moment: they go on."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import SettingsError, TierError
from lightning_spot.run import export
from lightning_spot.run.export import Exporter, NotExportedError, import_snapshot
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.survey import survey
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.selection import choose
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


def test_without_a_descriptor_ranks_read_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = put(store := LocalStore(str(tmp_path / "run")), 3)

    def no_descriptor(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with contextlib.closing(Exporter(store.url)) as exporter:
        with open(Path(store.root) / manifest.data_path, "rb") as file:
            exporter.export(1, OpenSnapshot(manifest, "durable", "x", [file.fileno()]))
            with contextlib.closing(import_snapshot(exporter.address, 1, manifest)) as imported:
                assert os.pread(imported.fds[0], 2**24, 0) == file.read()
            monkeypatch.setattr(export, "replace_file", no_descriptor)
            exporter.export(2, TierError("x"))
        with pytest.raises(NotExportedError):
            import_snapshot(exporter.address, 2, manifest)


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


def test_without_a_place_to_note_each_rank_reads_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ended with an error, and the others waited for it."""

    def unusable(_: str) -> Any:
        raise SettingsError("the runtime directory cannot be used")

    monkeypatch.setattr(export, "find_record", unusable)
    put(LocalStore(tmp_path / "run"), 3)
    location = Location.of(tmp_path / "run", local_server=False)

    def step_of(trainer: Any) -> Any:
        found = choose(Agreement(trainer), location, lambda: survey(location), lambda _: {})
        return found[0].step if found is not None else None

    assert on_two_ranks(step_of) == [3, 3]
