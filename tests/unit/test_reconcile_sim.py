"""A simulation with a clock of its own over what places do; defects that are planted in that are found."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_spot.server import reconcile
from lightning_spot.server.reconcile import Kind, Servers
from lightning_spot.server.slots import Mark, View
from tests.support.reconcile_model import simulate

pytestmark = pytest.mark.guarantee("G3")

SEEDS = 200
THOUSANDS = [
    pytest.param(range(first, first + 1000), marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
    for first in range(0, 10_000, 1000)
]


@pytest.mark.parametrize("seeds", [range(SEEDS), *THOUSANDS], ids=str)
def test_whatever_happens_nothing_is_lost_mixed_or_left_over(seeds: range) -> None:
    assert [problem for seed in seeds if (problem := simulate(seed))] == []


def nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def anything_may_go(view: View, _now_s: float) -> list[Any]:
    return [slot for slot in view.slots if not slot.readers]


def what_is_owed_may_go(view: View, now_s: float) -> list[Any]:
    groups = {slot for group in view.groups if group.is_evictable(now_s) for slot in group.slots}
    newest = {slot for slot in view.newest if Mark.SAFE not in slot.seen.values()}
    return [slot for slot in view.slots if (slot in groups or slot in newest) and not slot.readers]


def all_writers_whatever_they_say(servers: Servers) -> Any:
    for name, shown in {name: shown[0] for each in servers.all for name, shown in each.shown.items()}.items():
        if shown.shard is not None and len(servers.registers(name)) == shown.shard.writers:
            yield shown.lineage, shown.order


def without(kind: Kind, real: Any = reconcile.actions) -> Any:
    return lambda *about: [action for action in real(*about) if action.kind is not kind]


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (reconcile, "expected", nothing),
        (reconcile, "unknown", nothing),
        (reconcile, "actions", without(Kind.PUT_SHARDS)),
        (reconcile, "actions", without(Kind.LOOK)),
        (Servers, "is_nobody", property(lambda _: False)),
        (Servers, "committed", all_writers_whatever_they_say),
        (View, "reusable", anything_may_go),
        (View, "reusable", what_is_owed_may_go),
    ],
    ids=[
        "what a server lost is not sent again",
        "it is not learned what is durable",
        "shards are not brought to storage",
        "no register is looked at",
        "nobody stands in for a server",
        "plans are not compared",
        "the newest gives way",
        "the newest gives way before it is safe",
    ],
)
def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, defect: Any) -> None:
    monkeypatch.setattr(owner, name, defect)
    assert any(simulate(seed) for seed in range(150))
