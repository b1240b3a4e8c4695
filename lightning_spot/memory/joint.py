"""An upload that several ranks of a host fill: what was said of it, and how far each is. No rules: see ``shares``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_spot.errors import SettingsError, ShareFault
from lightning_spot.image.manifest import snapshot_order
from lightning_spot.image.parts import checksum

MOST_SHARES = 1024
_SPREAD, _BESIDES = "spread:", "+"
_LAYOUT_CHARS = 256 * 2**20  # of all runs together
_LAYOUTS = 3  # of a run, the newest: a rank may be a snapshot behind the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What the rank that leases a slot says of the snapshot that several ranks will fill.

    Attributes:
        name: of the snapshot.
        shares: how many ranks fill it.
        digest: what all of them must agree on, such as a checksum of the layout; ``""`` if they see to it themselves.
        layout: what the other ranks have to know of it, a text of any form; kept until another one is given.
        at: URLs of the run at the snapshot servers to which several hosts send it, separated by spaces, first that of
            the one that carries it on; or that of its storage; or, of snapshot servers over which it is spread,
            see :class:`SpreadPlace`. Each host sends its portion, which the layout names
            (see :class:`~lightning_spot.image.portion.Portions`). ``""`` if the ranks of one host have all of it.
        image_nbytes: of the image, where the slot of the first host, too, holds its own portion only; else 0.
        by_hosts: at that node: whether the shares are hosts', and come over the network.
    """

    name: str
    shares: int
    digest: str = ""
    layout: str = ""
    at: str = ""
    image_nbytes: int = 0
    by_hosts: bool = False

    def __post_init__(self) -> None:
        if snapshot_order(self.name) is None or not 1 <= self.shares <= MOST_SHARES:
            raise SettingsError(f"{self.name!r} in {self.shares} shares is no snapshot that ranks can fill together")


@dataclass(frozen=True, slots=True)
class SpreadPlace:
    """Snapshot servers over which a snapshot is spread: each host brings its portion to some of them.

    Attributes:
        replicas: at how many each portion is kept.
        urls: of the run at all of them.
        besides: likewise at servers to which nothing is brought any more, and that may have portions of earlier ones.
    """

    replicas: int
    urls: tuple[str, ...]
    besides: tuple[str, ...] = ()

    @classmethod
    def read(cls, at: str) -> SpreadPlace | None:
        """Read it from where hosts bring a snapshot; ``None`` if that is another place.

        Raises:
            SettingsError: if it is malformed.
        """
        if not at.startswith(_SPREAD):
            return None
        replicas, *named = at.removeprefix(_SPREAD).split(" ")
        urls = tuple(url for url in named if not url.startswith(_BESIDES))
        besides = tuple(url.removeprefix(_BESIDES) for url in named if url.startswith(_BESIDES))
        are_nodes = bool(urls) and all(url.startswith("spot://") for url in (*urls, *besides))
        if not (replicas.isdigit() and int(replicas) and are_nodes):
            raise SettingsError(f"{at!r} names no snapshot servers over which a snapshot is spread")
        return cls(int(replicas), urls, besides)

    @property
    def at(self) -> str:
        """As :attr:`Shared.at`."""
        named = (*self.urls, *(f"{_BESIDES}{url}" for url in self.besides))
        return f"{_SPREAD}{self.replicas} {' '.join(named)}"


def is_durable(at: str) -> bool:
    """Whether hosts bring a snapshot to storage, and not to snapshot servers."""
    return is_by_itself(at) and not at.startswith(_SPREAD)


def is_by_itself(at: str) -> bool:
    """Whether each host brings its portion by itself: to storage, or to servers over which it is spread."""
    return bool(at) and not at.startswith("spot://")


def urls_of(at: str) -> list[str]:
    """Each place to which hosts bring a snapshot; a directory may have spaces in its name."""
    return [at] if is_by_itself(at) else at.split()


def nodes_of(at: str) -> list[str]:
    """URLs of the run at the servers to which hosts bring a snapshot; none if they bring it to storage."""
    place = SpreadPlace.read(at)
    return list(place.urls) if place is not None else [] if is_durable(at) else at.split()


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """The layout that was sent or received last; it is not sent again.

    Attributes:
        id: its checksum, ``""`` for none.
        text: what it is.
    """

    id: str = ""
    text: str = ""

    @classmethod
    def of(cls, text: str) -> KnownLayout:
        """The layout of a text."""
        return cls(checksum(text.encode()), text) if text else cls()

    def to_send(self, text: str) -> dict[str, str]:
        """What a request says of a layout."""
        return {"layout_id": self.id} if text and text == self.text else {"layout": text}


class Layouts:
    """The layouts that were given for the snapshots of runs: who means one of the newest says its checksum only.

    It is guarded by the registry's lock.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, str]] = {}

    def joint(self, key: str, shared: Shared, layout_id: str = "") -> Joint:
        """An upload of a run that several ranks fill begins.

        Args:
            key: of the run.
            shared: what is said of the snapshot.
            layout_id: of a layout that was given before, if that is meant and ``shared`` has none.

        Raises:
            SettingsError: if that layout is not here (any more).
        """
        known = self._known.setdefault(key, {})
        if not shared.layout and layout_id:
            if layout_id not in known:
                raise SettingsError(f"the layout of {shared.name} is not known here; give it once more")
            shared = replace(shared, layout=known[layout_id])
        layout_id = KnownLayout.of(shared.layout).id
        known.pop(layout_id, None)
        known[layout_id] = shared.layout
        if len(known) > _LAYOUTS:
            del known[next(iter(known))]
        self._bound()
        return Joint(shared, layout_id)

    def forget(self, key: str) -> None:
        """Keep nothing of a run."""
        self._known.pop(key, None)

    def _bound(self) -> None:
        """Where all are too long together, the oldest of the run with the longest ones goes: it may be given again."""
        lengths = {key: sum(map(len, known.values())) for key, known in self._known.items()}
        while sum(lengths.values()) > _LAYOUT_CHARS:
            key = max(lengths, key=lengths.__getitem__)
            lengths[key] -= len(self._known[key].pop(next(iter(self._known[key]))))


@dataclass(slots=True)
class Joint:
    """The state of an upload that several ranks fill. Its fields change under the registry's lock.

    Attributes:
        shared: what was said of it.
        layout_id: checksum of its layout.
        joined: the session of each share that was asked for.
        writing: those of them whose bytes are not in place yet.
        placed: shares whose bytes are in place.
        failed: why it cannot become a snapshot any more.
        fault: what rank 0 has to know of that.
    """

    shared: Shared
    layout_id: str
    joined: dict[int, str] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    placed: set[int] = field(default_factory=set)
    failed: str = ""
    fault: ShareFault | None = None

    @property
    def missing(self) -> list[int]:
        """Shares, beside the first, whose bytes are not in place."""
        return [share for share in range(1, self.shared.shares) if share not in self.placed]
