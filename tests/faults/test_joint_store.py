"""Hosts that bring one snapshot to a durable tier by themselves: killed at every call, fenced, torn, damaged, in S3."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    SnapshotFailedError,
    SpotError,
    TierError,
)
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.notes import Own
from lightning_spot.image.portion import Portion, PortionImage, Portions
from lightning_spot.memory import joint_store
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.joint_store import JointStore
from lightning_spot.memory.node import Node
from lightning_spot.memory.tier import Gathering, TierHealth
from lightning_spot.retry import RetryPolicy
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey, survey
from lightning_spot.tiers.fences import Claim
from lightning_spot.tiers.local import LocalFolder, LocalStore
from lightning_spot.tiers.store import Folder, Store, retain
from tests.support import faulty
from tests.support.faulty import Plan
from tests.support.said import said
from tests.support.small_trainer import RUN_ID
from tests.support.waiting import until

PART = 64 * 1024
FILES = (  # in the first part bytes of both hosts lie, the second is host 0's, the third both hosts'
    FileSpan("__0_0.distcp", 0, 12_000),
    FileSpan("__1_0.distcp", 12_288, 9_000),
    FileSpan("rank-0000.pt", 24_576, 2 * PART),
    FileSpan("rank-0001.pt", 24_576 + 2 * PART, 700),
    FileSpan("meta.pt", 28_672 + 2 * PART, 300),
)
NBYTES = FILES[-1].stop
THEIRS = ((12_288, 12_288), (24_576 + 2 * PART, 4096))
LAST_S = 600.0  # of what never takes so long
missed = functools.partial(pytest.raises, SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused)

Hook = Callable[[str, tuple[Any, ...]], None]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_store, "PART_BYTES", PART)


class Killed(BaseException):
    """The process is no more."""


def goes_on() -> None:
    """Nothing has happened."""


class Hooked:
    """A folder, of which each call is told before and after; each file that is written is a call of its own."""

    def __init__(self, folder: Folder, before: Hook, after: Hook) -> None:
        self._folder, self._before, self._after = folder, before, after

    def write_all(
        self, contents: Mapping[str, memoryview], goes_on: Callable[[], None], done: Callable[[str], None]
    ) -> None:
        for name, data in contents.items():
            goes_on()
            self.__getattr__("write")(name, data)
            done(name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._before(name, arguments)
            result = getattr(self._folder, name)(*arguments)
            self._after(name, arguments)
            return result

        return call


class HookedStore(LocalStore):
    """A directory, as a process sees it to which something happens at its calls."""

    def __init__(self, root: Path, before: Hook = lambda *_: None, after: Hook = lambda *_: None) -> None:
        super().__init__(root)
        self._hooks = before, after

    def folder(self, name: str, *, attempt: int, run_id: str) -> Any:
        return Hooked(super().folder(name, attempt=attempt, run_id=run_id), *self._hooks)


def content(step: int) -> bytes:
    image = bytearray(NBYTES)
    for number, file in enumerate(FILES):
        image[file.offset : file.stop] = bytes([step, number, 7, 9]) * (file.nbytes // 4)
    return bytes(image)


class Host:
    """One of two hosts, and its part of snapshots."""

    def __init__(self, number: int, store: Store) -> None:
        self.committed: list[Manifest] = []
        self.number, self.tier = number, JointStore(store, RUN_ID, self.committed.append)
        self.tier.wait_s = self.tier.first_s = 0.0
        self.tier.pauses_s = ()
        self.files = tuple(file for file in FILES if ("1" in file.name) == bool(number))
        portions = Portions((THEIRS,), (1,))
        self.ranges = portions.ranges[0] if number else portions.rest(NBYTES)
        self.told = json.dumps(portions.to_dict() | Own(self.files).to_dict())

    def gathering(self, step: int, digest: str = "same") -> Gathering:
        shared = Shared(name=snapshot_name(step, 1), shares=1, digest=digest, layout=self.told, at="/run")
        return self.tier.begin(shared, NBYTES, attempt=1, hosts=2)

    def bring(self, step: int, whole: bytes | None = None) -> None:
        portion = Portion(self.ranges)
        self.memory = memory = memoryview(bytearray(portion.nbytes))
        for start, nbytes in self.ranges:
            place = portion.place(start)
            memory[place : place + nbytes] = (whole or content(step))[start : start + nbytes]
        image = PortionImage(portion, memory, NBYTES)
        self.tier.bring(self.gathering(step), image, self.ranges, None, goes_on)

    def end(self, step: int, digest: str = "same") -> Manifest:
        """What comes after its files are there."""
        gathering = self.gathering(step, digest)
        if self.number == 0:
            return self.tier.seal(gathering, manifest_of(step), goes_on)
        self.tier.placed(gathering, 1)
        return self.tier.finish(gathering, 1, goes_on)

    def rest(self) -> None:
        """Have done nothing."""

    def take(self, step: int) -> Manifest:
        self.bring(step)
        return self.end(step)


def manifest_of(step: int) -> Manifest:
    name = snapshot_name(step, 1)
    return Manifest(
        run="run", run_id=RUN_ID, name=name, step=step, attempt=1, nbytes=NBYTES, files=FILES, part_bytes=PART
    )


def together(hosts: list[Host], step: int) -> list[Manifest]:
    """Both bring a snapshot, one right after the other's files are there."""
    for host in hosts:
        host.tier.wait_s = 600.0
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda host: host.take(step), hosts))
    for host in hosts:
        host.tier.wait_s = 0.0
    return found


