"""Where a run's snapshots go: its name, its durable directory, its snapshot servers, and the local one."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_spot.client.starting import start
from lightning_spot.client.stores import open_store, open_tier
from lightning_spot.config import (
    MOST_SERVERS,
    SERVER_CALL_TIMEOUT_S,
    SERVER_SCHEMES,
    check_flag,
    check_number,
    directory_of,
    names_server,
    parse_bytes,
    plain_url,
    read_environment,
    scheme_of,
    why_no_place,
    without_password,
)
from lightning_spot.errors import ServerUnreachableError, SettingsError, TierError
from lightning_spot.protocol.slot import host_memory_bytes
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.say import say
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.server.runs import check_name
from lightning_spot.snapshot.packing import Compression
from lightning_spot.store.posix import why_not_writable
from lightning_spot.store.retention import Keep


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSettings:
    """What a ring on this host is opened with.

    Attributes:
        slots: of the ring.
        beyond: whether it may have more of them for a GPU whose snapshots overlap.
        memory_bytes: limit of their memory.
        server_idle_timeout_s: its server ends when no trainer came for so long.
        keep: which snapshots storage keeps, and how many each server.
        strict: whether to raise where a warning would do.
        min_upload_interval_s: least seconds between two snapshots brought to storage, see :class:`RunInfo`.
        compression: how what changed goes to snapshot servers behind, see :class:`RunInfo`.
        replicas: how many of them each snapshot is kept at.
        server_call_timeout_s: how long a call to the ring may keep the training thread.
        device_buffer_bytes: of the buffer on each GPU, see :class:`~lightning_spot.capture.copier.Copier`; 0 for none.
    """

    slots: int
    memory_bytes: int
    server_idle_timeout_s: float
    keep: Keep
    strict: bool
    min_upload_interval_s: float | None = None
    compression: Compression = "auto"
    replicas: int = 1
    server_call_timeout_s: float = SERVER_CALL_TIMEOUT_S
    device_buffer_bytes: int = 0
    beyond: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where the snapshots of one run go.

    Attributes:
        name: of the run, for people.
        url: durable directory: an absolute path or an fsspec URL.
        servers: ``spot://host:port`` of those on other hosts; to which of them a run goes, its identity says.
        has_local_server: whether a server on this host stands in front of them.
        named: whether the user named the run.
    """

    name: str
    url: str
    servers: tuple[str, ...]
    has_local_server: bool
    named: bool = False

    @classmethod
    def of(
        cls,
        dirpath: str | os.PathLike[str],
        *,
        servers: str | Sequence[str] | None = None,
        local_server: bool = True,
        run_name: str | None = None,
    ) -> Location:
        """Check and complete what the user gave.

        Raises:
            SettingsError: naming the argument and what is wrong with it.
        """
        if not isinstance(dirpath, str | os.PathLike):
            raise SettingsError(f"dirpath={dirpath!r}: give the run's directory or URL, such as checkpoints/run-1")
        check_flag("local_server", local_server)
        url = os.fsdecode(dirpath)
        if why := why_no_place(url):
            raise SettingsError(f"dirpath={without_password(url)!r}: {why}")
        scheme = scheme_of(url)
        if scheme in SERVER_SCHEMES:
            server = "/".join(url.split("/")[:3])
            raise SettingsError(
                f"dirpath={url!r}: it is where snapshots become durable; a server goes into servers={server!r}"
            )
        # "~" is the home directory, as in Lightning's own callbacks: YAML knows no shell.
        url = plain_url(url) if scheme else os.path.abspath(os.path.expanduser(directory_of(url)))
        try:
            name = check_name(run_name if run_name is not None else url.rstrip("/").rpartition("/")[2])
        except SettingsError as error:
            raise SettingsError(f"{error}; pass run_name='…'") from error
        if drill := read_environment().drill_dir:  # which must never write to the tiers of the real run
            return cls(
                name=name, url=os.path.join(drill, "runs", name), servers=(), has_local_server=bool(local_server)
            )
        urls = _server_urls(servers)
        if urls and not local_server:
            raise SettingsError(
                f"local_server=False with servers={servers!r}: the server on this host sends to the others. Leave"
                " local_server out"
            )
        return cls(name=name, url=url, servers=urls, has_local_server=bool(local_server), named=run_name is not None)

    @property
    def canonical(self) -> str:
        """What claims and servers call this location: ``file:///abs/path`` with links resolved, else the URL."""
        return self.url if "://" in self.url else f"file://{os.path.realpath(self.url)}"

    def check(self) -> None:
        """Make sure storage can be written to, if it is a directory.

        Raises:
            SettingsError: if it cannot.
        """
        if "://" in self.url:
            open_store(self.url)  # raises when the file system is not installed
            return
        if why := why_not_writable(self.url):
            raise SettingsError(
                f"dirpath {self.url!r} {why}; snapshots would never be durable. Give a directory that this user may"
                " write to"
            )

    def open_host(self, settings: RingSettings) -> Host:
        """The ring on this host: the local server, or one in this process. What an earlier one left is taken over.

        If the local server cannot be started, a ring in this process replaces it, with a warning (or the error,
        with ``strict``): snapshots then still reach the tiers below, but memory does not outlive the trainer.
        """
        if self.has_local_server:
            try:
                return start(
                    self.url,
                    self.name,
                    slots=settings.slots,
                    memory_bytes=settings.memory_bytes,
                    server_idle_timeout_s=settings.server_idle_timeout_s,
                    server_call_timeout_s=settings.server_call_timeout_s,
                )
            except (ServerUnreachableError, TierError, OSError) as error:
                if settings.strict:
                    raise
                say(
                    logging.WARNING,
                    "no-local-server",
                    "no snapshot server could be started on this host ({error}). Snapshots go through this process:"
                    " what is only in memory is lost if it is killed",
                    about=self.url,
                    error=error,
                )
        return InProcessHost(slots=settings.slots, memory_bytes=settings.memory_bytes, open_store=open_tier)


