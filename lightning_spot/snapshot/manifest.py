"""The manifest: a small JSON file, written last, that makes a snapshot count. No manifest, no snapshot."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from lightning_spot import untrusted
from lightning_spot.config import HIGHEST_ATTEMPT, MANIFEST_VERSION, PART_BYTES
from lightning_spot.errors import CorruptSnapshotError, MalformedError
from lightning_spot.snapshot.files import MODEL_FILE, MOST_FILES, FileSpan, check_files
from lightning_spot.snapshot.parts import checksum_parts, part_ranges, verify_parts
from lightning_spot.untrusted import FileName, UnixSeconds

if TYPE_CHECKING:
    from lightning_spot.snapshot.shards import Image

MANIFEST_FILE = "manifest.json"
OWN_DIR = ".lightning_spot"
"""Folder beside files that users named, which holds the manifests of these and what is on its way to become one."""

Order = tuple[int, int, int]
"""Sort key of a snapshot, see :attr:`Manifest.order`."""

_SNAPSHOT_NAME = re.compile(  # as it is written: two names never say the same
    r"step-(\d{9}|[1-9]\d{9,17})-attempt-(\d{4}|[1-9]\d{4,8})(-inexact|-complete)?", re.ASCII
)
_RANKS = {"-inexact": 0, None: 2, "-complete": 4}
_SHARD = "-shard-"

MOST_WRITERS = 65536
"""Of one snapshot."""

# A manifest may come from a stranger: nothing is allocated, listed or compared before its numbers are within these.
_PART_BYTES = (1, 2**30)
_MOST_PARTS = 2**20
_MOST_SMALL_PARTS = 2**17  # of less than the usual size: who makes a manifest large says so of the snapshot, too
MOST_STEPS = 10**18
_MOST_RANKS = 10**7
_MOST_VERSIONS = 64
MOST_METRICS = 64
"""Of one snapshot."""
_LAST_WITHOUT_CHECKSUM = 3  # format of manifests that have no checksum of themselves
_CHECKSUMS = re.compile(r"[0-9a-f]*")
_CHECKSUM_DIGITS = 32
_NO_CHECKSUMS = "checksums are no xxh3-128 each"


def snapshot_name(step: int, attempt: int, *, complete: bool = False, exact: bool = True) -> str:
    """Name of the snapshot of ``step`` taken by ``attempt``; two attempts never share a name.

    The snapshot of a finished run has a name of its own, so that it never replaces the last one before it; so has one
    that is not exact, so that neither it nor the exact one of its step ever replaces the other.
    """
    kind = "-complete" if complete else "" if exact else "-inexact"
    return f"step-{step:09d}-attempt-{attempt:04d}{kind}"


def snapshot_order(name: str) -> Order | None:
    """Sort key read from a snapshot's name, see :attr:`Manifest.order`; ``None`` for other names."""
    match = _SNAPSHOT_NAME.fullmatch(name)
    return (int(match[2]), int(match[1]), _RANKS[match[3]]) if match else None


def order_name(order: Order | None) -> str:
    """Name of the snapshot of that :attr:`Manifest.order`; ``""`` for none."""
    if order is None:
        return ""
    attempt, step, rank = order
    return snapshot_name(step, attempt, complete=rank == _RANKS["-complete"], exact=rank != _RANKS["-inexact"])


def shard_name(snapshot: str, writer: int) -> str:
    """Name of the shard of a snapshot that one of its writers has."""
    return f"{snapshot}{_SHARD}{writer:05d}"


_Step = Annotated[int, untrusted.whole(0, MOST_STEPS)]


@dataclass(frozen=True, slots=True)
class ShardOf:
    """What says that a manifest is that of one writer's shard of a snapshot, and not of a snapshot.

    Attributes:
        writer: number of the rank that writes it, from 0.
        writers: how many write the snapshot.
        digest: what all of them must agree on: a checksum of their plan.
        start: where in its file the first of the manifest's files begins: several writers may each have a range of
            ``model.ckpt``.
        persist: whether storage is to have the snapshot.
        failed: why this writer will never have its shard, ``""`` if it has: then the manifest is of no bytes.
    """

    writer: Annotated[int, untrusted.whole(0, MOST_WRITERS - 1)]
    writers: Annotated[int, untrusted.whole(1, MOST_WRITERS)]
    digest: Annotated[str, untrusted.short(64)] = ""
    start: Annotated[int, untrusted.whole(0, untrusted.MOST_BYTES)] = 0
    persist: bool = True
    failed: Annotated[str, untrusted.text] = ""


