"""Requests and streams that are wrong in every way: a server lives, answers others, and keeps what it has.

Mutations of every request that a server knows, over TCP and over a Unix socket, and of the frames of part streams.
Each test prints its seed; ``--seed`` runs it again.
"""

from __future__ import annotations

import copy
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_spot.client.local_server import Session
from lightning_spot.client.part_streams import PartStream
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.starting import start
from lightning_spot.errors import SnapshotNotFoundError, SpotError
from lightning_spot.protocol.record import find_record
from lightning_spot.protocol.wire import ATTEMPT_HEADER, Address, Frame, PartKind, parse_spot_url
from lightning_spot.snapshot.delta import Coding, changed_ranges, encode
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.packing import can_pack
from lightning_spot.snapshot.parts import checksum
from tests.support.server import RunningServer
from tests.support.small_trainer import image_of as archive_of
from tests.support.uploads import commit, plain_of

pytestmark = pytest.mark.guarantee("G30")

TOKEN = "a-token-that-is-long-enough"
KEPT, FUZZED = "kept@0123456789ab", "fuzzed@ba9876543210"
MIB = 2**20

PLACES = ("durable_url", "location", "at", "destinations", "servers", "via")
"""Fields that name places: nothing is made up for them, since a server writes where a trainer of its host says."""

ODD = [None, True, 0, 1, -1, 0.5, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "\0", "é" * 300]
ODD += ["x" * 5000, "../../x", "\ud83d", [], {}, [[]], [1] * 70, {"a": {"b": []}}, "0" * 32, snapshot_name(1, 1)]

HEADERS = [
    ("Range", ["bytes=0-", "bytes=5-2", "bytes=-0", "bytes=0-1,3-4", "bytes=" + "9" * 30 + "-", "lines=1-2", ""]),
    ("Content-Length", ["-1", "x", "1e3", "9" * 30, "0x10"]),
    ("Transfer-Encoding", ["chunked", "gzip", "chunked, chunked", "identity"]),
    ("Content-Encoding", ["gzip", "br", "zstd", "deflate"]),
    ("Expect", ["100-continue", "200-ok"]),
    ("Upgrade", ["spot-parts", "websocket", "h2c"]),
    ("Connection", ["Upgrade", "close", "keep-alive", "\x7f"]),
    ("Spot-Digest", ["0" * 32, "x", ""]),
    ("Spot-Target", ["0" * 32, "é"]),
    ("Spot-Protocol", ["0", "999", "x" * 999]),
    ("Spot-Sender", ["a", "b" * 999]),
    ("Spot-Attempt", ["1:x", "2:t", "0:", "x", ":", "9" * 999 + ":t", "1:%", "é"]),
    ("Want-Spot-Digest", ["1", ""]),
    ("If-None-Match", ["*", '"x"']),
    ("If-Match", ['"x"', "*"]),
    ("Authorization", ["Bearer wrong", "Basic eDp4", "é"]),
    ("Host", ["", "a" * 999, "[::1"]),
    ("X-Long", ["a" * 9000, "é"]),
]


# -- what is mutated ---------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """One that a server knows, or what a mutation made of it."""

    method: str
    path: str
    body: Any
    headers: list[tuple[str, str]]

    def bytes(self, chance: random.Random, *, is_raw_safe: bool) -> bytes:
        """As it is sent; now and then with bytes that are none of it, cut short, or with more of them."""
        data = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        if is_raw_safe and chance.random() < 0.15:
            data = _flipped(data, chance)
        head = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers)]
        if not any(name == "Content-Length" for name, _ in self.headers):
            head.append(f"Content-Length: {len(data)}")
        sent = "\r\n".join(head).encode("utf-8", "surrogatepass") + b"\r\n\r\n"
        return (_flipped(sent, chance) if chance.random() < 0.05 else sent) + data


def _flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data or b"{")
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(changed) + 1)
        how = chance.randrange(3)
        if how == 0 and place < len(changed):
            changed[place] ^= 1 << chance.randrange(8)
        elif how == 1:
            del changed[place : place + chance.randrange(1, 9)]
        else:
            changed[place:place] = chance.randbytes(chance.randrange(1, 9))
    return bytes(changed)


