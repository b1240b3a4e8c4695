"""What is to be seen at memory nodes over which snapshots are spread, and what follows from it. No requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.image.manifest import Manifest, Order, snapshot_order
from lightning_spot.memory.spread import Told

_MOST_NAMED = 32  # at once; the rest is named the next time


@dataclass(frozen=True, slots=True)
class Seen:
    """What is at the nodes.

    Attributes:
        held: portions, as :meth:`~lightning_spot.memory.spread.Spread.look` tells them.
        torn: why the snapshot that was asked for will never be whole; ``""`` if nobody says so.
        rests_s: how long the durable tier is still to be left alone.
        problems: of the nodes that do not answer, by their URLs.
    """

    held: list[dict[str, Any]]
    torn: str
    rests_s: float
    problems: dict[str, SpotError]


class Missing:
    """The portions of one snapshot that are at no node that answers: which of them nobody will bring any more.

    A node whose host is gone says nothing, and what it had is not brought again by whoever has brought it.

    Args:
        order: for each host, by its number, the URLs of the nodes to which its portion is brought: first those at which
            it is to be kept, then those that take the place of one that does not work.
        replicas: at how many it is kept.
        gone_s: a portion that was at a node is lost, if it is at none for so long.
        brought_s: so long may it take to bring one past nodes that do not answer.
    """

    def __init__(self, order: Sequence[Sequence[str]], replicas: int, *, gone_s: float, brought_s: float) -> None:
        self._first = [set(urls[:replicas]) for urls in order]
        self._gone_s, self._brought_s = gone_s, brought_s
        self._was = {0}  # the first host asks when its own is there
        self._since_s: dict[int, float] = {}

    def lost(self, seen: Seen, missing: Iterable[int], asked_s: float, now_s: float) -> list[int]:
        """Hosts whose portions will not come.

        Args:
            seen: at nodes now.
            missing: hosts whose portions are at none of them.
            asked_s: when that was asked, seconds.
            now_s: when all have answered, or were waited for.
        """
        missing, before = set(missing), self._since_s
        self._was |= set(range(len(self._first))) - missing
        late = {host for host in missing if host in self._was or self._first[host] <= seen.problems.keys()}
        self._since_s = {host: before.get(host, asked_s) for host in late}
        bounds = {host: self._gone_s if host in self._was else self._brought_s for host in late}
        return sorted(host for host in late if now_s - self._since_s[host] >= bounds[host])


def whole_names(held: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names of the snapshots of which all portions are among these."""
    hosts: dict[tuple[str, str, int], set[int]] = {}
    for item in held:
        hosts.setdefault((item["name"], item["digest"], item["hosts"]), set()).add(item["host"])
    return (name for (name, _, count), there in hosts.items() if len(there) == count)


def never_whole(held: Sequence[Mapping[str, Any]], begun: str, over: set[str]) -> list[str]:
    """Names of snapshots of the attempt that begins another one, of which nobody will ever say that they are whole.

    One may be declined before it begins, or given up (``over``) while a node does not hear it; and who leads may have
    lost its node, and begin the next one from another.
    """
    whole = {*(set(whole_names(held)) - over), *(item["name"] for item in held if item["whole"])}
    earlier = {item["name"] for item in held if order_of(begun)[0] == order_of(item["name"])[0]}
    return sorted(name for name in earlier - whole if order_of(name) < order_of(begun))


def left_torn(held: Sequence[Mapping[str, Any]], attempt: int) -> list[str]:
    """Names of snapshots of which an earlier attempt, that was killed, has left some portions only.

    Nobody else says so of them, and their memory is needed. What was told to be whole is not among them: a node that is
    lost now may come back with the rest.
    """
    whole = {*whole_names(held), *(item["name"] for item in held if item["whole"])}
    earlier = {item["name"] for item in held if order_of(item["name"])[0] < attempt}
    return sorted(earlier - whole)


def told_of(seen: Seen, name: str, lineage: str = "", *, brings: bool) -> Told:
    """What is to be said of a snapshot that is whole, and of those before it.

    Args:
        seen: what is at the nodes.
        name: of the snapshot.
        lineage: its own; by default, as the portion of the first host says.
        brings: whether it is to be brought to the durable tier.
    """
    lineages = {item["name"]: item["lineage"] for item in seen.held if item["lineage"]}
    lineage = lineage or lineages.get(name, "")
    older = {item["name"] for item in seen.held if order_of(item["name"]) < order_of(name)}
    left = {each for each in whole_names(seen.held) if each in older and lineages.get(each, lineage) != lineage}
    return Told(name, brings, tuple(sorted(older - left)[:_MOST_NAMED]), tuple(sorted(left)[:_MOST_NAMED]))


def is_to_be_brought(seen: Seen, manifest: Manifest) -> bool:
    """Whether nodes are to bring a snapshot to the durable tier: if none that they were to bring is on its way.

    One that is not whole any more, since a node was lost, is waited for no longer.
    """
    whole = set(whole_names(seen.held))
    on_its_way = any(item["brings"] and item["name"] in whole for item in seen.held)
    return manifest.complete or not (on_its_way or seen.rests_s > 0)


def order_of(name: str) -> Order:
    """Where a snapshot comes among others.

    Raises:
        SettingsError: if the name is none of a snapshot.
    """
    order = snapshot_order(name)
    if order is None:
        raise SettingsError(f"{name!r} names no snapshot")
    return order
