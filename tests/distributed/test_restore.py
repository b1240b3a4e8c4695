"""All ranks restore one snapshot: opened once on each host, agreed, and never sent through the process group."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_spot.client.remote import ServerStore
from lightning_spot.client.stores import open_tier
from lightning_spot.errors import CorruptSnapshotError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.run import reading
from lightning_spot.run.location import Location
from lightning_spot.run.reading import Exported, OpenSnapshot
from lightning_spot.run.sources import StoreSource
from lightning_spot.run.survey import Survey, survey
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.session import selection
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.selection import ResumedFrom, choose, load_snapshot
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.shards import Image
from lightning_spot.store.local import LocalStore
from lightning_spot.store.store import Holdings, Progress
from tests.integration.test_stores import sharded, snapshot
from tests.support.oracle import claim_of
from tests.support.proxy import Proxy
from tests.support.ranks import Group, Rank, rank_of_this_thread
from tests.support.said import said
from tests.support.server import served

pytestmark = pytest.mark.guarantee("G1")

LARGE = 400_000  # elements: more than 1 MiB
Chosen = tuple[ResumedFrom, dict[str, Any]] | None


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    store = LocalStore(str(tmp_path / "run"))
    store.claim(claim_of(1))
    for step in (3, 6):
        put(store, step)
    return store


def put(store: LocalStore, step: int) -> Manifest:
    small = torch.full((4,), step)
    file = io.BytesIO()
    torch.save({"step": step, "large": torch.full((LARGE,), step), "small": small, "tied": small[1:]}, file)
    content = memoryview(file.getvalue())
    manifest = Manifest(
        run="run",
        run_id="r",
        name=snapshot_name(step, 1),
        step=step,
        attempt=1,
        nbytes=len(content),
        part_bytes=1 << 20,
    )
    store.put(manifest.sealed(content), content, attempt=1)
    return manifest


def load_plain(snapshot: OpenSnapshot) -> dict[str, Any]:
    return load_snapshot(SimpleNamespace(world_size=2), snapshot, trusts=False)  # type: ignore[arg-type]


def of_image(load: Callable[[Image, Manifest], dict[str, Any]]) -> Callable[[OpenSnapshot], dict[str, Any]]:
    """Reads what is wanted of the image of a snapshot of several files."""

    def loaded(snapshot: OpenSnapshot) -> dict[str, Any]:
        with snapshot.image() as image:
            return load(image, snapshot.manifest)

    return loaded


def restored(
    store: LocalStore,
    size: int = 3,
    look: Callable[[Location], Survey] = survey,
    then: Callable[[int, Chosen], Any] = lambda _rank, found: found,
    group: Group | None = None,
    load: Callable[[OpenSnapshot], dict[str, Any]] = load_plain,
) -> list[Any]:
    """What each rank gets: what it chose, or the error that it raises."""
    group = group or Group(size)
    location = Location.of(store.root, local_server=False)

    def restore_on(rank: int) -> Any:
        threading.current_thread().name = f"rank-{rank}"
        trainer = Rank(group, rank)
        ranks = Agreement(trainer)  # type: ignore[arg-type]
        try:
            return then(rank, choose(ranks, location, lambda: look(location), load))
        except (SpotError, NotImplementedError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(restore_on, range(size)))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where ranks have received a snapshot from."""
    urls: list[str] = []
    original = reading.receive

    def receive(*arguments: Any) -> OpenSnapshot:
        urls.append(arguments[-1].partition("/step-")[0])
        return original(*arguments)

    monkeypatch.setattr("lightning_spot.run.sources.receive", receive)
    return urls


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    before = set(os.listdir("/proc/self/fd"))
    yield
    for number in set(os.listdir("/proc/self/fd")) - before:
        path = Path(f"/proc/self/fd/{number}")
        if path.exists() and "spot" in os.readlink(path):
            assert path.stat().st_size == 0, os.readlink(path)  # what is empty is held by an error in a log


def test_a_host_reads_once_and_its_ranks_look_at_the_same_memory(run: LocalStore, fetched: list[str]) -> None:
    group = Group(4)

    def pages(tensor: torch.Tensor) -> str:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [(*(int(end, 16) for end in line.split()[0].split("-")), line) for line in lines]
        return next(line for start, stop, line in spans if start <= tensor.data_ptr() < stop)

    def write(rank: int, found: Chosen) -> tuple[int, int, bool, bool]:
        resumed, checkpoint = found
        shared = ["lightning-spot-restore" in pages(checkpoint[name]) for name in ("large", "small")] == [True, False]
        checkpoint["large"] += rank  # its own, whoever else looks at that memory
        checkpoint["small"][1] = 100 + rank
        return resumed.step, int(checkpoint["large"].unique()), shared, int(checkpoint["tied"][0]) == 100 + rank

    assert restored(run, 4, then=write, group=group) == [(6, 6 + rank, True, True) for rank in range(4)]
    assert fetched == [run.url]
    assert group.moved_bytes < 64 * 1024 < LARGE


