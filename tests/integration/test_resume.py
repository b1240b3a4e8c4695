"""A resume that cannot read is no fresh start. The oracle is outside: what was durable, and where training began.

Whatever is broken: either training goes on from the newest snapshot that can be read, or ``fit`` ends with one clear
error that names the way on; and nothing that was there is deleted.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import AutoResume, EverySteps, PreemptedError, RemoteSnapshot, SpotCheckpoint, retry
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.starting import attach
from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import CorruptSnapshotError, ServerUnreachableError, SpotError, TierError
from lightning_spot.goodput import records
from lightning_spot.retry import RetryPolicy
from lightning_spot.run.choice import RestoreProgress, open_newest
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.survey import ask_all, survey
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import checksum
from lightning_spot.store.local import LocalStore
from lightning_spot.store.store import Holdings
from tests.support import faulty
from tests.support.faulty import Plan
from tests.support.said import informed, said, said_about
from tests.support.server import StartServer
from tests.support.snapshots import EachDurable, serverless
from tests.support.trainer import Dies, Net, Probe, Stop, StopAt, data, trainer
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G2")

KEEPS: dict[str, Any] = {"keep": 3, "min_upload_interval_s": 0.0}
EIO = Path("/proc/self/mem")  # reading its first byte fails with EIO, also for root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after step 9: snapshots of steps 3, 6 and 9."""
    path = tmp_path_factory.mktemp("trained") / "run-1"
    with pytest.raises(Stop):
        trainer(serverless(path, **KEEPS), StopAt(10), EachDurable(path, 3)).fit(Net(), data())
    assert [manifest.step for manifest in LocalStore(path).survey().manifests] == [9, 6, 3]
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it; tiers are asked again at once."""
    monkeypatch.setattr(retry, "DEFAULT_POLICY", RetryPolicy(tries=3, first_pause_s=0.05))
    shutil.copytree(trained, tmp_path / "run-1", symlinks=True)
    yield tmp_path / "run-1"
    faulty.use(Plan())


def begins(url: str | Path, **more: Any) -> int | type[SpotError]:
    """The step at which ``fit`` begins to train, or the kind of error it ends with. Its own snapshots are few."""
    callback, probe = serverless(url, **{"interval": EverySteps(100), "keep": 1, "run_name": "run-1", **more}), Probe()
    try:
        trainer(callback, probe, StopAt(11)).fit(Net(), data())
    except Stop:
        return min(probe.states)
    except SpotError as error:
        return type(error) if "resume=False" in str(error) else SpotError
    raise AssertionError("training did not stop")


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.glob("step-*/*"))


def step_9(run: Path) -> Path:
    (folder,) = run.glob("step-000000009-*")
    return folder


def fail_to_read(path: Path) -> None:
    path.unlink()
    path.symlink_to(EIO)


def of_a_newer_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "manifest-eio": ("manifest.json", fail_to_read),
    "manifest-newer-format": ("manifest.json", of_a_newer_format),
    "manifest-cut": ("manifest.json", lambda path: os.truncate(path, 100)),
    "manifest-names-a-petabyte": (
        "manifest.json",
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "nbytes": 10**15, "part_bytes": 1})),
    ),
    "data-eio": ("model.ckpt", fail_to_read),
    "data-cut": ("model.ckpt", lambda path: os.truncate(path, 1000)),
    "data-flipped": ("model.ckpt", flip),
    "data-gone": ("model.ckpt", lambda path: path.unlink()),
}


def test_each_start_names_what_it_skips(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second of two runs in one process said nothing of its damaged snapshot, which has the name of the first's."""
    flip(step_9(run) / "model.ckpt")
    for _ in range(2):
        opened = open_newest(survey(Location.of(str(run), local_server=False)), lambda _: None)
        assert opened is not None
    assert len(said_about(caplog, "snapshot-skipped")) == 2


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_bad_snapshot_is_passed_over_with_its_reason(
    run: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, act = DAMAGE[damage]
    act(step_9(run) / file)
    before = names(run)
    assert begins(run) == 6
    assert said_about(caplog, "snapshot-skipped") == [f"{step_9(run).name} at storage"]
    assert set(before) <= set(names(run))


@pytest.mark.parametrize("damage", ["manifest-cut", "data-eio", "data-flipped"])
def test_when_all_are_bad_there_is_one_clear_error(run: Path, damage: str) -> None:
    file, act = DAMAGE[damage]
    for folder in run.glob("step-*"):
        act(folder / file)
    before = names(run)
    assert begins(run) is CorruptSnapshotError
    assert names(run) == before
    assert begins(run, resume=False, interval=EverySteps(4)) == 0
    assert LocalStore(run).survey().manifests[0].step == 8
    assert set(before) <= set(names(run))  # and a fresh start deletes none of them


def loop(path: Path) -> None:
    """A directory that cannot be listed, also by root."""
    path.rename(path.with_name(path.name + "-aside"))
    path.symlink_to(path)


def test_claims_that_are_damaged_do_not_keep_from_resuming(run: Path) -> None:
    (run / "attempts" / "attempt-0001.json").write_text("{")
    assert begins(run) == 9


UNREADABLE = [
    pytest.param(kind, only, id=f"{kind}-{what}", marks=[] if index % 4 == 0 or index == 5 else pytest.mark.soak)
    for index, (kind, (what, only)) in enumerate(
        (kind, item)
        for kind in ("EIO", "EACCES", "ESTALE")
        for item in {"listing": ("ls",), "reading": ("cat_file",), "everything": ()}.items()
    )
]


@pytest.mark.parametrize(("kind", "only"), UNREADABLE)
def test_a_tier_that_cannot_be_read_is_an_error_and_then_goes_on(run: Path, kind: str, only: tuple[str, ...]) -> None:
    before = names(run)
    faulty.use(Plan(kind=kind, span=0, only=only))
    assert begins(f"faulty-objects:/{run}") in (TierError, CorruptSnapshotError)
    faulty.use(Plan())
    assert names(run) == before
    assert begins(f"faulty-objects:/{run}") == 9


@pytest.mark.parametrize("span", [6, 14, 0])
def test_a_listing_that_lags_is_no_empty_tier(run: Path, span: int) -> None:
    """The run began afresh without a word: neither its snapshots nor its claims were listed, which could be read."""
    before = names(run)
    faulty.use(Plan(kind="missing", span=span, only=("ls",)))
    assert begins(f"faulty-objects:/{run}") in (9, TierError)
    faulty.use(Plan())
    assert names(run) == before
    assert begins(f"faulty-objects:/{run}") == 9


def test_a_full_disk_for_server_records_blocks_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the memory of this host has is not read then; what is durable is."""
    callback = SpotCheckpoint(str(tmp_path), interval=EverySteps(3), run_name="run-1", on_full="wait", notices=None)
    with pytest.raises(Stop):
        trainer(callback, StopAt(10)).fit(Net(), data())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lightning_spot.client.starting.ServerRecord.starting", full)
    with pytest.raises(ServerUnreachableError, match="No space left"):
        attach(str(tmp_path), "run-1")
    assert begins(tmp_path) == 9
    assert "No space left" in caplog.text


def test_a_tier_that_gets_no_thread_counts_as_unresponsive(lacking: Callable[[str, int], None]) -> None:
    """The number of processes is limited in most containers."""
    lacking("", 1)
    answers, problems = ask_all({"first": Holdings, "second": Holdings}, 30.0)
    assert list(answers) == ["second"]
    assert problems == {"first": "can't start new thread"}


@pytest.mark.parametrize("since", ["the start", "the first look"])
def test_a_silent_tier_is_waited_for_less_than_its_library_would(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, since: str
) -> None:
    """It takes connections and never answers: s3fs waits for 75 s, with each request."""
    goes_on, silent = threading.Event(), threading.Event()
    for name in ("survey", "newest_claim", "claim"):
        ask = getattr(LocalStore, name)

        def asked(store: LocalStore, *about: Any, ask: Callable[..., Any] = ask, name: str = name) -> Any:
            if silent.is_set() or name == "claim":
                silent.set()
                goes_on.wait(120)
            return ask(store, *about)

        monkeypatch.setattr(LocalStore, name, asked)
    monkeypatch.setattr(retry, "DEFAULT_POLICY", RetryPolicy(tries=2, first_pause_s=0.05, silent_s=0.5))
    monkeypatch.setattr(records, "CLOSE_S", 0.5)  # its last record is waited for, too
    if since == "the start":
        silent.set()
    try:
        assert begins(run) is TierError
        assert not goes_on.is_set()
    finally:
        goes_on.set()
    assert "no answer within" in caplog.text
    assert bool(said_about(caplog, "claim-failing")) is (since == "the first look")


def test_a_server_that_does_not_answer(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"local_server": True, "servers": "spot://127.0.0.1:9", "upload_timeout_s": 0.5}
    assert begins(run, **settings) == 9  # the durable tier has answered, and has something
    lines = [record.message for record in caplog.records if "spot://127.0.0.1:9" in record.message]
    assert said_about(caplog, "not-read") == ["spot://127.0.0.1:9"]
    assert any("no snapshot server answers at" in line for line in lines)
    assert all(line.count("spot://127.0.0.1:9") == 1 for line in lines)
    for folder in run.glob("step-*"):
        shutil.rmtree(folder)
    assert begins(run, **settings) is TierError


def test_auto_resume_alone_raises_as_well(run: Path) -> None:
    loop(run)
    with pytest.raises(SpotError, match="resume=False"):
        trainer(AutoResume(str(run), local_server=False)).fit(Net(), data())


@pytest.mark.parametrize("what", ["cut", "flip", "eio"])
def test_a_file_damaged_between_check_and_use_falls_back(
    run: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch reads through a reader that checks each part as it is read: no SIGBUS, and no other bytes."""

    def use(snapshot: OpenSnapshot) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{snapshot.fds[0]}"))
        if snapshot.manifest.step == 9:
            if what == "cut":
                os.truncate(path, snapshot.manifest.nbytes // 2)
            elif what == "flip":
                with open(path, "r+b") as file:
                    file.seek(snapshot.manifest.nbytes // 2)
                    byte = file.read(1)
                    file.seek(snapshot.manifest.nbytes // 2)
                    file.write(bytes([byte[0] ^ 1]))
            else:
                fd = os.open(EIO, os.O_RDONLY)
                os.dup2(fd, snapshot.fds[0])
                os.close(fd)
        with snapshot.reader() as reader:
            try:
                return int(torch.load(reader.as_file(), weights_only=True)["global_step"])
            except Exception:
                if reader.problem is not None:
                    raise reader.problem from None
                raise

    opened = open_newest(survey(Location.of(str(run), local_server=False)), use)
    assert opened[1] == 6
    assert said_about(caplog, "snapshot-skipped") == [f"{step_9(run).name} at storage"]


def test_the_reader_gives_the_very_bytes(run: Path) -> None:
    def use(snapshot: OpenSnapshot) -> bool:
        content = (run / snapshot.manifest.data_path).read_bytes()
        small = Manifest.from_dict({**snapshot.manifest.to_dict(), "part_bytes": 1000, "checksums": []})
        small = small.sealed(memoryview(content))
        with OpenSnapshot(small, "durable", "x", snapshot.fds).reader() as reader:
            for start, count in ((0, 5), (995, 10), (999, 1), (1000, 1000), (1500, 5000), (len(content) - 3, 10)):
                reader.seek(start)
                assert reader.read(count) == content[start : start + count]
            reader.seek(0)
            assert reader.read() == content
            reader.seek(-22, os.SEEK_END)
            assert reader.read() == content[-22:]
        return True

    assert open_newest(survey(Location.of(str(run), local_server=False)), use) is not None


def test_a_restore_that_takes_long_says_how_far_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    open_newest(survey(Location.of(str(run), local_server=False)), lambda _: None)
    assert "restoring" not in informed(caplog)
    monkeypatch.setitem(RestoreProgress.__init__.__kwdefaults__, "after_s", 0.0)
    name = step_9(run).name
    open_newest(survey(Location.of(str(run), local_server=False)), lambda _: None)
    assert informed(caplog)["restoring"]["about"] == f"{name} from storage"


@pytest.mark.parametrize(("every_s", "said"), [(0.0, ["2.00 MB", "4.00 MB"]), (1000.0, ["2.00 MB"])])
def test_a_line_comes_now_and_then(caplog: pytest.LogCaptureFixture, every_s: float, said: list[str]) -> None:
    caplog.set_level("INFO")
    progress = RestoreProgress("step-1 from storage", 8_000_000, after_s=0.0, every_s=every_s)
    for _ in range(2):
        progress(2_000_000)
    assert [record.spot_facts["done"] for record in caplog.records if record.spot_key == "restoring"] == said  # type: ignore[attr-defined]


def test_a_server_is_asked_as_patiently_as_the_durable_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With tiers at their own pace it may be minutes ahead: one lost answer must not send the run back."""
    with socket.socket() as listener:  # takes connections and says nothing, twice
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        place = Location.of(tmp_path / "run-1", servers=f"spot://127.0.0.1:{port}")

        def answer() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            with listener.accept()[0] as connection:
                connection.recv(65536)
                body = b'{"runs": []}'
                lines = [
                    "HTTP/1.1 200 OK",
                    f"Spot-Protocol: {PROTOCOL_VERSION}",
                    f"Spot-Digest: {checksum(body)}",
                    f"Content-Length: {len(body)}",
                ]
                connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)

        thread = threading.Thread(target=answer)
        thread.start()
        found = survey(place, RetryPolicy(tries=3, first_pause_s=0.05))
        thread.join()
    assert found.problems == {}
    assert said_about(caplog, "read-retried") == list(place.servers)


def test_a_server_that_stands_still_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was said for a minute, and then it had been asked once."""
    monkeypatch.setattr(ServerClient, "ping", functools.partialmethod(ServerClient.ping, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Location.of(tmp_path / "run-1", servers=f"spot://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        found = survey(place, RetryPolicy(tries=2, first_pause_s=0.05))
        assert time.monotonic() - began_s < 45.0
    assert "no snapshot server answers" in found.problems[place.servers[0]]
    assert said_about(caplog, "read-retried") == list(place.servers)


def test_a_server_that_refuses_the_token_is_not_asked_again(
    tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """It will refuse that one tomorrow, too."""
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", "right")
    url = start_server("--allow-storage", str(tmp_path)).url
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", "wrong")
    (why,) = survey(Location.of(tmp_path / "run-1", servers=url)).problems.values()
    assert "another token" in why
    assert not said_about(caplog, "read-retried")


def test_a_resume_from_an_approximation_says_so(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Made by hand of step 9, and named as that of step 10: it is the newest, and passed over for nothing older."""
    manifest = Manifest.from_json((step_9(run) / "manifest.json").read_bytes())
    inexact = replace(replace(manifest, step=10).inexact(), checksums=manifest.checksums)
    shutil.copytree(step_9(run), run / inexact.name)
    (run / inexact.name / "manifest.json").write_text(inexact.to_json())
    assert begins(run) == 9  # what the file holds
    assert said(caplog, "resume-inexact") == [{"about": inexact.name, "exact": manifest.name}]


# -- a resume that fails at its first batch fails so at each start: that is said, and an older snapshot may be tried ---


def start(
    run: Path, dies: Dies, caplog: pytest.LogCaptureFixture, *callbacks: pl.Callback, **more: Any
) -> tuple[int, list[str]]:
    """Where a start that fails begins, and what it says of those before it."""
    new_process()
    fits = trainer(dies, *(callbacks or [serverless(run, **KEEPS, **more)]))
    caplog.clear()
    with pytest.raises(type(dies.error)):
        fits.fit(Net(), data())
    return dies.step, [str(facts["way_on"]) for facts in said(caplog, "resumes-failing")]


@pytest.mark.parametrize(("on_failure", "steps"), [("error", [9, 9, 9, 9]), ("older", [9, 9, 6, 6, 3, 3, 3])])
def test_each_start_after_one_that_failed_says_so(
    run: Path, on_failure: Any, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """All began there for ever, and each said that the same command goes on."""
    told = list[str]()
    for failed, step in enumerate(steps):
        at, ways_on = start(run, Dies(), caplog, on_resume_failure=on_failure)
        assert (at, len(ways_on)) == (step, bool(failed))
        told += ways_on
    assert "on_resume_failure='older'" in told[0] or on_failure == "older"
    assert "resume=False" in told[-1]


def test_a_snapshot_of_its_own_ends_that(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        start(run, Dies(), caplog, on_resume_failure="older")
    new_process()
    with pytest.raises(Stop):
        trainer(serverless(run, **KEEPS, on_resume_failure="older"), StopAt(13), EachDurable(run, 3)).fit(Net(), data())
    assert start(run, Dies(), caplog, on_resume_failure="older") == (12, [])


def test_only_starts_that_failed_are_counted(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A notice may come before the first snapshot, as often as machines are taken away."""
    for _ in range(3):
        assert start(run, Dies(PreemptedError("taken away", 143)), caplog, on_resume_failure="older") == (9, [])


def test_parts_alone_count_them_without_records(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    def parts() -> list[pl.Callback]:
        more: dict[str, Any] = {"local_server": False}
        snapshots = RemoteSnapshot(str(run), interval=EverySteps(3), **more)
        return [AutoResume(str(run), on_resume_failure="older", **more), snapshots]

    assert [start(run, Dies(), caplog, *parts())[0] for _ in range(4)] == [9, 9, 6, 6]
