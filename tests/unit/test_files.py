"""Snapshots of several files: what their manifests say, and how an image is cut into them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.files import FileSpan, check_zero, pieces
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.untrusted import sealed_json

FILES = (FileSpan(".metadata", 0, 100), FileSpan("__0_0.distcp", 4096, 5000), FileSpan("__1_0.distcp", 16384, 7))


def manifest(files: tuple[FileSpan, ...] = FILES, nbytes: int = 20_000, **more: Any) -> Manifest:
    return Manifest(
        run="r",
        name="step-000000001-attempt-0001",
        step=1,
        attempt=1,
        nbytes=nbytes,
        files=files,
        part_bytes=4096,
        **more,
    )


def image_of(made: Manifest) -> bytearray:
    image = bytearray(made.nbytes)
    for number, file in enumerate(made.files, 1):
        image[file.offset : file.stop] = bytes([number]) * file.nbytes
    return image


def test_paths_lead_to_the_files() -> None:
    made = manifest()
    assert made.data_path == made.name
    assert made.span_at(f"{made.name}/__1_0.distcp") == FILES[2]
    assert made.span_at(made.name) == FileSpan(made.name, 0, made.nbytes)
    assert made.span_at(f"{made.name}/model.ckpt") is None
    one = replace(made, files=())
    assert one.span_at(f"{one.name}/model.ckpt") == FileSpan(one.name, 0, one.nbytes)
    user = replace(one, file="", name="best.ckpt")
    assert [user.path_of(span) for span in user.spans] == ["best.ckpt"]


WRONG: dict[str, Any] = {
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


@pytest.mark.parametrize("files", WRONG.values(), ids=WRONG.keys())
def test_a_manifest_whose_files_contradict_it_is_refused(files: object) -> None:
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_json(sealed_json({**manifest().to_dict(), "files": files}))


def test_a_file_that_a_user_named_is_never_cut() -> None:
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_json(sealed_json({**manifest().to_dict(), "file": ""}))


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
    made = manifest(tuple(files), files[-1].stop + tail)
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
