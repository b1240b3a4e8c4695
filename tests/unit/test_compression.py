"""When packing pays: the rule over a simulated link and simulated processors, from 0.1 to 25 Gbit/s."""

from __future__ import annotations

import random

import pytest

from lightning_spot.client import encoding
from lightning_spot.client.encoding import PROBE_BYTES, CompressionRule

LANES = 4
PART = 8 * 2**20
PARTS = 126  # of a snapshot of about 1 GB
PACK_S = 1.0 / 2**30  # of one processor, for each byte
UNPACK_S = 0.6 / 2**30
RATIOS = (0.61, 0.83, 0.52)  # weights and the two moments of AdamW


SEND_S = 0.35 / 2**30
"""Of a processor, for each byte, on a machine that is sender, link and receiver at once."""


class Lane:
    """One connection: it packs, sends, and waits until the receiver has unpacked, one after another."""

    def __init__(self, index: int, *, packs: bool, probes: bool) -> None:
        self.index, self.packs = index, packs
        self.ratio = RATIOS[index * len(RATIOS) // PARTS]
        pack_s = PACK_S * (PART if packs else PROBE_BYTES if probes else 0)
        self.stages = [["cpu", pack_s], ["wire", PART * (self.ratio if packs else 1.0)]]
        self.stages += [["far", UNPACK_S * PART]] if packs else []
        self.probes = probes
        self.spent = {"cpu": 0.0, "wire": 0.0, "far": 0.0}

    def done(self, rule: CompressionRule) -> None:
        if self.probes:
            rule.probed(PROBE_BYTES, int(self.ratio * PROBE_BYTES), self.spent["cpu"])
        if self.packs:
            rule.packed(PART, int(self.ratio * PART), self.spent["cpu"])
        rule.sent(int(PART * (self.ratio if self.packs else 1.0)), self.spent["wire"] + self.spent["far"])


def snapshot_s(rule: CompressionRule | None, link: float, cores: float, far_cores: float = 0.0) -> float:
    """Seconds until a snapshot is there; lanes share the link and the processors evenly.

    Without ``far_cores``, both ends are one machine, and what is packed takes processors from what is sent.
    """
    waiting, lanes, now_s = list(range(PARTS)), [], 0.0
    if rule is not None:
        rule.begin()
    while waiting or lanes:
        while waiting and len(lanes) < LANES:
            index = waiting.pop(0)
            packs = rule is not None and rule.packs
            lanes.append(Lane(index, packs=packs, probes=rule is not None and not packs and rule.probes()))
        in_stage = {name: sum(lane.stages[0][0] == name for lane in lanes) for name in ("cpu", "wire", "far")}
        speed = {
            "cpu": min(1.0, cores / max(1, in_stage["cpu"])),
            "wire": link / max(1, in_stage["wire"]),
            "far": min(1.0, far_cores / max(1, in_stage["far"])),
        }
        if not far_cores:
            wanted = in_stage["cpu"] + in_stage["far"] + (link * SEND_S if in_stage["wire"] else 0.0)
            share = min(1.0, cores / wanted)
            speed = {"cpu": share, "far": share, "wire": share * link / max(1, in_stage["wire"])}
        step_s = min(lane.stages[0][1] / speed[lane.stages[0][0]] for lane in lanes)
        now_s += step_s
        for lane in lanes:
            name, left = lane.stages[0]
            lane.spent[name] += step_s
            lane.stages[0][1] = left - step_s * speed[name]
            if lane.stages[0][1] <= 1e-9 * PART * (1 if name == "wire" else PACK_S):
                lane.stages.pop(0)
        for lane in [lane for lane in lanes if not lane.stages]:
            lanes.remove(lane)
            if rule is not None:
                lane.done(rule)
    return now_s


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What the sender's host says of them."""
    cores = request.getfixturevalue("cores") if "cores" in request.fixturenames else 1.0
    monkeypatch.setattr(encoding.os, "cpu_count", lambda: max(1, int(cores)))


SOAK = [pytest.param(*cores, marks=pytest.mark.soak) for cores in ((0.2, 0.3), (1.0, 0.3), (1.0, 4.0), (2.0, 0.3))]


@pytest.mark.parametrize(("cores", "far_cores"), [(0.2, 4.0), (2.0, 4.0), (8.0, 0.3), (8.0, 4.0), *SOAK])
@pytest.mark.parametrize("gbit_per_s", [0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0])
def test_it_is_no_slower_than_sending_everything_as_it_is(gbit_per_s: float, cores: float, far_cores: float) -> None:
    rule, link = CompressionRule(), gbit_per_s * 1e9 / 8
    plain_s = snapshot_s(None, link, cores, far_cores)
    each_s = [snapshot_s(rule, link, cores, far_cores) for _ in range(8)]
    assert sum(each_s[4:]) <= 1.02 * 4 * plain_s  # by then it is known what packing costs a receiver
    assert max(each_s) <= (1.05 if far_cores >= 1.0 else 2.0) * plain_s
    if gbit_per_s <= 1.0 and min(cores, far_cores) >= 1.0:  # and where it pays it is used
        assert sum(each_s[1:]) < 7 * plain_s / 1.25


@pytest.mark.parametrize("cores", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("gbit_per_s", [0.5, 2.5, 5.0, 10.0, 25.0])
def test_packing_never_slows_sending_that_needs_the_processors(gbit_per_s: float, cores: float) -> None:
    """What one connection sees is too little there: packed parts make the others slow, and seem to be worth it."""
    rule, link = CompressionRule(), gbit_per_s * 1e9 / 8
    plain_s = snapshot_s(None, link, cores)
    each_s = [snapshot_s(rule, link, cores) / plain_s for _ in range(40)]
    assert sum(each_s) <= 1.025 * 40
    assert max(each_s) <= 1.05
    if gbit_per_s <= 0.5 and cores >= 1.0:
        assert sum(each_s[1:]) < 39 / 1.25


@pytest.mark.parametrize("gbit_per_s", [0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0])
def test_nor_where_threads_that_pack_wait_long_for_their_turn(
    gbit_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand back behind training: now and then one takes 10 times as long as usual, or 60 times."""
    rule, link, source = CompressionRule(), gbit_per_s * 1e9 / 8, random.Random(1)
    begun = Lane.__init__

    def begin(self: Lane, index: int, *, packs: bool, probes: bool) -> None:
        begun(self, index, packs=packs, probes=probes)
        self.stages[0][1] *= source.choice([1, 1, 3, 10, 60])

    plain_s = snapshot_s(None, link, 1.0)
    monkeypatch.setattr(Lane, "__init__", begin)
    each_s = [snapshot_s(rule, link, 1.0) / plain_s for _ in range(24)]
    assert sum(each_s) <= 1.1 * 24
    assert sum(each_s[12:]) <= 1.025 * 12
    if gbit_per_s <= 0.1:
        assert sum(each_s[1:]) < 23 / 1.2


def test_a_link_that_becomes_fast_or_slow_is_noticed() -> None:
    rule = CompressionRule()
    slow, fast = 0.5e9 / 8, 25e9 / 8
    for link, factor in ((slow, 0.85), (fast, 1.02), (slow, 0.85)):
        snapshot_s(rule, link, 1.0, 1.0)  # in which it is noticed
        snapshot_s(rule, link, 1.0, 1.0)
        assert snapshot_s(rule, link, 1.0, 1.0) <= factor * snapshot_s(None, link, 1.0, 1.0)


def test_nothing_is_packed_before_both_speeds_are_known() -> None:
    rule = CompressionRule()
    rule.begin()
    assert not rule.packs
    assert [rule.probes(), rule.probes()] == [True, False]  # once in a snapshot
    rule.probed(PART, PART // 2, 0.01)
    rule.begin()
    assert not rule.packs
    rule.sent(PART, 1.0)
    rule.begin()
    assert rule.packs
    assert not rule.probes()  # what is packed is measured


def test_a_snapshot_with_few_changes_leaves_the_choice_as_it_was() -> None:
    rule = CompressionRule()
    rule.probed(PART, PART // 2, 0.01)
    rule.sent(PART, 1.0)
    rule.begin()
    rule.begin()  # all was there
    assert rule.packs


def test_packing_that_did_not_pay_counts_for_more() -> None:
    rule = CompressionRule()
    found = []
    for _ in range(6):  # each time a piece is packed soon, and all of it takes long
        rule.probed(PART, PART // 2, 0.002)
        rule.sent(PART, 0.1)
        rule.begin()
        found.append(rule.packs)
        if rule.packs:
            rule.packed(PART, PART // 2, 0.3)
            rule.sent(PART // 2, 0.05)
            rule.begin()
            assert not rule.packs
    assert found == [True, True, False, False, False, False]


def test_what_cannot_be_compressed_is_not() -> None:
    rule = CompressionRule()
    rule.probed(PART, PART + 100, 0.0)
    rule.sent(PART, 100.0)
    rule.begin()
    assert not rule.packs