def check(store: Store, step: int) -> None:
    """The newest snapshot there is that of a step, byte for byte."""
    newest = store.survey().manifests[0]
    assert newest.step == step
    image = memoryview(bytearray(NBYTES))
    store.fetch(newest, image)
    assert image == content(step)


def names_of(store: LocalStore, step: int) -> list[str]:
    return sorted(path.name for path in (store.root / snapshot_name(step, 1)).iterdir())


def pair(store: Store) -> list[Host]:
    return [Host(0, store), Host(1, store)]


def attempt(tier_url: str, number: int) -> Claim:
    return Claim(attempt=number, run_id=RUN_ID, digest=f"t{number}", location=tier_url, started_unix_s=1.0)


def test_both_hosts_make_the_same_manifest_of_a_snapshot_and_leave_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    one, other = together(pair(store), 1)
    assert one == other == store.survey().manifests[0]
    check(store, 1)
    assert names_of(store, 1) == sorted([*(file.name for file in FILES), "manifest.json"])


def test_the_others_leave_it_to_the_first_host_to_commit_for_a_while(tmp_path: Path) -> None:
    first, other = pair(LocalStore(tmp_path / "run"))
    other.tier.first_s = LAST_S
    one, same = together([first, other], 1)
    assert one == same == first.committed[0]
    assert not other.committed


def dies_at_every_call(root: Path, number: int, before: Callable[[Host], None], *, is_done: bool) -> Iterator[Store]:
    """Yield the tier each time that a host was killed in the middle of step 2, one call later than before.

    Args:
        root: folder for one run after the other.
        number: of the host.
        before: what the other host has done until then.
        is_done: whether it is killed after that call, or before it.
    """
    for last in range(30):
        store = LocalStore(root / str(last))
        store.put(manifest_of(1).sealed(memoryview(content(1))), memoryview(content(1)), attempt=1)
        before(Host(1 - number, store))
        calls = itertools.count()

        def die(*_: Any, calls: Iterator[int] = calls, last: int = last) -> None:
            if next(calls) == last:
                raise Killed

        mortal = Host(number, HookedStore(store.root, **{"after" if is_done else "before": die}))
        mortal.tier.wait_s = 600.0
        try:
            mortal.take(2)
        except Killed:
            yield store
        else:
            return


def bring_and_note(host: Host) -> None:
    host.bring(2)
    with missed(match=r"has not brought its files of step-000000002-attempt-0001 within \d+ s"):
        host.end(2)


