"""The links by which tests connect hosts do what they are told, also where the kernel has no ``netem``."""

from __future__ import annotations

import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import until
from tests.link import Held, Link
from tests.network import Network, network_or_skip

PORT = 7


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip("links", ("near", "far")) as made:
        yield made


class Ends:
    """A datagram's way from one host to the other."""

    def __init__(self, network: Network) -> None:
        self._to = (network.address["far"], PORT)
        self._near = network.there("near", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._far = network.there("far", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._far.bind(self._to)
        self._far.settimeout(5.0)

    def took_ms(self) -> float:
        began_s = time.monotonic()
        self._near.sendto(b"x", self._to)
        self._far.recv(9)
        return 1000 * (time.monotonic() - began_s)

    def came(self, count: int, wait_s: float) -> int:
        """How many of some datagrams come."""
        for _ in range(count):
            self._near.sendto(b"x", self._to)
            time.sleep(0.0002)
        self._far.settimeout(wait_s)
        found = 0
        try:
            while self._far.recv(9):
                found += 1
        except TimeoutError:
            return found
        finally:
            self._far.settimeout(5.0)
        raise AssertionError("an empty datagram")

    def close(self) -> None:
        self._near.close()
        self._far.close()


@pytest.fixture
def ends(network: Network) -> Iterator[Ends]:
    made = Ends(network)
    try:
        yield made
    finally:
        made.close()


def test_frames_are_held_back_lost_and_cut_off(network: Network, ends: Ends) -> None:
    assert min(ends.took_ms() for _ in range(5)) < 20.0
    network.shape("near", delay_ms=40.0, jitter_ms=10.0)
    took = [ends.took_ms() for _ in range(20)]
    assert min(took) > 29.0
    assert 35.0 < statistics.median(took) < 80.0  # there may be others on these processors
    network.shape("near", loss=0.5, delay_ms=1.0, jitter_ms=0.0)
    assert 60 < ends.came(200, 0.3) < 140
    network.shape("near", loss=0.0)
    network.cut("near")
    assert ends.came(5, 0.3) == 0
    network.mend("near")
    until(lambda: ends.came(5, 0.3) >= 5, "the link to work again", 20.0)


def test_what_is_sent_goes_no_faster_than_the_link(network: Network) -> None:
    network.shape("near", delay_ms=1.0, bits_per_s=16_000_000)
    address, took = (network.address["far"], PORT), []
    listener = network.there("far", lambda: socket.create_server(address))

    def receive() -> None:
        connection, _ = listener.accept()
        began_s = time.monotonic()
        with connection:
            while connection.recv(2**16):
                pass
        took.append(time.monotonic() - began_s)

    thread = threading.Thread(target=receive)
    thread.start()
    with listener, network.there("near", lambda: socket.create_connection(address)) as sender:
        sender.sendall(bytes(1_500_000))
        sender.shutdown(socket.SHUT_WR)
        thread.join(30.0)
    assert 0.7 < took[0] < 10.0  # 0.75 s; what lies in the first buffers goes at once


def test_frames_stay_in_order_and_no_more_than_so_many_are_held() -> None:
    held, now_s = Held(Link(delay_ms=40.0, jitter_ms=39.0), random.Random(1)), 100.0
    for number in range(200):
        held.put(number.to_bytes(2, "big"), now_s + number / 1000)
    assert held.due(now_s) == []
    assert 0.0 < held.next_in_s(now_s) < 0.08
    assert [int.from_bytes(frame, "big") for frame in held.due(now_s + 1.0)] == list(range(200))
    assert held.next_in_s(now_s) == -1.0
    slow = Held(Link(bits_per_s=8_000_000), random.Random(1))  # 200 ms of it are 200 kB
    for _ in range(1000):
        slow.put(bytes(1000), now_s)
    assert [len(slow.due(now_s + seconds)) for seconds in (0.0501, 0.1001, 9.0)] == [50, 50, 100]


def test_a_process_that_moves_frames_ends_with_whoever_started_it(network: Network) -> None:
    network._move_by_process("near")
    mover = network._movers["near"]
    assert mover.stdin is not None
    mover.stdin.close()  # as the kernel does when that one is killed
    assert mover.wait(10.0) == 0


def test_where_there_is_no_way_to_have_such_a_link_the_test_is_skipped(
    network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = network._said

    def no_netem(program: str, arguments: str) -> str:
        return said(program, arguments.replace("netem", "no-such-qdisc"))

    monkeypatch.setattr(network, "_said", no_netem)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(pytest.skip.Exception, match="links here have no delay and lose nothing"):
        network.shape("near", delay_ms=40.0)
    network.shape("far", bits_per_s=8_000_000)  # every kernel can do that
