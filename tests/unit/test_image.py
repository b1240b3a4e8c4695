"""The ground floor: archives, sealing, checksums, manifests."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spot.config import parse_bytes
from lightning_spot.errors import CorruptSnapshotError, SettingsError
from lightning_spot.snapshot.manifest import Manifest, snapshot_name, snapshot_order
from lightning_spot.snapshot.parts import checksum, checksum_parts, part_ranges, verify_parts

pytestmark = pytest.mark.guarantee("G12")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("part_bytes", [1000, 4096, 2**20])
def test_a_file_is_sealed_part_by_part(threads: int, part_bytes: int) -> None:
    image = random.Random(1).randbytes(300_000)
    manifest = Manifest(run="r", name="x", step=1, attempt=1, nbytes=len(image), part_bytes=part_bytes)
    sealed = manifest.sealed(memoryview(image), threads)
    ranges = part_ranges(len(image), part_bytes)
    assert sealed.checksums == tuple(checksum(image[start:stop]) for start, stop in ranges)
    sealed.verify(memoryview(image), "here")


@given(st.binary(max_size=400), st.integers(1, 64))
def test_any_flipped_byte_is_found(data: bytes, part_bytes: int) -> None:
    checksums = checksum_parts(memoryview(data), part_bytes)
    verify_parts(memoryview(data), checksums, part_bytes, "here")
    for place in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(CorruptSnapshotError) as caught:
            verify_parts(memoryview(damaged), checksums, part_bytes, "here")
        assert caught.value.part == place // part_bytes


@given(st.integers(0, 10_000), st.integers(1, 999))
def test_parts_cover_the_file_once(nbytes: int, part_bytes: int) -> None:
    place = 0
    for start, stop in part_ranges(nbytes, part_bytes):
        assert start == place
        assert 0 < stop - start <= part_bytes
        place = stop
    assert place == nbytes


def manifest(**changes: Any) -> Manifest:
    return Manifest(**{"run": "r", "name": snapshot_name(5, 1), "step": 5, "attempt": 1, "nbytes": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 99}, "99"),
        ({"name": "../x"}, r"\.\./x"),
        ({"name": ""}, "name|''"),
        ({"file": "a/b"}, "a/b"),
        ({"nbytes": -1}, "nbytes"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"nbytes": 2**50}, "nbytes"),
        ({"nbytes": 10**13, "part_bytes": 1, "checksums": []}, "parts"),
        ({"attempt": True}, "attempt"),
        ({"run_id": "../x"}, r"\.\./x"),
        ({"checksums": ["a", "b", "c"]}, "checksums"),
        ({"step": "5"}, "step"),
    ],
)
def test_damaged_manifest_is_refused(changes: dict[str, Any], complaint: str) -> None:
    from dataclasses import asdict

    with pytest.raises(CorruptSnapshotError, match=complaint):
        Manifest.from_dict({**asdict(manifest()), **changes})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": "x"}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_json(text)


def test_names_sort_by_attempt_then_step_then_end() -> None:
    names = [snapshot_name(9, 1), snapshot_name(2, 2), snapshot_name(8, 2), snapshot_name(8, 2, complete=True)]
    assert sorted(names, key=lambda name: snapshot_order(name) or (0, 0, False)) == names
    assert snapshot_order("epoch=3.ckpt") is None


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8GiB", 8 * 2**30), ("512MB", 512 * 10**6), ("1.5k", 1500), (7, 7), (64e9, 64 * 10**9)]
)
def test_sizes(text: str | float, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "lots", "8QB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_bytes(text)
