"""A model of snapshots that several writers put at several places, with all that can go wrong, one step at a time.

Each writer is a rank on a host of its own, with the ring of that host. Its shards go from there to one snapshot server,
and from that to storage. A request may be lost, late, or come twice: what was ever in a ring may arrive at any time,
once more, or never. Listings may be as old as one likes. The trainers, and one place, may be lost at any moment. The
rules under test are those of the package (:mod:`lightning_spot.snapshot.shards`); defects are planted by other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_spot.snapshot.manifest import Order, ShardOf
from lightning_spot.snapshot.shards import Status, is_evictable, status

STORAGE = "storage"
Id = tuple[int, int]  # attempt, step
Value = tuple[str, int]  # digest of the plan, or "" for a failure; which content (a writer may only ever make one)
Key = tuple[Id, int]  # snapshot and writer
Registers = frozenset[tuple[str, Key, Value]]


class State(NamedTuple):
    """Everything that is somewhere.

    Attributes:
        attempt: that trains now.
        resumed: the step from which it went on.
        steps: of the last snapshot that each writer has begun in this attempt.
        made: what each writer has put into its ring, ever: late requests bring these.
        held: what each place holds now.
        ever: what each place has shown in a listing, ever: old answers say these.
        watermarks: by place.
        fences: the greatest attempt that each place has seen.
        lost: the place that is gone, if one is.
        told: the newest snapshot that a trainer was told to be committed at servers or storage.
    """

    attempt: int
    resumed: int
    steps: tuple[int, ...]
    made: frozenset[tuple[Key, Value]]
    held: Registers
    ever: Registers
    watermarks: tuple[Id, ...]
    fences: tuple[int, ...]
    lost: str
    told: Id


@dataclass(frozen=True)
class Model:
    """How large it is, and by which rules.

    Attributes:
        writers: how many.
        servers: how many; writer ``w`` uses server ``w % servers``.
        snapshots: most that are begun in one attempt.
        attempts: most attempts.
        values: what a writer may put.
        status: whether a snapshot is committed.
        may_evict: whether a place may let go of a shard: order, status, watermark.
        write_once: whether a writer that begins a snapshot twice leaves what is there.
    """

    writers: int = 2
    servers: int = 2
    snapshots: int = 2
    attempts: int = 2
    values: tuple[str, ...] = ("a", "")
    status: Callable[[dict[int, ShardOf], Order, Order | None], Status] = status
    may_evict: Callable[[Order, Status, Order | None], bool] = lambda order, state, watermark: is_evictable(
        order, state, watermark, is_durable=False
    )
    write_once: bool = True
    places: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        rings = tuple(f"ring {writer}" for writer in range(self.writers))
        servers = tuple(f"server {number}" for number in range(self.servers))
        object.__setattr__(self, "places", (*rings, *servers, STORAGE))

    @property
    def start(self) -> State:
        """Nothing has happened."""
        none = frozenset[tuple[str, Key, Value]]()
        count = len(self.places)
        return State(1, 0, (0,) * self.writers, frozenset(), none, none, ((0, 0),) * count, (1,) * count, "", (0, 0))

    # -- what is seen ---------------------------------------------------------------------------------------------

    def seen(self, registers: Registers, places: tuple[str, ...], snapshot: Id) -> dict[int, ShardOf]:
        """The registers of a snapshot at some places."""
        return {
            key[1]: ShardOf(key[1], self.writers, value[0], failed="" if value[0] else "it failed")
            for place, key, value in sorted(registers)
            if place in places and key[0] == snapshot
        }

    def committed(self, registers: Registers, places: tuple[str, ...]) -> list[Id]:
        """Snapshots that are committed over some places, the newest last."""
        ids = {key[0] for place, key, _ in registers if place in places}
        return sorted(
            i for i in ids if self.status(self.seen(registers, places, i), _order(i), None) is Status.COMMITTED
        )

    @property
    def safe(self) -> tuple[str, ...]:
        """Places that outlive hosts."""
        return self.places[self.writers :]

    def watched(self, place: str) -> tuple[str, ...]:
        """The places whose listings raise a place's watermark: none that is lost sooner than itself."""
        return (STORAGE,) if place == STORAGE else self.safe

    # -- what can happen ------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Everything that can happen next."""
        yield from self._begin(state)
        yield from self._arrive(state)
        yield from self._learn(state)
        yield from self._evict(state)
        yield from self._lose(state)

    def _begin(self, state: State) -> Iterator[tuple[str, State]]:
        for writer in range(self.writers):
            step = state.steps[writer] + 1
            if step - state.resumed > self.snapshots or state.lost == f"ring {writer}":
                continue
            steps = _with(state.steps, writer, step)
            key = ((state.attempt, step), writer)
            for value in self.values:
                after = state._replace(steps=steps, made=state.made | {(key, (value, 0))})
                yield f"rank {writer} writes {key[0]} as {value!r}", self._put(after, f"ring {writer}", key, (value, 0))
            if not self.write_once and step > 1:  # a defect: it writes the one before a second time
                again = ((state.attempt, step - 1), writer)
                after = state._replace(made=state.made | {(again, ("a", 1))})
                yield f"rank {writer} rewrites {again[0]}", self._put(after, f"ring {writer}", again, ("a", 1))

    def _arrive(self, state: State) -> Iterator[tuple[str, State]]:
        for key, value in state.made:
            server = f"server {key[1] % self.servers}"
            if server != state.lost and (after := self._put(state, server, key, value)) != state:
                yield f"{key} arrives at {server}", after
        for place, key, value in state.held:
            if place.startswith("server") and (after := self._put(state, STORAGE, key, value)) != state:
                yield f"{key} arrives at storage", after

    def _learn(self, state: State) -> Iterator[tuple[str, State]]:
        for number, place in enumerate(self.places):
            if place == state.lost:
                continue
            known = self.committed(state.ever, self.watched(place))
            if known and known[-1] > state.watermarks[number]:
                told = max(state.told, known[-1]) if place.startswith("ring") else state.told
                watermarks = _with(state.watermarks, number, known[-1])
                yield f"{place} learns of {known[-1]}", state._replace(watermarks=watermarks, told=told)

    def _evict(self, state: State) -> Iterator[tuple[str, State]]:
        for item in state.held:
            place, (snapshot, _), _ = item
            number = self.places.index(place)
            here = self.status(self.seen(state.held, (place,), snapshot), _order(snapshot), None)
            mark = state.watermarks[number]
            if self.may_evict(_order(snapshot), here, _order(mark) if mark > (0, 0) else None):
                yield f"{place} evicts {item[1]}", state._replace(held=state.held - {item})

    def _lose(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.lost:
            for place in self.places[:-1]:
                held = frozenset(item for item in state.held if item[0] != place)
                yield f"{place} is lost", state._replace(held=held, lost=place)
        if state.attempt < self.attempts:
            resumed = self.recoverable(state)
            attempt = state.attempt + 1
            fences = tuple(
                attempt if place != state.lost else fence
                for place, fence in zip(self.places, state.fences, strict=True)
            )
            yield (
                f"all trainers are killed, and go on from {resumed}",
                state._replace(attempt=attempt, resumed=resumed[1], steps=(resumed[1],) * self.writers, fences=fences),
            )

    def _put(self, state: State, place: str, key: Key, value: Value) -> State:
        number = self.places.index(place)
        if key[0][0] < state.fences[number]:
            return state
        there = [item for item in state.held if item[:2] == (place, key)]
        if there and self.write_once:
            return state
        item = (place, key, value)
        return state._replace(held=state.held - set(there) | {item}, ever=state.ever | {item})

    # -- what must hold -------------------------------------------------------------------------------------------

    def recoverable(self, state: State) -> Id:
        """The newest snapshot that a start would find now; ``(0, 0)`` for none."""
        return max(self.committed(state.held, self.places), default=(0, 0))

    def problem(self, state: State) -> str:
        """What is wrong in a state; ``""`` if nothing is."""
        if (found := self.recoverable(state)) < state.told:
            return f"{state.told} was told to be committed, and a start finds {found}"
        if not state.lost and (best := max(self.committed(state.ever, self.safe), default=(0, 0))) > found:
            return f"{best} was committed, and a start finds {found}"
        for snapshot in self.committed(state.held, self.places):
            of_it = [(key[1], value) for _, key, value in state.held if key[0] == snapshot]
            if len({value[0] for _, value in of_it}) > 1:
                return f"{snapshot} is made of two plans"
            if len(set(of_it)) > len({writer for writer, _ in of_it}):
                return f"a shard of {snapshot} is another one at another place"
        return ""


def search(model: Model, most: int) -> tuple[int, str]:
    """Look at every state that can be reached, but at most so many; how many were seen, and what is wrong in one."""
    start = model.start
    seen, waiting = {start}, [start]
    while waiting and len(seen) < most:
        following: list[State] = []
        for state in waiting:
            for what, after in model.steps(state):
                if after in seen:
                    continue
                if problem := model.problem(after):
                    return len(seen), f"{problem}, after: {what}"
                seen.add(after)
                following.append(after)
        waiting = following
    return len(seen), ""


def _order(snapshot: Id) -> Order:
    return (*snapshot, 2)


def _with(items: tuple, number: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:number], item, *items[number + 1 :])
