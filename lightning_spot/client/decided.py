"""What a host has decided, and learned, of snapshots that are spread over memory nodes, whichever these are."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from weakref import WeakValueDictionary

from lightning_spot.client.remote import NodeStore
from lightning_spot.client.telling import Telling
from lightning_spot.image.manifest import Manifest

_MOST_SENT = 4
_MOST_DECIDED = 64


class Known:
    """What a host knows of the snapshots of a run, over whichever nodes these are spread. From any thread.

    Args:
        nodes: by their URLs.

    Attributes:
        told: name of the newest that nodes were told to be whole, and whether it is to be brought to the durable tier.
        telling: tells nodes what was decided.
    """

    def __init__(self, nodes: dict[str, NodeStore]) -> None:
        self.told = ("", False)
        self.telling = Telling()
        self._nodes = WeakValueDictionary(nodes)  # as long as a place is made of them
        self._portions: list[Manifest] = []
        self._decided: dict[str, bool] = {}  # by the snapshot's name: whether it is whole, or over
        self._lock = threading.Lock()

    def share(self, nodes: Mapping[str, NodeStore]) -> dict[str, NodeStore]:
        """The same nodes, as far as they are known: it was learned how fast they are."""
        with self._lock:
            return {url: self._nodes.setdefault(url, node) for url, node in nodes.items()}

    def sent(self, portion: Manifest) -> None:
        """A portion of this host is at nodes."""
        with self._lock:
            self._portions = [*self._portions[-_MOST_SENT + 1 :], portion]

    def find(self, name: str) -> Manifest | None:
        """One of the newest portions that this host has sent."""
        with self._lock:
            return next((portion for portion in self._portions if portion.name == name), None)

    def decide(self, name: str, *, whole: bool) -> bool:
        """Whether a snapshot is whole, or over, as is wanted now. What was decided first stands: nodes act upon it.

        Told that it is whole, some let go what is older; told that it is over, they drop what they have of it.
        """
        with self._lock:
            while len(self._decided) >= _MOST_DECIDED:
                del self._decided[next(iter(self._decided))]
            return self._decided.setdefault(name, whole) is whole

    def given_up(self) -> set[str]:
        """Names of snapshots that this host has given up."""
        with self._lock:
            return {name for name, is_whole in self._decided.items() if not is_whole}
