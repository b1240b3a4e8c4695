"""The runs a node knows: what was said of each when it was opened, and how a run is named in URLs."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from lightning_spot.config import KEEP, check_run_name
from lightning_spot.errors import SettingsError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.packing import Compression
from lightning_spot.memory.prefixes import is_own_folder
from lightning_spot.tiers.claims import Claim, digest_of

EPOCH_UNIX_S = 1_577_836_800
"""2020-01-01: who saves files in a folder is an attempt by the clock, a number of seconds since then below 10**9."""

_RUN_ID = re.compile(r"[0-9a-f]{12}")


def key_of(manifest: Manifest) -> str:
    """What a node keeps a snapshot's run under: its identity, or its name where it has none (format 1)."""
    return manifest.run_id or manifest.run


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a trainer, or the node on its host, says of a run when it opens it.

    Attributes:
        name: of the run, for people.
        id: its identity.
        location: its durable directory, see :class:`~lightning_spot.tiers.store.Claim`.
        attempt: the attempt that writes from now on.
        token: of the attempt.
        keep: snapshots each tier keeps.
        durable_url: durable directory as a store's URL; ``None`` if the node is not to write there.
        min_upload_interval_s: least seconds between two snapshots brought to the durable tier; 0 for as often as it
            can; ``None`` likewise, but for those that follow each other in moments, see :data:`work.MOST_APART_S`.
        compression: how what changed goes to the nodes behind: ``"auto"`` packs it where that is faster, ``"always"``
            always, ``"off"`` never, and ``"topk"`` sends it not exactly.
        nodes: ``spot://host:port`` of the snapshot servers behind this one, in order of preference.
        replicas: how many of them each snapshot is kept at.
        carry: whether the node is to bring the run to its durable tier; where it is kept at several, one is.
        spread: whether snapshots are spread over all nodes behind this one: each of them is to carry the run on; or,
            at one of these, that it is to have portions of them only.
        left: whether its trainer is gone: its host only looks after what is there of it.
        is_claimed: whether its attempts claim its durable directory. Not so a folder of users' files, each of whose
            manifests says who may write it.
        session: live connection of the trainer, if it is on this host.
        pid: its process id, for messages.
        host: name of its machine, for messages.
    """

    name: str
    id: str
    location: str
    attempt: int
    token: str = field(repr=False)
    keep: int = KEEP
    durable_url: str | None = None
    min_upload_interval_s: float | None = None
    compression: Compression = "auto"
    nodes: tuple[str, ...] = ()
    replicas: int = 1
    carry: bool = True
    spread: bool = False
    left: bool = False
    is_claimed: bool = True
    session: str = ""
    pid: int = 0
    host: str = ""

    @property
    def key(self) -> str:
        """What a node keeps the run under, see :func:`key_of`."""
        return self.id or self.name

    @property
    def text(self) -> str:
        """How the run is written in URLs, see :func:`parse_run`."""
        return run_text(self.name, self.id)

    def claim(self) -> Claim:
        """What the attempt notes at the durable tier."""
        return Claim(
            attempt=self.attempt,
            run_id=self.id,
            digest=digest_of(self.token),
            location=self.location,
            started_unix_s=time.time(),
            host=self.host,
            pid=self.pid,
            keep=self.keep,
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node answers when a run is opened.

    Attributes:
        attempt: the attempt that writes now.
        carries: whether this node, or one behind it, brings the run to its durable tier.
        why_not: if it does not, the reason, for people.
        leaves: whether this is since it is shutting down, and is to have no further portions of snapshots.
    """

    attempt: int
    carries: bool
    why_not: str = ""
    leaves: bool = False


@dataclass(slots=True)
class Run:
    """A run this node knows. Fields change under the registry's lock.

    Attributes:
        info: as it was opened last; its ``session`` is ``""`` once the trainer's connection has closed.
        complete: whether its trainer said that the run has ended.
        opened_s: when it was opened last (monotonic).
        client: who opened it last, ``""`` if that is not known, as of what a killed node has left.
    """

    info: RunInfo
    complete: bool = False
    opened_s: float = 0.0
    client: str = ""
