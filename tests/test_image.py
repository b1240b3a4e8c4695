"""The ground floor: a laid-out, filled file is the file torch.save would have written."""

from __future__ import annotations

import io
import random
import subprocess
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spot.config import parse_bytes
from lightning_spot.errors import CorruptManifest, CorruptSnapshot, LayoutUnsupported, SettingsError, SnapshotNotFound
from lightning_spot.image.archive import read_entries
from lightning_spot.image.crc import combine
from lightning_spot.image.layout import Layout, lay_out, lay_out_plain
from lightning_spot.image.manifest import Manifest, snapshot_name, snapshot_order
from lightning_spot.image.parts import checksum, checksum_parts, part_ranges, verify_parts
from lightning_spot.image.sealing import Sealing
from tests.gated import write_crcs


def fill(layout: Layout) -> bytearray:
    """Fill a layout the slow way."""
    image = bytearray(b"\xaa" * layout.nbytes)  # dirty memory: every byte must be written
    for offset, data in layout.frame:
        image[offset : offset + len(data)] = data
    for piece in layout.pieces:
        source = torch.empty(0, dtype=torch.uint8).set_(piece.storage)
        image[piece.offset : piece.offset + piece.nbytes] = source.numpy().tobytes()
    return image


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        if left.is_sparse:
            left, right = left.to_dense(), right.to_dense()
        if left.is_quantized:
            return bool(left.dtype == right.dtype and torch.equal(left.int_repr(), right.int_repr()))
        return bool(left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def unusual_state() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32)
    tied = torch.nn.Parameter(torch.randn(3, 5))
    return {
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "non-contiguous": torch.randn(6, 4).t(),
        "bf16": torch.randn(7).bfloat16(),
        "half": torch.randn(7).half(),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False, True]),
        "int8": torch.tensor([-1, 2], dtype=torch.int8),
        "sparse": torch.eye(3).to_sparse(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "view-a": base[2:9],
        "view-b": base.view(4, 6)[1],
        "tied-a": tied,
        "tied-b": tied,
        "plain": {"step": 7, "lr": 0.1, "names": ["a", "b"], "none": None, "tuple": (1, 2.0, "x"), "big": 2**70},
    }


def test_filled_layout_equals_torch_save(tmp_path: Path) -> None:
    state = unusual_state()
    layout = lay_out(state)
    assert layout.pieces
    path = tmp_path / "model.ckpt"
    image = fill(layout)
    write_crcs(memoryview(image))
    path.write_bytes(image)
    loaded = torch.load(path, weights_only=True)
    assert same(state, loaded)
    assert loaded["tied-a"].data_ptr() == loaded["tied-b"].data_ptr()
    assert loaded["view-a"].untyped_storage().data_ptr() == loaded["view-b"].untyped_storage().data_ptr()
    assert zipfile.ZipFile(path).testzip() is None
    tested = subprocess.run(["unzip", "-tq", str(path)], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout


def test_quantised_state_falls_back_to_plain_save() -> None:
    state = {"q": torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.qint8), "w": torch.randn(3)}
    with pytest.raises(LayoutUnsupported):
        lay_out(state)
    image = fill(lay_out_plain(state))
    write_crcs(memoryview(image))
    assert same(state, torch.load(io.BytesIO(image), weights_only=True))


def test_torch_without_skip_data_is_refused_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.serialization, "skip_data")
    with pytest.raises(LayoutUnsupported, match="skip_data"):
        lay_out({"w": torch.ones(1)})


def test_layout_holds_each_storage_once() -> None:
    weight = torch.randn(100)
    layout = lay_out({"a": weight, "b": weight[3:], "c": weight.detach()})
    assert [piece.nbytes for piece in layout.pieces] == [400]


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_crcs_of_pieces_combine_to_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("part_bytes", [1000, 4096, 2**20])
@pytest.mark.parametrize("streamed", [True, False], ids=["torch's", "CRCs before the data"])
def test_a_file_sealed_in_parts_is_the_file(threads: int, part_bytes: int, streamed: bool) -> None:
    """By several threads, with records over many parts, and CRC fields after their data or before it."""
    whole = _archive(streamed)
    image = bytearray(whole)
    for record in read_entries(whole):
        for place in record.crc_at if record.nbytes else ():
            image[place : place + 4] = bytes(4)
    manifest = Manifest(run="r", name="x", step=1, attempt=1, nbytes=len(image), part_bytes=part_bytes)
    sealing = Sealing(manifest, memoryview(image))
    taken: list[tuple[int, int, str]] = []

    def take() -> None:
        for start, stop, digest in sealing.sealed_parts():
            assert checksum(memoryview(whole)[start:stop]) == digest  # what is taken never changes any more
            assert image[start:stop] == whole[start:stop]
            taken.append((start, stop, digest))

    taking = threading.Thread(target=take)
    taking.start()
    sealed = sealing.run(threads)
    taking.join()
    assert image == whole
    assert [digest for _, _, digest in sorted(taken)] == list(sealed.checksums)
    sealed.verify(memoryview(whole), "here")


