"""The runs a server knows: what was said of each when it was opened, how it is named in URLs, and where it may go."""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from lightning_spot import untrusted
from lightning_spot.config import HIGHEST_ATTEMPT, LARGEST, MOST_SERVERS, check_run_name, directory_of, scheme_of
from lightning_spot.errors import MalformedError, ServerRefusedError, SettingsError
from lightning_spot.snapshot.manifest import MOST_WRITERS, OWN_DIR, Manifest, snapshot_order
from lightning_spot.snapshot.packing import Compression
from lightning_spot.store.fences import ATTEMPTS_DIR, Claim, digest_of
from lightning_spot.store.retention import Keep, read_keep
from lightning_spot.untrusted import LONGEST_NAME, UnixSeconds, as_object, finite, integer, number, short, text, whole

EPOCH_UNIX_S = 1_577_836_800
"""2020-01-01. Attempts of a folder of users' files are not counted: each is the seconds since then, below 10**9."""

HEARTBEAT_TIMEOUT_S = 35.0
"""A trainer counts as gone so long after the last request for its run by its host, which sends one every 10 s."""

_RUN_ID = re.compile(r"[0-9a-f]{12}")


def key_of(manifest: Manifest) -> str:
    """What a server keeps a snapshot's run under: its identity, or its name where it has none (format 1)."""
    return manifest.run_id or manifest.run


def writer_of(manifest: Manifest) -> int:
    """Number of the rank that writes a snapshot, file or shard; 0 where one writes all."""
    return manifest.shard.writer if manifest.shard is not None else 0


def check_name(name: str) -> str:
    """Return the name of a run if it can be one, in URLs and as a directory.

    Raises:
        SettingsError: otherwise.
    """
    if is_own_folder(check_run_name(name)):
        raise SettingsError(f"run name {name!r} is that of a folder of lightning_spot: give the run another name")
    return name


def parse_run(text: str) -> tuple[str, str]:
    """Split ``NAME@ID`` into name and identity; the identity of a bare ``NAME`` is ``""``.

    Raises:
        SettingsError: if it is neither.
    """
    name, at, identity = text.partition("@")
    if at and not _RUN_ID.fullmatch(identity):
        raise SettingsError(f"{text!r} names no run: what follows '@' are the 12 hexadecimal digits of its identity")
    return check_name(name), identity


def files_name(identity: str) -> str:
    """Name of the run that a folder of users' files is, see :mod:`lightning_spot.run.attempts`."""
    return f"files-{identity}"


def run_text(name: str, identity: str) -> str:
    """How a run is written in URLs, see :func:`parse_run`."""
    return f"{name}@{identity}" if identity else name


LONGEST_PLACE = 1024
"""Of directories and URLs that are listed for everybody."""

_MOST_PID = 2**31
_LONGEST_APART_S = 365 * 86400.0

_Name = Annotated[str, short(LONGEST_NAME)]
_Place = Annotated[str, short(LONGEST_PLACE)]


def texts(fields: Mapping[str, Any], name: str, _default: object = None) -> tuple[str, ...]:
    """A list of texts, as many as a run may have servers at most.

    Raises:
        MalformedError: otherwise.
    """
    return tuple(untrusted.texts(fields, name, MOST_SERVERS))


def _seconds(fields: Mapping[str, Any], name: str, _default: object) -> float:
    return min(number(fields, name, None, 0, LARGEST), _LONGEST_APART_S)


def _compression(fields: Mapping[str, Any], name: str, _default: object) -> Compression:
    """What a later version may say counts as ``"auto"``."""
    named = text(fields, name)
    return next((each for each in get_args(Compression) if each == named), "auto")


