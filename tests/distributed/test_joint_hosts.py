"""One snapshot that several hosts bring to a server, each its portion: two hosts and a node, in this process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_spot.client import connection, remote
from lightning_spot.client.node_client import NodeClient
from lightning_spot.client.remote import NodeStore
from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    ServerRefusedError,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SpotError,
    TierReason,
)
from lightning_spot.image.layout import lay_out
from lightning_spot.image.manifest import MOST_HOSTS, Manifest, snapshot_name
from lightning_spot.image.pieces import Piece
from lightning_spot.image.portion import Portion, Portions, cut, is_whole, joined
from lightning_spot.image.written import Ranges
from lightning_spot.memory import push, replication, uploads
from lightning_spot.memory import uploads as uploads_module
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.service import joint_requests, upload_requests
from lightning_spot.tiers.local import LocalStore
from tests.support.proxy import Proxy
from tests.support.server import MIB, RUN_ID, manifest_of, served, snapshot_server
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G10")

RUN = f"run@{RUN_ID}"
LAST_S = 100.0  # of what never takes so long
missed = functools.partial(pytest.raises, SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused)


def image_of(state: dict[str, Any]) -> tuple[bytes, tuple[Piece, ...]]:
    """The file of a checkpoint, and where its storages lie."""
    layout = lay_out(state)
    image = bytearray(layout.nbytes)
    for offset, data in layout.frame:
        image[offset : offset + len(data)] = data
    for piece in layout.pieces:
        image[piece.offset : piece.offset + piece.nbytes] = bytes(piece.storage)
    return bytes(image), tuple(layout.pieces)


class Checkpoint:
    """A checkpoint of some weights, of which the other host brings the second half."""

    def __init__(self, seed: int, frozen: bool = False, note: str = "") -> None:
        dice = torch.Generator().manual_seed(seed)
        self.weights = [torch.rand(2_000, generator=dice) for _ in range(8)]
        if frozen:
            self.weights[4:] = [torch.full((2_000,), float(index)) for index in range(4)]
        self.image, pieces = image_of({"weights": self.weights, "note": note})
        self.theirs: Ranges = joined((piece.offset, piece.nbytes) for piece in pieces[4:])

    def told(self) -> str:
        return json.dumps(Portions((self.theirs,), (1,)).to_dict())


class Team:
    """Snapshot servers, and two hosts: the first leads."""

    serving: dict[str, contextlib.ExitStack]

    def __init__(self, root: Path, memories: list[Node], urls: list[str]) -> None:
        self.root, self.memories = root, dict(zip((f"{url}/{RUN}" for url in urls), memories, strict=True))
        self.memory = memories[0]
        self.at = " ".join(self.memories)
        self.first, self.second = self.make_node(None), self.make_node(None)
        self.pool = ThreadPoolExecutor(8)
        self.first.begin_session("first")
        self.second.begin_session("second")
        self.attempt = 0
        self.open()

    @property
    def durable(self) -> LocalStore:
        return LocalStore(str(self.root / "run"))

    def leave_slots(self, slots: int) -> None:
        """The hosts have no more than so many slots from now on."""
        for node in (self.first, self.second):
            node.ring._limits = replace(node.ring._limits, slots=slots)

    def make_node(self, allow: list[str] | None) -> Node:
        return Node(slots=3, memory_bytes=64 * MIB, open_store=open_store, allow=allow)

    def open(self) -> None:
        self.attempt += 1
        info = RunInfo(name="run", id=RUN_ID, location=f"file://{self.root}/run", attempt=self.attempt, token="t")
        nodes = tuple(url.rpartition("/")[0] for url in self.memories)
        self.info = info = replace(info, nodes=nodes, replicas=len(nodes), durable_url=str(self.root / "run"))
        self.first.open_run(replace(info, session="first"))
        if info.durable_url is not None:
            LocalStore(info.durable_url).claim(info.claim())  # as the trainer does
        self.second.open_run(replace(info, nodes=(), durable_url=None, carry=False, session="second"))
        kept = functools.partial(self.first.routes.status, RUN_ID)
        until(lambda: len(kept()["kept_at"]) == len(nodes), "the nodes to be open, and one to carry the run on")
        self.at = " ".join(kept()["kept_at"])

    def lead(self, step: int, checkpoint: Checkpoint, shares: int = 1) -> Upload:
        name = snapshot_name(step, self.attempt)
        shared = Shared(name=name, shares=shares, digest="d", layout=checkpoint.told(), at=self.at)
        nbytes = len(checkpoint.image)
        return self.first.lease(RUN, self.attempt, nbytes, name=shared.name, session="first", shared=shared)

    def fill(self, upload: Upload, checkpoint: Checkpoint) -> None:
        """What the first host writes: all but the others' bytes, which are somebody else's."""
        with upload.slot.view(upload.nbytes) as view:
            view[:] = bytes(upload.nbytes)
            for start, nbytes in Portions((checkpoint.theirs,), (1,)).rest(upload.nbytes):
                view[start : start + nbytes] = checkpoint.image[start : start + nbytes]

    def seal(self, upload: Upload, step: int) -> Manifest:
        return self.first.seal(upload.id, manifest_of(step, self.attempt, upload.nbytes))

    def join(self, step: int) -> Upload:
        name = snapshot_name(step, self.attempt)
        self.second.uploads.abroad.visits.join(RUN, self.attempt, name, self.at, 1)
        ask = functools.partial(self.second.uploads.shares.join, RUN, self.attempt, name, 1, "second", "d")
        upload: Upload = until(ask, "the share", LAST_S)
        return upload

    def follow(self, step: int, checkpoint: Checkpoint) -> None:
        """What the second host does."""
        upload = self.join(step)
        portion = Portion(checkpoint.theirs)
        assert upload.nbytes == portion.nbytes < len(checkpoint.image)
        with upload.slot.view(upload.nbytes) as view:
            for start, nbytes in checkpoint.theirs:
                place = portion.place(start)
                view[place : place + nbytes] = checkpoint.image[start : start + nbytes]
        self.second.uploads.shares.placed(upload.id, 1)

    def take(self, step: int, checkpoint: Checkpoint) -> Manifest:
        upload = self.lead(step, checkpoint)
        self.fill(upload, checkpoint)
        sealing = self.pool.submit(self.seal, upload, step)
        self.follow(step, checkpoint)
        return sealing.result(LAST_S)

    def take_alone(self, step: int) -> None:
        """A snapshot of the first host, which the other has no part in."""
        upload = self.first.lease(RUN, 1, 1000, session="first")
        with upload.slot.view(1000) as view:
            view[:] = bytes(1000)
        self.first.seal(upload.id, manifest_of(step))

    def sent(self, node: Node, url: str = "") -> Any:
        return node.uploads.abroad.bringing.tier(url or self.at, RUN_ID).sent  # type: ignore[attr-defined]

    def filling(self) -> int:
        """Slots that nobody can use now, anywhere."""
        nodes = (self.first, self.second, *self.memories.values())
        return sum(slot["state"] == "filling" for node in nodes for slot in node.ring.status()["slots"])

    def all_free(self) -> None:
        until(lambda: not self.filling(), "all slots to be usable again")

    def remote(self) -> NodeStore:
        """The snapshot server, for who has the token of this attempt."""
        store = NodeStore(self.at)
        store.know(replace(self.info, nodes=()))
        return store

    def check(self, manifest: Manifest, checkpoint: Checkpoint, url: str = "") -> None:
        """The snapshot server has the snapshot, and torch reads it."""
        store = NodeStore(url or self.at)
        found = next(each for each in store.survey().manifests if each.name == manifest.name)
        assert found.checksums == manifest.checksums
        image = memoryview(bytearray(found.nbytes))
        store.fetch(found, image)
        path = self.root / "read.ckpt"
        path.write_bytes(image)
        read = torch.load(path, weights_only=True)["weights"]
        assert all(torch.equal(one, other) for one, other in zip(read, checkpoint.weights, strict=True))

    def close(self) -> None:
        for node in (self.first, self.second):
            node.close()
        self.pool.shutdown()


@pytest.fixture
def teams(tmp_path: Path) -> Iterator[Callable[..., Team]]:
    made: list[Team] = []
    with snapshot_server(tmp_path) as (memory, at):

        def make(url: str = "") -> Team:
            made.append(Team(tmp_path, [memory], [url or at]))
            return made[-1]

        yield make
        for team in made:
            team.close()


@pytest.fixture
def team(teams: Callable[..., Team]) -> Team:
    return teams()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Team]:
    """Two hosts, and two snapshot servers that each have every snapshot."""
    serving = [contextlib.ExitStack(), contextlib.ExitStack()]
    with serving[0], serving[1]:
        servers = [stack.enter_context(snapshot_server(tmp_path)) for stack in serving]
        team = Team(tmp_path, [node for node, _ in servers], [url for _, url in servers])
        team.serving = dict(zip(team.memories, serving, strict=True))
        yield team
        team.close()


def test_two_hosts_bring_a_snapshot_together_and_each_sends_its_portion(team: Team) -> None:
    checkpoint = Checkpoint(1)
    manifest = team.take(1, checkpoint)
    team.check(manifest, checkpoint)
    theirs = sum(nbytes for _, nbytes in checkpoint.theirs)
    assert team.sent(team.second).bytes == theirs
    assert team.sent(team.first).bytes == manifest.nbytes - theirs
    assert team.first.committed(RUN) == team.second.committed(RUN) == []  # neither has all of it
    until(lambda: [each.step for each in team.durable.survey().manifests] == [1], "it to be durable")
    assert team.durable.has(manifest)
    team.all_free()


def test_only_what_changed_is_sent_of_each_portion(team: Team) -> None:
    same = Checkpoint(1)
    for step in (1, 2, 3):
        team.check(team.take(step, same), same)
    once = len(same.image)
    assert team.sent(team.first).bytes + team.sent(team.second).bytes < once + 5_000
    frozen = [Checkpoint(seed, frozen=True) for seed in (4, 5)]
    team.take(4, frozen[0])
    before = team.sent(team.second).bytes
    team.check(team.take(5, frozen[1]), frozen[1])
    assert team.sent(team.second).bytes - before < 1_000
    team.all_free()


def test_a_file_that_has_another_length_now_is_not_sent_anew(team: Team) -> None:
    team.take(1, Checkpoint(1))
    before = team.sent(team.first).bytes
    for step, note in ((2, "x" * 700), (3, "x" * 70)):
        team.check(team.take(step, other := Checkpoint(1, note=note)), other)
    assert team.sent(team.first).bytes - before < 10_000 < before / 2
    team.all_free()


def test_a_host_that_opens_many_streams_leaves_one_to_every_other(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node served 256 at once, shared by the uploads: those of 16 hosts kept the other 48 out of one snapshot."""
    monkeypatch.setattr(upload_requests, "MOST_STREAMS", 2)
    checkpoint = Checkpoint(1)
    upload = team.lead(1, checkpoint)
    lead = team.first.uploads.abroad._leads.find(upload)
    assert lead is not None
    _, gathering = lead.begun[team.at].result(LAST_S)
    client = NodeClient(parse_spot_url(team.at)[0])
    streams = [client.stream(gathering.upload) for _ in range(2)]
    with pytest.raises(ServerRefusedError, check=TierReason.TOO_MANY_STREAMS.caused):
        client.stream(gathering.upload)
    team.fill(upload, checkpoint)
    sealing = team.pool.submit(team.seal, upload, 1)
    team.follow(1, checkpoint)
    team.check(sealing.result(LAST_S), checkpoint)
    for stream in streams:
        stream.close()
    team.all_free()


