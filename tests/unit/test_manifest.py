"""Manifests: what they say of a file or of several, what is refused, and the checksums of parts that they have."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spot.config import parse_bytes
from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.files import FileSpan, check_zero, pieces
from lightning_spot.snapshot.manifest import MOST_METRICS, Manifest, snapshot_name
from lightning_spot.snapshot.parts import checksum, checksum_parts, part_ranges, verify_parts

pytestmark = pytest.mark.guarantee("G12")

FILES = (FileSpan(".metadata", 0, 100), FileSpan("__0_0.distcp", 4096, 5000), FileSpan("__1_0.distcp", 16384, 7))


def manifest(**changes: Any) -> Manifest:
    return Manifest(**{"run": "r", "name": snapshot_name(5, 1), "step": 5, "attempt": 1, "nbytes": 3, **changes})


def several(files: tuple[FileSpan, ...] = FILES, nbytes: int = 20_000) -> Manifest:
    return manifest(nbytes=nbytes, files=files, part_bytes=4096)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("part_bytes", [1000, 4096, 2**20])
def test_a_file_is_sealed_part_by_part(threads: int, part_bytes: int) -> None:
    image = random.Random(1).randbytes(300_000)
    sealed = manifest(nbytes=len(image), part_bytes=part_bytes).sealed(memoryview(image), threads)
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


def test_a_manifest_has_metrics_or_none() -> None:
    made = manifest(metrics={"val_loss": 0.5, "count": 3})
    assert Manifest.from_json(made.to_json()).metrics == {"val_loss": 0.5, "count": 3.0}
    assert "metrics" not in manifest().to_dict()  # as before there were any
    assert Manifest.from_dict(manifest().to_dict()).metrics == {}


BAD_METRICS = [
    *(3, ["a"], {"a": "b"}, {"a": None}, {"a": True}, {"a": 10**400}, {"": 1.0}, {"a\n": 1.0}, {"x" * 256: 1.0}),
    {str(number): 1.0 for number in range(MOST_METRICS + 1)},
]
BAD_FILES: dict[str, Any] = {
    "path": [{"name": "../x", "offset": 0, "nbytes": 1}],
    "manifest": [{"name": "manifest.json", "offset": 0, "nbytes": 1}],
    "dots": [{"name": "..", "offset": 0, "nbytes": 1}],
    "not ours": [{"name": "notes.txt", "offset": 0, "nbytes": 1}],
    "no name": [{"name": 5, "offset": 0, "nbytes": 1}],
    "twice": [{"name": "meta.pt", "offset": 0, "nbytes": 1}, {"name": "meta.pt", "offset": 4096, "nbytes": 1}],
    "overlap": [{"name": "meta.pt", "offset": 0, "nbytes": 4097}, {"name": ".metadata", "offset": 4096, "nbytes": 1}],
    "order": [{"name": "meta.pt", "offset": 4096, "nbytes": 1}, {"name": ".metadata", "offset": 0, "nbytes": 1}],
    "crooked": [{"name": "meta.pt", "offset": 5, "nbytes": 1}],
    "beyond": [{"name": "meta.pt", "offset": 16384, "nbytes": 20_000}],
    "negative": [{"name": "meta.pt", "offset": 0, "nbytes": -1}],
    "no number": [{"name": "meta.pt", "offset": "0", "nbytes": 1}],
    "less": [{"name": "meta.pt"}],
    "no list": "meta.pt",
    "no object": ["meta.pt"],
}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 99}, "99"),
        ({"name": "../x"}, r"\.\./x"),
        ({"name": ""}, "name|''"),
        ({"file": "a/b"}, "a/b"),
        ({"nbytes": -1}, "nbytes"),
        ({"nbytes": 2**50}, "nbytes"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"attempt": True}, "attempt"),
        ({"run_id": "../x"}, r"\.\./x"),
        ({"checksums": ["a", "b", "c"]}, "checksums"),
        ({"step": "5"}, "step"),
        ({"nbytes": 10**13, "part_bytes": 1, "checksums": []}, "parts"),
        *(({"metrics": metrics}, "") for metrics in BAD_METRICS),
        *((several().to_dict() | {"files": files}, "") for files in BAD_FILES.values()),
        (several().to_dict() | {"file": ""}, ""),  # a file that a user named is never cut
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CorruptSnapshotError, match=complaint):
        Manifest.from_dict({**manifest().to_dict(), **changes})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": "x"}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_json(text)


def image_of(made: Manifest) -> bytearray:
    image = bytearray(made.nbytes)
    for number, file in enumerate(made.files, 1):
        image[file.offset : file.stop] = bytes([number]) * file.nbytes
    return image


@settings(max_examples=25)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 2)), min_size=1, max_size=4),
    tail=st.integers(0, 5000),
    part_bytes=st.integers(500, 12_000),
)
def test_ranges_of_an_image_lie_in_its_files_or_in_none(
    sizes: list[tuple[int, int]], tail: int, part_bytes: int
) -> None:
    files, place = [], 0
    for number, (nbytes, holes) in enumerate(sizes):
        files.append(FileSpan(f"__{number}_0.distcp", place, nbytes))
        place += -(-nbytes // 4096) * 4096 + holes * 4096
    made = several(tuple(files), files[-1].stop + tail)
    assert Manifest.from_json(made.to_json()) == made
    image = memoryview(bytes(image_of(made)))
    for start in range(0, made.nbytes, part_bytes):
        found_pieces = list(pieces(made.files, start, min(start + part_bytes, made.nbytes)))
        assert [first for _, first, _ in found_pieces] + [min(start + part_bytes, made.nbytes)] == [
            start,
            *(last for _, _, last in found_pieces),
        ]
        assert all(file is None or file.offset <= first < last <= file.stop for file, first, last in found_pieces)
    holes = [(start, stop) for file, start, stop in pieces(made.files, 0, made.nbytes) if file is None]
    assert sum(stop - start for start, stop in holes) == made.nbytes - sum(file.nbytes for file in files)
    for start, stop in holes:
        assert start < stop
        check_zero(image[start:stop])
        with pytest.raises(CorruptSnapshotError):
            check_zero(memoryview(bytes(stop - start - 1) + b"x"))


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8GiB", 8 * 2**30), ("512MB", 512 * 10**6), ("1.5k", 1500), (7, 7), (64e9, 64 * 10**9)]
)
def test_sizes(text: str | float, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
