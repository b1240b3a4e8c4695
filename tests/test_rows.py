"""Rows of objects are looked at by C as by Python: both find whatever has changed, and nothing that has not."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_spot.image import rows

compiled = pytest.mark.skipif(rows._compiled is None, reason="installed where there was no compiler")


@pytest.fixture(params=[pytest.param("C", marks=compiled), "Python"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who looks."""
    if request.param == "Python":
        monkeypatch.setattr(rows, "_compiled", None)
    return str(request.param)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Like(torch.Tensor):
    """Answers for itself what torch is asked of it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        if name in ("_version", "requires_grad"):
            return {"_version": 1234, "requires_grad": True}[name]
        return super().__torch_function__(function, types, arguments, options or {})


def test_the_same_objects_have_the_same_identities_and_others_have_not(by: str) -> None:
    one, other = [1.5], [1.5]
    row = [one, other, None]
    assert rows.identities(row) == rows.identities([one, other, None])
    for changed in ([other, one, None], [one, other], [one, other, None, None], [one, [1.5], None], []):
        assert rows.identities(changed) != rows.identities(row)


def test_kinds_are_classes_themselves_and_each_counts(by: str) -> None:
    row: list[Any] = [torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), torch.zeros(2), 1, True]
    kinds = [torch.Tensor, torch.nn.Parameter, torch.Tensor, int, bool]
    assert rows.kinds_of(row) == set(kinds)
    assert rows.kinds_of([]) == set()
    assert rows.are_of_kinds(row, kinds)
    for number in range(len(row)):
        assert not rows.are_of_kinds(row, [*kinds[:number], Like, *kinds[number + 1 :]])  # a subclass neither
        assert not rows.are_of_kinds([*row[:number], "text", *row[number + 1 :]], kinds)
    assert not rows.are_of_kinds([True], [int])
    assert not rows.are_of_kinds(row[:-1], kinds)
    assert not rows.are_of_kinds(row, kinds[:-1])


def test_what_objects_hold_is_found_and_plain_tensors_hold_nothing(by: str) -> None:
    tensor, parameter, inner = torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), torch.zeros(1)
    tensor.held = parameter.held = "never asked for"  # type: ignore[attr-defined]
    other = torch.zeros(1).as_subclass(Like)
    other.held = inner  # type: ignore[attr-defined]
    found = rows.unwrapped([Holder(inner), tensor, parameter, 7, other], "held")
    assert list(map(id, found)) == list(map(id, [inner, tensor, parameter, 7, inner]))
    with pytest.raises(ZeroDivisionError):
        rows.unwrapped([type("Raises", (), {"held": property(lambda _: 1 // 0)})()], "held")


def test_each_attribute_counts(by: str) -> None:
    values: list[Any] = [object(), None, 2.5]
    row: list[Any] = list(map(Holder, values))
    assert rows.have(row, "held", values)
    for number in range(len(row)):
        row[number].held = 2.5 + number - number  # equal to one of them at most
        assert not rows.have(row, "held", values)
        row[number].held = values[number]
    with pytest.raises(AttributeError):
        rows.have([object()], "held", [None])
    with pytest.raises(ValueError, match=r"length|shorter|longer"):
        rows.have(row, "held", values[:-1])


def test_what_is_gone_or_another_is_not_what_a_reference_gives(by: str) -> None:
    objects: list[Any] = [Holder(1), Holder(2)]
    references: list[Any] = list(map(weakref.ref, objects))
    assert rows.are_given_by(references, objects)
    assert not rows.are_given_by(references, objects[::-1])
    assert not rows.are_given_by(references, [objects[0], Holder(2)])
    with pytest.raises(ValueError, match=r"length|shorter|longer"):
        rows.are_given_by(references, objects[:1])
    last = objects.pop()
    del last
    gc.collect()
    assert not rows.are_given_by(references, [objects[0], Holder(2)])
    assert not rows.are_given_by([lambda: None], [objects[0]])


def test_numbers_are_those_of_each(by: str) -> None:
    row = list(map(Holder, [3, -4, 2**47, True, 0]))
    said = rows.numbers(row, "held")
    assert rows.each_of(said) == [3, -4, 2**47, 1, 0]
    assert rows.said_of([3, -4, 2**47, 1, 0]) == said != rows.said_of([3, -4, 2**47, 1, 1])
    for each in row:
        before, each.held = each.held, 5
        assert rows.numbers(row, "held") != said
        each.held = before
    assert rows.numbers(row, "held") == said
    assert rows.numbers(row[:-1], "held") != said
    with pytest.raises(AttributeError):
        rows.numbers([Holder(1), object()], "held")


def test_methods_are_called_one_after_the_other(by: str) -> None:
    row = ["A", "B"]
    assert rows.called(row, "lower") == ["a", "b"]
    with pytest.raises(AttributeError):
        rows.called(row, "nothing")
    held = object()
    before = sys.getrefcount(held)
    for _ in range(100):
        rows.called([{1: held}], "copy")
    assert sys.getrefcount(held) == before


def tables() -> list[Any]:
    return [{"a": VALUES[0], "b": VALUES[1]}, {}, {"c": VALUES[2]}]


VALUES = [Holder(0), None, Holder(2)]
KEY = "".join(["of", " its", " own"])


@pytest.mark.parametrize("kind", [dict, OrderedDict], ids=["dicts", "mappings"])
@pytest.mark.parametrize(
    ("change", "is_still"),
    [
        (lambda found: None, True),
        (lambda found: found[0].update(b=VALUES[1]), True),
        (lambda found: found[0].update(a=Holder(0)), False),
        (lambda found: found[0].update(b=VALUES[2]), False),
        (lambda found: found[0].pop("b"), False),
        (lambda found: found[1].update(d=VALUES[0]), False),
        (lambda found: found[2].update({"e": found[2].pop("c")}), False),
        (lambda found: found[0].update(a=found[0].pop("a")), False),  # in another order
        (lambda found: found.reverse(), False),
        (lambda found: found.pop(), False),
        (lambda found: (found[0].pop("b"), found[1].update(b=VALUES[1])), False),  # in another table
    ],
)
def test_each_entry_of_tables_counts_and_so_does_their_order(by: str, kind: Any, change: Any, is_still: bool) -> None:
    found = list(map(kind, tables()))
    entries = rows.Entries(found)
    change(found)
    assert entries.are_in(found) == is_still


def test_a_key_does_not_take_the_place_of_one_that_is_gone(by: str) -> None:
    table = {f"key {0}{1}": VALUES[0]}
    entries = rows.Entries([table])
    for number in range(100):  # one of them would have the address that the first one had
        table.clear()
        table[f"key {number:02}"] = VALUES[0]
        assert entries.are_in([table]) <= (number == 1)


def test_tables_hold_nothing_alive_but_keys(by: str) -> None:
    held = Holder(1)
    alive, table = weakref.ref(held), {KEY: held}
    before = sys.getrefcount(held), sys.getrefcount(table)
    entries = rows.Entries([table])
    for _ in range(1000):
        assert entries.are_in([table])
    assert (sys.getrefcount(held), sys.getrefcount(table)) == before
    table.clear()
    del held
    assert alive() is None


@pytest.mark.parametrize("kind", [dict, OrderedDict], ids=["dicts", "mappings"])
def test_what_is_under_a_key_is_found(by: str, kind: Any) -> None:
    found = rows.under([kind(a=VALUES[0], b=1), kind(b=2), kind(a=None)], "a")
    assert found == [VALUES[0], None, None]
    assert rows.values_in(list(map(kind, tables()))) == VALUES
    assert rows.values_in([]) == []


@pytest.mark.parametrize("kind", [dict, OrderedDict], ids=["dicts", "mappings"])
def test_values_are_held_under_their_keys_and_there_are_no_more(by: str, kind: Any) -> None:
    found: list[Any] = [kind(a=1.5, b=None), kind(c=VALUES[0], d=VALUES[2])]
    values: list[Any] = [(found[0]["a"], None), (VALUES[2],)]
    seen: Any = ([2, 2], [("a", "b"), ("d",)], values)
    assert rows.hold(found, *seen)
    found[1]["c"] = 3  # does not count
    assert rows.hold(found, *seen)
    changes: list[dict[str, Any]] = [{"a": 1.5 * (1 + len(KEY) * 0)}, {"b": 0}, {"e": 1}]
    for change in changes:
        assert not rows.hold([kind({**found[0], **change}), found[1]], *seen)
    assert not rows.hold(
        [kind(a=found[0]["a"], c=None), found[1]], *seen
    )  # a value that is none, and a key that is gone
    assert not rows.hold([found[0], kind(c=1, d=VALUES[0])], *seen)
    assert not rows.hold([found[0], kind(c=1, d=VALUES[2], f=1)], *seen)
    assert not rows.hold([found[0], kind(d=VALUES[2])], *seen)  # one is gone that does not count


class Unlike:
    """Equal to everything, and itself only."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Refuses:
    """A key in the place of a text, with which nothing can be compared."""

    def __hash__(self) -> int:
        return hash(KEY)

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


