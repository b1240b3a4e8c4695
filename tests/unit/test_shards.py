"""When a snapshot of several writers counts, and how their shards make one image.

A model of snapshots that several writers put at several places, with all that can go wrong, one step at a time: each
writer is a rank on a host of its own, with the ring of that host. Its shards go from there to one snapshot server,
and from that to storage. A request may be lost, late, or come twice: what was ever in a ring may arrive at any time,
once more, or never. Listings may be as old as one likes. The trainers, and one place, may be lost at any moment. The
rules under test are those of the package (:mod:`lightning_spot.snapshot.shards`); defects are planted by other rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.files import FileSpan, is_own_file
from lightning_spot.snapshot.manifest import Manifest, Order, ShardOf, shard_name, snapshot_name, snapshot_order
from lightning_spot.snapshot.shards import (
    LEAST_PART_BYTES,
    JoinedImage,
    Status,
    assemble,
    by_snapshot,
    is_evictable,
    part_bytes_for,
    registers_of,
    sections,
    status,
)
from tests.support.shards import failed_shard, sealed_shard

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


PART = LEAST_PART_BYTES
NAME = snapshot_name(7, 2)
ORDER: Order = (2, 7, 2)


def of(writer: int, writers: int = 2, digest: str = "plan", failed: str = "") -> ShardOf:
    return ShardOf(writer, writers, digest, failed=failed)


# -- the functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registers", "watermark", "expected"),
    [
        ([], None, Status.PENDING),
        ([of(0)], None, Status.PENDING),
        ([of(0), of(1)], None, Status.COMMITTED),
        ([of(0), of(1)], (2, 9, 2), Status.COMMITTED),  # a newer one does not undo it
        ([of(0)], (2, 9, 2), Status.ABORTED),
        ([of(0)], ORDER, Status.PENDING),
        ([of(0), of(1, failed="no memory")], None, Status.ABORTED),
        ([of(1, failed="no memory")], None, Status.ABORTED),
        ([of(0), of(1, digest="another plan")], None, Status.ABORTED),
        ([of(0), of(1, writers=3)], None, Status.ABORTED),
        ([of(0, writers=1)], None, Status.COMMITTED),
    ],
)
def test_status(registers: list[ShardOf], watermark: Order | None, expected: Status) -> None:
    assert status({each.writer: each for each in registers}, ORDER, watermark) is expected


@pytest.mark.parametrize(
    ("order", "state", "watermark", "is_durable", "expected"),
    [
        ((1, 4, 2), Status.PENDING, (1, 5, 2), False, True),
        ((1, 4, 2), Status.COMMITTED, (1, 5, 2), False, True),
        ((1, 5, 2), Status.COMMITTED, (1, 5, 2), False, False),
        ((1, 5, 2), Status.COMMITTED, (1, 5, 2), True, True),
        ((1, 6, 2), Status.PENDING, (1, 5, 2), True, False),
        ((1, 6, 2), Status.ABORTED, (1, 5, 2), False, True),
        ((1, 1, 2), Status.PENDING, None, False, False),
    ],
)
def test_what_may_be_evicted(
    order: Order, state: Status, watermark: Order | None, is_durable: bool, expected: bool
) -> None:
    assert is_evictable(order, state, watermark, is_durable=is_durable) is expected


def test_whoever_sees_a_failure_of_a_writer_knows_it() -> None:
    """A place may have been told so before another one had the shard: what came first decided, or last."""
    there, failure = sealed_shard(1, 0), failed_shard(1, 0)
    for seen in ((there, failure), (failure, there), (there, failure, there)):
        assert by_snapshot(seen) == {there.snapshot: [failure]}
        assert registers_of(seen) == {0: failure.shard}


def test_more_registers_never_turn_committed_into_aborted() -> None:
    """Two observers that see different registers never disagree: one may only not know yet."""
    values = [None, ("a", ""), ("b", ""), ("", "failed")]
    for first in values:
        for second in values:
            seen = {w: of(w, digest=v[0], failed=v[1]) for w, v in enumerate((first, second)) if v is not None}
            whole = status(seen, ORDER)
            for left_out in seen:
                fewer = status({w: each for w, each in seen.items() if w != left_out}, ORDER)
                assert fewer in (Status.PENDING, whole)


@pytest.mark.parametrize(
    "name",
    ["step-7-attempt-2", "step-0000000007-attempt-0002", "step-000000007-attempt-00002", "step-00000000٧-attempt-0002"],
)
def test_no_two_names_are_of_one_snapshot(name: str) -> None:
    assert snapshot_order(NAME) == ORDER
    assert snapshot_order(name) is None
    assert snapshot_order(snapshot_name(10**17, 10**8)) == (10**8, 10**17, 2)


@pytest.mark.parametrize("name", ["shard-0000٠.json", "rank-0000١.pt", "__٠_0.distcp"])
def test_only_digits_of_ascii_name_a_file(name: str) -> None:
    assert not is_own_file(name)


# -- the model --------------------------------------------------------------------------------------------------------


MODELS = {
    "one server": Model(writers=2, servers=1, snapshots=2, attempts=1),
    "two servers": Model(writers=2, servers=2, snapshots=2, attempts=2, values=("a", "b", "")),
    "three writers": Model(writers=3, servers=2, snapshots=2, attempts=2),
}
LARGER = {
    "one server, two attempts": Model(writers=2, servers=1, snapshots=3, attempts=2, values=("a", "b", "")),
    "two servers, three attempts": Model(writers=2, servers=2, snapshots=3, attempts=3),
    "three writers, three snapshots": Model(writers=3, servers=2, snapshots=3, attempts=2),
}


@pytest.mark.parametrize(
    ("model", "most"),
    [
        *(pytest.param(model, 15_000, id=name) for name, model in MODELS.items()),
        *(
            pytest.param(model, 1_000_000, id=name, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
            for name, model in LARGER.items()
        ),
    ],
)
def test_no_state_loses_or_mixes_a_snapshot(model: Model, most: int) -> None:
    seen, problem = search(model, most=most)
    assert not problem
    assert seen >= most


def at_the_watermark(order: Order, state: Status, watermark: Order | None) -> bool:
    return state is Status.ABORTED or (watermark is not None and order <= watermark)


def without_digests(registers: dict[int, ShardOf], order: Order, watermark: Order | None) -> Status:
    return status({w: replace(each, digest="") for w, each in registers.items()}, order, watermark)


def without_failures(registers: dict[int, ShardOf], order: Order, watermark: Order | None) -> Status:
    return status({w: replace(each, failed="", digest="a") for w, each in registers.items()}, order, watermark)


def by_majority(registers: dict[int, ShardOf], order: Order, watermark: Order | None) -> Status:
    return Status.COMMITTED if registers else status(registers, order, watermark)


@pytest.mark.parametrize(
    "model",
    [
        Model(may_evict=at_the_watermark),
        Model(values=("a", "b"), status=without_digests),
        Model(status=without_failures),
        Model(status=by_majority),
        Model(write_once=False),
    ],
    ids=["evicts at the watermark", "no digests", "no failures", "before all are there", "a register twice"],
)
def test_the_model_finds_a_planted_defect(model: Model) -> None:
    _, problem = search(model, most=60_000)
    assert problem


# -- one image --------------------------------------------------------------------------------------------------------


def shard(
    writer: int, writers: int, files: Sequence[FileSpan], nbytes: int, start: int = 0, fill: int | None = None
) -> tuple[Manifest, memoryview]:
    image = bytearray(nbytes)
    for file in files:
        image[file.offset : file.stop] = os.urandom(file.nbytes) if fill is None else bytes([fill]) * file.nbytes
    manifest = Manifest(
        run="run",
        name=shard_name(NAME, writer),
        step=7,
        attempt=2,
        nbytes=nbytes,
        files=tuple(files),
        part_bytes=PART,
        shard=ShardOf(writer, writers, "plan", start),
    )
    return manifest.sealed(memoryview(image)), memoryview(image)


def ranges_of_one_file() -> dict[int, tuple[Manifest, memoryview]]:
    """Rank 0 has the end of ``model.ckpt``, rank 3 none of it, and all but rank 0 a file of their own."""
    return {
        0: shard(0, 4, [FileSpan("model.ckpt", 0, PART + 100)], 2 * PART, start=5 * PART),
        1: shard(1, 4, [FileSpan("model.ckpt", 0, 3 * PART), FileSpan("rank-00001.pt", 3 * PART, 500)], 4 * PART),
        2: shard(
            2, 4, [FileSpan("model.ckpt", 0, 2 * PART), FileSpan("rank-00002.pt", 2 * PART, 500)], 3 * PART, 3 * PART
        ),
        3: shard(3, 4, [FileSpan("rank-00003.pt", 0, 700)], PART),
    }


def test_a_range_within_one_shard_is_read_in_place() -> None:
    shards = ranges_of_one_file()
    image = JoinedImage(sections(m for m, _ in shards.values()), {w: data for w, (_, data) in shards.items()})
    assert image[10:20].obj is shards[1][1].obj
    crossing = image[3 * PART - 5 : 3 * PART + 5]
    assert crossing == bytes(shards[1][1][3 * PART - 5 : 3 * PART]) + bytes(shards[2][1][:5])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda shards: shards[:-1],
        lambda shards: [*shards, shards[0]],
        lambda shards: [replace(shards[0], shard=replace(shards[0].shard, digest="other")), *shards[1:]],
        lambda shards: [replace(shards[0], shard=replace(shards[0].shard, start=4 * PART)), *shards[1:]],
        lambda shards: [replace(shards[0], part_bytes=2 * PART), *shards[1:]],
        lambda shards: [replace(shards[0], lineage="0" * 12), *shards[1:]],
        lambda shards: [replace(shards[0], checksums=()), *shards[1:]],
        lambda shards: [replace(shards[0], shard=None, name=NAME), *shards[1:]],
        lambda shards: [replace(shards[0], nbytes=PART + 100), *shards[1:]],
        lambda _shards: [],
    ],
    ids=["missing", "twice", "plan", "gap", "parts", "lineage", "checksums", "no shard", "not padded", "none"],
)
def test_shards_that_do_not_fit_are_refused(spoil: Callable[[list[Manifest]], list[Manifest]]) -> None:
    with pytest.raises(CorruptSnapshotError):
        assemble(spoil([manifest for manifest, _ in ranges_of_one_file().values()]))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3 * PART)), min_size=1, max_size=5), st.integers(1, PART))
@settings(max_examples=25, deadline=None)
def test_any_shards_make_an_image_with_their_checksums(sizes: list[tuple[int, int]], end: int) -> None:
    writers, start, shards = len(sizes) + 1, 0, []
    for writer, (parts, own) in enumerate(sizes, start=1):
        files = [FileSpan("model.ckpt", 0, parts * PART)] if parts else []
        files.append(FileSpan(f"rank-{writer:05d}.pt", parts * PART, own))
        nbytes = -(-(parts * PART + own) // PART) * PART
        shards.append(shard(writer, writers, files, nbytes, start, fill=writer))
        start += parts * PART
    shards.append(shard(0, writers, [FileSpan("model.ckpt", 0, end)], -(-end // PART) * PART, start, fill=9))
    manifests = [manifest for manifest, _ in shards]
    whole = assemble(manifests)
    image = JoinedImage(sections(manifests), {m.shard.writer: data for m, data in shards if m.shard is not None})
    whole.verify(image[0 : len(image)], "the shards")
    assert whole.span_of("model.ckpt").nbytes == start + end


@given(st.integers(0, 2**40))
def test_padding_costs_little(nbytes: int) -> None:
    part = part_bytes_for(nbytes)
    assert part & (part - 1) == 0
    assert part <= max(LEAST_PART_BYTES, nbytes / 16)
