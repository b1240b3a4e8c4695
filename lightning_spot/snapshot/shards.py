"""Snapshots that several processes write: what each has written, when all of it counts, and how it is one image.

Each writer (a rank) fills a register of its own, once: with its shard, or with the reason why there will be none.
Whether the snapshot is committed is a function of these registers, so whoever sees them all knows it, and no two ever
disagree. Nothing here reads a byte: the manifest of the whole is put together from those of the shards.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.files import MODEL_FILE, FileSpan
from lightning_spot.snapshot.manifest import Manifest, Order, ShardOf
from lightning_spot.untrusted import LONGEST_TEXT, plain

LEAST_PART_BYTES = 64 * 1024
_PARTS = 32  # of a shard, where it is small: what is added to the end of one is far less than the shard


class Status(enum.Enum):
    """What has become of a snapshot."""

    PENDING = "pending"
    COMMITTED = "committed"
    ABORTED = "aborted"


def status(registers: Mapping[int, ShardOf], order: Order, watermark: Order | None = None) -> Status:
    """What has become of a snapshot, by the registers that are seen.

    Who sees fewer of them may find it pending where another finds it committed or aborted; never the opposite of what
    another finds, since a register is written once.

    Args:
        registers: what each writer has put, by its number; those that are not seen are missing.
        order: of the snapshot.
        watermark: of the newest snapshot that is known to be committed, of the same lineage.
    """
    if any(each.failed for each in registers.values()) or len({_agreed(each) for each in registers.values()}) > 1:
        return Status.ABORTED
    writers = next(iter(registers.values())).writers if registers else 0
    if registers and registers.keys() == set(range(writers)):
        return Status.COMMITTED
    return Status.ABORTED if watermark is not None and order < watermark else Status.PENDING


def why_aborted(registers: Mapping[int, ShardOf]) -> str:
    """Why a snapshot is aborted, by its registers, for people; ``""`` if these don't say it."""
    for writer, each in sorted(registers.items()):
        if each.failed:
            return f"rank {writer}: {each.failed}"
    if len({_agreed(each) for each in registers.values()}) > 1:
        return "its ranks don't hold the same model and optimizers. All ranks must train one model with one optimizer"
    return ""


def is_evictable(order: Order, state: Status, watermark: Order | None, *, is_durable: bool) -> bool:
    """Whether a place may let go of a snapshot, or of its shard of one.

    The newest committed snapshot that is durable nowhere never is; neither is what may still become newer than it.

    Args:
        order: of the snapshot.
        state: of it, as this place sees it.
        watermark: of the newest snapshot, of the same lineage, that this place knows to be committed over places that
            are lost no sooner than this one: what the rings of hosts hold raises no server's watermark.
        is_durable: whether storage, or another place that is as good, has the whole snapshot.
    """
    if state is Status.ABORTED or (watermark is not None and order < watermark):
        return True
    return is_durable and state is Status.COMMITTED


def registers_of(manifests: Iterable[Manifest]) -> dict[int, ShardOf]:
    """What shards of one snapshot, and those that failed, say of it: by the number of the writer."""
    return {writer: shard_of(each) for writer, each in _one_of_each_writer(manifests).items()}