def step_of(commit: Callable[[], Manifest]) -> int:
    """What the newest step is, by what a host is told that waits."""
    try:
        return commit().step
    except SnapshotFailedError as error:
        if error.reason is not FailureReason.SHARE_MISSING:
            raise
        return 1


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_host_that_is_killed_at_any_call_leaves_the_snapshot_or_the_one_before(
    tmp_path: Path, number: int, is_done: bool
) -> None:
    ends = []
    for store in dies_at_every_call(tmp_path / "last", number, bring_and_note, is_done=is_done):
        left = Host(1 - number, store)  # whoever is left commits it
        ends.append(committed := step_of(lambda: left.tier.finish(left.gathering(2), left.number, goes_on)))  # noqa: B023
        check(store, committed)
    assert {1, 2} == set(ends)
    assert ends == sorted(ends)  # from its note on, it is there
    ends.clear()
    for store in itertools.islice(dies_at_every_call(tmp_path / "first", number, Host.rest, is_done=is_done), 12):
        survivor = Host(1 - number, store)
        survivor.bring(2)
        ends.append(committed := step_of(lambda: survivor.end(2)))  # noqa: B023
        check(store, committed)
    assert {1, 2} == set(ends)
    assert ends == sorted(ends)


def test_what_hosts_have_brought_that_are_all_gone_is_committed_by_the_next_attempt(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    location = Location.of(str(tmp_path / "run"), local_server=False)
    together(pair(store), 1)
    for host in pair(store):
        host.bring(2)
    Host(1, store).bring(3)  # and then all were gone
    bring_notes(store, (0,))
    assert steps(survey(location)) == [1]
    bring_notes(store, (1,))
    assert steps(survey(location, begins=False)) == [1]  # who only wants to know writes nothing
    assert [manifest.step for manifest in store.survey().manifests] == [1]
    assert steps(survey(location)) == [2, 1]
    check(store, 2)


def test_the_next_attempt_reads_again_where_that_fails_and_needs_not_write_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path / "run")
    location, bounds = Location.of(str(tmp_path / "run"), local_server=False), RetryPolicy(first_pause_s=0.0)
    for host in pair(store):
        host.bring(2)
    bring_notes(store, (0, 1))
    fails, read = [True], LocalFolder.read

    def once(self: LocalFolder, name: str, *arguments: Any) -> bytes:
        if name == "portion-0001.json" and fails and fails.pop():
            raise TierError("timed out", tier="here")
        return read(self, name, *arguments)

    def never(*_: Any) -> None:
        raise TierError("Permission denied", tier="here")

    monkeypatch.setattr(LocalFolder, "read", once)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", never)
        ((manifest, _),) = survey(location, bounds).candidates
    assert manifest.step == 2
    assert [str(facts["error"]) for facts in said(caplog, "commit-failed")] == ["Permission denied"]
    assert store.survey().manifests == []
    image = memoryview(bytearray(NBYTES))
    store.fetch(manifest, image)
    assert image == content(2)


def test_notes_that_do_not_fit_each_other_keep_no_attempt_from_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path / "run")
    together(pair(store), 1)
    for host in pair(store):
        host.bring(2)
    bring_notes(store, (0,))
    bring_notes(store, (1,), "another")
    found = survey(Location.of(str(tmp_path / "run"), local_server=False))
    assert steps(found) == [1]
    assert not found.problems
    (skipped,) = said(caplog, "snapshot-skipped")
    assert "host 1 has another layout" in str(skipped["reason"])


def steps(found: Survey) -> list[int]:
    return [manifest.step for manifest, _ in found.candidates]


def bring_notes(store: Store, numbers: tuple[int, ...], digest: str = "same") -> None:
    """Leave notes of files that are there."""
    for number in numbers:
        host = Host(number, LocalStore(store.url + "-other"))
        host.bring(2)
        host.tier.store = store
        host.tier._note(host.gathering(2, digest), number, None if number else manifest_of(2))


def test_a_later_attempt_keeps_a_snapshot_of_an_earlier_one_from_being_committed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.claim(attempt(store.url, 1))
    bring_and_note(Host(1, store))
    (lead := Host(0, store)).bring(2)
    store.claim(attempt(store.url, 2))
    with pytest.raises(FencedError):
        lead.end(2)
    with pytest.raises(FencedError):
        Host(0, store).bring(3)
    assert store.survey().manifests == []


