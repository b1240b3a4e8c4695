"""Connections between ranks: of both versions of IP, over links that fail in silence, to ports that cannot be had."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spot.capture import mail
from lightning_spot.capture.mail import Mailbox, Sender
from lightning_spot.errors import ShareMissing, SpotError
from lightning_spot.fit.agreement import Failed
from lightning_spot.fit.ranks import Ranks
from lightning_spot.image.manifest import snapshot_name
from lightning_spot.notices import exchange
from lightning_spot.notices.exchange import Exchange, ExchangeServer
from lightning_spot.protocol.listening import Listening
from tests.conftest import until
from tests.network import Network, network_or_skip

SECRET, NAME, AGAIN = "s" * 64, snapshot_name(1, 1), snapshot_name(2, 1)
SILENT_S, LAST_S = 3.0, 30.0


async def say_hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_it_is_reached_by_either_version_of_ip(address: str) -> None:
    listening = Listening(say_hello, "spot-test", SILENT_S)
    try:
        with socket.create_connection((address, listening.port), LAST_S) as connection:
            assert connection.recv(5, socket.MSG_WAITALL) == b"hello"
    finally:
        listening.close()


def test_without_ipv6_it_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    test_it_is_reached_by_either_version_of_ip("127.0.0.1")


def test_a_server_that_does_not_start_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("no descriptors are left")

    monkeypatch.setattr(asyncio, "start_server", fail)
    with pytest.raises(OSError, match="spot-mail cannot listen: no descriptors are left"):
        Mailbox(SECRET)
    until(lambda: not [each for each in threading.enumerate() if each.name == "spot-mail"], "its thread to end", LAST_S)


class Strategy(SimpleNamespace):
    """Of one rank of two, as far as it is asked: the other one says what it is given."""

    def broadcast(self, said: Any, src: int = 0) -> Any:
        if src == self.rank:
            self.said.append(said)
            return said
        return self.others.pop(0) if self.others else None


class OneOfTwo(SimpleNamespace):
    """A trainer, as far as it is asked for its rank."""


def rank(number: int, *others: Any) -> Any:
    strategy = Strategy(rank=number, said=[], others=list(others))
    return OneOfTwo(global_rank=number, world_size=2, strategy=strategy)


def test_rank_0_has_the_connections_of_more_ranks_than_a_process_may_have_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 1,500 ranks, and 1,024 files, rank 0 could open nothing any more, and printed thousands of errors."""
    monkeypatch.setattr("lightning_spot.fit.ranks.main_address", lambda _: "127.0.0.1")
    before, connections = resource.getrlimit(resource.RLIMIT_NOFILE), list[Exchange]()
    first = rank(0)
    first.world_size = 300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        ranks = Ranks(first)
        try:
            connections += (Exchange(*ranks._address) for _ in range(299))
            connections[0].set("stop", 7)
            assert {each.get("stop", LAST_S) for each in connections} == {7}
        finally:
            for each in connections:
                each.close()
            ranks.end(over=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_where_rank_0_cannot_listen_all_ranks_end_with_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("spot-exchange cannot listen: no thread can be had")

    monkeypatch.setattr("lightning_spot.fit.ranks.ExchangeServer", fail)
    first = rank(0)
    with pytest.raises(OSError, match="no thread can be had"):
        Ranks(first)
    (told,) = first.strategy.said
    with pytest.raises(SpotError, match="rank 0: OSError: spot-exchange cannot listen"):
        Ranks(rank(1, told))


def test_a_rank_that_does_not_reach_rank_0_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr("lightning_spot.fit.ranks.main_address", lambda _: "127.0.0.1")
    second = rank(1, None, (port, "secret"))
    with pytest.raises(SpotError, match=rf"rank 0 is not reached at 127.0.0.1:{port} .*do without notices") as raised:
        Ranks(second).ballot(lambda: None)
    assert second.strategy.said[-1] == Failed.of(raised.value, 1)


def test_a_connection_that_is_reset_is_made_anew() -> None:
    """So it ends where rank 0 gave it up first, or where what lies between has forgotten it; rank 0 is there still."""
    server = ExchangeServer("secret")
    first, second = (Exchange("127.0.0.1", server.port, "secret") for _ in range(2))
    try:
        assert second.get("from the first", 0.1) is None
        until(lambda: len(server._writers) == 2, "rank 0 to know both", LAST_S)
        (theirs,) = (each for each in server._writers if each.get_extra_info("peername") == own_name(second))
        theirs.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server._listening._loop.call_soon_threadsafe(theirs.transport.abort)
        until(lambda: len(server._writers) == 1, "it to be reset", LAST_S)
        first.set("from the first", 1)
        second.set("from the second", 2)
        assert second.get("from the first", LAST_S) == 1
        assert first.get("from the second", LAST_S) == 2
        check_is_told_that_rank_0_goes(second, server)
    finally:
        second.close()
        first.close()
        server.close()


def check_is_told_that_rank_0_goes(exchange: Exchange, server: ExchangeServer) -> None:
    server.close()
    with pytest.raises(ConnectionError):
        exchange.get("anything", LAST_S)


def own_name(exchange: Exchange) -> Any:
    assert exchange._socket is not None
    return ("::ffff:127.0.0.1", exchange._socket.getsockname()[1], 0, 0)


# -- a link that fails without a word ----------------------------------------------------------------------------------


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(mail, "_SILENT_S", SILENT_S)
    monkeypatch.setattr(mail, "RECONNECT_S", 2.0)
    monkeypatch.setattr(mail, "_ANSWER_S", 1.0)
    monkeypatch.setattr(mail, "_CONNECT_S", 1.0)
    monkeypatch.setattr(exchange, "SILENT_S", SILENT_S)
    monkeypatch.setattr(exchange, "_AGAIN_S", 1.0)
    with network_or_skip("listening", ("first", "second")) as made:
        yield made


def test_nobody_waits_for_a_rank_whose_link_has_failed_and_it_comes_back(network: Network) -> None:
    box = network.there("first", lambda: Mailbox(SECRET))
    sender = network.there("second", lambda: Sender(network.address["first"], box.port, SECRET, 1))
    try:
        network.cut("second")
        began_s = time.monotonic()
        with pytest.raises(ShareMissing, match="that rank has gone"):
            list(box.all_of(NAME, {1: 9}))
        assert SILENT_S - 2 < time.monotonic() - began_s < SILENT_S + mail.RECONNECT_S + LAST_S  # it would be minutes
        network.mend("second")
        sender.send(AGAIN, b"again")
        assert list(box.all_of(AGAIN, {1: 9})) == [(1, b"again")]
    finally:
        sender.close()
        box.close()


def test_ranks_hear_of_each_other_when_a_link_works_again(network: Network) -> None:
    """What was published meanwhile, on either side, too; a server that has gone by then is told from it."""
    server = network.there("first", lambda: ExchangeServer("secret"))
    address = (network.address["first"], server.port, "secret")
    first, second = (network.there(host, lambda: Exchange(*address)) for host in ("first", "second"))
    try:
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
    finally:
        second.close()
        first.close()
        server.close()
