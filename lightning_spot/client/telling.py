"""What nodes over which snapshots are spread are told of these: again, as long as one has not heard it.

The last snapshot of a run is followed by no other one with which the word would be told once more.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import FencedError, SettingsError, SnapshotNotFoundError, SpotError
from lightning_spot.retry import growing
from lightning_spot.say import say
from lightning_spot.threads import all_at_once

logger = logging.getLogger(__name__)

Word = Callable[[NodeStore], None]
"""Tells one node something."""

_AGAIN_S = (1.0, 10.0, 1.5)  # the first pause, the longest, and by what they grow
_MOST_UNHEARD = 64  # words at one node


@dataclass(slots=True)
class _OnItsWay:
    """What nodes are being told, of one thing.

    Attributes:
        word: the newest.
        tellers: threads that tell it, or an older one.
    """

    word: Word
    tellers: int = 0


class Telling:
    """Words to the nodes of one run. Methods may be called from any thread.

    Attributes:
        stops: whether nothing is told again any more; so it is until somebody says how long it is to be.
        unheard: what each node has not heard: by its URL and by what it is about.
    """

    def __init__(self) -> None:
        self.stops: Callable[[], bool] = lambda: True
        self.unheard: dict[str, dict[str, tuple[NodeStore, Word]]] = {}
        self._on_its_way: dict[str, _OnItsWay] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def tell(self, nodes: Iterable[NodeStore], about: str, word: Word) -> list[SpotError]:
        """Tell all nodes something at the same time; what went wrong. Who does not hear it is told again.

        Args:
            nodes: to tell.
            about: what it is about: of two such words, only the newer one is told again, also at other nodes.
            word: tells one.
        """
        nodes = list(nodes)
        with self._lock:
            told = self._on_its_way.setdefault(about, _OnItsWay(word))
            told.word, told.tellers = word, told.tellers + 1
        try:
            problems = at_all(nodes, word)
        finally:
            with self._lock:
                told.tellers -= 1
                if not told.tellers:
                    del self._on_its_way[about]
        with self._lock:
            for words in self.unheard.values():
                if about in words:
                    words[about] = (words[about][0], told.word)
            for node in nodes:
                problem = problems.get(node.url)
                if told.word is word or not _is_heard(problem):  # else a newer one may be on its way there
                    self._note(node, about, told.word, problem)
            self._begin()
        return list(problems.values())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _note(self, node: NodeStore, about: str, word: Word, problem: SpotError | None) -> None:
        """Note whether a node has heard a word, or never will; under the lock."""
        if isinstance(problem, FencedError):  # a later attempt speaks for the run: all nodes would refuse it
            for url, words in list(self.unheard.items()):
                if about in words and words[about][1] is word:
                    self._forget(url, about)
        elif _is_heard(problem):
            self._forget(node.url, about)
        else:
            words = self.unheard.setdefault(node.url, {})
            words[about] = (node, word)
            while len(words) > _MOST_UNHEARD:
                del words[next(iter(words))]

    def _forget(self, url: str, about: str) -> None:
        """Tell a node nothing of that any more; under the lock."""
        words = self.unheard.get(url, {})
        words.pop(about, None)
        if not words:
            self.unheard.pop(url, None)

    def _begin(self) -> None:
        """Have a thread tell again what was not heard; under the lock."""
        if self._thread is not None or not self.unheard or self.stops():
            return
        self._thread = threading.Thread(target=self._again, name="spot-telling", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads can be had now: with the next word
            logger.debug("nothing is told again now: %s", error)
            self._thread = None

    def _again(self) -> None:
        for pause_s in growing(*_AGAIN_S):
            time.sleep(pause_s)
            with self._lock:
                if not self.unheard or self.stops():
                    self._thread = None
                    return
                nodes = [next(iter(words.values()))[0] for words in self.unheard.values()]
            try:
                at_all(nodes, self._tell_all_again)
            except Exception:  # whatever fails, such as want of memory, nobody else tells them again
                text = "snapshot servers were not told again; they are later"
                say(logging.ERROR, "servers-not-told", text, exc_info=True)

    def _tell_all_again(self, node: NodeStore) -> None:
        with self._lock:
            words = dict(self.unheard.get(node.url, {}))
        for about, (_, word) in words.items():
            self._tell_again(node, about, word)

    def _tell_again(self, node: NodeStore, about: str, word: Word) -> None:
        problem = at_all([node], word).get(node.url)
        with self._lock:
            known = self.unheard.get(node.url, {}).get(about)
            if known is not None and known[1] is word:  # else there is a newer one, or it has heard that
                self._note(node, about, word, problem)
        if problem is not None:
            raise problem  # it does not hear the others either


def _is_heard(problem: SpotError | None) -> bool:
    """Whether a node need not be told again: it has heard, or has nothing of that run."""
    return problem is None or isinstance(problem, FencedError | SnapshotNotFoundError | SettingsError)


def at_all(nodes: Iterable[NodeStore], ask: Word) -> dict[str, SpotError]:
    """Ask all nodes at the same time; what went wrong, by the URL."""

    def one(node: NodeStore) -> SpotError | None:
        try:
            ask(node)
        except SpotError as error:
            return error
        return None

    nodes = list(nodes)
    found = zip(
        nodes, all_at_once([functools.partial(one, node) for node in nodes], "spot-ask", len(nodes)), strict=True
    )
    return {node.url: error for node, error in found if error is not None}
