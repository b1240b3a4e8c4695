"""What of a module's attributes is kept, what is named where it cannot be, and what is no change at all."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_spot.state.change_detector import ChangeDetector
from lightning_spot.state.compare import differences
from lightning_spot.state.module_state import Attributes, ModuleState, put


class Phase(Enum):
    FIRST = 1
    SECOND = 2


class Own(nn.Module):
    """A user's module, with a counter."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.net, self.count = nn.Linear(2, 2), 0
        vars(self).update(attributes)


class Meter:
    """A user's object."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def detector(module: nn.Module) -> ChangeDetector:
    return ChangeDetector(list(module.modules()))


def changes(module: Own, change: Callable[[Any], Any]) -> tuple[dict[str, Any], set[str]]:
    """What is kept of a module that is changed, and what is named as lost."""
    before = Attributes("", module, detector(module))
    module.count += 1
    change(module)
    return before.changed(module, set(), detector(module)), before.lost


def dead() -> Any:
    """A proxy of something that is gone."""
    gone = Meter()
    return weakref.proxy(gone)


class Irrep(tuple[Any, ...]):
    """A tuple without a length, as e3nn's are."""

    def __len__(self) -> int:
        raise NotImplementedError


class Refuses:
    """An object that does not let its attributes be seen."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


OF_PROCESS: list[Any] = [torch.default_generator, random.seed.__self__, np.random.mtrand._rand]  # type: ignore[attr-defined]


def draws(_module: Any) -> None:
    torch.rand(1)
    random.random()
    np.random.rand()


def nothing(_module: Any) -> None:
    """Only the counter changes."""


def step(module: Any) -> None:
    """As an optimizer does."""
    with torch.no_grad():
        module.net.weight.add_(1)


def hides(**attributes: Any) -> Callable[[], Own]:
    """A module in which something else knows its parts; made anew each time."""

    def make() -> Own:
        module = Own()
        vars(module).update({name: of(module.net) for name, of in attributes.items()})
        return module

    return make


@pytest.mark.parametrize(
    ("make", "change", "lost"),
    [
        (lambda: Own(drawn=random.SystemRandom()), nothing, ""),
        (lambda: Own(owner=dead()), nothing, ""),
        (lambda: Own(irrep=Irrep((1, -1))), nothing, ""),
        (lambda: Own(irreps=[Irrep((1, -1))], refuses=Refuses()), nothing, ""),
        (lambda: Own(one=torch.zeros(1, dtype=torch.int64).as_strided((1,), (0,))), nothing, ""),
        *[(lambda held=held: Own(drawn=held), draws, "") for held in OF_PROCESS],
        (lambda: Own(drawn=OF_PROCESS, sampler=Meter(generator=OF_PROCESS[0])), draws, ""),
        (lambda: Own(drawn=[random.Random(1)]), lambda m: m.drawn[0].random(), "drawn"),
        (lambda: Own(drawn={"a": torch.Generator()}), lambda m: m.drawn["a"].manual_seed(3), "drawn"),
        (lambda: Own(seen=Counter()), lambda m: m.seen.update([Phase.SECOND]), "seen"),
        (lambda: Own(cache=OrderedDict()), lambda m: m.cache.update(a=Meter()), "cache"),
        (lambda: Own(made=defaultdict(list)), lambda m: m.made["a"].append(Meter()), "made"),
        (lambda: Own(seen={1}), lambda m: m.seen.add(2), "seen"),
        (lambda: Own(array=np.array([None])), lambda m: setattr(m, "array", np.array([[None]])), "array"),
        (lambda: Own(phase=Phase.FIRST), lambda m: setattr(m, "phase", Phase.SECOND), "phase"),
        (lambda: Own(recent=deque([1], maxlen=2)), lambda m: m.recent.append(2), "recent"),
        (lambda: Own(mapped=np.zeros(3).view(np.matrix)), lambda m: m.mapped.fill(1), ""),
        (hides(parts=lambda net: [net]), step, ""),
        (hides(parts=lambda net: list(net.parameters())), step, ""),
        (hides(loss=lambda net: Meter(net=net)), step, ""),
        (hides(loss=lambda net: Meter(clipped=list(net.parameters()))), step, ""),
        (hides(loss=lambda net: Meter(wrapped=nn.Sequential(net))), step, ""),
    ],
)
def test_a_counter_beside_it_comes_back(make: Callable[[], Own], change: Callable[[Any], Any], lost: str) -> None:
    kept, named = changes(make(), change)
    assert {name: kept[name] for name in kept.keys() - {lost}} == {"count": 1}
    assert named == ({f"Own.{lost}"} if lost else set())


@pytest.mark.parametrize("value", [random.Random(1), torch.Generator(), Phase.SECOND, defaultdict(lambda: 5)])
def test_a_value_only_the_program_makes_leaves_its_flag_unsaved(value: Any) -> None:
    """Else a flag would say that it is there already, and it is not."""
    kept, _ = changes(Own(made=None, is_made=False), lambda module: vars(module).update(made=value, is_made=True))
    assert kept == {}


def test_a_teacher_is_named_that_knows_a_part_of_the_model() -> None:
    teacher = nn.Linear(2, 2)

    def learn(module: Own) -> None:
        step(module)
        with torch.no_grad():
            teacher.weight.add_(module.net.weight)

    module = Own()
    vars(module).update(held=[nn.ModuleList([teacher, module.net])])
    assert changes(module, learn) == ({"count": 1}, {"Own.held"})


def test_another_thread_may_write_to_what_is_looked_at() -> None:
    module, stop = Own(feed=Meter(queue=deque(range(30), maxlen=40), known={})), threading.Event()

    def feed() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            module.feed.queue.append(number)
            module.feed.known[number % 60] = number
            if len(module.feed.known) > 50:
                module.feed.known.clear()

    writing = threading.Thread(target=feed)
    writing.start()
    try:
        before = Attributes("", module, detector(module))
        for _ in range(3000):
            before.changed(module, set(), detector(module))
    finally:
        stop.set()
        writing.join()
    assert before.lost == {"Own.feed"}


KEPT: list[Any] = [
    2.5,
    "text",
    b"bytes",
    None,
    torch.arange(3.0),
    [torch.ones(2), torch.zeros(2)],
    [1, (2, "a"), {"b": [None, 3.0]}],
    {(0, 1): 2.0, "c": {3: [torch.ones(1)]}},
    [*range(100), 2**63 + 1],  # NumPy makes floats of these
]


@pytest.mark.parametrize("value", KEPT, ids=[type(value).__name__ + str(number) for number, value in enumerate(KEPT)])
def test_plain_values_come_back_from_a_file_read_by_torch_alone(value: Any, tmp_path: Path) -> None:
    kept, lost = changes(Own(held=0), lambda module: setattr(module, "held", value))
    torch.save(kept, tmp_path / "kept.pt")
    again = Own(held=0)
    for name, saved in torch.load(tmp_path / "kept.pt", weights_only=True).items():
        put(again, name, saved, torch.device("cpu"))
    assert lost == set()
    assert differences({"held": again.held}, {"held": value}) == []
    assert again.count == 1


def test_a_view_of_a_buffer_stays_one() -> None:
    """The view was replaced by a copy, which training did not change any more."""
    module = Own()
    module.register_buffer("seen", torch.zeros(4))
    module.first = module.seen[:2]
    kept, _ = changes(module, lambda module: module.seen.add_(1))
    put(module, "first", kept["first"], torch.device("cpu"))
    module.seen.add_(1)
    assert module.first.tolist() == [2, 2]


def test_what_is_put_back_is_put_into_lists_that_others_hold() -> None:
    kept, _ = changes(Own(held=[1], known={}), lambda module: (module.held.append(2), module.known.update(a=1)))
    again = Own(held=[], known={"b": 2})
    held, known = again.held, again.known
    for name, saved in kept.items():
        put(again, name, saved, torch.device("cpu"))
    assert (held, known) == ([1, 2], {"a": 1})


@pytest.mark.parametrize("large", [False, True])
def test_a_change_in_an_array_is_seen(large: bool) -> None:
    array = np.zeros(2**21 if large else 2**16)
    detect = detector(Own())
    before = detect.stamp([array, 1])
    assert before == detect.stamp([array, 1])
    array[:: 7 if large else 2**15] = 1
    assert before != detect.stamp([array, 1])


def test_only_the_length_of_a_large_inner_container_is_checked() -> None:
    """A tokenizer's vocabulary has tens of thousands of items, and each snapshot would walk over them."""
    module = Own(tokenizer=Meter(vocabulary=dict.fromkeys(range(65))))
    before = Attributes("", module, detector(module))
    module.tokenizer.vocabulary[0] = 1
    before.changed(module, set(), detector(module))
    assert before.lost == set()
    module.tokenizer.vocabulary[65] = 1
    before.changed(module, set(), detector(module))
    assert before.lost == {"Own.tokenizer"}


