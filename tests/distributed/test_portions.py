"""Portions of a snapshot that lie apart: which nodes they go to, what they are together, what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from lightning_spot.client.spread_store import SpreadStore

from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import CorruptSnapshotError, FencedError, ServerUnreachableError, SettingsError
from lightning_spot.image.files import FileSpan, note_name, torn_name
from lightning_spot.image.manifest import Manifest, portion_name, snapshot_name
from lightning_spot.image.notes import Note, sealed, spans_of
from lightning_spot.image.parts import checksum
from lightning_spot.image.portion import missing, place_of, portion_of, starts, whole_of
from lightning_spot.memory.flusher import NotWhole, put_portion
from lightning_spot.memory.joint import SpreadPlace, is_by_itself, is_durable, nodes_of, urls_of
from lightning_spot.memory.joint_store import JointFolder
from lightning_spot.memory.placement import placed_portions
from lightning_spot.tiers.fences import Claim
from lightning_spot.tiers.local import LocalStore

NODES = [f"spot://node-{number}:7070" for number in range(8)]
PART_BYTES = 8192


@pytest.mark.parametrize(("hosts", "count", "replicas"), itertools.product((1, 2, 3, 8, 64), (1, 2, 3, 8), (1, 2)))
def test_portions_go_to_nodes_evenly_and_each_to_as_many_as_it_is_kept_at(
    hosts: int, count: int, replicas: int
) -> None:
    for run in map(str, range(20)):
        orders = placed_portions(NODES[:count], run, hosts, replicas)
        assert orders == placed_portions(NODES[:count][::-1], run, hosts, replicas)
        assert all(sorted(order) == sorted(NODES[:count]) for order in orders)
        chosen = min(replicas, count)
        loads = Counter(node for order in orders for node in order[:chosen])
        assert max(loads.values()) <= -(-hosts * chosen // count)


def test_a_node_that_is_lost_moves_few_other_portions() -> None:
    before, after = placed_portions(NODES, "run", 64, 1), placed_portions(NODES[1:], "run", 64, 1)
    moved = sum(one[0] != other[0] for one, other in zip(before, after, strict=True))
    assert moved - sum(one[0] == NODES[0] for one in before) <= 64 // 4


def portions(*sizes: int) -> tuple[list[Manifest], list[bytes]]:
    """Of hosts that bring so many bytes each, in a file and some of a second one."""
    plain = Manifest(run="run", name=snapshot_name(1, 1), step=1, attempt=1, nbytes=0, part_bytes=PART_BYTES)
    found, images = [], []
    for host, nbytes in enumerate(sizes):
        image = bytes((host + place) % 251 for place in range(nbytes))
        cut = nbytes // 2 // 4096 * 4096
        files = [FileSpan(f"__{host}_0.distcp", 0, cut), FileSpan(f"rank-{host:04d}.pt", cut, nbytes - cut)]
        memory = memoryview(bytearray(image))
        found.append(portion_of(replace(plain, nbytes=nbytes), files, memory, host=host, hosts=len(sizes), digest="d"))
        images.append(image)
    return found, images


@pytest.mark.parametrize("sizes", [(1,), (8192, 8192), (8193, 1, 30_000), (5000, 16384, 4096)])
def test_the_whole_is_known_without_a_byte_of_it(sizes: tuple[int, ...]) -> None:
    found, images = portions(*sizes)
    image = b"".join(data + bytes(-len(data) % PART_BYTES) for data in images)
    whole = whole_of(reversed(found))
    whole.verify(memoryview(image), "here")
    assert Manifest.from_json(whole.to_json()) == whole
    assert (whole.nbytes, whole.portion, whole.name) == (len(image), None, snapshot_name(1, 1))
    for span in whole.files:
        host = next(host for host, each in enumerate(found) for file in each.files if file.name == span.name)
        file = found[host].span_of(span.name)
        assert image[span.offset : span.stop] == images[host][file.offset : file.stop]
    for start, _ in whole.ranges(PART_BYTES):
        host, within = place_of(start, starts(found))
        assert image[start : start + 1] == images[host][within : within + 1]
    assert starts(found)[-1] == whole.nbytes
    assert sealed(map(Note.of_portion, found), lambda *_: b"") == whole
    assert {(span.name, span.nbytes) for span in spans_of(map(Note.of_portion, found)) or ()} == {
        (span.name, span.nbytes) for span in whole.files
    }


class Replica:
    """A node that has the portions of all hosts; ``silent``, none of its answers comes."""

    def __init__(self, url: str, images: list[bytes], *, silent: bool) -> None:
        self.url, self._images, self._silent, self.asked = url, images, silent, 0

    def read(self, portion: Manifest, start: int, into: memoryview) -> None:
        self.asked += 1
        if self._silent:
            raise ServerUnreachableError("its link is cut")
        into[:] = self._images[portion.portion.host][start : start + len(into)]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_does_not_answer_is_not_waited_for_with_each_part(silent: int) -> None:
    """A minute each time: with another replica at hand, a resume took hours."""
    found, images = portions(20 * PART_BYTES, 20 * PART_BYTES - 1)
    nodes = [Replica(url, images, silent=number == silent) for number, url in enumerate(NODES[:2])]
    store = SpreadStore(SpreadPlace(2, tuple(NODES[:2])).at)
    (whole,) = store.know([(cast(NodeStore, node), portion) for node in nodes for portion in found])
    into = memoryview(bytearray(whole.nbytes))
    store.fetch(whole, into)
    assert into == b"".join(images) + bytes(1)
    assert nodes[silent].asked <= 1


def test_portions_that_do_not_belong_together_are_none() -> None:
    found, _ = portions(5000, 5000, 5000)
    assert missing(found[1:]) == [0]
    assert missing([]) == [0]
    one = found[1].portion
    assert one is not None
    for others in (
        found[1:],
        [*found, found[0]],
        [found[0], replace(found[1], portion=replace(one, digest="other")), found[2]],
        [found[0], replace(found[1], portion=replace(one, hosts=4)), found[2]],
        [found[0], replace(found[1], part_bytes=4096), found[2]],
        [found[0], replace(found[1], files=found[0].files), found[2]],
        [found[0], replace(found[1], portion=None), found[2]],
    ):
        with pytest.raises(CorruptSnapshotError):
            whole_of(others)


@pytest.mark.parametrize("sizes", [(5000, 0), (5000, 30_000), (5000, 2**45)])
def test_portions_without_the_checksums_of_their_parts_make_no_whole(sizes: tuple[int, ...]) -> None:
    """A node may say what it likes: each manifest is read without complaint."""
    one, other = portions(5000, max(1, sizes[1] % 2**16))[0]
    files = (replace(other.files[0], nbytes=0), replace(other.files[1], offset=0, nbytes=0))
    told = replace(other, nbytes=sizes[1], checksums=(), files=files, part_bytes=2**27 if sizes[1] > 2**40 else 8192)
    told = Manifest.from_json(told.to_json())
    with pytest.raises(CorruptSnapshotError, match="no checksums"):
        whole_of([replace(one, part_bytes=told.part_bytes), told])


def test_a_portion_without_the_checksum_of_its_end_makes_no_whole() -> None:
    """The manifest that nodes made of it could be read by nobody, and they took it that the snapshot was durable."""
    one, other = portions(5000, 5000)[0]
    assert other.portion is not None
    told = Manifest.from_json(replace(other, portion=replace(other.portion, tail="")).to_json())
    with pytest.raises(CorruptSnapshotError, match="no checksums"):
        whole_of([one, told])


def test_a_portion_says_what_it_is_and_its_note_too() -> None:
    (portion, _), _ = portions(5000, 5000)
    again = Manifest.from_json(portion.to_json())
    assert again == portion
    assert (again.snapshot, again.name) == (snapshot_name(1, 1), portion_name(snapshot_name(1, 1), 0))
    assert portion.portion.tail == checksum(bytes(place % 251 for place in range(5000)) + bytes(PART_BYTES - 5000))
    note = Note.of_portion(portion)
    assert Note.from_json(note.to_json()) == note
    with pytest.raises(CorruptSnapshotError):
        Note.of_portion(replace(portion, portion=None))
    with pytest.raises(CorruptSnapshotError):
        Note.from_json('{"portion": 7}')


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": 2},
        {"host": -1},
        {"host": "0"},
        {"hosts": 10**9},
        {"digest": 7},
        {"tail": "short"},
    ],
)
def test_a_malformed_portion_is_refused(wrong: dict[str, Any]) -> None:
    (portion, _), _ = portions(5000, 5000)
    fields = portion.to_dict()
    fields["portion"] = {**fields["portion"], **wrong}
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_dict(fields)
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_dict({**portion.to_dict(), "name": snapshot_name(1, 1)})
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_dict({**portion.to_dict(), "files": []})


def test_a_place_over_which_a_snapshot_is_spread_is_read_as_it_was_written() -> None:
    place = SpreadPlace(2, ("spot://a:1/run@id", "spot://b:2/run@id"))
    assert SpreadPlace.read(place.at) == place
    assert urls_of(place.at) == [place.at]
    assert nodes_of(place.at) == list(place.urls)
    assert is_by_itself(place.at)
    assert not is_durable(place.at)
    assert SpreadPlace.read("spot://a:1/run@id") is None
    assert nodes_of("/a folder/run") == []
    for wrong in ("spread:", "spread:0 spot://a:1/r", "spread:1", "spread:1 /a", "spread:x spot://a:1/r"):
        with pytest.raises(SettingsError):
            SpreadPlace.read(wrong)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_portion_that_is_damaged_in_memory_leaves_nothing_at_the_durable_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another node that has it too takes the files that are there for written."""
    (one, other), images = portions(5000, 5000)
    store, image, write_all = LocalStore(str(tmp_path / "run")), bytearray(images[1]), JointFolder.write_all
    with pytest.raises(NotWhole):
        put_portion(store, one, memoryview(images[0]), attempt=1)
    if when == "before":
        image[7] ^= 1

    def damaged(folder: JointFolder, contents: Mapping[str, memoryview]) -> None:
        image[7] |= 128 * (when == "meanwhile")
        write_all(folder, contents)

    with monkeypatch.context() as damaging:
        damaging.setattr(JointFolder, "write_all", damaged)
        with pytest.raises(CorruptSnapshotError):
            put_portion(store, other, memoryview(image), attempt=1)
    there = {path.name for path in (tmp_path / "run" / one.snapshot).iterdir()}
    assert there == {*(file.name for file in one.files), note_name(0)}
    whole = put_portion(store, other, memoryview(images[1]), attempt=1)
    fetched = memoryview(bytearray(whole.nbytes))
    store.fetch(whole, fetched)
    assert fetched == b"".join(data + bytes(PART_BYTES - 5000) for data in images)