def test_what_is_equal_is_not_the_same(by: str) -> None:
    one, other = Unlike(), Unlike()
    assert not rows.have([Holder(one)], "held", [other])
    assert not rows.are_given_by([lambda: one], [other])
    assert not rows.hold([{"a": one}], [1], [("a",)], [(other,)])
    assert rows.identities([one]) != rows.identities([other])


def test_an_order_of_its_own_is_that_of_the_mapping(by: str) -> None:
    table = OrderedDict(a=VALUES[0], b=VALUES[2])
    entries = rows.Entries([table])
    table.move_to_end("a")  # behind the back of what is a dict in it
    assert not entries.are_in([table])
    assert rows.values_in([table]) == [VALUES[2], VALUES[0]]


def test_what_a_mapping_gives_is_asked_for(by: str) -> None:
    class Given(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return VALUES[2]

        def get(self, key: str, default: Any = None) -> Any:
            return VALUES[2]

    assert rows.under([Given(a=1)], "a") == [VALUES[2]]
    assert rows.hold([Given(a=1)], [1], [("a",)], [(VALUES[2],)])


def test_errors_of_what_is_asked_are_raised(by: str) -> None:
    class Meta(type):
        def __hash__(cls) -> int:
            raise ZeroDivisionError

    raising = type("Raising", (), {"held": property(lambda _: 1 // 0), "call": lambda _: 1 // 0})()
    for ask in (
        lambda: rows.kinds_of([Meta("Unhashable", (), {})()]),
        lambda: rows.have([raising], "held", [1]),
        lambda: rows.numbers([raising], "held"),
        lambda: rows.called([raising], "call"),
        lambda: rows.are_given_by([raising.call], [1]),
        lambda: rows.under([{Refuses(): 1}], KEY),  # type: ignore[dict-item]
        lambda: rows.hold([{Refuses(): 1}], [1], [(KEY,)], [(1,)]),  # type: ignore[dict-item]
    ):
        with pytest.raises(ZeroDivisionError):
            ask()


@pytest.mark.parametrize("kind", [dict, OrderedDict], ids=["dicts", "mappings"])
def test_rows_of_different_lengths_are_refused(by: str, kind: Any) -> None:
    tables = [kind(a=1)]
    for lengths, keys, values in (
        ([1], [("a",), ("a",)], [(1,)]),
        ([1], [("a",)], [(1,), (1,)]),
        ([1], [("a",)], []),
        ([1], [("a",)], [(1, 2)]),
        ([1], [("a", "b")], [(1,)]),
    ):
        with pytest.raises(ValueError, match=r"length|shorter|longer"):
            rows.hold(tables, lengths, keys, values)


@compiled
def test_c_needs_as_many_lengths_as_tables() -> None:
    for lengths in ([], [1, 1]):
        with pytest.raises(ValueError, match="length"):
            rows.hold([{"a": 1}], lengths, [("a",)], [(1,)])


class Shortens:
    """Takes things out of rows while it is asked."""

    def __init__(self, *of: list[Any]) -> None:
        self.of = of

    @property
    def held(self) -> int:
        for row in self.of:
            row.clear()
        return 1

    def call(self) -> int:
        return self.held


@compiled
def test_a_row_that_becomes_shorter_ends_the_look_and_nothing_else() -> None:
    class Meta(type):
        row: list[Any]

        def __hash__(cls) -> int:
            Meta.row.clear()
            return 7

    c = rows._compiled
    Meta.row = row = [Meta("Clears", (), {})(), *map(Holder, range(9))]
    assert len(c.kinds_of(row)) == 1
    for ask in ("unwrapped", "called"):
        row = [None] * 9
        row[0] = Shortens(row)
        more = (int, str) if ask == "unwrapped" else ()
        assert getattr(c, ask)(row, "held" if more else "call", *more) == [1]
    row = [None] * 9
    row[0] = Shortens(row)
    with pytest.raises(IndexError):
        c.numbers(row, "held")
    for which in ([0], [1], [0, 1]):
        asked: list[Any] = [Holder(1)] * 9
        values: list[Any] = [1] * 9
        asked[0] = Shortens(*([asked, values][number] for number in which))
        with pytest.raises(IndexError):
            c.have(asked, "held", values)
        asked, values = [lambda: 1] * 9, [1] * 9
        asked[0] = Shortens(*([asked, values][number] for number in which)).call
        with pytest.raises(IndexError):
            c.are_given_by(asked, values)


class Vanishes:
    """Is held by a row only, and leaves it when it is asked; then it is asked once more."""

    def __init__(self, row: list[Any]) -> None:
        self.row, self.number = row, 7

    def __getattribute__(self, name: str) -> Any:
        if name in ("held", "call"):
            self.row.clear()
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        number = self.number
        return number if name == "held" else lambda: number


@compiled
def test_what_is_asked_lives_as_long_as_it_is_asked() -> None:
    c, row = rows._compiled, list[Any]()
    for look, found in (
        (lambda: c.unwrapped(row, "held", int, str), [7]),
        (lambda: c.have(row, "held", [7]), True),
        (lambda: rows.each_of(c.numbers(row, "held")), [7]),
        (lambda: c.called(row, "call"), [7]),
    ):
        row.append(Vanishes(row))
        assert look() == found


@compiled
def test_tables_that_become_fewer_while_keys_are_compared_end_the_look() -> None:
    class Clears(Refuses):
        def __init__(self, *of: list[Any]) -> None:
            self.of = of

        def __eq__(self, other: object) -> bool:
            for row in self.of:
                row.clear()
            return False

        __hash__ = Refuses.__hash__

    c = rows._compiled
    tables: list[Any] = [{} for _ in range(9)]
    tables[0] = {Clears(tables): 1}
    kept = list(tables)
    assert c.under(tables, KEY) == [None]
    for number in range(4):
        look: list[list[Any]] = [list(kept), [1] + [0] * 8, [()] * 9, [()] * 9]
        key = Clears()
        kept[0] = look[0][0] = {key: 1, KEY: KEY}
        names = values = (KEY,)
        look[1][0], look[2][0], look[3][0] = 2, names, values
        key.of = (look[number],)
        with pytest.raises((IndexError, SystemError)):
            c.hold(*look)


@compiled
def test_what_a_comparison_takes_out_of_its_row_lives_until_the_look_is_over() -> None:
    """Else another object may be in its place in memory, and that one be looked at."""

    class Takes(Refuses):
        def __init__(self, row: list[Any], other: Callable[[], object]) -> None:
            self.row, self.other = row, other

        def __eq__(self, asked: object) -> bool:
            self.row.clear()
            self.made = self.other()
            return False

        __hash__ = Refuses.__hash__

    c, there, other = rows._compiled, object(), object()
    tables: list[Any] = []
    tables.append({Takes(tables, lambda: {KEY: other}): 1})
    assert c.under(tables, KEY) == [None]
    tables.append({Takes(tables, lambda: {KEY: there}): 1})
    assert not c.hold(tables, [1], [(KEY,)], [(there,)])
    for taken, made in (("names", (KEY, "c")), ("were", (there, other))):
        rows_of = {"names": [tuple([KEY, "b"])], "were": [tuple([there, there])]}
        key = Takes([], lambda: None)
        tables = [{key: 1, KEY: there, "b": there}]  # to make it compares them, too
        key.row, key.other = rows_of[taken], functools.partial(tuple, list(made))
        assert c.hold(tables, [3], rows_of["names"], rows_of["were"])


def test_nothing_is_kept_and_nothing_let_go(by: str) -> None:
    number, name, other = 2**40, KEY, "".join(["an", "other"])
    held = Holder(number)
    holder, table = Holder(held), {KEY: held}
    reference = Shortens().call  # gives 1
    looks: list[Any] = [
        lambda: rows.identities([holder, held]),
        lambda: rows.kinds_of([holder, held, table]),
        lambda: rows.are_of_kinds([holder], [Holder]),
        lambda: rows.unwrapped([holder, held, table], "held"),
        lambda: rows.have([holder, holder], "held", [held, held]),
        lambda: rows.have([holder], "held", [table]),
        lambda: rows.numbers([held, held], "held"),
        lambda: rows.called([table], "copy"),
        lambda: rows.are_given_by([lambda: held], [held]),
        lambda: rows.are_given_by([lambda: held], [table]),
        lambda: rows.Entries([table, table]).are_in([table, table]),
        lambda: rows.values_in([table, table]),
        lambda: rows.under([table, {}], KEY),
        lambda: rows.hold([table], [1], [(KEY,)], [(held,)]),
        lambda: rows.hold([table], [1], [(other,)], [(held,)]),
    ]
    failing: list[Any] = [lambda: rows.numbers([held, table], "held"), lambda: rows.called([held], "held")]
    objects = [holder, held, number, table, name, other, reference]

    def count() -> list[int]:
        return list(map(sys.getrefcount, objects))

    for look in looks:
        look()
        before = count()
        for _ in range(50):
            look()
        assert [now - was for was, now in zip(before, count(), strict=True)] == [0] * len(objects)
    for look in failing:
        before, blocks = count(), sys.getallocatedblocks()
        for _ in range(500):
            with suppress(AttributeError, TypeError):
                look()
        assert [now - was for was, now in zip(before, count(), strict=True)] == [0] * len(objects)
        assert sys.getallocatedblocks() - blocks < 250


@compiled
@pytest.mark.parametrize("what", [None, 7, "text", (1, 2)])
def test_c_refuses_what_is_no_row(what: Any) -> None:
    """By the error after which Python looks, where it may be a row of something else."""
    c = rows._compiled
    for refused in (
        lambda: c.identities(what),
        lambda: c.kinds_of(what),
        lambda: c.entries(what),
        lambda: c.values_in(what),
        lambda: c.are_of_kinds(what, []),
        lambda: c.unwrapped(what, "held", int, str),
        lambda: c.have([], "held", what),
        lambda: c.are_given_by(what, []),
        lambda: c.hold([], what, [], []),
        lambda: c.hold([{}], [str(what)], [("a",)], [(1,)]),
        lambda: c.numbers(what, "held"),
        lambda: c.called(what, "held"),
        lambda: c.under(what, "held"),
        lambda: c.under([OrderedDict()], "held"),
        lambda: c.numbers([Holder("text")], "held"),
    ):
        with pytest.raises(TypeError):
            refused()
    for wrong in (
        lambda: c.hold([{}], [0], [("a",)], [()]),
        lambda: c.numbers([Holder(2**64)], "held"),
        lambda: c.hold([{"a": 1}], [1], [what if type(what) is not tuple else []], [(1,)]),
    ):
        with pytest.raises((ValueError, OverflowError, SystemError)):
            wrong()


# -- what tensors say -------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded() -> Iterator[Any]:
    """Makes DTensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda: distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    dist.destroy_process_group()


def test_of_dtensors_it_is_said_what_each_says_itself(sharded: Any, by: str) -> None:
    row = [sharded(), torch.nn.Parameter(sharded()), torch.zeros(1), torch.nn.Parameter(torch.zeros(1))]
    row.append(torch.nn.Parameter(sharded(), requires_grad=False))
    assert rows.each_of(rows.versions_of(row)) == [tensor._version for tensor in row]
    assert rows.each_of(rows.which_train(row)) == [False, True, False, True, False]
    for number, tensor in enumerate(row):
        before = rows.each_of(rows.versions_of(row))
        with torch.no_grad():
            tensor.add_(1)
        after = rows.each_of(rows.versions_of(row))
        assert [now - was for was, now in zip(before, after, strict=True)] == [
            int(n == number) for n in range(len(row))
        ]
        assert after == [each._version for each in row]
        tensor.requires_grad_(not tensor.requires_grad)
        assert rows.each_of(rows.which_train(row)) == [each.requires_grad for each in row]


def test_a_class_that_answers_for_itself_is_asked(sharded: Any, by: str) -> None:
    own = torch.zeros(1).as_subclass(Like)
    for row in ([own], [sharded(), own], [torch.zeros(1), own]):
        assert rows.each_of(rows.versions_of(row)) == [tensor._version for tensor in row]
        assert rows.each_of(rows.versions_of(row))[-1] == 1234
        assert rows.each_of(rows.which_train(row))[-1]


def test_an_older_torch_is_asked_as_others_are(sharded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = [sharded(), torch.nn.Parameter(sharded())]
    said = rows.versions_of(row), rows.which_train(row)
    monkeypatch.setattr(rows, "_NO_OVERRIDE", None)
    assert (rows.versions_of(row), rows.which_train(row)) == said


def test_asking_leaves_everything_as_it_was(sharded: Any, by: str) -> None:
    row = [sharded()]
    assert torch._C._is_torch_function_enabled()
    with torch.inference_mode():
        row.append(torch.zeros(1))
    with pytest.raises(RuntimeError):
        rows.versions_of(row)
    assert torch._C._is_torch_function_enabled()
