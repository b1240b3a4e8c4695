"""The table of state parts: what is captured, and at which stage each part of it is put back; generators."""

from __future__ import annotations

import gc
import io
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed.tensor
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_spot.sharded.file_plan import state_file
from lightning_spot.state import fit_state
from lightning_spot.state.compare import differences
from lightning_spot.state.dump import KEY, VERSION, Dump, in_present_form, packed, states_in_files, with_ranks
from lightning_spot.state.fit_state import PARTS, FitState, Stage
from lightning_spot.state.randomness import capture_random, restore_random


class Trainer(SimpleNamespace):
    """One to which there can be weak references."""


@pytest.fixture
def trainer() -> Any:
    return Trainer(lightning_module=torch.nn.Linear(1, 1))


def test_state_parts_have_unique_names_and_every_stage_has_one() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert {stage for part in PARTS for stage in part.restore} == set(Stage)


def test_a_hook_that_comes_twice_adds_one_listener(trainer: Any) -> None:
    """Lightning goes through a list of callbacks that one of them may change."""
    fit, listener = FitState(trainer), SimpleNamespace()
    for _ in range(2):
        fit.listen(listener)  # type: ignore[arg-type]
    assert fit.listeners == [fit, listener]


class Dotted(dict[str, Any]):
    """As many programs have one: ``copy.deepcopy`` gets a KeyError of it."""

    __getattr__ = dict.__getitem__


class Maker:
    """Its method makes items of a dict."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def make(self) -> Any:
        return self.item


class Locked(dict[str, Any]):
    def __copy__(self) -> Any:
        raise TypeError("it cannot be copied")


KEPT: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda item: {"a": item},
    "a list": lambda item: [item],
    "a tuple of lists": lambda item: ([item],),
    "a deque": lambda item: deque([item], maxlen=9),
    "a set": lambda item: {item},
    "an ordered dict": lambda item: OrderedDict(a=item),
    "a dict with a factory": lambda item: defaultdict(Maker(item).make, a=item),
    "counts": lambda item: Counter({item: 1}),
    "a class of the user's": lambda item: Dotted(a=item, b=[item]),
    "one that cannot be copied": lambda item: Locked(a=item),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_kept_state_has_the_tensors_of_training(kind: str) -> None:
    """A copy of a deque, such as a replay buffer, had copies of all tensors in it; of one in a graph there is none."""
    tensor = torch.ones(2, requires_grad=True) * 2
    value = KEPT[kind](tensor)
    state: dict[str, Any] = {"one": value, "two": value}
    state["itself"] = state
    kept = Dump(checkpoint=state, state={}, shared={}).kept().checkpoint
    assert kept["itself"] is kept is not state
    assert kept["two"] is kept["one"] or kind == "a tuple of lists"
    assert (kept["one"] is value) == (kind == "one that cannot be copied")
    assert type(kept["one"]) is type(value)
    items = kept["one"].values() if {"a"} <= {*getattr(kept["one"], "keys", list)()} else kept["one"]
    found = next(iter(items))
    assert (found[0] if isinstance(found, list) else found) is tensor
    state.clear()
    if kind != "one that cannot be copied":
        (value[0] if isinstance(value, tuple) else value).clear()
        assert len(kept["one"]) > 0
        assert kept["one"] != ([],)


def test_what_training_drops_from_a_module_is_freed(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights stayed in memory until the next snapshot."""
    monkeypatch.setattr(fit_state, "PARTS", ())
    module = trainer.lightning_module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    fit = FitState(trainer)
    fit.capture()
    dropped = weakref.ref(module[0])
    del module[0]
    gc.collect()
    assert dropped() is None


# -- generators --------------------------------------------------------------------------------------------------------


DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python's gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: np.random.rand(),
    "numpy's gauss": lambda: np.random.randn(),
    "torch": lambda: torch.rand(1),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests draw what they would have."""
    before = capture_random()
    yield
    restore_random(before)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_shows_in_the_next_snapshot_and_in_no_former_one(draw: str) -> None:
    first, before = capture_random(), capture_random()
    for _ in range(3):
        DRAWS[draw]()
        now = capture_random()
        assert differences(now, first) != []
    assert differences(first, before) == []
    drawn = [DRAWS[draw]() for _ in range(3)]
    restore_random(now)
    assert [DRAWS[draw]() for _ in range(3)] == drawn
    restore_random(first)
    assert differences(capture_random(), before) == []


def test_ranks_are_not_given_the_numbers_of_rank_0_again(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does when DTensors on GPUs first draw: once in a run, and once more in a resumed one."""
    made: list[tuple[Any, bool]] = []
    home = torch.distributed.tensor._random
    monkeypatch.setattr(home, "_rng_tracker", None)

    def make(mesh: Any, run_state_sync: bool = True) -> object:
        made.append((mesh, run_state_sync))
        return made

    monkeypatch.setattr(home, "OffsetBasedRNGTracker", make)
    trainer.strategy = ModelParallelStrategy()
    trainer.strategy._device_mesh = "mesh"
    fit, part = FitState(trainer), next(part for part in PARTS if part.name == "shared_random")
    restore = part.restore[Stage.FIRST_BATCH]
    assert part.capture(fit) is False
    restore(fit, False)
    assert made == []
    restore(fit, True)
    restore(fit, True)
    assert made == [("mesh", False)]
    assert part.capture(fit) is True


def test_parts_that_were_off_are_none_in_an_earlier_form_too() -> None:
    """A snapshot of the version before was refused."""
    ranks: list[dict[str, Any] | None] = [{"hooked": None, "loaders": None}, None]
    present = in_present_form({"version": 5, "lost": [], "ranks": ranks})
    assert present == {"version": VERSION, "lost": [], "ranks": ranks}


# -- what each rank knows beside the checkpoint ------------------------------------------------------------------------


@pytest.mark.guarantee("G10")
def test_states_in_one_file_are_values_again_when_they_are_read() -> None:
    """So users' files have them, and snapshots of earlier versions, with room behind each."""
    state = {"random": [1, 2], "mean": torch.ones(3)}
    with_room = torch.cat([packed(state), torch.zeros(5000, dtype=torch.uint8)])
    read = with_ranks({KEY: {"ranks": [state, packed(state), with_room, {"old": 1}]}})[KEY]["ranks"]
    assert [read[0], read[3]] == [state, {"old": 1}]
    for each in read[1:3]:
        assert each["random"] == [1, 2]
        assert torch.equal(each["mean"], state["mean"])


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("first", [[{"rank": 0}], []], ids=["beside a checkpoint", "of a model in shards"])
@pytest.mark.parametrize("world_size", [3, 2])
def test_a_rank_reads_the_files_that_it_needs(first: list[Any], world_size: int) -> None:
    files = {}
    for rank in range(3):
        data = io.BytesIO()
        torch.save({"rank": rank}, data)
        files[state_file(rank)] = memoryview(data.getvalue())
    shared = {"world_size": 3, "shares": 3, "ranks": first}
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": 1, "num_replicas": world_size})
    trainer = cast(Any, SimpleNamespace(world_size=world_size, global_rank=1, strategy=strategy))
    read: list[str] = []
    found = states_in_files(trainer, shared, lambda name: read.append(name) or files[name])  # type: ignore[func-returns-value]
    wanted = {0, 1} if world_size == 3 else {0, 1, 2}
    assert [each.get("rank") for each in found] == [rank if rank in wanted else None for rank in range(3)]
    assert read == [state_file(rank) for rank in sorted(wanted)[len(first) :]]
