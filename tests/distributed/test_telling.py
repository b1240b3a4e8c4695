"""Words to snapshot servers that are told again: see also ``test_spread_told.py``."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from lightning_spot.client import remote
from lightning_spot.client.remote import Telling
from lightning_spot.errors import FencedError, ServerUnreachableError
from tests.support.waiting import until


class Listener:
    """Stands for a node."""

    def __init__(self, url: str) -> None:
        self.url, self.heard, self.attempt, self.is_cut = url, list[str](), 1, False

    def hear(self, what: str, attempt: int) -> None:
        if self.is_cut:
            raise ServerUnreachableError(f"{self.url} does not answer")
        if attempt < self.attempt:
            raise FencedError("a later attempt has the run", current=self.attempt)
        self.heard.append(what)


def say(what: str, attempt: int = 1) -> Any:
    return lambda node: node.hear(what, attempt)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tells; the nodes are its attributes here."""
    monkeypatch.setattr(remote, "_AGAIN_S", (0.01, 0.01))
    made: Any = Telling()
    made.one, made.other = Listener("spot://one/run"), Listener("spot://other/run")
    ended = threading.Event()
    made.stops = ended.is_set
    yield made
    ended.set()
    until(lambda: made._thread is None, "it to be told no more")


def test_what_an_earlier_attempt_said_and_a_node_refuses_does_not_silence_the_later_one(words: Any) -> None:
    words.one.is_cut = words.other.is_cut = True
    words.tell([words.one], "an older one", say("it is torn", attempt=1))
    words.one.attempt = words.other.attempt = 2
    words.tell([words.one, words.other], "the newest", say("it is whole", attempt=2))
    words.one.is_cut = False
    until(lambda: words.one.heard, "one node to hear it")
    until(lambda: words.one.url not in words.unheard, "it to refuse the other word")
    words.other.is_cut = False
    until(lambda: words.other.heard, "the other one to hear it, too")
    assert words.one.heard == words.other.heard == ["it is whole"]


def test_an_older_word_that_took_longer_is_not_told_again_in_place_of_the_newer(words: Any) -> None:
    words.other.is_cut = True
    begun, goes_on = threading.Event(), threading.Event()

    def older(node: Any) -> None:
        begun.set()
        assert goes_on.wait(30)
        node.hear("older", 1)

    slow = threading.Thread(target=words.tell, args=([words.other], "the newest", older))
    slow.start()
    assert begun.wait(30)
    words.tell([words.one, words.other], "the newest", say("newer"))
    goes_on.set()
    slow.join(30)
    words.other.is_cut = False
    until(lambda: words.other.heard and not words.unheard, "it to have heard something")
    assert words.other.heard == words.one.heard == ["newer"]


@pytest.mark.parametrize("where", ["word", "threads"])
def test_words_are_told_again_whatever_failed_once(words: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words.one.is_cut = words.other.is_cut = True
    number = itertools.count()

    def word(node: Any) -> None:
        if where == "word" and next(number) == 2:  # the first time that it is told again
            raise MemoryError("there is none left")
        node.hear("whole", 1)

    words.tell([words.one, words.other], "the newest", word)
    if where == "threads":
        start = threading.Thread.start

        def none_left(thread: threading.Thread) -> None:
            if threading.current_thread().name == "spot-telling":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", none_left)
    words.one.is_cut = words.other.is_cut = False
    until(lambda: words.one.heard and words.other.heard, "both to hear it")