BLOCKED_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Bounds by which a :class:`Histogram` counts what snapshots cost training."""

_MOST_COUNTED = 10**15
_MOST_LABELS = 16
_LABEL = re.compile(r"[a-z_]{1,32}", re.ASCII)


def _labelled(fields: Mapping[str, Any], name: str, _default: object) -> dict[str, float]:
    """A few numbers by their labels.

    Raises:
        MalformedError: otherwise.
    """
    given = as_object(fields.get(name, {}))
    if len(given) > _MOST_LABELS or not all(_LABEL.fullmatch(label) for label in given):
        raise MalformedError(f"{name} has more than {_MOST_LABELS} labels, or one that is no word")
    return {label: number(given, label, None, 0, _MOST_COUNTED) for label in given}


def _buckets(fields: Mapping[str, Any], name: str, _default: object) -> list[int]:
    counts = untrusted.items(fields, name, len(BLOCKED_S) + 1)
    if len(counts) != len(BLOCKED_S) + 1:
        raise MalformedError(f"{name} has not {len(BLOCKED_S) + 1} counts")
    return [integer({name: count}, name, None, 0, _MOST_COUNTED) for count in counts]


@dataclass(kw_only=True, slots=True)
class Histogram:
    """How often a snapshot has blocked training for how long.

    Attributes:
        counts: by the bounds of :data:`BLOCKED_S`; the last of those beyond them.
        sum_s: seconds of all together.
    """

    counts: Annotated[list[int], _buckets] = field(default_factory=lambda: [0] * (len(BLOCKED_S) + 1))
    sum_s: Annotated[float, finite(0, _MOST_COUNTED)] = 0.0

    def observe(self, seconds: float) -> None:
        """Count one more."""
        self.counts[bisect_left(BLOCKED_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a trainer has measured, for the metrics of the servers that have its run.

    Attributes:
        snapshots: of this attempt, by their result.
        blocked: how long each of them has blocked training.
        seconds: of the run so far, by what they were spent on.
        attempts: of the run, by how they ended.
        notices: of a preemption, in this attempt.
        persisted_step: newest snapshot in storage, -1 for none.
        persisted_unix_s: when that was taken.
    """

    snapshots: Annotated[dict[str, float], _labelled]
    blocked: Histogram
    seconds: Annotated[dict[str, float], _labelled]
    attempts: Annotated[dict[str, float], _labelled]
    notices: Annotated[int, whole(0, _MOST_COUNTED)] = 0
    persisted_step: Annotated[int, whole(-1, 10**18)] = -1
    persisted_unix_s: UnixSeconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a trainer, or the server on its host, says of a run when it opens it.

    Attributes:
        name: of the run, for people.
        id: its identity.
        location: its durable directory, see :class:`~lightning_spot.store.fences.Claim`.
        attempt: the attempt that writes from now on.
        token: of the attempt.
        keep: which snapshots storage keeps, and how many each server.
        durable_url: durable directory as a store's URL; ``None`` if the server is not to write there.
        min_upload_interval_s: least seconds between two snapshots brought to storage; 0 for as often as storage can;
            ``None`` for the same, but snapshots in quick succession are thinned, see :data:`.reconcile.MOST_APART_S`.
        compression: how what changed goes to the servers behind: ``"auto"`` packs it on slow links, ``"always"``
            always, ``"off"`` never, and ``"topk"`` sends it not exactly.
        servers: ``spot://host:port`` of the snapshot servers behind this one, in order of preference, see
            :mod:`~lightning_spot.server.placement`.
        replicas: how many of them each snapshot is kept at.
        hosts: how many hosts write it.
        apart: number of this host, if each has shards of its own of a sharded model: they go to servers of their own.
            ``None`` if the shards of all hosts go to the same servers.
        carry: whether the server is to bring the run to its storage; where it is kept at several, one is.
        committed: name of the newest snapshot that is known to be committed over snapshot servers or at storage, ``""``
            for none: what is older gives way to what is newer.
        persisted: name of the newest snapshot that is known to be in storage, ``""`` for none: it may go, and
            older ones of its lineage.
        lineage: of that one.
        left: whether its trainer is gone: its host only looks after what is there of it.
        is_claimed: whether its attempts claim its durable directory. Not so a folder of users' files, each of whose
            manifests says who may write it.
        session: live connection of the trainer, if it is on this host.
        pid: its process id, for messages.
        host: name of its machine, for messages.
        started_unix_s: when its attempt began: a claim that is made later says so, too.
        figures: what its trainer has measured last; ``None`` if it has not said, or another host does.
    """

    name: _Name
    id: _Name
    location: _Place
    attempt: Annotated[int, whole(0, HIGHEST_ATTEMPT)]
    token: _Name = field(repr=False)
    keep: Annotated[Keep, read_keep] = field(default_factory=Keep)
    durable_url: _Place | None = None
    min_upload_interval_s: Annotated[float, _seconds] | None = None
    compression: Annotated[Compression, _compression] = "auto"
    servers: Annotated[tuple[str, ...], texts] = ()
    replicas: Annotated[int, whole(1, MOST_SERVERS)] = 1
    hosts: Annotated[int, whole(1, MOST_WRITERS)] = 1
    apart: Annotated[int, whole(0, MOST_WRITERS)] | None = None
    carry: bool = True
    committed: _Name = ""
    persisted: _Name = ""
    lineage: _Name = ""
    left: bool = False
    is_claimed: bool = True
    session: _Name = ""
    pid: Annotated[int, whole(0, _MOST_PID)] = 0
    host: _Name = ""
    started_unix_s: UnixSeconds = field(default_factory=time.time, compare=False)
    figures: Figures | None = None

    @property
    def key(self) -> str:
        """What a server keeps the run under, see :func:`key_of`."""
        return self.id or self.name

    @property
    def text(self) -> str:
        """How the run is written in URLs, see :func:`parse_run`."""
        return run_text(self.name, self.id)

    def claim(self) -> Claim:
        """What the attempt notes at storage."""
        return Claim(
            attempt=self.attempt,
            run_id=self.id,
            digest=digest_of(self.token),
            location=self.location,
            started_unix_s=self.started_unix_s,
            host=self.host,
            pid=self.pid,
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """What a server answers when a run is opened.

    Attributes:
        attempt: the attempt that writes now.
        carries: whether this server, or one behind it, brings the run to its storage.
        why_not: if it does not, the reason, for people.
        leaves: whether this is since it is shutting down: another one is to have what comes next.
    """

    attempt: int
    carries: bool
    why_not: str = ""
    leaves: bool = False


@dataclass(slots=True)
class Run:
    """A run this server knows. Fields change under the registry's lock.

    Attributes:
        info: as it was opened last; its ``session`` is ``""`` once the trainer's connection has closed.
        complete: whether its trainer said that the run has ended.
        opened_s: when it was opened last (monotonic).
        client: who opened it last, ``""`` if that is not known, as of what a killed server has left.
        sessions: connections of all ranks on this host that have opened it.
        carried_for: when each host, by its name and trainer, asked last that the run be brought to storage from here
            (monotonic); those of one attempt.
    """

    info: RunInfo
    complete: bool = False
    opened_s: float = 0.0
    client: str = ""
    sessions: set[str] = field(default_factory=set)
    carried_for: dict[tuple[str, int], float] = field(default_factory=dict)


def refusal(url: str, prefixes: Sequence[str]) -> str:
    """Why a server may not write to ``url``, for people; ``""`` if it may.

    Args:
        url: durable directory of a run: a path, ``file://…`` or an fsspec URL.
        prefixes: what the operator allowed.
    """
    try:
        wanted = _segments(url)
    except SettingsError as error:
        return str(error)
    if inside := next((name for name in wanted[2:] if is_own_folder(name)), None):
        return f"{url} is no directory of a run: {inside!r} is a folder of lightning_spot. Give another directory"
    for prefix in prefixes:
        allowed = _segments(prefix)
        if wanted[: len(allowed)] == allowed:
            return ""
    listed = ", ".join(prefixes) or "nothing"
    return (
        f"this server may not write to {url} (allowed: {listed}). Its operator can start it with"
        f" --allow-storage {url.rstrip('/').rpartition('/')[0] or url}; until then the trainer's host writes there"
    )


def is_own_folder(name: str) -> bool:
    """Whether a folder of that name, within a run, is lightning_spot's: a run in it could forge what it holds."""
    return name in (ATTEMPTS_DIR, OWN_DIR) or snapshot_order(name) is not None


