"""What only one rank knows, on its way to rank 0: it comes once and whole, or whoever waits for it is told."""

from __future__ import annotations

import io
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_spot.capture.mailbox import Mailbox, Sender
from lightning_spot.capture.split import SharingRanks

from lightning_spot.capture import mailbox
from lightning_spot.capture.tensors import by_storage
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.errors import FailureReason, ShareFault, ShareProblem, SnapshotFailedError, SpotError
from lightning_spot.exact.rank_states import Rooms, packed, unpacked
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.host import InProcessHost
from tests.support.proxy import Proxy
from tests.support.server import MIB
from tests.support.small_trainer import RUN_ID, info_of
from tests.support.waiting import until

SECRET, NAME = "s" * 64, snapshot_name(1, 1)
LAST_S = 20.0


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailbox]:
    monkeypatch.setattr(mailbox, "RECONNECT_S", LAST_S)
    monkeypatch.setattr(mailbox, "_PAUSES_S", (0.0, 0.1, 0.1))
    made = Mailbox(SECRET)
    yield made
    made.close()


@pytest.fixture
def soon_gone(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has little time to connect anew. Where one is to come back it has more: the machine may be slow."""
    monkeypatch.setattr(mailbox, "RECONNECT_S", 0.3)


@pytest.fixture
def connect(box: Mailbox) -> Iterator[Callable[..., Sender]]:
    made: list[Sender] = []

    def connected(rank: int, port: int = 0, secret: str = SECRET) -> Sender:
        made.append(Sender("127.0.0.1", port or box.port, secret, rank))
        return made[-1]

    yield connected
    for sender in made:
        sender.close()


def taken(box: Mailbox, *ranks: int, name: str = NAME, room: int = 10**6) -> dict[int, bytes]:
    return dict(box.all_of(name, dict.fromkeys(ranks, room)))


def test_each_rank_s_state_comes_whatever_the_order(box: Mailbox, connect: Callable[..., Sender]) -> None:
    states = {rank: random.Random(rank).randbytes(300_000 * rank) for rank in (1, 2, 3)}
    senders = {rank: connect(rank) for rank in states}
    for name in (snapshot_name(step, 1) for step in (1, 2)):
        for rank in (3, 1, 2):
            senders[rank].send(name, states[rank] + name.encode())
    for name in (snapshot_name(step, 1) for step in (2, 1)):
        assert taken(box, *states, name=name) == {rank: state + name.encode() for rank, state in states.items()}
    assert not box._letters


def test_what_is_not_wanted_any_more_is_not_kept(box: Mailbox, connect: Callable[..., Sender]) -> None:
    sender = connect(1)
    box.over(NAME)
    sender.send(NAME, b"late")
    sender.send(snapshot_name(2, 1), b"next")
    assert taken(box, 1, name=snapshot_name(2, 1)) == {1: b"next"}
    assert not box._letters


def test_a_state_that_outgrew_its_room_is_named(box: Mailbox, connect: Callable[..., Sender]) -> None:
    connect(1).send(NAME, b"12345")
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused) as failed:
        taken(box, 1, room=4)
    assert failed.value.fault == ShareFault(ShareProblem.OUTGROWN, rank=1, nbytes=5)


class Torn:
    def __len__(self) -> int:
        return 1

    def __bytes__(self) -> bytes:
        raise SpotError("the GPU failed")


def test_a_rank_that_has_none_in_the_end_says_so(box: Mailbox, connect: Callable[..., Sender]) -> None:
    connect(1).send(NAME, Torn())
    with pytest.raises(SnapshotFailedError, match="rank 1: the GPU failed", check=FailureReason.SHARE_MISSING.caused):
        taken(box, 1)


@pytest.mark.usefixtures("soon_gone")
def test_nobody_waits_for_a_rank_that_has_gone(box: Mailbox, connect: Callable[..., Sender]) -> None:
    sender, began_s = connect(1), time.monotonic()
    threading.Timer(0.2, sender.close).start()
    with pytest.raises(SnapshotFailedError, match=r"rank 1 .*has gone", check=FailureReason.SHARE_MISSING.caused):
        taken(box, 1)
    assert 0.4 < time.monotonic() - began_s < LAST_S


def test_a_rank_that_is_there_and_sends_nothing_is_not_waited_for_for_ever(
    box: Mailbox, connect: Callable[..., Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "HOST_SILENT_S", 0.3)
    connect(1)
    with pytest.raises(SnapshotFailedError, match="did not come in time", check=FailureReason.SHARE_MISSING.caused):
        taken(box, 1)


def test_who_waits_is_told_when_the_mailbox_closes(box: Mailbox, connect: Callable[..., Sender]) -> None:
    connect(1)
    threading.Timer(0.2, box.close).start()
    with pytest.raises(SnapshotFailedError, match="did not come", check=FailureReason.SHARE_MISSING.caused):
        taken(box, 1)


@pytest.mark.parametrize("kind", ["cut before", "cut within", "cut after"])
def test_what_is_lost_on_its_way_is_sent_again(box: Mailbox, connect: Callable[..., Sender], kind: str) -> None:
    """Only the answer is lost, too: then it comes twice, and counts once."""
    proxy = Proxy(f"spot://127.0.0.1:{box.port}", 1)
    try:
        sender = connect(1, int(proxy.url.rpartition(":")[2]))
        proxy.strike(1, kind)
        sender.send(NAME, b"a" * 1000)
        assert taken(box, 1) == {1: b"a" * 1000}
        assert proxy.struck
        sender.send(snapshot_name(2, 1), b"b")
        assert taken(box, 1, name=snapshot_name(2, 1)) == {1: b"b"}
        assert not box._letters
    finally:
        proxy.close()


def test_strangers_are_not_listened_to(box: Mailbox, connect: Callable[..., Sender]) -> None:
    with pytest.raises(OSError, match="hung up"):
        connect(1, secret="t" * 64)
    with socket.create_connection(("127.0.0.1", box.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
        stranger.settimeout(LAST_S)
        with pytest.raises((ConnectionResetError, AssertionError)):
            assert stranger.recv(1)


def test_a_mailbox_that_is_gone_is_noticed_beside_training(
    box: Mailbox, connect: Callable[..., Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, goes_on = connect(1), threading.Event()
    letter = sender._letter

    def held_up(*what: Any) -> Any:
        assert goes_on.wait(LAST_S)
        return letter(*what)

    monkeypatch.setattr(sender, "_letter", held_up)
    box.close()
    sender.send(NAME, b"nobody takes it")  # returns before anything is tried
    goes_on.set()
    began_s = time.monotonic()
    sender.close()
    assert time.monotonic() - began_s < LAST_S


# -- in snapshots ------------------------------------------------------------------------------------------------------


class Desk:
    """Rank 0's writer with the ring in its own process, and what other ranks send."""

    def __init__(self, root: Path, box: Mailbox) -> None:
        self.host = InProcessHost(slots=2, memory_bytes=256 * MIB, open_store=open_store)
        self.host.open_run(info_of(str(root / "run"), 1))
        self.writer = SnapshotWriter(self.host)
        self.writer.mailbox = box
        self.weights = [torch.rand(3 * MIB) for _ in range(3)]  # 36 MiB: several parts
        self.rooms = Rooms()
        self.rooms.put(1, packed({"rank": 1, "seen": "x" * 100}))
        self.store = open_store(str(root / "run"))

    def begin(self, step: int) -> Any:
        name = snapshot_name(step, 1)
        checkpoint = {
            "ranks": [{"rank": 0}, *self.rooms.known.values()],
            "w": self.weights,
        }  # in a part without the rest
        manifest = Manifest(run="run", run_id=RUN_ID, name=name, step=step, attempt=1, nbytes=0)
        done = self.writer.begin(
            checkpoint,
            manifest,
            owned=by_storage(self.weights),
            wait_s=LAST_S,
            ranks=SharingRanks(1, {}, sent=self.rooms.known),
        )
        self.writer.copied()
        return done

    def durable(self, manifest: Manifest) -> dict[str, Any]:
        """As it lies at the durable tier, where each part had its checksum compared."""

        def found() -> Manifest | None:
            return next((each for each in self.store.survey().manifests if each.name == manifest.name), None)

        until(found, "it to be durable", LAST_S)
        data = (Path(self.store.url) / manifest.data_path).read_bytes()
        saved: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        saved["ranks"] = unpacked(saved["ranks"], lambda file: torch.load(file, weights_only=True))
        return saved

    def close(self) -> None:
        self.writer.close()
        self.host.leave(complete=True)


@pytest.fixture
def desk(tmp_path: Path, box: Mailbox) -> Iterator[Desk]:
    made = Desk(tmp_path, box)
    yield made
    made.close()


def test_what_was_sent_is_in_the_snapshot_also_where_nothing_else_has_changed(
    desk: Desk, connect: Callable[..., Sender]
) -> None:
    """Parts in which nothing was written keep their checksums: not those in which it was sent."""
    sender = connect(1)
    for step in range(1, 7):
        sender.send(snapshot_name(step, 1), packed({"rank": 1, "seen": str(step) * (20 * step)}))
        done = desk.begin(step)
        manifest = done.result(LAST_S)
        assert desk.durable(manifest)["ranks"] == [{"rank": 0}, {"rank": 1, "seen": str(step) * (20 * step)}]
    assert desk.writer.missed == 0
    assert (desk.writer.together, desk.writer.posted) == (0, 6)
    assert desk.writer.copied_bytes < 3.2 * sum(weight.nbytes for weight in desk.weights)


@pytest.mark.usefixtures("soon_gone")
def test_what_does_not_come_drops_the_snapshot_and_the_former_one_stands(
    desk: Desk, connect: Callable[..., Sender], caplog: pytest.LogCaptureFixture
) -> None:
    sender = connect(1)
    sender.send(snapshot_name(1, 1), packed({"rank": 1}))
    first = desk.begin(1).result(LAST_S)
    sender.close()
    with pytest.raises(SnapshotFailedError, match="that rank has gone", check=FailureReason.SHARE_MISSING.caused):
        desk.begin(2).result(LAST_S)
    assert desk.writer.missed == 1
    assert desk.writer.committed.name == first.name
    assert "was not committed" in caplog.text
    connect(1).send(snapshot_name(3, 1), packed({"rank": 1, "again": True}))
    assert desk.durable(desk.begin(3).result(LAST_S))["ranks"][1] == {"rank": 1, "again": True}


def test_what_came_for_a_snapshot_that_was_dropped_for_another_reason_is_not_kept(
    desk: Desk, box: Mailbox, connect: Callable[..., Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training may go on for weeks, and a few snapshots of it be torn."""
    sender = connect(1)
    sender.send(snapshot_name(1, 1), packed({"rank": 1}))
    until(lambda: len(box._letters) == 1, "it to come", LAST_S)
    with monkeypatch.context() as patch:
        patch.setattr(desk.writer._copying.unchanged, "written_past_counts", lambda *_: 1)
        with pytest.raises(SnapshotFailedError, check=FailureReason.TORN.caused):
            desk.begin(1).result(LAST_S)
    assert not box._letters
    sender.send(snapshot_name(2, 1), packed({"rank": 1}))
    assert desk.durable(desk.begin(2).result(LAST_S))["ranks"][1] == {"rank": 1}
    assert desk.writer.posted == 1
