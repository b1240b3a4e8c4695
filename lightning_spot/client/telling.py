"""What nodes over which snapshots are spread are told of these: again, as long as one has not heard it.

The last snapshot of a run is followed by no other one with which the word would be told once more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import Fenced, SettingsError, SnapshotNotFound, SpotError

logger = logging.getLogger(__name__)

Word = Callable[[NodeStore], None]
"""Tells one node something."""

_FIRST_AGAIN_S, _LAST_AGAIN_S = 1.0, 10.0
_MOST_UNHEARD = 64  # words at one node


class Telling:
    """Words to the nodes of one run. Methods may be called from any thread.

    Attributes:
        stops: whether nothing is told again any more; so it is until somebody says how long it is to be.
        unheard: what each node has not heard: by its URL and by what it is about.
    """

    def __init__(self) -> None:
        self.stops: Callable[[], bool] = lambda: True
        self.unheard: dict[str, dict[str, tuple[NodeStore, Word]]] = {}
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
        problems = at_all(nodes, word)
        with self._lock:
            for words in self.unheard.values():
                if about in words:
                    words[about] = (words[about][0], word)
            for node in nodes:
                self._note(node, about, word, problems.get(node.url))
            self._begin()
        return list(problems.values())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _note(self, node: NodeStore, about: str, word: Word, problem: SpotError | None) -> None:
        """Note whether a node has heard a word, or never will; under the lock."""
        if isinstance(problem, Fenced):  # a later attempt speaks for the run
            self.unheard.clear()
            return
        words = self.unheard.setdefault(node.url, {})
        if problem is None or isinstance(problem, SnapshotNotFound | SettingsError):  # it has nothing of that run
            words.pop(about, None)
        else:
            words[about] = (node, word)
            while len(words) > _MOST_UNHEARD:
                del words[next(iter(words))]
        if not words:
            del self.unheard[node.url]

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
        pause_s = _FIRST_AGAIN_S
        while True:
            time.sleep(pause_s)
            pause_s = min(_LAST_AGAIN_S, 1.5 * pause_s)
            with self._lock:
                if not self.unheard or self.stops():
                    self._thread = None
                    return
                unheard = {url: dict(words) for url, words in self.unheard.items()}

            def tell(node: NodeStore, unheard: dict[str, dict[str, tuple[NodeStore, Word]]] = unheard) -> None:
                for about, (_, word) in unheard[node.url].items():
                    self._tell_again(node, about, word)

            at_all([next(iter(words.values()))[0] for words in unheard.values()], tell)

    def _tell_again(self, node: NodeStore, about: str, word: Word) -> None:
        problem = at_all([node], word).get(node.url)
        with self._lock:
            known = self.unheard.get(node.url, {}).get(about)
            if known is not None and known[1] is word:  # else there is a newer one, or it has heard that
                self._note(node, about, word, problem)
        if problem is not None:
            raise problem  # it does not hear the others either


def at_all(nodes: Iterable[NodeStore], ask: Word) -> dict[str, SpotError]:
    """Ask all nodes at the same time; what went wrong, by the URL."""

    def one(node: NodeStore) -> SpotError | None:
        try:
            ask(node)
        except SpotError as error:
            return error
        return None

    nodes = list(nodes)
    if not nodes:
        return {}
    with ThreadPoolExecutor(len(nodes)) as pool:
        found = zip(nodes, pool.map(one, nodes), strict=True)
        return {node.url: error for node, error in found if error is not None}