def check_prefix(prefix: str) -> str:
    """Return a prefix as given if it can be compared.

    Raises:
        SettingsError: otherwise.
    """
    _segments(prefix)
    return prefix


def _segments(url: str) -> list[str]:
    """Scheme, host and path segments of a URL, so that ``s3://b/run-evil`` does not pass for ``s3://b/run``."""
    if "::" in url or any(ord(character) < 32 or character in "\\?#" for character in url):
        raise SettingsError(
            f"{url!r} cannot be compared with the prefixes that a server may write to: write it plainly"
        )
    if not (scheme := scheme_of(url)):
        directory = directory_of(url)
        if not directory.startswith("/"):
            raise SettingsError(f"{url!r} is no absolute path")
        if ".." in directory.split("/"):
            raise SettingsError(f"{url!r} climbs with '..'")
        return ["file", "", *[name for name in os.path.realpath(directory).split("/") if name]]
    bucket, _, path = url.partition("://")[2].partition("/")
    names = path.strip("/").split("/") if path.strip("/") else []
    if not bucket or any(name in ("", ".", "..") for name in names):
        raise SettingsError(f"{url!r} has no bucket, or a path with empty names or dots")
    return [scheme, bucket, *names]


def file_name(path: str) -> str:
    """Name of a user's file below a run.

    Raises:
        ServerRefusedError: if the path has folders: a run has none.
        SettingsError: if it is no name.
    """
    if "/" in path.strip("/"):
        raise ServerRefusedError(f"{path!r} names no file: those of a run are in no folders", status=409)
    if not path or path.startswith(".") or "\0" in path or len(path.encode()) > 200:
        raise SettingsError(f"{path!r} cannot name a file: it is empty, hidden or too long")
    if is_own_folder(path):
        raise SettingsError(f"{path!r} cannot name a file: a run has a directory of that name")
    return path