def register_of(step: int, writer: int, nbytes: int = 100) -> Manifest:
    """The manifest of a writer's shard of a snapshot, without checksums."""
    shard = ShardOf(writer, 2, "plan", start=nbytes * (1 - writer))
    name, files = shard_name(snapshot_name(step, 1), writer), (FileSpan("model.ckpt", 0, nbytes),)
    return plain_of(step, nbytes, FUZZED, name=name, part_bytes=nbytes, files=files, shard=shard)


def requests(uploads: list[str], chance: random.Random, *, near: bool, session: str) -> list[Request]:
    """Every request that a server knows, as it is meant."""
    step = chance.randrange(1, 5)
    name = snapshot_name(step, 1)
    manifest = plain_of(step, 100, FUZZED).to_dict()
    upload = chance.choice(uploads) if uploads else "0" * 32
    run, of, files = f"/v1/runs/{FUZZED}", f"/v1/uploads/{upload}", f"/v1/files/{FUZZED}"
    marks = {"committed": name, "persisted": name}
    lease = {"attempt": 1, "nbytes": 100, "wait_s": 0.0, "committed": name}
    register = register_of(step, chance.randrange(2)).to_dict()
    failed = {**register, "nbytes": 0, "files": [], "shard": {**register["shard"], "failed": "why"}}
    made = [
        ("GET", "/healthz", {}),
        ("GET", "/readyz", {}),
        ("GET", "/v1/status", {}),
        ("GET", "/v1/runs", {}),
        ("POST", f"{run}/open", {"attempt": 1, "token": "t", "keep": {"newest": 2}, "host": "h", "pid": 1, **marks}),
        ("POST", f"{run}/close", {"session": "", "complete": False}),
        ("GET", f"{run}/snapshots", {}),
        ("POST", f"{run}/uploads", lease),
        ("POST", f"{run}/uploads", {**lease, "manifest": manifest}),
        ("POST", f"{run}/uploads", {**lease, "manifest": register}),
        ("POST", f"{run}/fail", {"attempt": 1, "manifest": failed}),
        ("POST", f"{of}/stream", {}),
        ("POST", f"{of}/commit", {"manifest": {**manifest, "checksums": [checksum(bytes(100))]}}),
        ("POST", f"{of}/commit", {"manifest": {**register, "checksums": [checksum(bytes(100))]}}),
        ("DELETE", of, {}),
        ("POST", "/v1/flush", {"run": FUZZED, "wait_s": 0.0}),
        ("GET", f"{files}/{name}/model.ckpt", {}),
        ("GET", f"{files}/{register['name']}/model.ckpt", {}),
        ("DELETE", f"{files}/notes-{chance.randrange(5)}", {"unseen": False}),
        ("DELETE", f"{files}/{name}", {}),
    ]
    if near:
        made += [
            ("POST", f"{run}/uploads", {**lease, "session": session, "making": "never", "writer": 1}),
            ("POST", f"{run}/uploads", {**lease, "writer": register["shard"]["writer"]}),
            ("POST", f"{run}/awaited", {"name": name, "wait_s": 0.0}),
            ("POST", f"{of}/commit", {"manifest": manifest, "floats": []}),
            ("POST", f"{of}/commit", {"manifest": register, "floats": []}),
        ]
    return [Request(method, path, body, []) for method, path, body in made]