def test_every_rank_gets_the_image_of_a_sharded_snapshot(run: LocalStore, fetched: list[str]) -> None:
    manifest, content = sharded(9)
    run.put(manifest, memoryview(content), attempt=1)

    def load(image: Image, found: Manifest) -> dict[str, Any]:
        assert found.files == manifest.files
        return {"same": bytes(image[:]) == bytes(content), "readonly": image[:].readonly}

    assert [found[1] for found in restored(run, load=of_image(load))] == [{"same": True, "readonly": True}] * 3
    assert len(fetched) == 1


def test_without_room_in_memory_all_read_the_file_in_place(
    run: LocalStore, monkeypatch: pytest.MonkeyPatch, fetched: list[str]
) -> None:
    monkeypatch.setattr(reading, "available_bytes", lambda: 0)
    assert [found[1]["step"] for found in restored(run)] == [6, 6, 6]
    assert fetched == []


def test_if_memory_is_short_ranks_read_only_the_shards_they_need(
    run: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, content = sharded(9)
    run.put(manifest, memoryview(content), attempt=1)
    monkeypatch.setattr(reading, "available_bytes", lambda: 0)
    read, preadv = [], os.preadv

    def count(fd: int, buffers: Any, offset: int) -> int:
        read.append(got := preadv(fd, buffers, offset))
        return got

    def load(image: Image, found: Manifest) -> dict[str, Any]:
        assert len(image) == found.nbytes == len(content)
        return {"same": all(image[at : at + 9] == content[at : at + 9] for at in (4090, 5000, len(content) - 9))}

    monkeypatch.setattr(os, "preadv", count)
    assert [found[1] for found in restored(run, load=of_image(load))] == [{"same": True}] * 3
    assert sum(read) <= 3 * 3 * manifest.part_bytes < 3 * manifest.nbytes


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 on one host, 2 and 3 on another, which does not see the first one's directories."""
    monkeypatch.setattr(selection, "this_host", lambda: f"host {rank_of_this_thread() // 2}")

    def open_store(url: str) -> LocalStore:
        assert rank_of_this_thread() == 2, "the first rank of the other host opens for it"
        return LocalStore(url + "-of-another-host")

    monkeypatch.setattr(selection, "open_tier", open_store)


@pytest.mark.usefixtures("two_hosts")
def test_a_host_that_sees_the_tier_reads_there(
    run: LocalStore, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "open_tier", lambda url: LocalStore(url))
    assert [found[1]["step"] for found in restored(run, 4)] == [6] * 4
    assert fetched == [run.url, run.url]


@pytest.mark.usefixtures("two_hosts")
def test_a_host_to_which_no_tier_gives_it_is_an_error_on_all(run: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spot.retry.time.sleep", lambda _s: None)
    for rank, error in enumerate(restored(run, 4)):
        assert isinstance(error, CorruptSnapshotError)  # there are snapshots, and none can be used
        assert "on the host of rank 2" in str(error), rank
        assert "-of-another-host" in str(error)


@pytest.mark.usefixtures("two_hosts")
def test_each_host_reads_a_sharded_snapshot_once_from_a_server(
    run: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "open_tier", open_tier)
    plain, content = snapshot(9, nbytes=4_000_000, part_bytes=1 << 20)
    manifest = replace(
        plain, files=(FileSpan("__0_0.distcp", 0, 2_048_000), FileSpan("__1_0.distcp", 2_048_000, 1_952_000))
    )
    with served(SnapshotServer(slots=2, memory_bytes=2**26, open_store=lambda _url: pytest.fail("written"))) as port:
        proxy = Proxy(f"spot://127.0.0.1:{port}", seed=0)
        at = ServerStore(f"{proxy.url}/run")
        at.put(manifest, memoryview(content), attempt=1)

        def look(location: Location) -> Survey:
            source = StoreSource(at, proxy.url)
            found = survey(location)
            return replace(found, answers=[(source, source.survey()), *found.answers])

        def load(image: memoryview, found: Manifest) -> dict[str, Any]:
            return {"same": bytes(image) == content and found.files == manifest.files}

        before = proxy.given_bytes
        assert [found[1] for found in restored(run, 4, look, load=of_image(load))] == [{"same": True}] * 4
        assert 2 * len(content) < proxy.given_bytes - before < 2.1 * len(content)
        at.client.close()
        proxy.close()


def test_what_is_damaged_is_passed_over_by_all(run: LocalStore) -> None:
    path = run.root / run.survey().manifests[0].data_path
    with open(path, "r+b") as file:
        file.seek(LARGE)
        file.write(b"!")
    assert [found[0].step for found in restored(run)] == [3, 3, 3]


def test_a_snapshot_gone_from_a_server_is_read_from_storage(run: LocalStore) -> None:
    """The server that listed it has brought it there since, and needed its memory."""
    newest, older = run.survey().manifests

    class Left(StoreSource):
        def open(self, manifest: Manifest, progress: Progress | None = None, *, shared: bool = False) -> OpenSnapshot:
            raise SnapshotNotFoundError(f"{manifest.name} has left memory")

    def look(location: Location) -> Survey:
        found = survey(location)
        (durable,) = [source for source, _ in found.answers]
        found.answers = [(Left(run, "spot://server"), Holdings([newest])), (durable, Holdings([older]))]
        return found

    assert [found[0].step for found in restored(run, look=look)] == [6, 6, 6]


@pytest.mark.parametrize("failing", [0, 2])
def test_what_one_rank_cannot_use_none_uses(run: LocalStore, failing: int) -> None:
    def load(snapshot: OpenSnapshot) -> dict[str, Any]:
        if rank_of_this_thread() == failing and snapshot.manifest.step == 6:
            raise CorruptSnapshotError("it went bad")
        return load_plain(snapshot)

    assert [(found[0].step, found[1]["step"]) for found in restored(run, load=load)] == [(3, 3)] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_an_unexpected_error_on_one_rank_is_raised_on_all(run: LocalStore, failing: int) -> None:
    def load(_snapshot: OpenSnapshot) -> dict[str, Any]:
        if rank_of_this_thread() == failing:
            raise NotImplementedError("not on this machine")
        return {}

    errors = restored(run, 2, load=load)
    assert ["not on this machine" in str(error) for error in errors] == [True] * 2
    assert any(f"rank {failing}" in str(error) for error in errors)


def test_any_error_of_what_rank_0_does_alone_is_raised_on_all() -> None:
    """Of errors that are not ours the others did not hear, and waited for ever."""
    group = Group(2)

    def on(rank: int) -> str:
        def act() -> None:
            assert rank == 0
            raise PermissionError("not here")

        threading.current_thread().name = f"rank-{rank}"
        trainer = Rank(group, rank)  # it is not kept alive by what knows it
        with pytest.raises((PermissionError, SpotError)) as caught:
            Agreement(trainer).on_rank_zero(act)  # type: ignore[arg-type]
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(on, range(2))) == ["not here", "rank 0: PermissionError: not here"]


def test_a_failed_survey_raises_on_all_and_an_empty_one_starts(run: LocalStore, tmp_path: Path) -> None:
    def fails(_location: Location) -> Survey:
        raise TierError("the bucket is gone")

    assert ["the bucket is gone" in str(error) for error in restored(run, look=fails)] == [True] * 3
    assert restored(LocalStore(str(tmp_path / "empty"))) == [None, None, None]


def test_a_rank_that_cannot_reach_its_hosts_reader_reads_alone(
    run: LocalStore, fetched: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> OpenSnapshot:
        raise TierError("no way there")

    monkeypatch.setattr(Exported, "open", refused)
    assert [found[1]["step"] for found in restored(run)] == [6, 6, 6]
    assert fetched == [run.url]  # by the first; the others have nobody to share with, and read in place
    assert [str(facts["error"]) for facts in said(caplog, "not-imported")] == ["no way there"]


def test_a_rank_opens_what_another_has_open_or_nothing(run: LocalStore) -> None:
    manifest = run.survey().manifests[0]
    with contextlib.closing(StoreSource(run, "storage").open(manifest, shared=True)) as opened:
        what = Exported.of(opened)
        with contextlib.closing(what.open(manifest)) as imported:
            assert imported.reader().read() == (run.root / manifest.data_path).read_bytes()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierError):
            replace(what, paths=(*what.paths, "/proc/self/fd/1048576")).open(manifest)
        assert len(os.listdir("/proc/self/fd")) == before