def test_a_name_is_brought_once_and_nothing_is_written_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    together(pair(store), 1)
    with missed(match="nothing is written over"):
        Host(0, store).bring(1)
    check(store, 1)


def test_hosts_that_do_not_fit_each_other_and_bytes_that_were_changed_make_no_snapshot(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for host in (hosts := pair(store)):
        host.bring(2)
        host.tier.wait_s = LAST_S
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(host.end, 2, digest) for host, digest in zip(hosts, ("same", "another"), strict=True)]
        for end in ends:
            with missed(match=r"host \d has another model, or other optimizers, than host \d"):
                end.result(LAST_S)
    assert {name[:5] for name in names_of(store, 2)} == {"torn-"}  # else each such snapshot would leave all its bytes

    store = LocalStore(tmp_path / "damaged")
    bring_and_note(Host(1, store))
    (tmp_path / "damaged" / snapshot_name(2, 1) / "__1_0.distcp").write_bytes(bytes(9_000))
    with pytest.raises(CorruptSnapshotError, match="are not those that were brought"):
        Host(0, store).take(2)

    image = bytearray(content(3))
    image[FILES[1].stop] = 1  # between two files, where nothing would be read again
    with pytest.raises(CorruptSnapshotError, match="are not zero"):
        Host(1, store).bring(3, bytes(image))
    assert store.survey().manifests == []


def test_a_host_that_gives_up_keeps_the_others_from_waiting_and_what_it_left_is_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    (guest := Host(1, store)).bring(2)
    Host(0, store).tier.decline(snapshot_name(2, 1), attempt=1, why="no slot is free")
    guest.tier.wait_s = 600.0
    with missed(match="no slot is free"):
        guest.end(2)
    later = manifest_of(5)
    later = replace(later, name=snapshot_name(5, 2), attempt=2).sealed(memoryview(content(5)))
    store.put(later, memoryview(content(5)), attempt=2)
    retain(store, 1, later)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [later.name]


def test_where_the_disk_is_full_no_host_leaves_its_files(tmp_path: Path) -> None:
    """Else there would be less room for each next one, and nothing to make room for it."""

    def full(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "write" and arguments[0] == "rank-0001.pt":
            raise TierError("No space left on device", tier="here")

    store = LocalStore(tmp_path / "run")
    first, other = Host(0, store), Host(1, HookedStore(store.root, full))
    first.tier.wait_s = LAST_S
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.take, 2)
        until(lambda: (store.root / snapshot_name(2, 1) / "portion-0000.json").exists(), "the first host's note")
        with pytest.raises(TierError, match="No space left"):
            other.bring(2)
        assert [name for name in names_of(store, 2) if "1" in name] == []
        other.tier.placed(other.gathering(2), 1, "host 1: No space left on device")
        with missed(match="host 1: No space left"):
            waiting.result(LAST_S)
    assert [name[:5] for name in names_of(store, 2)] == ["torn-"]
    with missed(match="host 1: No space left"):  # who comes later begins with nothing
        Host(1, store).bring(2)
    assert [name[:5] for name in names_of(store, 2)] == ["torn-"]