class Mutations:
    """Makes wrong requests of right ones.

    Args:
        chance: what is made.
        near: whether they come from the server's own host.
        token: that the server asks for.
        session: of a trainer on this host, if there is one.
    """

    def __init__(self, chance: random.Random, *, near: bool, token: str, session: str = "") -> None:
        self.uploads: list[str] = []
        self._chance, self._near, self._token, self._session = chance, near, token, session

    def next(self) -> bytes:
        """The next one as it is sent."""
        chance = self._chance
        known = requests(self.uploads, chance, near=self._near, session=self._session)
        made = copy.deepcopy(chance.choice(known))
        made.headers = [("Host", "x"), ("Authorization", f"Bearer {self._token}"), (ATTEMPT_HEADER, "1:t")]
        kinds = [self._field, self._field, self._field, self._header, self._path, self._method, lambda _made: None]
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            chance.choice(kinds)(made)
        sent = made.bytes(chance, is_raw_safe=not _names_places(made.body))
        # To that aiohttp's own answer fails, before anything of ours is asked.
        return self.next() if re.search(rb"(?im)^expect:.*[\x80-\xff]", sent) else sent

    def _field(self, made: Request) -> None:
        """Another value for a field of the body, or of an object in it; or a field that is not there, or one more."""
        chance, target = self._chance, made.body
        while isinstance(target, dict) and (inner := [v for v in target.values() if isinstance(v, dict)]):
            if chance.random() < 0.5:
                break
            target = chance.choice(inner)
        if not isinstance(target, dict):
            made.body = chance.choice((b"", b"[]", b"null", b"[" * 5000, b'{"attempt": ' + b"9" * 5000 + b"}", b"\xff"))
            return
        name = chance.choice([*target, "session", "attempt", "manifest", "upload", "making", "writer"])
        if name in PLACES:
            return
        if name == "wait_s":  # who waits for an hour tells nothing
            target[name] = chance.choice((0.0, -1, "1", None, float("nan"), [0]))
        elif chance.random() < 0.2:
            target.pop(name, None)
        else:
            target[name] = copy.deepcopy(chance.choice(ODD))

    def _header(self, made: Request) -> None:
        name, values = self._chance.choice(HEADERS)
        made.headers.append((name, self._chance.choice(values)))

    def _path(self, made: Request) -> None:
        chance, parts = self._chance, made.path.split("/")
        odd = ("", ".", "..", "%2e%2e", "%00", "%", "a" * 3000, "é", "?x=1", "#", "x@y", "@", "%2F", "0" * 32, ";", "*")
        place = chance.randrange(1, len(parts))
        if chance.random() < 0.5:
            parts[place] = chance.choice(odd)
        elif chance.random() < 0.5:
            parts.insert(place, chance.choice(odd))
        else:
            del parts[place]
        made.path = "/".join(parts) or "/"

    def _method(self, made: Request) -> None:
        methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get", "")
        made.method = self._chance.choice(methods)


def _names_places(body: Any) -> bool:
    return isinstance(body, dict) and any(name in body for name in PLACES)


# -- the server --------------------------------------------------------------------------------------------------------


def commit_in_place(client: ServerClient, run: str, step: int, data: bytes) -> Manifest:
    manifest, session = plain_of(step, len(data), run).sealed(memoryview(data)), Session(client, 10.0)
    lease = {"attempt": 1, "nbytes": len(data), "name": manifest.name, "session": session.id}
    leased = client.call("POST", f"/v1/runs/{run}/uploads", lease)
    with session.map_slot(leased["slot"], leased["generation"]) as memory:
        memory[: len(data)] = data
    client.call("POST", f"/v1/uploads/{leased['upload']}/commit", {"manifest": manifest.to_dict()})
    session.close()
    return manifest


class Target:
    """A server in a process of its own, that has a snapshot which nobody may change.

    It may leave memory for storage, where there is any: leases that nobody fills take the memory for two minutes.
    """

    def __init__(self, address: Address, pid: int, log: Path, storage: Path | None = None) -> None:
        self.client = ServerClient(address, TOKEN)
        self.answers: Counter[str] = Counter()
        self.process = psutil.Process(pid)
        self._address, self._log, self._storage = address, log, storage
        for run, token in ((KEPT, "of the one that stays"), (FUZZED, "t")):
            self.client.call("POST", f"/v1/runs/{run}/open", {"attempt": 1, "token": token})
        self.client.speak_for(1, "of the one that stays")
        if address.socket_path:
            self._data = archive_of(1, 5000)
            self._kept = commit_in_place(self.client, KEPT, 1, self._data).data_path
        else:
            self._data = random.Random(7).randbytes(5000)
            self._kept = commit(self.client, 1, self._data, KEPT).data_path
        self.client.speak_for(1, "t")
        self._before = self._costs()

    def _costs(self) -> tuple[int, int, int]:
        return self.process.memory_info().rss, self.process.num_threads(), self.process.num_fds()

    def ask(self, sent: bytes, within_s: float = 5.0) -> bytes:
        """The answer to raw bytes, as much of it as comes in one go; it is counted by its status."""
        at_unix = bool(self._address.socket_path)
        with socket.socket(socket.AF_UNIX if at_unix else socket.AF_INET) as connection:
            connection.settimeout(within_s)
            connection.connect(self._address.socket_path if at_unix else (self._address.host, self._address.port))
            got = b""
            try:
                connection.sendall(sent)
                if is_cut_short(sent):
                    self.answers["not awaited"] += 1
                    return b""
                got = connection.recv(65536)
            except TimeoutError:
                self.answers["silent"] += 1
            except OSError as error:
                self.answers[type(error).__name__] += 1
            status = re.match(rb"HTTP/1\.1 (\d{3})", got)
            self.answers[status[1].decode() if status else "hung up"] += 1
            assert status is None or status[1] != b"500" or is_ours(got), (sent[:2000], got)
            return got

    def check(self) -> None:
        """The server is as well as before, says nothing of an error of its own, and has the snapshot bit for bit."""
        print(dict(self.answers))
        assert self.process.is_running()
        assert self.client.call("GET", "/healthz") == {"status": "ok"}
        raised = re.findall(
            r"Traceback \(most recent call last\):\n(?:[ +|].*\n)*(.*)", self._log.read_text(errors="replace")
        )
        # What is no HTTP at all is aiohttp's to refuse.
        assert [line for line in raised if not line.startswith("aiohttp.http_exceptions.")] == []
        assert self._read() == self._data
        rss, threads, files = (now - before for now, before in zip(self._costs(), self._before, strict=True))
        assert rss < 300 * MIB
        assert threads < 300
        assert files < 300

    def _read(self) -> bytes:
        read = bytearray(len(self._data))
        try:
            self.client.receive(f"/v1/files/{KEPT}/{self._kept}", 0, memoryview(read))
        except SnapshotNotFoundError:
            if self._storage is None:
                raise
            return (self._storage / KEPT / self._kept).read_bytes()
        return bytes(read)