def test_a_request_to_take_part_that_is_lost_is_sent_again(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts would wait a minute for this one."""
    asked: list[str] = []
    original = NodeClient.call

    def call(client: NodeClient, method: str, path: str, *arguments: Any, **more: Any) -> dict[str, Any]:
        if not path.endswith("/joint/join"):
            return original(client, method, path, *arguments, **more)
        if not asked:
            asked.append("lost")
            raise ServerUnreachableError("no snapshot server answers") from TimeoutError()
        answer = original(client, method, path, *arguments, **more)
        asked.append("in time" if answer["upload"] else "early")
        if asked.count("in time") == 1:
            raise ServerUnreachableError("its answer is lost")
        return answer

    monkeypatch.setattr(NodeClient, "call", call)
    monkeypatch.setattr(remote, "_TRY_S", 0.01)
    checkpoint = Checkpoint(1)
    team.second.uploads.abroad.visits.join(RUN, 1, snapshot_name(1, 1), team.at, 1)
    until(lambda: len(asked) >= 3, "it to be asked for thrice", LAST_S)
    team.check(team.take(1, checkpoint), checkpoint)
    assert asked[:3] == ["lost", "early", "early"]
    assert asked[-2:] == ["in time", "in time"]
    team.all_free()


@pytest.mark.parametrize("lost", ["request", "answer", "answer, and the snapshot is committed meanwhile"])
def test_word_that_a_portion_is_in_place_is_said_again_if_it_is_lost(
    team: Team, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """All hosts would have brought theirs in vain."""
    asked: list[str] = []
    original = NodeClient.call

    def call(client: NodeClient, method: str, path: str, *arguments: Any, **more: Any) -> dict[str, Any]:
        if not path.endswith("/joint/placed"):
            return original(client, method, path, *arguments, **more)
        asked.append(path)
        if len(asked) == 1 and lost == "request":
            raise ServerUnreachableError("no snapshot server answers") from TimeoutError()
        if len(asked) > 1 and lost.endswith("meanwhile"):
            until(lambda: team.memory.ring.committed(RUN_ID), "the snapshot", LAST_S)
        answer = original(client, method, path, *arguments, **more)
        if len(asked) == 1:
            raise ServerUnreachableError("its answer is lost")
        return answer

    monkeypatch.setattr(NodeClient, "call", call)
    ended: list[BaseException | None] = []
    visits = team.second.uploads.abroad.visits
    end = visits._ended
    monkeypatch.setattr(visits, "_ended", lambda visit, url, error: (ended.append(error), end(visit, url, error)))
    checkpoint = Checkpoint(1)
    team.check(team.take(1, checkpoint), checkpoint)
    until(lambda: bool(ended), "the other host to be done", LAST_S)
    assert ended == [None]
    assert len(asked) == 2
    team.all_free()


@pytest.mark.parametrize("kind", ["cut before", "cut there", "cut after"])
@pytest.mark.parametrize("request_of", ["joint", "seal"])
def test_a_connection_that_breaks_under_a_request_of_the_first_host_costs_no_snapshot(
    team: Team, request_of: str, kind: str
) -> None:
    """The request is lost, the node hears the first host hang up, or only its answer is lost."""
    url = team.at
    with contextlib.closing(Proxy(url.rpartition("/")[0], 1)) as proxy:
        team.at = f"{proxy.url}/{RUN}"
        for step in (1, 2):
            checkpoint = Checkpoint(step)
            proxy.strike_at(f"/{request_of} HTTP".encode(), kind)
            upload = team.lead(step, checkpoint)
            team.fill(upload, checkpoint)
            sealing = team.pool.submit(team.seal, upload, step)
            if request_of == "seal" and kind != "cut after":
                until(lambda: proxy.struck, "the request to be cut", LAST_S)
            team.follow(step, checkpoint)
            team.check(sealing.result(LAST_S), checkpoint)
            assert proxy.struck
            team.all_free()
    assert len(team.memory.ring.committed(RUN_ID)) == 2


def test_a_first_host_that_hangs_up_and_asks_no_more_counts_as_gone(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_requests, "ASKED_AGAIN_S", 0.2)
    monkeypatch.setattr(remote, "_PAUSES_S", ())
    with contextlib.closing(Proxy(team.at.rpartition("/")[0], 1)) as proxy:
        team.at = f"{proxy.url}/{RUN}"
        checkpoint = Checkpoint(1)
        proxy.strike_at(b"/seal HTTP", "cut there")
        upload = team.lead(1, checkpoint)
        team.fill(upload, checkpoint)
        with pytest.raises(SpotError, match="no snapshot server answers"):
            team.seal(upload, 1)
        until(lambda: not len(team.memory.uploads), "it to be given up there", LAST_S)
        team.second.uploads.shares.decline(RUN, 1, snapshot_name(1, 1), "the first host is gone")
        team.all_free()


@pytest.mark.parametrize("lost", [1, 2])
def test_one_ping_that_is_lost_gives_no_snapshot_up_and_two_in_a_row_do(
    team: Team, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    pings: list[None] = []

    def ping(client: NodeClient, *_: Any) -> None:
        pings.append(None)
        if len(pings) in range(2, 2 + lost):
            raise ServerUnreachableError("no snapshot server answers") from TimeoutError()

    checkpoint = Checkpoint(1)
    upload = team.lead(1, checkpoint)
    team.fill(upload, checkpoint)
    lead = team.first.uploads.abroad._leads.find(upload)
    assert lead is not None
    wait(lead.begun.values(), LAST_S)  # which asks for itself where it takes long
    monkeypatch.setattr(NodeClient, "ping", ping)
    monkeypatch.setattr(connection, "_PULSE_S", 0.02)
    sealing = team.pool.submit(team.seal, upload, 1)
    if lost == 2:
        with pytest.raises(SpotError, match="no snapshot server answers"):
            sealing.result(LAST_S)
        assert len(pings) == 3
        team.second.uploads.shares.decline(RUN, 1, snapshot_name(1, 1), "the first host has given it up")
    else:
        until(lambda: len(pings) > 4, "it to be asked on", LAST_S)
        team.follow(1, checkpoint)
        team.check(sealing.result(LAST_S), checkpoint)
    team.all_free()


def test_a_run_does_not_wait_for_what_hosts_bring_of_another(team: Team) -> None:
    upload = team.lead(1, Checkpoint(1))
    team.join(1)
    assert team.second.flush(RUN, 0.0) == [f"{team.at}: {snapshot_name(1, 1)} is on its way"]
    assert team.second.flush("another", 0.0) == []
    team.first.abort(upload.id)


def test_with_replicas_each_host_brings_its_portion_to_both_nodes(pair: Team) -> None:
    checkpoint = Checkpoint(1)
    manifest = pair.take(1, checkpoint)
    pair.all_free()
    theirs = sum(nbytes for _, nbytes in checkpoint.theirs)
    for url in pair.memories:
        pair.check(manifest, checkpoint, url)
        assert pair.sent(pair.second, url).bytes == theirs
        assert pair.sent(pair.first, url).bytes == manifest.nbytes - theirs
    until(lambda: [each.step for each in pair.durable.survey().manifests] == [1], "it to be durable")
    same = pair.take(2, checkpoint)
    pair.all_free()
    for url in pair.memories:  # each knows what the other end has
        pair.check(same, checkpoint, url)
        assert pair.sent(pair.second, url).bytes - theirs < 1_000


@contextlib.contextmanager
def comes_back_empty(pair: Team, allow: Path, url: str) -> Iterator[Node]:
    """A snapshot server was lost, with all that it held, and another one is at its address."""
    pair.serving[url].close()
    empty = Node(slots=None, memory_bytes=64 * MIB, open_store=open_store, allow=[str(allow)])
    port = parse_spot_url(url)[0].port
    chain = pair.first.routes._replications[RUN_ID]
    pair.first.routes.heard(url, ServerUnreachableError("its connection broke"))
    until(lambda: url in chain.away(), "the loss to be noticed", LAST_S)
    with served(empty, port):
        pair.memories[url] = empty
        until(lambda: len(chain.used) == 2, "both nodes to be open again", LAST_S)
        yield empty


@pytest.mark.parametrize("lost", ["the other", "the carrier"])
def test_a_node_that_comes_back_is_given_the_newest_that_hosts_have_brought(
    pair: Team, tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    """No host has all of it, and no further one comes: what was at one node only would be lost with that."""
    carrier, other = pair.at.split()
    gone = other if lost == "the other" else carrier
    newest = Checkpoint(2)
    pair.take(1, Checkpoint(1))
    manifest = pair.take(2, newest)
    pair.all_free()
    caplog.set_level("INFO", "lightning_spot")
    with comes_back_empty(pair, tmp_path, gone) as empty:
        until(lambda: steps_at(empty) == [2], "it to have what it had missed", LAST_S)
        pair.check(manifest, newest, gone)
        assert f"{gone} has caught up to {manifest.name}" in caplog.text
        kept = functools.partial(pair.first.routes.status, RUN_ID)
        until(lambda: len(kept()["kept_at"]) == 2, "one of them to carry the run on")
        pair.at = " ".join(kept()["kept_at"])
        before = pair.sent(pair.second, gone).bytes
        following = pair.take(3, newest)  # of which it needs only what has changed
        pair.all_free()
        pair.check(following, newest, gone)
        assert pair.sent(pair.second, gone).bytes - before < 1_000


def test_what_a_node_has_missed_is_not_copied_while_a_newer_one_is_on_its_way(
    pair: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, other = pair.at.split()
    pair.take(1, Checkpoint(1))
    pair.all_free()
    reads, given_up = threading.Event(), threading.Event()
    read, put = NodeStore.read, NodeStore.put_parts

    def read_later(*arguments: Any) -> None:
        reads.set()
        assert given_up.wait(LAST_S)
        read(*arguments)

    def tried(*arguments: Any, **more: Any) -> Manifest:
        try:
            return put(*arguments, **more)
        except SnapshotFailedError as error:
            ended.append(str(error))
            raise

    ended: list[str] = []
    monkeypatch.setattr(NodeStore, "read", read_later)
    monkeypatch.setattr(NodeStore, "put_parts", tried)
    with comes_back_empty(pair, tmp_path, other) as empty:
        assert reads.wait(LAST_S)
        pair.at = f"{carrier} {other}"
        with held_up(pair, "another") as go_on:
            pair.take(2, Checkpoint(2))
            given_up.set()
            until(lambda: ended, "the copy to be given up", LAST_S)
            go_on.set()
            pair.all_free()
        assert "a newer one comes" in ended[0]
        assert steps_at(empty) == [2]


def test_what_is_damaged_at_one_node_is_not_given_to_the_other(
    pair: Team, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    carrier, other = pair.at.split()
    pair.take(1, Checkpoint(1))
    pair.all_free()
    (slot,) = pair.memories[carrier].committed(RUN)
    assert slot.manifest is not None
    with slot.view(slot.manifest.nbytes) as view:
        view[200] ^= 1
    caplog.set_level("INFO", "lightning_spot")
    with comes_back_empty(pair, tmp_path, other) as empty:
        until(lambda: "could not be given the newest snapshot" in caplog.text, "it to be tried", LAST_S)
        pair.all_free()
        assert steps_at(empty) == []


def test_a_node_is_looked_at_again_if_there_was_no_thread_for_it(
    pair: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    original = replication.in_background

    def in_background(work: Callable[[], Any], name: str) -> Any:
        began.append(name)
        if len(began) == 1:
            raise RuntimeError("can't start new thread")
        return original(work, name)

    pair.take(1, Checkpoint(1))
    pair.all_free()
    monkeypatch.setattr(replication, "in_background", in_background)
    with comes_back_empty(pair, tmp_path, pair.at.split()[1]) as empty:
        until(lambda: began, "the first look", LAST_S)
        pair.first.routes.heard(
            next(url for url, node in pair.memories.items() if node is empty), ServerUnreachableError("x")
        )
        until(lambda: steps_at(empty) == [1], "the next one", LAST_S)


@contextlib.contextmanager
def held_up(team: Team, host: str) -> Iterator[threading.Event]:
    """Nothing gets from a host to the second snapshot server before the event is set."""
    _, slow = team.at.split()
    tier = (team.first if host == "the first" else team.second).uploads.abroad.bringing.tier(slow, RUN_ID)
    go_on, bring = threading.Event(), tier.bring

    def wait_there(*arguments: Any) -> Any:
        assert go_on.wait(LAST_S)
        return bring(*arguments)

    tier.bring = wait_there  # type: ignore[method-assign]
    try:
        yield go_on
    finally:
        go_on.set()
        tier.bring = bring  # type: ignore[method-assign]


def steps_at(memory: Node) -> list[int]:
    return sorted(manifest.step for slot in memory.committed(RUN) if (manifest := slot.manifest))


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("host", ["the first", "another"])
def test_a_slow_replica_holds_nothing_up_and_has_the_last_one_of_a_row(pair: Team, host: str, slots: int) -> None:
    """Also where a host has no more slots than for one on its way to it and for the one that is filled."""
    pair.leave_slots(slots)
    carrier, slow = pair.at.split()
    row = [Checkpoint(seed) for seed in range(1, 5)]
    with held_up(pair, host) as go_on:
        for step, checkpoint in enumerate(row, 1):
            pair.check(pair.take(step, checkpoint), checkpoint, carrier)
            assert pair.first.uploads.abroad.busy() == {slow}
        assert not pair.memories[slow].committed(RUN)
        go_on.set()
        pair.all_free()
    assert steps_at(pair.memories[slow]) == [1, 4]
    assert not pair.first.uploads.abroad.busy()
    manifest = pair.take(5, row[0])
    pair.all_free()
    for url in pair.memories:
        pair.check(manifest, row[0], url)


def test_what_waits_for_a_slow_replica_goes_on_if_the_one_before_fails_there(pair: Team) -> None:
    _, slow = pair.at.split()
    second = Checkpoint(2)
    with held_up(pair, "another") as go_on:
        pair.take(1, Checkpoint(1))
        manifest = pair.take(2, second)
        [before] = pair.memories[slow].uploads
        pair.memories[slow].abort(before)
        go_on.set()
        pair.all_free()
    assert steps_at(pair.memories[slow]) == [2]
    pair.check(manifest, second, slow)


def test_what_waits_for_a_slow_replica_is_not_given_up_for_a_later_one_that_never_was(pair: Team) -> None:
    """The node takes what it is told of a later one for a word on all before it."""
    _, slow = pair.at.split()
    with held_up(pair, "another") as go_on:
        pair.take(1, Checkpoint(1))
        pair.take(2, Checkpoint(2))
        pair.first.uploads.abroad.decline(RUN, pair.at, snapshot_name(3, 1), 1, "no slot is free")
        until(lambda: pair.memory.uploads.shares.is_over(RUN, snapshot_name(3, 1)), "the other node to be told", LAST_S)
        go_on.set()
        pair.all_free()
        assert steps_at(pair.memories[slow]) == [1, 2]
        told = pair.memories[slow].uploads.shares.is_over
        until(lambda: told(RUN, snapshot_name(3, 1)), "the slow node to be told", LAST_S)


@pytest.mark.parametrize("why", ["the first host has no slot", "the carrier has no room"])
def test_ranks_of_other_hosts_hear_of_what_never_begins_while_another_one_waits(
    pair: Team, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Training waited for the slot as long as the slow replica took what was on its way there."""

    def full(*_: Any, **__: Any) -> None:
        raise SnapshotFailedError(why, reason=FailureReason.RING_FULL)

    carrier, slow = pair.at.split()
    with held_up(pair, "another") as go_on:
        pair.take(1, Checkpoint(1))
        manifest = pair.take(2, second := Checkpoint(2))
        asking = pair.pool.submit(pair.join, 3)
        if "carrier" in why:
            with monkeypatch.context() as patch:
                patch.setattr(pair.first.uploads.abroad.bringing.tier(carrier, RUN_ID), "begin", full)
                upload = pair.lead(3, Checkpoint(3))
                with missed(match="no room"):
                    pair.seal(upload, 3)
        else:
            pair.first.uploads.abroad.decline(RUN, pair.at, snapshot_name(3, 1), 1, why)
        with missed(match=why if "first" in why else None):
            asking.result(LAST_S)
        assert not go_on.is_set()
        go_on.set()
        pair.all_free()
    assert steps_at(pair.memories[slow]) == ([1, 2] if "first" in why else [1])
    pair.check(manifest, second, carrier)


def test_what_counts_goes_on_to_a_slow_replica_after_its_trainer_has_ended(pair: Team) -> None:
    _, slow = pair.at.split()
    with held_up(pair, "another") as go_on:
        pair.take(1, Checkpoint(1))
        manifest = pair.take(2, second := Checkpoint(2))
        pair.first.end_session("first")
        pair.second.end_session("second")
        go_on.set()
        pair.all_free()
    pair.check(manifest, second, slow)


@pytest.mark.parametrize("ends", ["a later attempt", "another use of its slot", "the node"])
def test_what_waits_for_a_slow_replica_ends_with(pair: Team, ends: str) -> None:
    pair.leave_slots(2)
    carrier, slow = pair.at.split()
    with held_up(pair, "the first") as go_on:
        pair.take(1, Checkpoint(1))
        manifest = pair.take(2, second := Checkpoint(2))
        if ends == "a later attempt":
            pair.open()
        elif ends == "another use of its slot":
            upload = pair.first.lease(RUN, 1, 1_000, session="first")
            pair.first.abort(upload.id)
        else:
            pair.first.uploads.close()
            pair.second.uploads.abroad.make_way()  # it waits for a word that nobody can give any more
        name, leads = snapshot_name(2, 1), pair.first.uploads.abroad._leads._leads
        until(lambda: not any(each.shared.name == name for each in list(leads.values())), "it to pass", LAST_S)
        go_on.set()
        pair.all_free()
    assert 2 not in steps_at(pair.memories[slow])
    pair.check(manifest, second, carrier)


def test_what_is_passed_over_does_not_end_the_one_before_that_begins_late(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica whose slots are full for a moment: what was said of the next snapshot was taken for the one before."""
    carrier, slow = pair.at.split()
    tier = pair.first.uploads.abroad.bringing.tier(slow, RUN_ID)
    go_on, begin = threading.Event(), tier.begin

    def late(*arguments: Any, **more: Any) -> Any:
        assert go_on.wait(LAST_S)
        return begin(*arguments, **more)

    monkeypatch.setattr(push, "_OTHERS_S", LAST_S)
    monkeypatch.setattr(tier, "begin", late)
    first, second = Checkpoint(1), Checkpoint(2)
    manifest = pair.take(1, first)
    pair.check(pair.take(2, second), second, carrier)
    time.sleep(0.5)
    go_on.set()
    pair.all_free()
    pair.check(manifest, first, slow)


def test_a_host_takes_part_in_what_has_begun_whatever_was_said_of_the_next(team: Team) -> None:
    checkpoint = Checkpoint(1)
    upload = team.lead(1, checkpoint)
    team.first.uploads.abroad.decline(RUN, team.at, snapshot_name(2, 1), 1, "no slot is free")
    until(lambda: team.memory.uploads.shares.is_over(RUN, snapshot_name(2, 1)), "the node to be told", LAST_S)
    team.fill(upload, checkpoint)
    sealing = team.pool.submit(team.seal, upload, 1)
    team.follow(1, checkpoint)
    team.check(sealing.result(LAST_S), checkpoint)
    team.all_free()


@pytest.mark.parametrize("lost", [0, 1])
def test_with_one_of_two_replicas_lost_a_snapshot_counts_at_the_other(
    pair: Team, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "_OTHERS_S", 0.1)
    urls = pair.at.split()
    left, nobody = urls[1 - lost], f"spot://127.0.0.1:1/{RUN}"
    pair.at = " ".join([nobody, left] if lost == 0 else [left, nobody])
    checkpoint = Checkpoint(1)
    pair.check(pair.take(1, checkpoint), checkpoint, left)
    pair.all_free()
    assert not pair.first.uploads.abroad.busy()
    pair.at = " ".join(urls)
    manifest = pair.take(2, checkpoint)
    pair.all_free()
    for url in urls:
        pair.check(manifest, checkpoint, url)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_replica_that_vanishes_without_a_word_holds_a_snapshot_no_longer_than_it_takes_to_ask_it(
    pair: Team, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link is cut, or it stands still: the commit waited half a minute for it to begin."""
    monkeypatch.setattr(NodeClient, "ping", functools.partialmethod(NodeClient.ping, 0.2))
    monkeypatch.setattr(uploads, "_OPEN_S", 1000.0)  # instead of half a minute, which this may take where it is slow
    left = pair.at.split()[1 - lost]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"spot://127.0.0.1:{silent.getsockname()[1]}/{RUN}"
        pair.at = " ".join([nobody, left] if lost == 0 else [left, nobody])
        checkpoint, began_s = Checkpoint(1), time.monotonic()
        pair.check(pair.take(1, checkpoint), checkpoint, left)
        until(lambda: not pair.first.uploads.abroad.busy(), "the first host's slot to be free", LAST_S)
        assert time.monotonic() - began_s < LAST_S
    pair.all_free()


def test_what_neither_replica_takes_is_given_up_at_both(pair: Team) -> None:
    checkpoint = Checkpoint(1)
    upload = pair.lead(1, checkpoint)
    pair.fill(upload, checkpoint)
    theirs = pair.join(1)
    sealing = pair.pool.submit(pair.seal, upload, 1)
    pair.second.uploads.shares.placed(theirs.id, 1, "rank 3: a tensor changed")
    with missed(match="rank 3: a tensor changed"):
        sealing.result(LAST_S)
    pair.all_free()
    assert not any(node.committed(RUN) for node in pair.memories.values())
    pair.check(pair.take(2, checkpoint), checkpoint, pair.at.split()[0])


@pytest.mark.parametrize("how", ["torn", "ended", "never there"])
def test_a_host_that_brings_nothing_gives_the_snapshot_up_and_the_former_one_stands(team: Team, how: str) -> None:
    first, second = Checkpoint(1), Checkpoint(2)
    manifest = team.take(1, first)
    upload = team.lead(2, second)
    team.fill(upload, second)
    if how == "never there":
        team.memory.uploads.shares.silent_s = 0.0
        expected = "host 1 has brought no portion"
    else:
        theirs = team.join(2)
        sealing = team.pool.submit(team.seal, upload, 2)
        if how == "torn":
            team.second.uploads.shares.placed(theirs.id, 1, "rank 3: a tensor changed")
            expected = "rank 3: a tensor changed"
        else:
            team.second.end_session("second")
            expected = "rank 1 ended before its bytes were in place"
    with missed(match=expected):
        sealing.result(LAST_S) if how != "never there" else team.seal(upload, 2)
    team.all_free()
    team.check(manifest, first)
    team.memory.uploads.shares.silent_s = LAST_S
    if how == "never there":  # it comes late
        with missed(match="there is no share of"):
            team.join(2)
    if how != "ended":
        team.check(team.take(3, second), second)


def test_a_host_whose_node_is_lost_when_it_has_brought_its_portion_costs_no_snapshot(team: Team) -> None:
    checkpoint = Checkpoint(1)
    upload = team.lead(1, checkpoint)
    team.follow(1, checkpoint)
    uploads, tell = team.memory.uploads, team.remote().joint.decline
    until(lambda: [each.joint.placed for each in uploads.of_run(RUN_ID) if each.joint] == [{1}], "it to be there")
    tell(snapshot_name(1, 1), attempt=1, why="its node was lost", host=1)
    team.fill(upload, checkpoint)
    team.check(team.seal(upload, 1), checkpoint)
    upload = team.lead(2, checkpoint)
    team.fill(upload, checkpoint)
    sealing = team.pool.submit(team.seal, upload, 2)
    until(lambda: uploads.of_run(RUN_ID), "the next one to begin there")
    tell(snapshot_name(2, 1), attempt=1, why="host 1: its node was lost", host=1)
    with missed(match="host 1: its node was lost"):
        sealing.result(LAST_S)
    team.all_free()


def test_a_host_that_is_silent_is_waited_for_once(team: Team) -> None:
    """Whoever sealed it counted as heard, and all waited for as long once more."""
    upload, checkpoint = team.lead(1, Checkpoint(1)), Checkpoint(1)
    team.fill(upload, checkpoint)
    team.memory.uploads.shares.silent_s = 8.0
    began_s = time.monotonic()
    with missed(match="nothing came for 8 s"):
        team.seal(upload, 1)
    assert 8.0 <= time.monotonic() - began_s < 15.5
    team.all_free()


def test_the_first_host_ends_and_nobody_waits(team: Team) -> None:
    upload, checkpoint = team.lead(1, Checkpoint(1)), Checkpoint(1)
    team.fill(upload, checkpoint)
    theirs = team.join(1)
    team.first.end_session("first")
    team.second.uploads.shares.placed(theirs.id, 1)
    team.all_free()
    assert not team.memory.committed(RUN)
    waiting = team.pool.submit(team.join, 2)
    team.first.uploads.abroad.decline(RUN, team.at, snapshot_name(2, 1), 1, "no slot is free")
    with missed(match="no slot is free"):
        waiting.result(LAST_S)


def test_a_later_attempt_gives_up_what_an_earlier_one_was_bringing(team: Team) -> None:
    upload, checkpoint = team.lead(1, Checkpoint(1)), Checkpoint(1)
    team.fill(upload, checkpoint)
    name = snapshot_name(1, 1)
    team.join(1)
    NodeStore(team.at).open_run(RunInfo(name="run", id=RUN_ID, location="", attempt=2, token="other"))
    with pytest.raises((SnapshotFailedError, FencedError), match="attempt"):
        team.seal(upload, 1)
    with pytest.raises(SpotError):
        team.remote().joint.join(name, attempt=1, host=1, wait_s=0.0)
    team.second.end_session("second")
    team.all_free()
    assert not team.memory.committed(RUN)


def test_what_a_first_host_has_begun_that_is_gone_keeps_no_slot_from_a_later_attempt(team: Team) -> None:
    team.lead(1, Checkpoint(1))
    until(lambda: len(team.memory.uploads), "it to begin there")
    NodeStore(team.at).open_run(RunInfo(name="run", id=RUN_ID, location="", attempt=2, token="other"))
    assert [slot["state"] for slot in team.memory.ring.status()["slots"]] == ["free"]


def test_what_lost_hosts_have_begun_keeps_no_node_that_is_to_end(team: Team) -> None:
    """It waited until --drain-timeout for them, and owed nothing to anybody."""
    team.lead(1, Checkpoint(1))
    until(lambda: len(team.memory.uploads), "it to begin there")
    uploads = team.memory.uploads
    (upload,) = uploads._uploads.values()
    team.memory.ring.opened_s[upload.run] = time.monotonic()
    upload.touched_s -= 20.0
    uploads.expire(15.0)
    assert len(uploads) == 1  # its hosts still ask how this node is
    team.memory.ring.opened_s[upload.run] -= 20.0
    uploads.expire()
    assert len(uploads) == 1
    uploads.expire(15.0)
    assert len(uploads) == 0
    assert [slot["state"] for slot in team.memory.ring.status()["slots"]] == ["free"]


def test_what_lost_hosts_have_begun_keeps_its_slot_from_other_runs_for_a_minute_only(team: Team) -> None:
    """It was ten minutes, as for ranks that take their time, on a node that other runs use too."""
    team.lead(1, Checkpoint(1))
    until(lambda: len(team.memory.uploads), "it to begin there")
    ring, uploads = team.memory.ring, team.memory.uploads
    (upload,) = uploads._uploads.values()
    upload.touched_s -= 100.0
    uploads.expire()
    assert len(uploads) == 1  # its hosts still ask how this node is
    upload.touched_s -= 600.0
    ring.opened_s[upload.run] = time.monotonic() - 50.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads_module, "SHARES_WAIT_S", 1_000.0)
        uploads.expire()
        assert len(uploads) == 1
        ring.opened_s[upload.run] -= 20.0
        uploads.expire()
    assert len(uploads) == 0
    assert [slot["state"] for slot in ring.status()["slots"]] == ["free"]


def test_what_comes_late_does_not_end_what_was_begun_after_it(team: Team) -> None:
    """Over a connection that was cut, say: the newer one, which hosts were bringing, was given up for the older."""
    checkpoint = Checkpoint(2)
    upload = team.lead(2, checkpoint)
    until(lambda: len(team.memory.uploads), "it to begin there")
    late = Shared(name=snapshot_name(1, 1), shares=2, layout=checkpoint.told(), by_hosts=True)
    with missed(match=r"step-000000001-attempt-0001 was overtaken by step-000000002"):
        team.memory.lease(RUN, 1, upload.nbytes, name=late.name, shared=late)
    team.fill(upload, checkpoint)
    sealing = team.pool.submit(team.seal, upload, 2)
    team.follow(2, checkpoint)
    team.check(sealing.result(LAST_S), checkpoint)


def test_what_is_begun_while_a_later_attempt_begins_keeps_no_slot(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later attempt gives up what it finds: that one had its slot already, and was not noted yet."""
    take = uploads_module._lease

    def overtaken(*arguments: Any, **more: Any) -> Any:
        slot = take(*arguments, **more)
        info = RunInfo(name="run", id=RUN_ID, location="", attempt=2, token="other")
        team.memory.open_run(info)
        return slot

    monkeypatch.setattr(uploads_module, "_lease", overtaken)
    with pytest.raises(FencedError):
        team.memory.lease(RUN, 1, 1_000)
    assert not len(team.memory.uploads)
    assert not team.filling()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["cut within", "cut after", "corrupt"])
def test_a_link_that_fails_while_portions_are_sent_is_tried_again_or_gives_the_snapshot_up(
    team: Team, kind: str
) -> None:
    url = team.at
    proxy = Proxy(url.rpartition("/")[0], 1)
    team.at = f"{proxy.url}/{RUN}"  # of what is brought together; the rest goes past it
    team.memory.uploads.shares.silent_s = 1.0  # of a host that could not ask for its portion nothing is heard
    try:
        for step in range(1, 9):
            checkpoint = Checkpoint(step)
            upload = team.lead(step, checkpoint)
            team.fill(upload, checkpoint)
            following = team.pool.submit(team.follow, step, checkpoint)
            proxy.strike(step, kind)
            try:
                team.check(team.seal(upload, step), checkpoint)
                following.result(LAST_S)
            except SpotError:
                team.second.uploads.shares.decline(RUN, 1, snapshot_name(step, 1), "the first host has given it up")
                assert following.exception(LAST_S) is None or isinstance(following.exception(), SpotError)
            team.all_free()
    finally:
        proxy.close()
    team.memory.uploads.shares.silent_s = LAST_S
    team.at = url
    team.check(team.take(9, checkpoint), checkpoint)


def test_a_memory_node_that_is_lost_is_said_and_older_snapshots_count_again(team: Team) -> None:
    team.take_alone(1)
    until(lambda: [slot.dirty for slot in team.first.committed(RUN)] == [[]], "it to be durable")
    team.take(2, Checkpoint(2))
    ((slot,),) = [team.first.committed(RUN)]
    assert slot.surpassed
    team.first.routes.heard(team.at, None)
    chain = team.first.routes._replications[RUN_ID]
    chain._lost(chain._replicas[0], chain._nodes[0], SettingsError("gone"))
    assert not slot.surpassed
    checkpoint = Checkpoint(3)
    team.at = f"spot://127.0.0.1:1/{RUN}"
    upload = team.lead(3, checkpoint)
    with missed(match="did not come together at"):
        team.seal(upload, 3)
    team.all_free()


def test_a_memory_node_at_which_none_begins_is_asked_how_it_is_though_a_rank_of_the_first_host_is_late(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next snapshot would go there, too, and after two the hosts would bring none for a minute."""
    heard: list[str] = []
    monkeypatch.setattr(team.first.routes, "heard", lambda url, error: heard.append(f"{url}: {error}"))

    def lost(*_: Any, **__: Any) -> None:
        raise ServerUnreachableError("nobody there")

    monkeypatch.setattr(team.first.uploads.abroad.bringing.tier(team.at, RUN_ID), "begin", lost)
    with missed(match="nobody there"):
        team.seal(team.lead(1, Checkpoint(1), shares=2), 1)
    assert heard == [f"{team.at}: nobody there"]
    team.all_free()


def test_an_older_snapshot_that_is_not_durable_is_owed_no_more(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    far = team.first.routes._replications[RUN_ID]
    monkeypatch.setattr(far, "_follow", lambda *_: 0.1)  # what became durable is not learned
    team.take_alone(1)
    (slot,) = team.first.committed(RUN)
    assert slot.dirty
    team.take(2, Checkpoint(2))
    assert not slot.dirty
    assert team.first.flush(RUN, 0.0) == []


def test_what_only_the_other_node_takes_is_made_durable_by_that_one(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, other = pair.at.split()

    def full(*_: Any, **__: Any) -> None:
        raise SnapshotFailedError("none of 2 slots can be had now", reason=FailureReason.RING_FULL)

    with monkeypatch.context() as patch:
        patch.setattr(pair.first.uploads.abroad.bringing.tier(carrier, RUN_ID), "begin", full)
        manifest = pair.take(1, Checkpoint(1))
    pair.all_free()
    assert not pair.memories[carrier].committed(RUN)
    until(lambda: [each.step for each in pair.durable.survey().manifests] == [1], "it to be durable")
    assert pair.durable.has(manifest)
    until(lambda: pair.first.routes.status(RUN_ID)["carrier"] == other, "the other node to carry the run on")


def test_a_later_attempt_at_one_node_ends_the_earlier_one_at_both(pair: Team) -> None:
    carrier, _ = pair.at.split()
    NodeStore(carrier).open_run(RunInfo(name="run", id=RUN_ID, location="", attempt=2, token="other"))
    with pytest.raises(FencedError):
        pair.take(1, Checkpoint(1))
    pair.all_free()


def test_what_the_last_node_to_end_does_not_take_is_given_up_there(pair: Team) -> None:
    tier = pair.first.uploads.abroad.bringing.tier(pair.at.split()[1], RUN_ID)
    go_on = threading.Event()

    def broken(*_: Any) -> Any:
        assert go_on.wait(LAST_S)
        raise ServerUnreachableError("its line is broken")

    tier.bring = broken  # type: ignore[method-assign]
    pair.take(1, Checkpoint(1))
    go_on.set()
    pair.all_free()


def test_with_a_spare_replica_lost_older_snapshots_are_not_waited_for(pair: Team) -> None:
    chain = pair.first.routes._replications[RUN_ID]
    pair.take_alone(1)
    (slot,) = pair.first.committed(RUN)
    pair.take(2, Checkpoint(2))
    pair.all_free()
    assert slot.surpassed
    carrier, other = pair.at.split()
    spare = next(each for each in chain._replicas if each.node is not None and each.node.url == other)
    assert spare.node is not None
    chain._lost(spare, spare.node, SettingsError("gone"))
    assert slot.surpassed
    assert pair.memories[carrier].committed(RUN)


def test_what_is_not_every_byte_once_is_not_committed(team: Team) -> None:
    checkpoint = Checkpoint(1)
    joint = team.remote().joint
    nbytes, image = len(checkpoint.image), memoryview(checkpoint.image)
    for step, missing in enumerate(("a byte", "a portion"), 1):
        shared = Shared(name=snapshot_name(step, 1), shares=2, layout=checkpoint.told())
        begun = joint.begin(shared, nbytes, attempt=1, hosts=2)
        ranges = ((0, nbytes - 1),) if missing == "a byte" else Portions((checkpoint.theirs,), (1,)).rest(nbytes)
        joint.bring(begun, image, ranges, None, lambda: None)
        theirs = joint.join(shared.name, attempt=1, host=1, wait_s=0.0)
        joint.placed(theirs, 1)
        with pytest.raises(SpotError, match="not every byte of it once"):
            joint.seal(begun, manifest_of(step, nbytes=nbytes), lambda: None)
        joint.give_up(begun)
    team.all_free()
    assert not team.memory.committed(RUN)


@pytest.mark.parametrize("hosts", [100, pytest.param(MOST_HOSTS, marks=pytest.mark.soak)])
def test_as_many_hosts_as_a_large_job_has_bring_a_snapshot_together(tmp_path: Path, hosts: int) -> None:
    """More than 64 were refused, of a model in shards with an error and of DDP without a word."""
    weights = torch.rand(hosts, 1024)
    image, (piece,) = image_of({"weights": weights})
    spans = [((piece.offset + 4096 * host, 4096),) for host in range(1, hosts)]
    portions = Portions(tuple(spans), (8,) * (hosts - 1))
    nbytes, told = len(image), json.dumps(portions.to_dict())
    with (
        snapshot_server(tmp_path) as (memory, at),
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(hosts) as pool,
    ):
        stores = [NodeStore(f"{at}/{RUN}") for _ in range(hosts)]
        for store in stores:
            stack.callback(store.client.close)
        info = RunInfo(name="run", id=RUN_ID, location=f"file://{tmp_path}/run", attempt=1, token="t")
        stores[0].open_run(replace(info, durable_url=str(tmp_path / "run")))
        for store in stores:
            store.know(info)

        def bring(host: int, name: str) -> None:
            joint = stores[host].joint
            gathering = joint.join(name, attempt=1, host=host, wait_s=LAST_S)
            joint.bring(gathering, memoryview(image), spans[host - 1], None, lambda: None)
            joint.placed(gathering, host)

        for step in (1, 2):
            name = snapshot_name(step, 1)
            others = [pool.submit(bring, host, name) for host in range(1, hosts)]
            begun = stores[0].joint.begin(Shared(name=name, shares=hosts, layout=told), nbytes, attempt=1, hosts=hosts)
            stores[0].joint.bring(begun, memoryview(image), portions.rest(nbytes), None, lambda: None)
            for other in others:
                other.result(LAST_S)
            sealed = stores[0].joint.seal(begun, manifest_of(step, nbytes=nbytes), lambda: None)
            assert sealed.checksums
            newest = memory.committed(RUN)[0]
            assert newest.manifest is not None
            assert newest.manifest.step == step
            assert torch.equal(torch.load(io.BytesIO(newest.view()))["weights"], weights)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_memory_node_that_stays_silent_is_not_asked_again_for_a_snapshot(is_there: bool) -> None:
    """Ranks waited for it for 40 s where their training waits for slots."""
    asked = list[str]()

    def call(_method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(path.rpartition("/")[2])
        if is_there and len(asked) > 1:
            return {"upload": "u", "nbytes": 1000, "layout": "", "layout_id": "l", "shares": 2, "digest": "d"}
        raise ServerUnreachableError("no snapshot server answers") from TimeoutError("timed out")

    def ping() -> None:
        if not is_there:
            raise ServerUnreachableError("nor to this")
        asked.append("ping")

    client = SimpleNamespace(call=call, ping=ping)
    tier = remote.JointUploads(cast(NodeClient, client), "spot://node:7070/run", RUN)
    with contextlib.nullcontext() if is_there else pytest.raises(ServerUnreachableError, match="nor to this"):
        tier.join(snapshot_name(1, 1), attempt=1, host=1, wait_s=100.0)
    assert asked == (["join", "ping", "join"] if is_there else ["join"])


@pytest.mark.parametrize("is_told", [True, False], ids=["it has no room", "it does not answer for a while"])
def test_ranks_of_other_hosts_hear_that_a_memory_node_does_not_begin(
    team: Team, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Else they would wait for two minutes for a snapshot that never begins."""

    def fails(*_: Any, **__: Any) -> None:
        if is_told:
            raise SnapshotFailedError("none of 2 slots can be had now", reason=FailureReason.RING_FULL)
        raise ServerUnreachableError("no route to host")

    why = "can be had now" if is_told else "no route to host"
    waiting, checkpoint = team.pool.submit(team.join, 1), Checkpoint(1)
    with monkeypatch.context() as patch:
        joint = team.first.uploads.abroad.bringing.tier(team.at, RUN_ID)
        for call in ("begin",) if is_told else ("begin", "decline"):
            patch.setattr(joint, call, fails)
        upload = team.lead(1, checkpoint)
        team.fill(upload, checkpoint)
        with missed(match=why):
            team.seal(upload, 1)
        time.sleep(0.0 if is_told else 0.2)
        assert is_told or not waiting.done()
    with missed(match=why):
        waiting.result(LAST_S)
    team.all_free()
    team.check(team.take(2, checkpoint), checkpoint)


@pytest.mark.parametrize("fails", ["join", "bring"])
def test_a_host_whose_link_was_cut_says_that_it_brings_nothing_as_soon_as_it_works_again(
    team: Team, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Else all hosts would wait for it for a minute, from when the last byte came: some two in all."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise ServerUnreachableError("no route to host")

    upload, checkpoint = team.lead(1, Checkpoint(1)), Checkpoint(1)
    team.fill(upload, checkpoint)
    sealing = team.pool.submit(team.seal, upload, 1)
    with monkeypatch.context() as patch:
        tier = team.second.uploads.abroad.bringing.tier(team.at, RUN_ID)
        for what in (fails, "decline", "placed"):
            patch.setattr(tier, what, unreachable)
        with contextlib.suppress(SnapshotFailedError):  # its ranks are told so
            team.follow(1, checkpoint)
        time.sleep(0.5)
        assert not sealing.done()
    with missed(match="host 1: no route to host"):
        sealing.result(LAST_S)
    team.all_free()
    team.check(team.take(2, checkpoint), checkpoint)


def test_requests_of_hosts_are_for_what_hosts_fill_only(team: Team) -> None:
    client = team.remote().client
    upload = team.memory.lease(RUN, 1, 1000, name=snapshot_name(1, 1), manifest=manifest_of(1))
    for what, body in (("seal", {"manifest": manifest_of(1).to_dict()}), ("placed", {"host": 1})):
        with pytest.raises(SpotError, match="not one that several hosts fill"):
            client.call("POST", f"/v1/uploads/{upload.id}/joint/{what}", body)
    team.memory.abort(upload.id)
    for bad in ({"hosts": 1}, {"hosts": MOST_HOSTS + 1}, {"hosts": 2, "nbytes": 0}, {"hosts": 2, "name": "best.ckpt"}):
        request = {"attempt": 1, "nbytes": 1000, "name": snapshot_name(1, 1), **bad}
        with pytest.raises(SettingsError):
            client.call("POST", f"/v1/runs/{RUN}/joint", request)


def test_the_node_asks_for_the_layout_once_more_if_it_has_forgotten_it(team: Team) -> None:
    checkpoint = Checkpoint(1)
    team.take(1, checkpoint)
    team.memory.uploads.shares.forget(RUN_ID)
    team.check(team.take(2, checkpoint), checkpoint)


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "[]",
        "{}",
        '{"portions": [], "ranks": []}',
        '{"portions": [[[0, 5]]], "ranks": [0]}',
        '{"portions": [[[0, 5], [4, 2]]], "ranks": [1]}',
        '{"portions": [[[0, 5]], [[4, 2]]], "ranks": [1, 1]}',
        '{"portions": [[[0, 1000000000]]], "ranks": [1]}',
    ],
)
def test_a_layout_that_says_nothing_of_the_hosts_is_refused(layout: str) -> None:
    with pytest.raises(SettingsError):
        Portions.read(layout, 1000).rest(1000)


def test_portions_lie_one_after_another_and_the_rest_is_the_first_hosts() -> None:
    dice = random.Random(3)
    for _ in range(50):
        ends = sorted(dice.sample(range(1, 10_000), 9))
        spans = [(start, stop - start) for start, stop in zip([0, *ends], [*ends, 10_000], strict=True)]
        hosts = [joined(spans[host::3]) for host in range(3)]
        rest = Portions((hosts[1], hosts[2]), (1, 2)).rest(10_000)
        assert rest == hosts[0]
        pieces = [piece for each in hosts for piece in cut(each, 64)]
        assert all(stop - start <= 64 and start // 64 == (stop - 1) // 64 for start, stop in pieces)
        received = {start: (stop - start, "") for start, stop in pieces}
        assert is_whole(received, 10_000)
        assert not is_whole({key: value for key, value in received.items() if key != pieces[3][0]}, 10_000)
        portion, taken = Portion(hosts[1]), set[int]()
        for start, nbytes in hosts[1]:
            places = range(portion.place(start), portion.place(start) + nbytes)
            assert taken.isdisjoint(places)
            taken.update(places)
            assert portion.place(start + nbytes - 1) == places[-1]
        assert max(taken) + 1 == portion.nbytes
        with pytest.raises(SettingsError, match="another host's"):
            portion.place(hosts[2][0][0])
