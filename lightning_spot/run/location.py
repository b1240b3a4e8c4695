"""Where a run's snapshots go: its name, its durable directory, its memory nodes, and how its own node is reached."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_spot.client.starting import start
from lightning_spot.client.stores import open_store
from lightning_spot.config import (
    MOST_NODES,
    check_number,
    directory_of,
    parse_bytes,
    plain_url,
    read_environment,
    scheme_of,
    why_no_place,
    without_password,
)
from lightning_spot.errors import NodeUnreachable, SettingsError, TierError
from lightning_spot.memory.host import Host, InProcessHost
from lightning_spot.memory.runs import check_name
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.staging.slot import host_memory_bytes
from lightning_spot.tiers.files import why_not_writable

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where the snapshots of one run go.

    Attributes:
        name: of the run, for people.
        url: durable directory: an absolute path or an fsspec URL.
        nodes: ``spot://host:port`` of memory nodes on other hosts; to which of them a run goes, its identity says.
        embedded: whether a node on this host stands in front of them.
        named: whether the user named the run.
    """

    name: str
    url: str
    nodes: tuple[str, ...]
    embedded: bool
    named: bool = False

    @classmethod
    def of(cls, dirpath: str | os.PathLike[str], memory: str | Sequence[str] | None, run: str | None) -> Location:
        """Check and complete what the user gave.

        Raises:
            SettingsError: naming the argument and what is wrong with it.
        """
        if not isinstance(dirpath, str | os.PathLike):
            raise SettingsError(f"dirpath={dirpath!r}: give the run's directory or URL, such as checkpoints/run-1")
        url = os.fsdecode(dirpath)
        if not url.strip():
            raise SettingsError("dirpath is empty; give the run's directory or URL, such as checkpoints/run-1")
        if why := why_no_place(url):
            raise SettingsError(f"dirpath={without_password(url)!r}: {why}")
        scheme = scheme_of(url)
        if scheme == "spot":
            node = "/".join(url.split("/")[:3])
            raise SettingsError(
                f"dirpath={url!r}: dirpath is the durable tier; a memory node goes into memory={node!r}"
            )
        # "~" is the home directory, as in Lightning's own callbacks: YAML knows no shell.
        url = plain_url(url) if scheme else os.path.abspath(os.path.expanduser(directory_of(url)))
        try:
            name = check_name(run if run is not None else url.rstrip("/").rpartition("/")[2])
        except SettingsError as error:
            raise SettingsError(f"{error}; pass run='…'") from error
        if drill := read_environment().drill_dir:  # which must never write to the tiers of the real run
            return cls(name=name, url=os.path.join(drill, "runs", name), nodes=(), embedded=memory is not None)
        if memory is None or memory == AUTO:
            nodes: tuple[str, ...] = ()
        else:
            several = isinstance(memory, Sequence) and not isinstance(memory, str | bytes)
            if several and not memory:
                raise SettingsError(
                    f"memory={memory!r} names no memory node. For none but the one on this host give 'auto', for no"
                    " node at all None"
                )
            if several and AUTO in memory:
                raise SettingsError(
                    f"memory={memory!r}: name memory nodes only; the one on this host, 'auto', is there in any case"
                )
            nodes = tuple(map(_node_url, memory if several else [memory]))
            if len(nodes) > MOST_NODES:
                raise SettingsError(f"memory= names {len(nodes)} memory nodes: a run has {MOST_NODES} at most")
            if len(set(nodes)) < len(nodes):
                raise SettingsError(f"memory={memory!r} names a node twice; one that is gone takes both with it")
        return cls(name=name, url=url, nodes=nodes, embedded=memory is not None, named=run is not None)

    @property
    def canonical(self) -> str:
        """What claims and nodes call this location: ``file:///abs/path`` with links resolved, else the URL."""
        return self.url if "://" in self.url else f"file://{os.path.realpath(self.url)}"

    def check(self) -> None:
        """Make sure the durable tier can be written to, if it is a directory.

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

    def open_host(
        self,
        *,
        slots: int,
        memory_bytes: int,
        idle_timeout_s: float,
        max_stall_s: float,
        strict: bool,
    ) -> Host:
        """The ring on this host: the embedded node, or one in this process.

        If the embedded node cannot be started, a ring in this process replaces it, with a warning (or the error,
        with ``strict``): snapshots then still reach the tiers below, but memory does not outlive the trainer.
        """
        if self.embedded:
            try:
                return start(
                    self.url,
                    self.name,
                    slots=slots,
                    memory_bytes=memory_bytes,
                    idle_timeout_s=idle_timeout_s,
                    max_stall_s=max_stall_s,
                )
            except (NodeUnreachable, TierError, OSError) as error:
                if strict:
                    raise
                logger.warning(
                    "lightning_spot: no memory node could be started on this host (%s); snapshots go through this"
                    " process instead, and what is only in memory is lost if it is killed",
                    error,
                )
        return InProcessHost(slots=slots, memory_bytes=memory_bytes, open_store=open_store)


def check_replicas(replicas: int, memory: str | Sequence[str] | None) -> None:
    """Refuse a number of replicas for which ``memory`` names too few nodes.

    Raises:
        SettingsError: naming both.
    """
    check_number("replicas", replicas, 1, whole=True)
    alone = memory is None or isinstance(memory, str)
    nodes = int(memory not in (None, AUTO)) if alone else len(memory or ())
    if replicas > max(1, nodes):
        such = [f"spot://10.0.0.{5 + number}:7070" for number in range(min(replicas, 8))]
        raise SettingsError(
            f"replicas={replicas} with memory={memory!r}: each replica is at a memory node of its own, and {nodes} are"
            f" named. Name {replicas}, such as memory={such}"
        )


def memory_limit_bytes(limit: str | float | None) -> int:
    """The limit of slot memory: as given, or half of what this host, or its container, has."""
    if limit is not None:
        return parse_bytes(limit, "memory_limit", none="half of this host's memory")
    return host_memory_bytes() // 2


def node_url(url: str) -> str:
    """URL of a memory node alone.

    Raises:
        SettingsError: if it is none, or names more.
    """
    address, path = parse_spot_url(url)
    if path:
        raise SettingsError(f"{url!r} names more than a node: give {address} only")
    return str(address)


def _node_url(url: object) -> str:
    shown = without_password(url) if isinstance(url, str) else url
    if not str(url).startswith("spot://"):
        raise SettingsError(f"memory={shown!r} is no node URL such as spot://10.0.0.5:7070, nor 'auto' or None")
    try:
        address, path = parse_spot_url(str(url))
    except SettingsError as error:
        raise SettingsError(f"memory={shown!r}: {error}") from error
    if path:
        raise SettingsError(
            f"memory={shown!r}: name the node only, {address}; the run's name comes from run= or dirpath"
        )
    return str(address)