def is_ours(got: bytes) -> bool:
    """Whether an answer of status 500 is an error that was foreseen: those that have no status of their own."""
    return b'"error": "' in got and b'"reason": "server-failed"' not in got


def is_cut_short(sent: bytes) -> bool:
    """Whether a request says that more follows: the server waits for it, half a minute long."""
    head, _, body = sent.partition(b"\r\n\r\n")
    lengths = re.findall(rb"(?im)^content-length: *(\d+)\s*$", head)
    chunked = re.search(rb"(?i)transfer-encoding: *chunked", head) and not body.endswith(b"0\r\n\r\n")
    upgraded = re.search(rb"(?i)/stream.*\n(?s:.*)upgrade: spot-parts", head)
    return bool(chunked or upgraded) or any(int(length) > len(body) for length in lengths)


def environment(root: Path) -> dict[str, str]:
    of_ours = {"SHM_DIR": "", "RUNTIME_DIR": str(root), "TOKEN": TOKEN}
    return {f"LIGHTNING_SPOT_{name}": value for name, value in of_ours.items()}


@pytest.fixture
def over_tcp(tmp_path: Path) -> Iterator[Target]:
    flags = ["--listen", "127.0.0.1:0", "--memory-limit", "64MiB", "--storage", str(tmp_path / "below")]
    server = RunningServer(flags, tmp_path / "server.log", environment(tmp_path)).wait_listening()
    yield Target(parse_spot_url(server.url)[0], server.process.pid, server.log, storage=tmp_path / "below")
    server.stop(9)


