"""When packing pays: over a slow link, whatever the processors do."""

from __future__ import annotations

from lightning_spot.client.encoding import SLOW_BYTES_PER_S, CompressionRule

PART = 8 * 2**20


def sent(rule: CompressionRule, bytes_per_s: float) -> bool:
    """Whether a snapshot is packed of which each part goes that fast."""
    rule.begin()
    for _ in range(4):
        rule.sent(PART, PART / bytes_per_s)
    return rule.packs


def test_a_link_that_becomes_fast_or_slow_is_noticed() -> None:
    rule = CompressionRule()
    slow, fast = SLOW_BYTES_PER_S / 2, SLOW_BYTES_PER_S * 2
    assert [sent(rule, speed) for speed in (slow, slow, fast, fast, slow)] == [False, True, True, False, False]


def test_a_snapshot_with_few_changes_leaves_the_choice_as_it_was() -> None:
    rule = CompressionRule()
    sent(rule, SLOW_BYTES_PER_S / 2)
    rule.begin()
    rule.begin()  # all was there
    assert rule.packs
