"""A checkpoint at a node that the user names (``ckpt_path="spot://…"``): fetched once on each host, for all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lightning_spot.client.filesystem import SpotFileSystem
from lightning_spot.client.part_lanes import CONNECTIONS
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.restore import Hosts, Try
from lightning_spot.image.manifest import Manifest
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.receiving import receive
from lightning_spot.run.sources import Use
from lightning_spot.tiers.store import Holdings, Progress

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextlib.contextmanager
def fetched_once(trainer: pl.Trainer, location: Location, path: Any) -> Iterator[None]:
    """Have all ranks load a named checkpoint from memory of their host, where it is at a node. Every rank calls it.

    Args:
        trainer: that loads it, by its strategy, while the context lasts.
        location: of its run.
        path: what the user named.
    """
    if trainer.world_size == 1 or not str(path).startswith("spot://"):
        yield
        return
    ranks = Agreement(trainer)
    url = str(path)
    # All are to read one version of it, also if it is replaced meanwhile.
    found = ranks.on_rank_zero(lambda: _found(url))
    info: dict[str, Any] = ranks.tell(found)
    if info["type"] != "file":
        yield
        return
    hosts = Hosts(ranks, location)
    try:
        with contextlib.closing(_open(ranks, hosts, url, info)) as snapshot:
            strategy = trainer.strategy
            original, was = strategy.load_checkpoint, vars(strategy).get("load_checkpoint")

            def load_checkpoint(asked: Any, *arguments: Any, **named: Any) -> Any:
                here = f"/proc/self/fd/{snapshot.fd}" if str(asked) == url else asked
                return original(here, *arguments, **named)

            strategy.load_checkpoint = load_checkpoint  # type: ignore[assignment,method-assign] # taken back
            try:
                yield
            finally:
                vars(strategy).pop("load_checkpoint")
                if was is not None:
                    strategy.load_checkpoint = was  # type: ignore[method-assign]
    finally:
        hosts.close()


def _found(url: str) -> dict[str, Any]:
    files = SpotFileSystem(**SpotFileSystem._get_kwargs_from_urls(url))
    return dict(files.info(url))


def _open(ranks: Agreement, hosts: Hosts, url: str, info: dict[str, Any]) -> OpenSnapshot:
    size = int(info["size"])
    manifest = Manifest(run="-", name="-", file="", step=0, attempt=0, nbytes=size)  # as far as sharing needs one
    tried = Try(1, manifest.to_json(), ())
    return ranks.together(lambda: hosts.open(tried, _Named(url, info)))


class _Named:
    """A file at a node, as a :class:`~lightning_spot.run.sources.Source`.

    Args:
        url: of the file.
        info: what its file system says of it.
    """

    def __init__(self, url: str, info: dict[str, Any]) -> None:
        self.tier = self.url = url
        self._info = info
        self._files = SpotFileSystem(**SpotFileSystem._get_kwargs_from_urls(url))

    def survey(self) -> Holdings:
        """Nothing: it is no run."""
        return Holdings()

    def open(self, manifest: Manifest, progress: Progress | None = None, *, use: Use = Use.CHECK) -> OpenSnapshot:
        """See :meth:`Source.open`."""
        return receive(self, manifest, self.tier, self.url, progress)

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Fetches.fetch`; the node sends a checksum with each range."""

        def read(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            self._files.fill(self._info, start, into[start:stop])
            if progress is not None:
                progress(stop - start)

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(read, manifest.ranges()))
