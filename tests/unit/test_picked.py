"""The numbers that changed most: chosen, put in their places at both ends alike, and whatever a stranger sends."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest

from lightning_spot.errors import CorruptSnapshotError, SettingsError
from lightning_spot.image import picked
from lightning_spot.image.delta import decode, encode_picked
from lightning_spot.image.floats import WIDTHS, Floats, read_floats
from lightning_spot.image.picked import pick

NUMBERS = 40_000  # two whole blocks and a piece of one


def raw(source: np.random.Generator, dtype: str, spoilt: bool) -> bytes:
    """Random numbers as they lie in a file; spoilt ones are any bits, infinities and NaNs among them."""
    width = WIDTHS[dtype]
    if spoilt:
        return source.bytes(NUMBERS * width)
    numbers = source.standard_normal(NUMBERS).astype(np.float32)
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    return numbers.astype(f"<f{width}").tobytes()


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_both_ends_agree_and_the_most_different_values_are_exact(dtype: str, spoilt: bool, seed: int) -> None:
    source = np.random.default_rng(seed)
    head = source.bytes(37)  # numbers lie at any place
    new, base = head + raw(source, dtype, spoilt), head + raw(source, dtype, spoilt)
    mine = bytearray(base)
    picks = pick(memoryview(new), memoryview(mine), [Floats(37, NUMBERS * WIDTHS[dtype], dtype)])
    theirs = bytearray(len(base))
    decode(encode_picked(memoryview(mine), [], picks), base, memoryview(theirs))
    assert theirs == mine
    unsigned = f"<u{WIDTHS[dtype]}"
    wanted, before, after = (np.frombuffer(each, unsigned, NUMBERS, 37) for each in (new, base, mine))
    changed = before != after
    assert (after[changed] == wanted[changed]).all()
    blocks = [2**14, 2**14, NUMBERS - 2**15]
    assert changed.sum() == sum(math.ceil(0.01 * block) for block in blocks)
    assert len(picks) == changed.sum() * (2 + WIDTHS[dtype]) + 7 * len(blocks)
    if dtype == "float32" and not spoilt:
        far = np.abs(wanted.view("<f4") - before.view("<f4"))[: 2**14]
        assert far[changed[: 2**14]].min() >= far[~changed[: 2**14]].max()


def test_what_is_behind_is_chosen_in_the_end() -> None:
    """Of numbers that stay as they are, nothing stays wrong: what was not sent is not forgotten."""
    source = np.random.default_rng(1)
    new, mine = source.bytes(1000 * 4), bytearray(source.bytes(1000 * 4))
    for _ in range(10):
        assert mine != new
        pick(memoryview(new), memoryview(mine), [Floats(0, 4000, "float32")], share=0.1)
    assert mine == new
    assert not pick(memoryview(new), memoryview(mine), [Floats(0, 4000, "float32")])


def test_strangers_cannot_write_beyond_the_part(seed: int) -> None:
    source = random.Random(seed)
    base = source.randbytes(10_000)
    new = source.randbytes(10_000)
    sent = encode_picked(
        memoryview(new), [(3, 99)], pick(memoryview(new), memoryview(bytearray(base)), [Floats(100, 8000, "float32")])
    )
    for _ in range(300):
        hostile = bytearray(sent)
        for _ in range(source.randrange(1, 4)):
            hostile[source.randrange(len(hostile))] = source.randrange(256)
        hostile = hostile[: source.choice([len(hostile), source.randrange(len(hostile))])]
        room = bytearray(12_000)
        try:
            decode(hostile, base, memoryview(room)[1000:11_000])
        except CorruptSnapshotError:
            continue
        finally:
            assert room[:1000] == room[11_000:] == bytes(1000)


@pytest.mark.parametrize(
    "picks",
    [
        struct.pack("<IBH", 0, 4, 1),  # cut short
        struct.pack("<IBH", 0, 3, 0),  # of no width
        struct.pack("<IBHHI", 9_996, 4, 1, 1, 7),  # behind the end
        struct.pack("<IBHHI", 20_000, 4, 1, 0, 7),
        struct.pack("<IBHHI", 0, 4, 1, picked._BLOCK, 7),  # in another block
        b"\0",
    ],
)
def test_numbers_that_are_none_are_refused(picks: bytes) -> None:
    with pytest.raises(CorruptSnapshotError, match="delta is damaged"):
        decode(encode_picked(b"", [], picks), bytes(10_000), memoryview(bytearray(10_000)))


def test_what_a_trainer_says_of_its_numbers_is_checked() -> None:
    assert read_floats([[0, 8, "float32"], [8, 2, "bfloat16"]], 10) == ((0, 8, "float32"), (8, 2, "bfloat16"))
    for wrong in (
        7,
        [7],
        [[0, 8]],
        [[0, 7, "float32"]],
        [[0, 8, "int32"]],
        [[4, 8, "float32"]],
        [[0, 0, "float32"]],
        [[4, 4, "float32"], [0, 4, "float32"]],
        [[-4, 4, "float32"]],
        [[0.0, 8, "float32"]],
    ):
        with pytest.raises(SettingsError, match="malformed request"):
            read_floats(wrong, 10)