@pytest.fixture
def over_unix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A local server writes wherever a trainer says: no request here names a place."""
    monkeypatch.setenv("LIGHTNING_SPOT_SHM_DIR", "")
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
    start(str(tmp_path), "run", slots=4, memory_bytes=64 * MIB, server_idle_timeout_s=900.0).disconnect()
    record = find_record(str(tmp_path))
    process = record.process()
    return Target(Address(socket_path=str(record.http)), process.pid, record.log)


# -- requests ----------------------------------------------------------------------------------------------------------


def fuzz_requests(target: Target, chance: random.Random, count: int, *, near: bool) -> None:
    mutations = Mutations(chance, near=near, token=TOKEN)
    for number in range(count):
        got = target.ask(mutations.next())
        if found := re.search(rb'"upload": "([0-9a-f]{32})"', got):
            mutations.uploads.append(found[1].decode())
            del mutations.uploads[:-4]
        if number % 500 == 499:
            with suppress(SpotError):  # a mutation may have said that a later attempt writes
                target.client.call("POST", f"/v1/runs/{FUZZED}/open", {"attempt": 1, "token": "t"})
    target.check()
    answered = sum(number for status, number in target.answers.items() if status.isdigit())
    assert answered > count / 2
    assert target.answers["200"] > count / 50


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("target", "count"),
    [
        ("over_tcp", 1500),
        ("over_unix", 500),
        pytest.param("over_tcp", 42_000, marks=pytest.mark.soak),
        pytest.param("over_unix", 10_000, marks=pytest.mark.soak),
    ],
)
def test_no_request_harms_a_server(
    target: str, count: int, chance: random.Random, request: pytest.FixtureRequest
) -> None:
    fuzz_requests(request.getfixturevalue(target), chance, count, near=target == "over_unix")


# -- frames ------------------------------------------------------------------------------------------------------------


def frame_of(chance: random.Random, new: bytes, base: bytes) -> bytes:
    """A frame of the only part of a snapshot, and its content: as it should be, or nearly."""
    nbytes, digest = len(new), checksum(new)
    coding = chance.choice((Coding.PLAIN, Coding.PACKED)) if can_pack() else Coding.PLAIN
    delta = encode(new, base, changed_ranges(new, base), coding)
    kind, start, content, said = PartKind.DELTA, 0, delta, None
    how = chance.randrange(8)
    if how < 3:
        content = _flipped(delta, chance)
    elif how == 3:
        count = chance.choice((0, 1, 1000, 2**32 - 1))
        content = struct.pack(">BI", chance.randrange(4), count) + chance.randbytes(chance.randrange(200))
    elif how == 4:
        start, nbytes = chance.choice((0, 1, nbytes, 2**63)), chance.choice((0, 1, nbytes + 1, 2**30, 2**63))
    elif how == 5:
        kind, content, said = chance.choice(list(PartKind)), b"", chance.choice((0, 1, nbytes, 2**40))
    elif how == 6:
        digest = chance.randbytes(16).hex()
    sent = Frame(kind, start, nbytes, len(content) if said is None else said, digest).pack() + content
    return _flipped(sent, chance) if how == 7 and chance.random() < 0.5 else sent


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.soak)])
def test_no_frame_makes_other_bytes_count(over_tcp: Target, chance: random.Random, count: int) -> None:
    """What is committed is what its sender announced, whatever came before: a snapshot, or a writer's shard of one."""
    client, step, sent = over_tcp.client, 1, 0
    bases = [chance.randbytes(20_000)] * 3  # of snapshots of one writer, and of each of two writers' shards
    commit(client, step, bases[0], FUZZED)
    while sent < count:
        step += 1
        kind = chance.randrange(3)
        new = bytearray(base := bases[kind])
        for _ in range(20):
            new[chance.randrange(len(new))] ^= 255
        new_bytes = bytes(new)
        manifest = plain_of(step, len(new_bytes), FUZZED).sealed(memoryview(new_bytes))
        if kind:
            manifest = register_of(step, kind - 1, len(new)).sealed(memoryview(new_bytes))
        lease = {"attempt": 1, "nbytes": len(new), "name": manifest.name, "wait_s": 10.0}
        plain = {**asdict(manifest), "checksums": []}
        upload = client.call("POST", f"/v1/runs/{FUZZED}/uploads", {**lease, "manifest": plain})["upload"]
        for _ in range(12):
            sent += 1
            over_tcp.answers[_say(client, upload, frame_of(chance, new_bytes, base), manifest.checksums[0])] += 1
        frame = Frame(PartKind.WHOLE, 0, len(new), len(new), manifest.checksums[0])
        assert _say(client, upload, frame.pack() + new_bytes, manifest.checksums[0]) == "as announced"
        client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": asdict(manifest)})
        read = bytearray(len(new_bytes))
        client.receive(f"/v1/files/{FUZZED}/{manifest.data_path}", 0, memoryview(read))
        assert read == new_bytes
        bases[kind] = new_bytes
    over_tcp.check()
    assert over_tcp.answers["as announced"] > count / 100
    assert over_tcp.answers["hung up"] > count / 20


def _say(client: ServerClient, upload: str, sent: bytes, digest: str) -> str:
    """What becomes of some bytes on a stream of parts."""
    try:
        stream = PartStream(client, upload)
    except SpotError as error:
        return type(error).__name__
    try:
        stream._socket.settimeout(5.0)
        stream._socket.sendall(sent)
        stream._socket.shutdown(socket.SHUT_WR)  # no more comes: nobody waits for the rest of a frame
        got = stream._socket.recv(16)
        return "hung up" if not got else "as announced" if got.hex() == digest else "other bytes"
    except OSError as error:
        return type(error).__name__
    finally:
        stream.close()