@pytest.mark.parametrize("change", ["training", "number", "kind", "more", "own-method"])
def test_a_module_keeps_what_has_changed(change: str) -> None:
    module: Any = nn.LayerNorm(2) if change != "own-method" else Own()
    known = Attributes("", module, detector(module))
    assert known.changed(module, set(), detector(module)) == {}
    expected = {
        "training": {"training": False},
        "number": {"eps": 1e-3},
        "kind": {"normalized_shape": 7},
        "more": {"counter": 0},
        "own-method": {"count": 3},
    }[change]
    vars(module).update(expected)
    if change == "own-method":  # Lightning puts ``forward`` there for DDP, in the first step
        module.forward = module.forward
    assert known.changed(module, set(), detector(module)) == expected
    assert known.lost == set()


def test_what_hooks_change_beside_scripted_modules_is_found() -> None:
    root: Any = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    trainer: Any = SimpleNamespace(
        lightning_module=root,
        callbacks=[],
        datamodule=None,
        optimizers=[],
        lr_scheduler_configs=[],
        precision_plugin=None,
    )
    state = ModuleState()
    state.begin(trainer)
    assert not state.capture(trainer, root.named_modules())["trains"]
    root[1].weight.requires_grad_(False)
    root[1].counter = 3
    found = state.capture(trainer, root.named_modules())
    assert (found["trains"], found["attributes"]) == ({"1.weight": False}, {"1": {"counter": 3}})


def test_a_scaler_that_a_program_keeps_is_seen_to_change() -> None:
    module: Any = Own()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))  # makes what it keeps
    before = detector(module).stamp(scaler)
    assert detector(module).stamp(scaler) == before
    scaler.update(4.0)
    assert detector(module).stamp(scaler) != before


def test_attributes_that_torch_adds_to_fsdp2_modules_are_ignored() -> None:
    module: Any = Own()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert any(type(value) is OrderedDict for value in vars(module).values())
    before = Attributes("", module, detector(module))
    module.count = 3
    assert before.changed(module, set(), detector(module)) == {"count": 3}
    assert before.lost == set()