@pytest.mark.parametrize("how", ["gone", "cut short"])
def test_a_note_does_not_stand_for_its_files(tmp_path: Path, how: str) -> None:
    """Another node with this portion, damaged in its memory, may have taken back files when this one left its note."""
    (one, other), images = portions(5000, 5000)
    store, path = LocalStore(str(tmp_path / "run")), tmp_path / "run" / one.snapshot / one.files[1].name
    with pytest.raises(NotWhole):
        put_portion(store, one, memoryview(images[0]), attempt=1)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(NotWhole):
        put_portion(store, one, memoryview(images[0]), attempt=1)
    assert path.read_bytes() == images[0][one.files[1].offset : one.files[1].stop]
    assert put_portion(store, other, memoryview(images[1]), attempt=1) == store.survey().manifests[0]


def test_a_portion_that_waits_for_others_hears_of_a_later_attempt_and_that_there_will_be_none(tmp_path: Path) -> None:
    """Its node held it for an hour, and longer."""
    (one, _), images = portions(5000, 5000)
    store = LocalStore(str(tmp_path / "run"))
    with pytest.raises(NotWhole) as waits:
        put_portion(store, one, memoryview(images[0]), attempt=1)
    assert not waits.value.is_final
    torn = tmp_path / "run" / one.snapshot / torn_name()
    torn.write_text('{"why": "host 1 has another model"}')
    with pytest.raises(NotWhole, match="another model") as over:
        put_portion(store, one, memoryview(images[0]), attempt=1)
    assert over.value.is_final
    torn.unlink()
    store.claim(Claim(attempt=2, run_id="", digest="b", location=store.url, started_unix_s=0.0))
    with pytest.raises(FencedError):
        put_portion(store, one, memoryview(images[0]), attempt=1)


def test_portions_that_do_not_belong_together_are_not_tried_for_ever(tmp_path: Path) -> None:
    """Who led them was lost before it could say so: a node that shuts down waited until its time was over."""
    (one, other), images = portions(5000, 5000)
    store = LocalStore(str(tmp_path / "run"))
    assert other.portion is not None
    with pytest.raises(NotWhole) as waits:
        put_portion(store, one, memoryview(images[0]), attempt=1)
    assert not waits.value.is_final
    unlike = replace(other, portion=replace(other.portion, digest="another model"))
    for portion, image in ((unlike, images[1]), (one, images[0])):
        with pytest.raises(NotWhole, match="another layout") as over:
            put_portion(store, portion, memoryview(image), attempt=1)
        assert over.value.is_final
    assert not store.survey().manifests