_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
_MOUNTS = Path("/proc/self/mountinfo")


def local_file_system(url: str, mounts: Path = _MOUNTS) -> str | None:
    """The type of the file system that a directory is on, if that is a disk or memory of this machine.

    Args:
        url: durable directory or fsspec URL of a run.
        mounts: what is mounted here, as Linux lists it.
    """
    if scheme_of(url):
        return None
    path = os.path.realpath(directory_of(url))
    found, deepest = None, -1
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4])
        if os.path.commonpath([path, point]) == point and len(point) >= deepest:  # a later mount hides an earlier one
            found, deepest = file_system.split(" ")[0], len(point)
    return found if found in _LOCAL else None


def check_replicas(replicas: int, servers: str | Sequence[str] | None) -> None:
    """Refuse a number of replicas for which ``servers`` names too few.

    Raises:
        SettingsError: naming both.
    """
    check_number("replicas", replicas, 1, whole=True)
    named = int(servers is not None) if servers is None or isinstance(servers, str) else len(servers)
    if replicas > max(1, named):
        such = [f"spot://10.0.0.{5 + number}:7070" for number in range(min(replicas, 8))]
        raise SettingsError(
            f"replicas={replicas} with servers={servers!r}: each replica is at a server of its own, and {named}"
            f" are named. Name {replicas}, such as servers={such}"
        )


def memory_limit_bytes(limit: str | float | None) -> int:
    """The limit of slot memory: as given, or half of what this host, or its container, has."""
    if limit is not None:
        return parse_bytes(limit, "memory_limit", none="half of this host's memory")
    return host_memory_bytes() // 2


def _server_urls(servers: str | Sequence[str] | None) -> tuple[str, ...]:
    if servers is None:
        return ()
    several = isinstance(servers, Sequence) and not isinstance(servers, str | bytes)
    if several and not servers:
        raise SettingsError(f"servers={servers!r} names no snapshot server. For none leave servers out")
    urls = tuple(map(_server_url, servers if several else [servers]))
    if len(urls) > MOST_SERVERS:
        raise SettingsError(f"servers= names {len(urls)} snapshot servers: a run has {MOST_SERVERS} at most")
    if len(set(urls)) < len(urls):
        raise SettingsError(f"servers={servers!r} names a server twice; one that is gone takes both with it")
    return urls


def _server_url(url: object) -> str:
    shown = without_password(url) if isinstance(url, str) else url
    if not names_server(str(url)):
        raise SettingsError(f"servers={shown!r} is no URL of a snapshot server such as spot://10.0.0.5:7070")
    try:
        address, path = parse_spot_url(str(url))
    except SettingsError as error:
        raise SettingsError(f"servers={shown!r}: {error}") from error
    if path:
        raise SettingsError(
            f"servers={shown!r}: name the server only, {address}; the run's name comes from run_name= or dirpath"
        )
    return str(address)
