"""Connections between ranks: strangers at their ports, links that fail in silence, ports that cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spot.errors import SpotError
from lightning_spot.preemption import key_value
from lightning_spot.preemption.key_value import KeyValueClient, KeyValueServer
from lightning_spot.protocol.listening import (
    LOOPBACK,
    Listening,
    facing,
    greeted,
    most_connections,
    tcp_listener,
)
from lightning_spot.session.collectives import Failed
from lightning_spot.session.ranks import Meeting, Ranks
from tests.support.network import Network, network_or_skip
from tests.support.ranks import OneRank
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G30")

SECRET = "s" * 64
SILENT_S, LAST_S = 3.0, 120.0


# -- strangers ---------------------------------------------------------------------------------------------------------


async def say_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    assert not await reader.read(1)


@pytest.fixture
def listening() -> Iterator[Callable[..., tuple[str, int]]]:
    """Has two ranks listened to; where."""
    made = []

    def listen(talk: Any = say_hello, host: str = LOOPBACK, most: int = most_connections(2)) -> tuple[str, int]:
        listener = tcp_listener(host, SILENT_S)
        made.append(Listening(listener, talk, "spot-test", SECRET, most))
        return host, listener.getsockname()[1]

    yield listen
    for each in made:
        each.close()


def greet(where: tuple[str, int]) -> socket.socket:
    return greeted(where, LAST_S, SECRET)


def hears_hello(connection: socket.socket) -> bool:
    return connection.recv(5, socket.MSG_WAITALL) == b"hello"


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_listens_at_one_address_of_either_version_of_ip(
    host: str, listening: Callable[..., tuple[str, int]]
) -> None:
    where = listening(host=host)
    with greet(where) as connection:
        assert hears_hello(connection)
    other = {"127.0.0.1": "127.0.0.2", "::1": "127.0.0.1"}[host]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, where[1]), LAST_S)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"5\n",
        b"null\n",
        b"[]\n",
        b'"' + SECRET.encode() + b'"\n',
        b"{}\n",
        b'{"secret": null}\n',
        b'{"secret": "guess"}\n',
        b'{"secret": "\\ud800"}\n',
        b'{"secret": ["' + SECRET.encode() + b'"]}\n',
        b"[" * 900 + b"\n",
        b"\xff\xfe\n",
        b"x" * 100_000,
    ],
)
def test_who_does_not_greet_is_hung_up_on_without_a_word(
    said: bytes,
    listening: Callable[..., tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("lightning_spot.protocol.listening.GREETING_S", LAST_S if said else 0.1)
    where = listening(lambda *_: pytest.fail("a stranger was let in"))
    with socket.create_connection(where, LAST_S) as stranger:
        with contextlib.suppress(ConnectionError):  # it may be hung up on before all is sent
            stranger.sendall(said)
            assert not stranger.recv(1)
    assert not caplog.records


def test_a_greeting_has_its_time_however_it_is_cut(
    listening: Callable[..., tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_spot.protocol.listening.GREETING_S", 0.3)
    with socket.create_connection(listening(), LAST_S) as slow:
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while is_open(slow):  # a byte now and then gains no time
                slow.sendall(b"x")
                time.sleep(0.02)
        assert 0.2 < time.monotonic() - began_s < LAST_S


@pytest.mark.parametrize("said", [b"", b'{"secret":'], ids=["silent", "half a greeting"])
def test_strangers_use_up_no_descriptors_threads_or_ranks(said: bytes) -> None:
    """1,100 silent connections, and the trainer had no descriptor left."""
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        server, strangers = stack.enter_context(contextlib.closing(KeyValueServer(SECRET))), []
        for _ in range(5 * most_connections(2)):
            strangers.append(stack.enter_context(socket.create_connection((LOOPBACK, server.port), LAST_S)))
            strangers[-1].sendall(said)
        with contextlib.closing(KeyValueClient(LOOPBACK, server.port, SECRET)) as rank:  # which comes last
            rank.set("k", 1)
            assert rank.get("k", LAST_S) == 1
        until(lambda: sum(map(is_open, strangers)) <= most_connections(2), "those before to give way", LAST_S)
        assert threading.active_count() <= threads + 1  # the rank's own


def test_strangers_never_displace_ranks(listening: Callable[..., tuple[str, int]]) -> None:
    where = listening(most=8)
    ranks = [greet(where) for _ in range(8)]
    strangers = [socket.create_connection(where, LAST_S) for _ in range(30)]
    try:
        assert all(map(hears_hello, ranks))
        until(lambda: not any(map(is_open, strangers)), "strangers to be hung up on", LAST_S)
        assert all(map(is_open, ranks))
        ranks.pop().close()
        until(lambda: is_open(greet(where)), "the next rank to be let in", LAST_S)
    finally:
        for each in (*ranks, *strangers):
            each.close()


def test_a_silent_rank_survives_a_garbage_collection(caplog: pytest.LogCaptureFixture) -> None:
    """An event loop keeps no task: one that waits for a silent rank is held by nothing else."""
    with contextlib.closing(KeyValueServer(SECRET)) as server, greet((LOOPBACK, server.port)) as connection:
        until(lambda: server._writers, "it to be known there", LAST_S)
        for _ in range(3):
            gc.collect()
            time.sleep(0.02)
        assert is_open(connection)
    assert not caplog.records


def test_a_rank_is_let_in_while_strangers_flood(listening: Callable[..., tuple[str, int]]) -> None:
    where, over = listening(), threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.ExitStack() as stack:
                for _ in range(100):
                    stack.enter_context(socket.create_connection(where, LAST_S))

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(20):
            with greet(where) as connection:
                assert hears_hello(connection)
    finally:
        over.set()
        flooding.join()


def test_without_descriptors_clients_wait_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, lacks = socket.socket.accept, itertools.count()

    def limited(listener: socket.socket) -> Any:
        if next(lacks) < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", limited)
    listener = tcp_listener(LOOPBACK, SILENT_S)
    server = Listening(listener, say_hello, "spot-test", SECRET, 9)
    with greet(listener.getsockname()) as connection:
        assert hears_hello(connection)
    server.close()
    assert [record.getMessage() for record in caplog.records] == [
        "2 errors of the event loop: socket.accept() out of system resource (Too many open files) in the last minute"
    ]


# -- where -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "seen", "listens", "connects"),
    [
        ("aaa", ["10.9.9.9"] * 3, LOOPBACK, [LOOPBACK] * 3),
        ("aab", ["127.0.1.1", "127.0.1.1", "127.0.0.5"], "127.0.0.5", ["127.0.0.5", "127.0.0.5", "main"]),
        ("aba", ["127.0.1.1", "", "127.0.1.1"], "127.0.0.7", ["127.0.0.7", "main", "127.0.0.7"]),
    ],
    ids=["one host", "its own name is loopback", "others cannot resolve it"],
)
def test_rank_0_listens_where_the_others_see_it(
    hosts: str, seen: list[str], listens: str, connects: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: lookup("127.0.0.7" if host == "main" else host, *a, **k)
    )
    meetings = [Meeting("main", list(hosts), seen, rank) for rank in range(3)]
    assert meetings[0].listen() == listens
    assert [each.connect(listens) for each in meetings] == connects


@pytest.mark.parametrize("version", ["10.79.7.", "fd79::"])
def test_the_host_address_that_faces_the_peer_is_used(version: str) -> None:
    with network_or_skip("facing", ("first", "second"), prefix=version) as network:
        there = network.address["second"]
        assert network.there("first", lambda: facing(there)) == network.address["first"]
        assert network.there("first", lambda: facing(network.address["first"])) == network.address["first"]
        with contextlib.closing(network.there("first", lambda: KeyValueServer(SECRET, facing(there)))) as server:
            address = network.address["first"], server.port
            network.there("second", lambda: KeyValueClient(*address, SECRET)).close()
            with pytest.raises(ConnectionRefusedError):
                network.there("first", lambda: socket.create_connection((LOOPBACK, server.port), LAST_S))


class Strategy(SimpleNamespace):
    """Of one rank of two, as far as it is asked: the other one says what it is given."""

    def broadcast(self, said: Any, src: int = 0) -> Any:
        if src == self.rank:
            self.said.append(said)
            return said
        return self.others.pop(0) if self.others else None


def on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "of", lambda trainer: Meeting("main", "aa", ["", ""], trainer.global_rank))


def rank(number: int, *others: Any) -> Any:
    strategy = Strategy(rank=number, said=[], others=list(others))
    return OneRank(global_rank=number, world_size=2, strategy=strategy)


def test_rank_0_serves_more_ranks_than_its_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,500 ranks, and 1,024 files, rank 0 could open nothing any more, and printed thousands of errors."""
    on_one_host(monkeypatch)
    before, connections = resource.getrlimit(resource.RLIMIT_NOFILE), list[KeyValueClient]()
    first = rank(0)
    first.world_size = 300
    monkeypatch.setattr("lightning_spot.protocol.listening.GREETING_S", LAST_S)
    least = len(os.listdir("/proc/self/fd")) + 64  # what earlier tests have left open does not matter
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(256, least), before[0]), before[1]))
        ranks = Ranks(first)
        try:
            connections += (KeyValueClient(*ranks._address) for _ in range(299))
            connections[0].set("stop", 7)
            assert {each.get("stop", LAST_S) for each in connections} == {7}
        finally:
            for each in connections:
                each.close()
            ranks.end(over=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_if_rank_0_cannot_listen_all_ranks_raise_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("spot-key-value cannot listen: no thread can be had")

    monkeypatch.setattr("lightning_spot.session.ranks.KeyValueServer", fail)
    on_one_host(monkeypatch)
    first = rank(0)
    with pytest.raises(OSError, match="no thread can be had"):
        Ranks(first)
    (told,) = first.strategy.said
    with pytest.raises(SpotError, match="rank 0: OSError: spot-key-value"):
        Ranks(rank(1, told))


def test_a_rank_that_does_not_reach_rank_0_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    on_one_host(monkeypatch)
    second = rank(1, None, (LOOPBACK, port, "secret"))
    with pytest.raises(SpotError, match=rf"\b0 .*127\.0\.0\.1:{port} .*notices=None") as raised:
        Ranks(second).stop_agreement(lambda: None)
    assert second.strategy.said[-1] == Failed.of(raised.value, 1)


def test_a_connection_that_is_reset_is_made_anew() -> None:
    """So it ends where rank 0 gave it up first, or where what lies between has forgotten it; rank 0 is there still."""
    with (
        contextlib.closing(KeyValueServer("secret")) as server,
        contextlib.closing(KeyValueClient("127.0.0.1", server.port, "secret")) as first,
        contextlib.closing(KeyValueClient("127.0.0.1", server.port, "secret")) as second,
    ):
        assert second.get("from the first", 0.1) is None
        until(lambda: len(server._writers) == 2, "rank 0 to know both", LAST_S)
        own_name = ("127.0.0.1", second._socket.getsockname()[1])
        (theirs,) = (each for each in server._writers if each.get_extra_info("peername") == own_name)
        theirs.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server._listening.call(theirs.transport.abort)
        until(lambda: len(server._writers) == 1, "it to be reset", LAST_S)
        first.set("from the first", 1)
        second.set("from the second", 2)
        assert second.get("from the first", LAST_S) == 1
        assert first.get("from the second", LAST_S) == 2
        check_is_told_that_rank_0_goes(second, server)


def check_is_told_that_rank_0_goes(channel: KeyValueClient, server: KeyValueServer) -> None:
    server.close()
    with pytest.raises(ConnectionError):
        channel.get("anything", LAST_S)


# -- a link that fails without a word ----------------------------------------------------------------------------------


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(key_value, "SILENT_S", SILENT_S)
    monkeypatch.setattr(key_value, "RECONNECT_S", 1.0)
    with network_or_skip("listening", ("first", "second")) as made:
        yield made


def test_ranks_hear_of_each_other_when_a_link_works_again(network: Network) -> None:
    """What was published meanwhile, on either side, too; a server that has gone by then is told from it."""
    with contextlib.ExitStack() as stack:
        server = network.there("first", lambda: KeyValueServer("secret", network.address["first"]))
        stack.callback(server.close)
        address = (network.address["first"], server.port, "secret")
        first, second = (network.there(host, lambda: KeyValueClient(*address)) for host in ("first", "second"))
        for client in (first, second):
            stack.callback(client.close)
        assert second.get("from the first", 0.1) is None
        network.cut("second")
        first.set("from the first", 1)
        second.set("from the second", 2)
        until(lambda: network.there("second", lambda: second.get("from the first", 0.1) or second._socket is None), "")
        assert second._socket is None
        assert network.there("second", lambda: second.get("from the first", 0.1)) is None
        network.mend("second")
        assert network.there("second", lambda: second.get("from the first", LAST_S)) == 1
        assert first.get("from the second", LAST_S) == 2
        check_is_told_that_rank_0_goes(second, server)