def _archive(streamed: bool) -> bytes:
    buffer = io.BytesIO()
    if streamed:
        torch.save([torch.randn(70_000), torch.randn(3), *(torch.randn(10) for _ in range(50)), torch.zeros(0)], buffer)
        return buffer.getvalue()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, nbytes in enumerate((5, 300_000, 0, 7_000)):
            archive.writestr(f"model/data/{number}", random.Random(number).randbytes(nbytes))
    return buffer.getvalue()


def test_a_record_that_reaches_beyond_the_file_is_refused() -> None:
    image = bytearray(_archive(streamed=False))
    central = image.rfind(b"PK\x01\x02")
    image[central + 20 : central + 28] = (2**31).to_bytes(4, "little") * 2
    manifest = Manifest(run="r", name="x", step=1, attempt=1, nbytes=len(image))
    with pytest.raises(LayoutUnsupported, match="beyond the end"):
        Sealing(manifest, memoryview(image)).run(1)


def test_who_waits_for_parts_of_a_file_that_is_given_up_is_told() -> None:
    image = memoryview(bytearray(_archive(streamed=True)))
    sealing = Sealing(Manifest(run="r", name="x", step=1, attempt=1, nbytes=len(image)), image)
    sealing.give_up()
    with pytest.raises(SnapshotNotFound, match="given up"):
        list(sealing.sealed_parts())
    with pytest.raises(SnapshotNotFound, match="given up"):
        sealing.committed()


shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16])
tensors = st.builds(lambda shape, dtype: torch.randint(0, 2, shape).to(dtype), shapes, dtypes)
leaves = st.one_of(tensors, st.integers(), st.text(max_size=5), st.booleans(), st.none(), st.floats(allow_nan=False))
states = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4), st.dictionaries(st.text(max_size=3), children, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(states)
def test_any_state_survives(state: Any) -> None:
    image = fill(lay_out(state))
    write_crcs(memoryview(image))
    assert same(state, torch.load(io.BytesIO(image), weights_only=True))
    assert zipfile.ZipFile(io.BytesIO(image)).testzip() is None


def test_records_are_those_of_the_zip_directory() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.randn(1000), "b": torch.ones(3)}, buffer)
    infos = zipfile.ZipFile(buffer).infolist()
    records = read_entries(buffer.getvalue())
    assert [(record.name, record.nbytes) for record in records] == [(info.filename, info.file_size) for info in infos]


@pytest.mark.parametrize("damage", [b"", b"PK", b"no zip at all" * 10])
def test_no_archive_is_refused(damage: bytes) -> None:
    with pytest.raises(LayoutUnsupported):
        read_entries(damage)


@given(st.binary(max_size=400), st.integers(1, 64))
def test_any_flipped_byte_is_found(data: bytes, part_bytes: int) -> None:
    checksums = checksum_parts(memoryview(data), part_bytes)
    verify_parts(memoryview(data), checksums, part_bytes, "here")
    for place in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(CorruptSnapshot) as caught:
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


def test_manifest_round_trip() -> None:
    sealed = manifest().sealed(memoryview(b"abc"))
    assert Manifest.from_json(sealed.to_json()) == sealed
    sealed.verify(memoryview(b"abc"), "here")
    with pytest.raises(CorruptSnapshot):
        sealed.verify(memoryview(b"abd"), "here")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 99}, "upgrade"),
        ({"name": "../x"}, "separator"),
        ({"name": ""}, "empty"),
        ({"file": "a/b"}, "separator"),
        ({"nbytes": -1}, "nbytes"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"nbytes": 2**50}, "nbytes"),
        ({"nbytes": 10**13, "part_bytes": 1, "checksums": []}, "parts"),
        ({"attempt": True}, "attempt"),
        ({"run_id": "../x"}, "separator"),
        ({"checksums": ["a", "b", "c"]}, "checksums"),
        ({"step": "5"}, "step"),
    ],
)
def test_damaged_manifest_is_refused(changes: dict[str, Any], complaint: str) -> None:
    from dataclasses import asdict

    with pytest.raises(CorruptManifest, match=complaint):
        Manifest.from_dict({**asdict(manifest()), **changes})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": "x"}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(CorruptManifest):
        Manifest.from_json(text)


def test_names_sort_by_attempt_then_step_then_end() -> None:
    names = [snapshot_name(9, 1), snapshot_name(2, 2), snapshot_name(8, 2), snapshot_name(8, 2, complete=True)]
    assert sorted(names, key=lambda name: snapshot_order(name) or (0, 0, False)) == names
    assert snapshot_order("epoch=3.ckpt") is None


@pytest.mark.parametrize(("text", "nbytes"), [("8GiB", 8 * 2**30), ("512MB", 512 * 10**6), ("1.5k", 1500), (7, 7)])
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "lots", "8QB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_bytes(text)
