"""What of a module's attributes is kept where one of them cannot be, and what is no change at all."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_spot.exact.attributes import Attributes
from lightning_spot.exact.objects import Inside
from lightning_spot.exact.plain_values import is_same, mark, put
from tests.exact_kept import Longer
from tests.exact_table import Case, train
from tests.test_exact import Stop, StopAt, final


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


def inside(module: nn.Module) -> Inside:
    return Inside(list(module.modules()))


def changes(module: Own, change: Callable[[Any], Any]) -> tuple[dict[str, Any], set[str]]:
    """What is kept of a module that is changed, and what is named as lost."""
    before = Attributes(module, inside(module))
    module.count += 1
    change(module)
    return before.changed(module, (), inside(module)), before.lost


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
def test_what_can_be_had_only_where_the_program_makes_it_belongs_to_what_is_beside_it(value: Any) -> None:
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


def test_a_dictionary_whose_default_is_unknown_here_is_not_put_in_the_place_of_nothing() -> None:
    kept, _ = changes(Own(made=defaultdict(lambda: 5)), lambda module: module.made[1])
    there, nowhere = Own(made=defaultdict(lambda: 5)), Own(made=None)
    for module in (there, nowhere):
        put(module, "made", kept["made"], torch.device("cpu"), {})
    assert (dict(there.made), there.made[7], nowhere.made) == ({1: 5}, 5, None)


def turn(module: Any) -> None:
    module.phases[1] = Phase.SECOND
    module.by_name["a"] = (Phase.SECOND, 1)
    module.seen.update([Phase.SECOND])
    module.done.add(Phase.SECOND)


def test_enums_in_lists_dictionaries_and_sets_come_back() -> None:
    """One that changed kept all of the module's attributes from a resumed run; in a set, none was seen to change."""

    def make() -> Own:
        return Own(
            phases=[Phase.FIRST, Phase.FIRST],
            by_name={"a": (Phase.FIRST, 1)},
            seen=Counter({Phase.FIRST: 1}),
            done={Phase.FIRST},
        )

    module, again = make(), make()
    kept, lost = changes(module, turn)
    assert (kept.keys(), lost) == ({"count", "phases", "by_name", "seen", "done"}, set())
    enums = Attributes(again, inside(again)).enums
    for name in kept.keys() - {"count"}:
        put(again, name, kept[name], torch.device("cpu"), enums)
        assert getattr(again, name) == getattr(module, name)


def test_classes_of_one_name_are_not_taken_for_each_other() -> None:
    other = Enum("Phase", ["FIRST", "SECOND"])  # type: ignore[misc] # the name is the other's on purpose
    kept, lost = changes(Own(phases={1: Phase.FIRST, 2: other.FIRST}), lambda m: m.phases.update({1: Phase.SECOND}))
    assert kept.keys() <= {"training"}
    assert lost <= {"Own.phases"}


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
        before = Attributes(module, inside(module))
        for _ in range(3000):
            before.changed(module, (), inside(module))
    finally:
        stop.set()
        writing.join()
    assert before.lost == {"Own.feed"}


def test_many_arrays_are_known_again_without_copies_of_all_of_them() -> None:
    arrays = [np.zeros(2**17) for _ in range(100)]
    before = mark(arrays, most=1000)
    content = [each.content for each in before]
    assert all(sum(len(part) for part in parts if isinstance(part, bytes)) < 2**16 for parts in content)
    assert is_same(before, mark(arrays, most=1000))
    arrays[50][:] = 1
    assert not is_same(before, mark(arrays, most=1000))


def test_one_array_is_compared_whole() -> None:
    array = np.zeros(2**21)  # as large as is kept
    before = mark([array, 1, 2])
    array[12345] = 1
    assert not is_same(before, mark([array, 1, 2]))
    several = array.reshape(2**10, -1)[:, ::2]
    before = mark(several)
    assert is_same(before, mark(several))
    several[7, 7] = 1
    assert not is_same(before, mark(several))


@pytest.mark.parametrize(("given", "trained"), [(3, 4), (6, 6)])
def test_a_limit_that_a_hook_raised_comes_back_where_the_program_gives_none_of_its_own(
    given: int, trained: int, tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        train(Case(model=Longer), tmp_path, StopAt(13), seed=11)
    train(Case(model=Longer, settings={"max_epochs": given}), tmp_path, seed=200)
    assert final(tmp_path)["epoch"] == trained