def test_what_is_damaged_in_memory_while_it_is_written_is_not_committed(tmp_path: Path) -> None:
    def damage(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "write" and arguments[0] == "rank-0001.pt":
            other.memory[0] ^= 1

    store = LocalStore(tmp_path / "run")
    other = Host(1, HookedStore(store.root, damage))
    with pytest.raises(CorruptSnapshotError, match="was damaged in memory"):
        other.bring(2)
    assert names_of(store, 2) == []


def test_a_host_whose_note_is_there_tears_nothing(tmp_path: Path) -> None:
    """Its node may be shut down, or it may have waited long enough: the other hosts bring theirs all the same."""
    store = LocalStore(tmp_path / "run")
    bring_and_note(first := Host(0, store))
    first.tier.give_up(first.gathering(2))
    first.tier.decline(snapshot_name(2, 1), attempt=1, why="its node is lost")
    assert Host(1, store).take(2).step == 2
    check(store, 2)


def test_a_host_that_has_said_that_it_will_not_leaves_no_note(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    (first := Host(0, store)).bring(2)
    first.tier.decline(snapshot_name(2, 1), attempt=1, why="a rank has ended")
    with missed(match="was given up"):
        first.end(2)
    assert [name[:5] for name in names_of(store, 2)] == ["torn-"]


def test_a_tier_that_fails_for_a_while_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failed: set[Any] = set()

    def once(call: str, arguments: tuple[Any, ...]) -> None:
        what = (call, *map(str, arguments[:1]))
        if what not in failed:
            failed.add(what)
            raise TierError(f"{what} timed out", tier="here")

    hosts = pair(HookedStore(tmp_path / "run", once))
    for host in hosts:
        host.tier.pauses_s = (0.0,)
    together(hosts, 1)
    check(LocalStore(tmp_path / "run"), 1)
    assert ("write", "manifest.json") in failed
    assert said(caplog, "upload-failing")
    assert [host.tier.why for host in hosts] == ["", ""]


@pytest.mark.parametrize("when", ["read", "sizes"])
def test_who_comes_too_late_to_commit_leaves_no_manifest_without_bytes(tmp_path: Path, when: str) -> None:
    store = LocalStore(tmp_path / "run")
    calls: list[str] = []
    overtaken: list[Manifest] = []
    once = threading.Lock()  # files are read side by side

    def overtake(call: str, arguments: tuple[Any, ...]) -> None:
        calls.append(f"{call} {arguments[:1]}")
        if call == when and any("read ('__" in each for each in calls) and once.acquire(blocking=False):
            overtaken.append((first := Host(0, store)).tier.finish(first.gathering(2), 0, goes_on))
            store.delete(overtaken[0])  # newer ones have been committed since

    for host in pair(store):
        host.bring(2)
    bring_notes(store, (0, 1))
    late = Host(1, HookedStore(store.root, overtake))
    with missed(match="has not brought"):
        late.tier.finish(late.gathering(2), 1, goes_on)
    assert [manifest.step for manifest in overtaken] == [2]
    assert store.survey().manifests == []


def test_hosts_bring_a_snapshot_to_s3(s3: str) -> None:
    store = open_store(f"{s3}/together")
    together(pair(store), 1)
    check(store, 1)
    assert set(store.folder(snapshot_name(1, 1), attempt=1, run_id="").sizes()) == {  # type: ignore[attr-defined]
        *(file.name for file in FILES),
        "manifest.json",
    }


def test_a_snapshot_that_a_host_tears_while_another_one_commits_it_is_not_there(tmp_path: Path) -> None:
    store, torn = LocalStore(tmp_path / "run"), list[str]()

    def tear(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "read" and arguments[0] in {file.name for file in FILES} and not torn:
            torn.append("torn-00000000.json")
            (store.root / snapshot_name(1, 1) / torn[0]).write_text('{"why": "its node was lost"}')

    other = Host(1, store)
    other.bring(1)
    other.tier.placed(other.gathering(1), 1)
    with missed(match="its node was lost"):
        Host(0, HookedStore(store.root, tear)).take(1)
    assert torn
    assert store.survey().manifests == []


def test_nothing_is_kept_of_what_was_given_up_before_its_note(tmp_path: Path) -> None:
    host = Host(1, LocalStore(tmp_path / "run"))
    host.bring(1)
    host.tier.give_up(host.gathering(1))
    with missed(match="was given up"):
        host.end(1)
    assert host.tier._brought == {}


def test_a_tier_to_which_hosts_bring_again_is_not_said_to_work_in_other_ways(tmp_path: Path) -> None:
    node, url = Node(slots=1, memory_bytes=2**20, open_store=open_store, allow=None), str(tmp_path / "run")
    try:
        tier = node.uploads.abroad.bringing.tier(url, RUN_ID)
        assert isinstance(tier, JointStore)
        tier._heard("no space left")
        assert node.tiers()[url].error == "no space left"
        node.flusher.health[url] = TierHealth(error="old snapshots cannot be deleted")
        tier._heard("")
        assert node.tiers()[url].error == "old snapshots cannot be deleted"
    finally:
        node.close()


def test_who_asks_how_the_tiers_are_does_not_wait_for_a_store_that_is_being_opened(tmp_path: Path) -> None:
    """That takes seconds for a bucket, and a node that does not answer for so long is taken for a lost one."""
    opening, go_on = threading.Event(), threading.Event()

    def slow(url: str) -> LocalStore:
        opening.set()
        assert go_on.wait(60)
        return LocalStore(tmp_path / "run")

    node = Node(slots=None, memory_bytes=2**22, open_store=slow, allow=[str(tmp_path)])
    bringing = node.uploads.abroad.bringing
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(bringing.tier, str(tmp_path / "run"), "r") for _ in range(2)]
        assert opening.wait(60)
        assert bringing.failing() == {}
        go_on.set()
        first, second = (future.result(60) for future in both)
    assert first is second
    assert isinstance(first, JointStore)
    first.why = "it does not answer"
    assert list(bringing.failing().values()) == ["it does not answer"]
    bringing.calm("r")
    assert bringing.failing() == {}
    node.close()


@pytest.fixture
def counted() -> Iterator[None]:
    """Requests are counted, and struck as a test says; afterwards none is."""
    faulty.use(Plan())
    yield
    faulty.use(Plan())


def requests_of(action: Callable[[], object]) -> int:
    """How many requests something takes."""
    counting = faulty.use(Plan())
    action()
    return counting.calls


@pytest.mark.usefixtures("counted")
def test_hosts_ask_a_bucket_no_more_than_they_need(s3: str) -> None:
    """Each request to one that is far is a tenth of a second. There were 40 and more, one after the other."""
    store = open_store(f"{s3}/counted".replace("s3://", "faulty-s3://"))
    first, other = pair(store)
    assert requests_of(lambda: other.bring(1)) == 2 + len(other.files)  # what is there, who has claimed, and its files
    assert requests_of(lambda: other.tier.placed(other.gathering(1), 1)) == 2  # who has claimed, and its note
    assert requests_of(lambda: first.bring(1)) == 2 + len(first.files)
    # Its note, what is there, two notes, six pieces of two shared parts, the same look again, the manifest, the notes.
    assert requests_of(lambda: first.end(1)) <= 2 + 1 + 2 + 6 + 2 + 1 + 1
    check(store, 1)
    put = functools.partial(store.put, attempt=1)
    image = memoryview(content(2))
    assert requests_of(lambda: put(manifest_of(2).sealed(image), image)) == 4 + len(FILES)
    assert requests_of(lambda: retain(store, 1, store.survey().manifests[0])) <= 18


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("lost", 6),
        ("EIO", 6),
        *(pytest.param(kind, 1, marks=pytest.mark.soak) for kind in ("lost", "EIO", "missing")),
    ],
)
def test_every_request_of_hosts_that_bring_a_snapshot_to_s3_fails(s3: str, kind: str, stride: int) -> None:
    """What counts is whole, and what a host was told to be there is. From there on, or once, as when a link is cut."""
    for at in range(random.randrange(stride) + 1, 200, stride):
        store = open_store(f"{s3}/{kind}-{at}".replace("s3://", "faulty-s3://"))
        faulty.use(Plan())
        store.put(manifest_of(1).sealed(memoryview(content(1))), memoryview(content(1)), attempt=1)
        fault = faulty.use(Plan(kind, at=at, span=at % 2))
        said = []
        for host in pair(store):
            with contextlib.suppress(SpotError):
                host.bring(2)
                said.append(host.end(2))
        faulty.use(Plan())
        newest = store.survey().manifests[0]
        assert newest.step == 2 or not said, f"call {at}"
        check(store, newest.step)
        retain(store, 1, newest)
        check(store, newest.step)
        if not fault.struck:
            assert at > 20
            return
    raise AssertionError("it does not end")
