"""A slot of which little was written is sealed as if all of it had been, and little of it is read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot.errors import CorruptSnapshotError, SettingsError
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.coming import Sealing
from lightning_spot.snapshot.layout import Layout, Layouter
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.ranges import CHECK_EVERY, Before, Ranges, in_order, read_floats, read_ranges
from tests.support.filled import fill
from tests.support.server import RUN_ID, Bench

PART_BYTES = 4096


def manifest_of(step: int, nbytes: int) -> Manifest:
    return Manifest(
        run="run",
        run_id=RUN_ID,
        name=snapshot_name(step, 1),
        step=step,
        attempt=1,
        nbytes=nbytes,
        part_bytes=PART_BYTES,
        created_unix_s=1.0,
    )


class Slot:
    """Memory into which one layout after the other is written, only what changed, as a trainer does it."""

    def __init__(self) -> None:
        self.memory = bytearray(2**20)
        self.last: Layout | None = None

    def write(self, layout: Layout, changed: set[int]) -> Ranges:
        """Write what is not there, and the storages at these addresses; what was written."""
        there = {} if self.last is None else {piece.named: piece.offset for piece in self.last.pieces}
        frame = () if self.last is None else self.last.frame
        image = fill(layout)
        written = [(entry[0], len(entry[1])) for entry in layout.frame if not any(entry is old for old in frame)]
        written += [
            (piece.offset, piece.nbytes)
            for piece in layout.pieces
            if there.get(piece.named) != piece.offset or piece.storage.data_ptr() in changed
        ]
        for start, nbytes in written:
            self.memory[start : start + nbytes] = image[start : start + nbytes]
        self.last = layout
        return in_order(written)


def sealed_as_a_whole(layout: Layout, step: int) -> tuple[bytearray, Manifest]:
    image = fill(layout)
    return image, Sealing(manifest_of(step, layout.nbytes), memoryview(image)).run(1)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_sealed_is_what_would_be_if_all_was_written(seed: int) -> None:
    """Storages that are written to, come and go, and a pickle that grows and shrinks, one snapshot after the other."""
    dice = random.Random(seed)
    slot, layouter = Slot(), Layouter()
    state = {f"{index}": torch.rand(dice.choice([1, 10, 300, 3000])) for index in range(25)}
    checksums: tuple[str, ...] = ()
    for step in range(15):
        chosen = [state[name] for name in state if dice.random() < 0.1]
        for tensor in chosen:
            tensor.add_(1)
        if dice.random() < 0.3:
            state[f"new {step}"] = torch.rand(dice.choice([5, 2000]))
        if dice.random() < 0.2:
            state.pop(dice.choice(list(state)))
        layout = layouter.lay_out({"state": state, "note": "x" * dice.choice([0, 10, 9000])})
        written = slot.write(layout, {tensor.data_ptr() for tensor in chosen})
        image, whole = sealed_as_a_whole(layout, step)
        before = Before(written, checksums[: layout.nbytes // PART_BYTES], step) if checksums else None
        found = Sealing(manifest_of(step, layout.nbytes), memoryview(slot.memory)[: layout.nbytes], before)
        assert found.run(dice.choice([1, 3])) == whole
        assert slot.memory[: layout.nbytes] == image
        checksums = whole.checksums[: layout.nbytes // PART_BYTES]


def test_memory_that_was_changed_by_others_is_found_in_its_turn() -> None:
    slot, layouter = Slot(), Layouter()
    layout = layouter.lay_out({"w": torch.rand(100_000), "last": torch.rand(3)})
    slot.write(layout, set())
    image = memoryview(slot.memory)[: layout.nbytes]
    checksums = Sealing(manifest_of(0, layout.nbytes), image).run(1).checksums
    image[17 * PART_BYTES] ^= 1
    found = []
    for turn in range(CHECK_EVERY):
        written = in_order([(offset, len(data)) for offset, data in layout.frame[-1:]])
        before = Before(written, checksums[: layout.nbytes // PART_BYTES], turn)
        try:
            Sealing(manifest_of(1, layout.nbytes), image, before).run(1)
        except CorruptSnapshotError as error:
            found.append(error.part)
    assert found == [17]


def test_a_server_reads_all_of_it_before_it_writes_it_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it took over may have been damaged since: this one is dropped, and nothing in its slot is known any more."""
    bench = Bench(tmp_path, slots=1)
    bench.open()
    slot, layouter = Slot(), Layouter()
    layout = layouter.lay_out({"w": torch.rand(100_000), "last": torch.rand(3)})
    slot.write(layout, set())
    held = seal(bench.server, slot, manifest_of(1, layout.nbytes), None)
    assert held == ""
    assert bench.flush() == []
    (ring_slot,) = bench.server.ring.slots
    with ring_slot.view() as view:
        view[17 * PART_BYTES] ^= 1
    ring_slot.buffer.seals = 0  # part 17 has its turn at the third one
    assert seal(bench.server, slot, manifest_of(2, layout.nbytes), ()) != ""
    assert bench.flush() == []
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [1]
    assert seal(bench.server, slot, manifest_of(3, layout.nbytes), None) == ""
    assert bench.flush() == []
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [3, 1]
    bench.close()


def seal(server: SnapshotServer, slot: Slot, manifest: Manifest, written: Ranges | None) -> str:
    """Commit what a slot holds; as what it was filled before."""
    upload = server.lease(f"run@{RUN_ID}", 1, manifest.nbytes)
    if written is None:
        with upload.slot.view(manifest.nbytes) as view:
            view[:] = slot.memory[: manifest.nbytes]
    server.seal(upload.id, manifest, None, (), written)
    return upload.held


@pytest.mark.parametrize(
    "fields", [7, "ab", [[0, 0]], [[0, 5], [4, 2]], [[0, 101]], [[-1, 3]], [[0, 1.0]], [[0, True]], [[1]], [3]]
)
def test_what_a_request_says_is_checked(fields: Any) -> None:
    with pytest.raises(SettingsError, match="malformed"):
        read_ranges(fields, 100)


def test_ranges() -> None:
    assert read_ranges(None, 100) is None
    before = Before(read_ranges([[10, 5], [15, 5], [40, 1]], 100) or (), (), 0)
    assert [place for place in range(45) if before.touches(place, place + 1)] == [*range(10, 20), 40]
    assert before.touches(0, 11)
    assert not before.touches(20, 40)
    assert not Before((), (), 0).touches(0, 100)


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