def by_snapshot(manifests: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    """The shards, and those that failed, of each snapshot, by its name; one of each writer."""
    found: dict[str, list[Manifest]] = {}
    for each in manifests:
        if each.shard is not None:
            found.setdefault(each.snapshot, []).append(each)
    return {name: list(_one_of_each_writer(shards).values()) for name, shards in found.items()}


def _one_of_each_writer(manifests: Iterable[Manifest]) -> dict[int, Manifest]:
    """Of two shards of one writer, one that failed counts, else the first.

    A place may have been told of a failure before another one had the shard.
    """
    found: dict[int, Manifest] = {}
    for each in manifests:
        if each.shard is not None and (each.shard.failed or each.shard.writer not in found):
            found[each.shard.writer] = each
    return found


def failed(manifest: Manifest, why: str) -> Manifest:
    """The register of a writer that will never have its shard.

    Args:
        manifest: of the shard, as far as it is known.
        why: for people.
    """
    shard = replace(shard_of(manifest), start=0, failed=plain(why or "unknown", LONGEST_TEXT))
    return replace(manifest, nbytes=0, files=(), checksums=(), shard=shard)


def _agreed(shard: ShardOf) -> tuple[int, str]:
    return shard.writers, shard.digest if not shard.failed else ""


def part_bytes_for(nbytes: int) -> int:
    """Size of the parts of a snapshot, of whose writers each has about so many bytes: a power of two."""
    return min(PART_BYTES, max(LEAST_PART_BYTES, 1 << max(0, (nbytes // _PARTS).bit_length() - 1)))


# -- one image of several shards --------------------------------------------------------------------------------------


class Section(NamedTuple):
    """Whole parts of the image that one writer has.

    Attributes:
        place: of its first byte in the image.
        nbytes: how long it is.
        writer: who has it.
        offset: of its first byte in that writer's shard.
    """

    place: int
    nbytes: int
    writer: int
    offset: int


def sections(shards: Iterable[Manifest]) -> list[Section]:
    """Where the image of a snapshot lies in its shards: ranges of one file first, in their order, then all else.

    Args:
        shards: manifests of all writers' shards.

    Raises:
        CorruptSnapshotError: if they are not those of all writers of one snapshot, or don't fit each other.
    """
    by_writer = _all_of(shards)
    ranges = sorted((each for each in by_writer if range_of(each) is not None), key=lambda each: shard_of(each).start)
    found: list[Section] = []
    place, file_end = 0, 0
    for manifest in ranges:
        span = range_of(manifest)
        assert span is not None
        if shard_of(manifest).start != file_end or file_end % manifest.part_bytes:
            raise CorruptSnapshotError(f"the ranges of {span.name} in {manifest.snapshot} don't follow each other")
        nbytes = _padded(span.nbytes, manifest.part_bytes)
        found.append(Section(place, nbytes, shard_of(manifest).writer, 0))
        place, file_end = place + nbytes, file_end + span.nbytes
    for manifest in by_writer:
        span = range_of(manifest)
        begin = 0 if span is None else _padded(span.nbytes, manifest.part_bytes)
        if manifest.nbytes > begin:
            found.append(Section(place, manifest.nbytes - begin, shard_of(manifest).writer, begin))
            place += manifest.nbytes - begin
    return found


def assemble(shards: Iterable[Manifest]) -> Manifest:
    """The manifest of a snapshot, of those of its shards. Whoever makes it makes the same.

    Raises:
        CorruptSnapshotError: if they are not those of all writers of one snapshot, or don't fit each other.
    """
    by_writer = _all_of(shards)
    first = by_writer[0]
    files: list[FileSpan] = []
    checksums: list[str] = []
    place = 0
    for section in sections(by_writer):
        manifest = by_writer[section.writer]
        begin, end = section.offset, section.offset + section.nbytes
        checksums += manifest.checksums[begin // manifest.part_bytes : end // manifest.part_bytes]
        for span in manifest.files:
            if not begin <= span.offset < max(end, begin + 1):
                continue
            if files and files[-1].name == span.name == MODEL_FILE:
                files[-1] = replace(files[-1], nbytes=files[-1].nbytes + span.nbytes)
            else:
                files.append(replace(span, offset=section.place + span.offset - begin))
        place = section.place + section.nbytes
    if len(checksums) * first.part_bytes != place:
        raise CorruptSnapshotError(f"the shards of {first.snapshot} have no checksums of all their parts")
    whole = replace(
        first, name=first.snapshot, nbytes=place, files=tuple(files), checksums=tuple(checksums), shard=None
    )
    return Manifest.from_dict(whole.to_dict())  # what strangers' shards make is checked as any manifest is


def check_of_one(shards: Sequence[Manifest]) -> None:
    """Refuse shards that can never be one image, whichever others come. Their writers have agreed on all of it.

    Raises:
        CorruptSnapshotError: if they are not of one snapshot, or one failed, or does not end with a part.
    """
    name = shards[0].snapshot if shards else ""
    agreed = {(m.run_id, m.lineage, m.snapshot, m.part_bytes, *_agreed(shard_of(m))) for m in shards}
    if len(agreed) > 1 or any(manifest.why_failed for manifest in shards):
        raise CorruptSnapshotError(f"the shards of {name} are not of one snapshot")
    if any(manifest.nbytes % manifest.part_bytes for manifest in shards):
        raise CorruptSnapshotError(f"a shard of {name} does not end with a part")


class Image(Protocol):
    """The bytes of an image, wherever they lie."""

    def __len__(self) -> int:
        """Bytes of the whole image."""

    def __getitem__(self, bounds: slice, /) -> memoryview:
        """The bytes from one place in the image to another."""


class JoinedImage:
    """An image that some sections make, one after the other, wherever they lie. Implements :class:`Image`.

    Args:
        found: the sections; see :func:`sections` for those of a snapshot.
        images: the bytes of each writer's shard, by the number of the writer.
    """

    def __init__(self, found: Iterable[Section], images: Mapping[int, Image] | Sequence[Image]) -> None:
        self._sections: list[Section] = []
        self._images = images
        for section in found:
            self._sections.append(section._replace(place=len(self)))

    def __len__(self) -> int:
        return sum(self._sections[-1][:2]) if self._sections else 0

    def __getitem__(self, bounds: slice, /) -> memoryview:
        """The bytes in place where one shard has all of them, else a copy."""
        start, stop, _ = bounds.indices(len(self))
        found = [self._images[writer][first:last] for writer, first, last in self.pieces(start, stop)]
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(writer, start, stop)`` of what lies in a range of the image: in whose shard, and where there."""
        index = max(0, bisect_right(self._sections, start, key=lambda section: section.place) - 1)
        for section in self._sections[index:]:
            if section.place >= stop:
                return
            first, last = max(start, section.place), min(stop, section.place + section.nbytes)
            if first < last:
                offset = section.offset - section.place
                yield section.writer, first + offset, last + offset

    def cut_out(self, start: int, stop: int) -> JoinedImage:
        """A range of it, of which no byte is copied."""
        found = (Section(0, last - first, writer, first) for writer, first, last in self.pieces(start, stop))
        return JoinedImage(found, self._images)

    def slices(self, most: int) -> Iterator[memoryview]:
        """Yield all of it in order, in slices of at most so many bytes, none of which is a copy."""
        for section in self._sections:
            for start in range(section.offset, section.offset + section.nbytes, most):
                stop = min(start + most, section.offset + section.nbytes)
                yield self._images[section.writer][start:stop]


def cut_out(image: Image, start: int, stop: int) -> Image:
    """A range of an image, of which no byte is copied."""
    return image.cut_out(start, stop) if isinstance(image, JoinedImage) else image[start:stop]


def slices(image: Image, most: int) -> Iterator[memoryview]:
    """Yield an image in order, in slices of at most so many bytes, none of which is a copy."""
    if isinstance(image, JoinedImage):
        yield from image.slices(most)
        return
    for start in range(0, len(image), most):
        yield image[start : start + most]


def shared_file(shards: Iterable[Manifest], images: Mapping[int, Image]) -> JoinedImage | None:
    """The file of which several writers have a range each, if all of its ranges are here; the last one is writer 0's.

    Args:
        shards: manifests of the shards that are here.
        images: the bytes of each, by the number of its writer.
    """
    ranges = sorted(
        (shard_of(each).start, shard_of(each).writer, span.nbytes)
        for each in shards
        if (span := range_of(each)) is not None
    )
    ends = [0, *(start + nbytes for start, _, nbytes in ranges)]
    if not ranges or ranges[-1][1] != 0 or ends[:-1] != [start for start, _, _ in ranges]:
        return None
    return JoinedImage((Section(start, nbytes, writer, 0) for start, writer, nbytes in ranges), images)


def _all_of(shards: Iterable[Manifest]) -> list[Manifest]:
    """The shards of all writers, in their order.

    Raises:
        CorruptSnapshotError: if one is missing, there twice, failed, or of something else.
    """
    by_writer = sorted(shards, key=lambda manifest: shard_of(manifest).writer)
    if not by_writer:
        raise CorruptSnapshotError("there are no shards to put together")
    first = by_writer[0]
    check_of_one(by_writer)
    if [shard_of(manifest).writer for manifest in by_writer] != list(range(shard_of(first).writers)):
        raise CorruptSnapshotError(f"the shards of {first.snapshot} are not those of all writers once")
    return by_writer


def shard_of(manifest: Manifest) -> ShardOf:
    """What a manifest says of the shard that it is of.

    Raises:
        CorruptSnapshotError: if it is of none.
    """
    if manifest.shard is None:
        raise CorruptSnapshotError(f"{manifest.name} is no shard of a snapshot")
    return manifest.shard


def range_of(manifest: Manifest) -> FileSpan | None:
    """What of the one file that several writers share is in a shard; ``None`` if nothing is."""
    first = manifest.files[0] if manifest.files else None
    return first if first is not None and first.name == MODEL_FILE else None


def _padded(nbytes: int, part_bytes: int) -> int:
    return -(-nbytes // part_bytes) * part_bytes