def _files(fields: Mapping[str, Any], name: str, default: object) -> tuple[FileSpan, ...]:
    return tuple(untrusted.listed(FileSpan, MOST_FILES)(fields, name, default))


def _checksums(fields: Mapping[str, Any], name: str, _default: object) -> tuple[str, ...]:
    found = tuple(untrusted.items(fields, name, _MOST_PARTS))
    if not all(isinstance(each, str) and len(each) == _CHECKSUM_DIGITS for each in found):
        raise MalformedError(_NO_CHECKSUMS)
    return found


def _versions(fields: Mapping[str, Any], name: str, _default: object) -> dict[str, str]:
    items = [*untrusted.as_object(fields[name]).items()][:_MOST_VERSIONS]
    return {untrusted.plain(of): untrusted.plain(version) for of, version in items}


def is_metric_name(name: object) -> bool:
    """Whether a manifest can have a metric of that name."""
    return isinstance(name, str) and 0 < len(name) <= untrusted.LONGEST_NAME and untrusted.is_line(name)


def _metrics(fields: Mapping[str, Any], name: str, _default: object) -> dict[str, float]:
    found = untrusted.as_object(fields[name])
    if len(found) > MOST_METRICS or not all(map(is_metric_name, found)):
        raise MalformedError(f"{name} are no {MOST_METRICS} numbers with names at most")
    return {each: untrusted.number(found, each, None, -sys.float_info.max, sys.float_info.max) for each in found}


