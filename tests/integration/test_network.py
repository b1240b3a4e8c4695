"""The links by which tests connect hosts do what they are told, also where the kernel has no ``netem``."""

from __future__ import annotations

import contextlib
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.link import Held, Link
from tests.support.network import Network, network_or_skip
from tests.support.waiting import until

PORT = 7
LAST_S, MOMENT_S = 60.0, 0.3  # of what never takes so long


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
        self._number = 0

    def took_ms(self) -> float:
        began_s = time.monotonic()
        self._send()
        self._far.settimeout(LAST_S)
        self._far.recv(9)
        return 1000 * (time.monotonic() - began_s)

    def came(self, count: int) -> int:
        """How many of some datagrams come. They stay in order: no more will, once one does that was sent later."""
        word, found, end_s = self._send(count), 0, time.monotonic() + LAST_S
        self._far.settimeout(MOMENT_S)
        while time.monotonic() < end_s:
            self._send()
            with contextlib.suppress(TimeoutError):
                while (come := self._far.recv(9)) <= word:
                    found += come == word
                return found
        raise AssertionError("nothing comes any more")

    def comes(self) -> bool:
        """Whether one of some datagrams does within a moment."""
        word = self._send(5)
        self._far.settimeout(MOMENT_S)
        with contextlib.suppress(TimeoutError):
            while self._far.recv(9) != word:
                pass
            return True
        return False

    def _send(self, count: int = 1) -> bytes:
        """Send a word so often that was never sent before."""
        self._number += 1
        word = self._number.to_bytes(4, "big")
        for _ in range(count):
            self._near.sendto(word, self._to)
            time.sleep(0.0002)
        return word

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
    network.shape("near", delay_ms=40.0, jitter_ms=10.0)
    took = [ends.took_ms() for _ in range(20)]
    assert min(took) > 29.0
    assert statistics.median(took) > 35.0
    network.shape("near", loss=0.5, delay_ms=1.0, jitter_ms=0.0)
    assert 60 < ends.came(200) < 140
    network.shape("near", loss=0.0)
    network.cut("near")
    assert not ends.comes()
    network.mend("near")
    until(ends.comes, "the link to work again")
    assert ends.came(50) == 50


def test_what_is_sent_goes_no_faster_than_the_link(network: Network) -> None:
    network.shape("near", delay_ms=1.0, bits_per_s=16_000_000)
    address, ended_s = (network.address["far"], PORT), []
    listener = network.there("far", lambda: socket.create_server(address))

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(2**16):
                pass
        ended_s.append(time.monotonic())

    thread = threading.Thread(target=receive)
    thread.start()
    began_s = time.monotonic()
    with listener, network.there("near", lambda: socket.create_connection(address)) as sender:
        sender.sendall(bytes(1_500_000))
        sender.shutdown(socket.SHUT_WR)
        thread.join(LAST_S)
    assert ended_s[0] - began_s > 0.7  # 0.75 s; what lies in the first buffers goes at once


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


def test_a_process_that_moves_frames_ends_with_its_starter(network: Network) -> None:
    network._move_by_process("near")
    mover = network._movers["near"]
    mover.stdin.close()  # as the kernel does when that one is killed
    assert mover.wait(LAST_S) == 0