def _present(_fields: Mapping[str, Any], _name: str, _default: object) -> int:
    return MANIFEST_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a committed snapshot holds.

    Attributes:
        run: name of the run, for people.
        run_id: identity of the run, 12 hexadecimal digits; ``""`` if it is of none.
        lineage: identity of the fresh start from which this state descends, 12 hexadecimal digits; ``""`` if unknown.
            A resume inherits it; retention deletes within one lineage only.
        name: name of the snapshot within the run; for a single file that a user named, the file's name.
        step: Lightning's ``global_step`` (optimizer steps).
        attempt: number of the trainer process that took it, counted over restarts, from 1.
        nbytes: size of the image in bytes: what is copied, checksummed and sent. It is the one file, or holds all.
        file: the file's name within the snapshot directory, or ``""`` when the snapshot *is* a file named ``name``.
        files: into which the image is cut at rest, in the order of their places; bytes in none of them are zero. Empty
            when the image is the one ``file``.
        checksums: xxh3-128 of each part, 32 hexadecimal digits each; empty until sealed.
        part_bytes: size of a part in bytes.
        epoch: Lightning's ``current_epoch``.
        complete: whether training had reached its end.
        created_unix_s: wall-clock time of the capture, seconds since 1970.
        world_size: number of ranks that trained.
        versions: versions of torch, lightning and lightning_spot that wrote it.
        metrics: finite values of logged metrics, those that were logged last before it, by name; some of them.
        exact: whether it holds the very bits of the training state; not what ``lossy="topk"`` made of it.
        shard: what of a snapshot it is, if it is one writer's shard of it; then :attr:`name` is that of the shard.
        format: version of the format that it is written in; one that was read from an earlier one has the present one.
    """

    run: FileName
    name: FileName
    step: _Step
    attempt: Annotated[int, untrusted.whole(0, HIGHEST_ATTEMPT)]
    nbytes: Annotated[int, untrusted.whole(0, untrusted.MOST_BYTES)]
    file: FileName = MODEL_FILE
    files: Annotated[tuple[FileSpan, ...], _files] = ()
    checksums: Annotated[tuple[str, ...], _checksums] = ()
    part_bytes: Annotated[int, untrusted.whole(*_PART_BYTES)] = PART_BYTES
    epoch: _Step = 0
    complete: bool = False
    created_unix_s: UnixSeconds = 0.0
    world_size: Annotated[int, untrusted.whole(0, _MOST_RANKS)] = 1
    run_id: FileName = ""
    lineage: FileName = ""
    versions: Annotated[Mapping[str, str], _versions] = field(default_factory=dict)
    metrics: Annotated[Mapping[str, float], _metrics] = field(default_factory=dict)
    exact: bool = True
    shard: ShardOf | None = None
    format: Annotated[int, _present] = MANIFEST_VERSION

    @property
    def stored_bytes(self) -> int:
        """What it is at rest: files of an image are cut out of that, without the gaps in between."""
        return sum(file.nbytes for file in self.files) if self.files else self.nbytes

    @property
    def order(self) -> Order:
        """Sort key: a later attempt beats an earlier one, within an attempt a later step, the end beats all.

        Of one step the exact snapshot beats the other.
        """
        rank = _RANKS["-complete" if self.complete else None if self.exact else "-inexact"]
        return (self.attempt, self.step, rank)

    @property
    def is_file(self) -> bool:
        """Whether this is a single file at a place the user named, not a snapshot directory."""
        return not self.file

    @property
    def why_failed(self) -> str:
        """Why a writer will never have this shard; ``""`` of all else."""
        return self.shard.failed if self.shard is not None else ""

    @property
    def is_sharded(self) -> bool:
        """Whether it is of a model in shards: it has files for ``torch.distributed.checkpoint``, and no checkpoint."""
        return bool(self.files) and all(span.name != MODEL_FILE for span in self.files)

    @property
    def snapshot(self) -> str:
        """Name of the snapshot, also of one of which this is a shard."""
        if self.shard is not None:
            return self.name.removesuffix(shard_name("", self.shard.writer))
        return self.name

    @property
    def data_path(self) -> str:
        """Path of the image below the run's directory: of its one file, or of the directory that holds its files."""
        return self.name if self.is_file or self.files else f"{self.name}/{self.file}"

    @property
    def spans(self) -> tuple[FileSpan, ...]:
        """The files at rest, also if it is one."""
        return self.files or (FileSpan(self.file or self.name, 0, self.nbytes),)

    def path_of(self, span: FileSpan) -> str:
        """Path of one of the :attr:`spans` below the run's directory."""
        return self.name if self.is_file else f"{self.name}/{span.name}"

    def span_of(self, file: str) -> FileSpan:
        """The file of that name, of those that the image is cut into at rest.

        Raises:
            CorruptSnapshotError: if there is none.
        """
        span = next((span for span in self.files if span.name == file), None)
        if span is None:
            raise CorruptSnapshotError(f"{self.name} has no {file}", where=self.name)
        return span

    def span_at(self, path: str) -> FileSpan | None:
        """What of the image a path below the run's directory names; ``None`` if it names nothing of it.

        The path of a snapshot of several files names the whole image.
        """
        if path in (self.data_path, self.name):
            return FileSpan(self.name, 0, self.nbytes)
        return next((span for span in self.spans if path == self.path_of(span)), None)

    @property
    def manifest_path(self) -> str:
        """Path of the manifest below the run's directory."""
        return f"{OWN_DIR}/{self.name}.{MANIFEST_FILE}" if self.is_file else f"{self.name}/{MANIFEST_FILE}"

    def inexact(self) -> Manifest:
        """That of an approximation of this snapshot, not sealed yet."""
        name = snapshot_name(self.step, self.attempt, exact=False)
        name = shard_name(name, self.shard.writer) if self.shard is not None else name
        return replace(self, name=name, exact=False, checksums=())

    def sealed(self, image: memoryview, threads: int | None = None) -> Manifest:
        """This manifest with the checksums of its image's parts.

        Args:
            image: all of it.
            threads: on which they are computed, see :func:`checksum_parts`.
        """
        return replace(self, checksums=checksum_parts(image, self.part_bytes, threads), nbytes=len(image))

    def verify(self, image: Image, where: str) -> None:
        """Check the whole file against this manifest.

        Raises:
            CorruptSnapshotError: if size or a part's checksum differs.
        """
        verify_parts(image, self.checksums, self.part_bytes, f"{self.run}/{self.name} at {where}")

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ``(start, stop)`` of runs of whole parts, about 8 MiB each: fetched and checked at once."""
        return part_ranges(self.nbytes, max(1, PART_BYTES // self.part_bytes) * self.part_bytes)

    def verify_range(self, start: int, data: memoryview, where: str) -> None:
        """Check one of the :meth:`ranges`.

        Raises:
            CorruptSnapshotError: if a part's checksum differs, or this manifest is not sealed.
        """
        first = start // self.part_bytes
        checksums = self.checksums[first : first - (-len(data) // self.part_bytes)]
        verify_parts(data, checksums, self.part_bytes, f"{self.run}/{self.name} at {where}", start)

    def to_dict(self) -> dict[str, Any]:
        """The manifest as a JSON object."""
        left_out = {"files": (), "metrics": {}, "exact": True, "shard": None}
        return {name: value for name, value in asdict(self).items() if name not in left_out or value != left_out[name]}

    def to_json(self) -> str:
        """The manifest as JSON text, with a checksum of itself."""
        return untrusted.sealed_json(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest.

        Raises:
            CorruptSnapshotError: if it is damaged or contradicts itself, or a newer version of this package wrote it.
        """
        try:
            fields = untrusted.read_json(text, untrusted.LARGE_JSON_BYTES)
        except MalformedError as error:
            raise CorruptSnapshotError(f"a manifest cannot be read: {error}") from error
        return cls._read(fields, at_rest=True)

    @classmethod
    def from_dict(cls, fields: Any) -> Manifest:
        """Read a manifest from its JSON object, which came in something that has a checksum; see :meth:`from_json`."""
        return cls._read(fields, at_rest=False)

    @classmethod
    def _read(cls, fields: Any, *, at_rest: bool) -> Manifest:
        if not isinstance(fields, dict) or type(fields.get("format")) is not int:
            raise CorruptSnapshotError("a manifest is no JSON object with a 'format' number")
        version, known = fields["format"], dict(fields)
        if version > MANIFEST_VERSION:
            raise CorruptSnapshotError(
                f"a manifest has format {version}; this version of lightning_spot reads up to"
                f" {MANIFEST_VERSION}: upgrade it"
            )
        try:
            if not untrusted.unseal(known) and at_rest and version > _LAST_WITHOUT_CHECKSUM:
                raise MalformedError("it has no checksum of itself")
            manifest = untrusted.decoded(cls, known)
            manifest._check()
        except MalformedError as error:
            raise CorruptSnapshotError(f"a manifest is damaged or contradicts itself: {error}") from error
        return manifest

    def _check(self) -> None:
        _require(self.name not in ("", ".", "..") and self.file not in (".", ".."), "a name is empty or a dot")
        _require(self.exact or not (self.complete or self.is_file), "the end of a run, or a file, is not exact")
        parts = -(-self.nbytes // self.part_bytes)
        most = _MOST_PARTS if self.part_bytes >= PART_BYTES else _MOST_SMALL_PARTS
        _require(parts <= most, f"{parts} parts are too many")
        _require(len(self.checksums) in (0, parts), f"{len(self.checksums)} checksums for {parts} parts")
        _require(_CHECKSUMS.fullmatch("".join(self.checksums)), _NO_CHECKSUMS)
        if self.files:
            _require(not self.is_file, "it is one file and has several")
            problem = check_files(self.files, self.nbytes)
            _require(problem is None, str(problem))
        if self.shard is not None:
            self._check_shard(self.shard)
        if not self.is_file:
            _require(snapshot_order(self.snapshot) == self.order, f"{self.name} is not its name")

    def _check_shard(self, shard: ShardOf) -> None:
        _require(shard.writer < shard.writers, "its writer is none of those that there are")
        is_named = self.name == shard_name(self.snapshot, shard.writer)
        _require(is_named and snapshot_order(self.snapshot) is not None, "its name is no shard's")
        _require(not (shard.failed and self.nbytes), "it failed, and has bytes")
        _require(shard.failed or self.files, "it is a shard and has no files")


def _require(is_met: object, otherwise: str) -> None:
    if not is_met:
        raise MalformedError(otherwise)
