"""Takes snapshots: lays the checkpoint out, leases a slot, copies beside training, guards, commits.

The training thread calls :meth:`SnapshotWriter.begin` and, before the tensors change, :meth:`~SnapshotWriter.copied`.
Everything else happens on one background thread, the courier.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_spot.capture.guess import Guess, same_places
from lightning_spot.capture.tensors import storage_address, tensors_in
from lightning_spot.config import read_environment
from lightning_spot.errors import (
    Fenced,
    LayoutUnsupported,
    NodeUnreachable,
    NotSerialisable,
    RingFull,
    SnapshotTooLarge,
    SpotError,
    TierError,
    TornSnapshot,
)
from lightning_spot.image.layout import Layout, Piece, lay_out, lay_out_plain
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.host import Host, Lease
from lightning_spot.staging.copier import Copier, CopyJob, SlotView, watch

logger = logging.getLogger(__name__)

_MOST_VIEWS = 16
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0


@dataclass(slots=True)
class Pending:
    """A snapshot on its way.

    Attributes:
        manifest: what it will be.
        lease: its slot.
        job: copies that may go on until the next optimizer step.
        done: becomes the manifest when committed, or the error.
    """

    manifest: Manifest
    lease: Lease
    job: CopyJob
    done: Future[Manifest]
    destinations: list[str] | None


class SnapshotWriter:
    """Takes snapshots into a ring on this host.

    Args:
        host: the ring, its run already opened.
        reconnect: makes a new connection to the ring (and opens the run again) after the old one broke.

    Attributes:
        committed: manifest of the newest snapshot that is committed in memory.
        torn: snapshots dropped because a tensor changed while it was copied.
    """

    def __init__(self, host: Host, reconnect: Callable[[], Host] | None = None) -> None:
        self.host: Host | None = host
        self.committed: Manifest | None = None
        self.torn = 0
        self._reconnect = reconnect
        self._copier = Copier()
        self._views: OrderedDict[int, SlotView] = OrderedDict()
        self._pending: list[Pending] = []
        self._guess: Guess | None = None
        self._unsteady: frozenset[int] = frozenset()
        self._said: set[str] = set()
        self._scratch = read_environment().shm_dir
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._warming = threading.Event()
        self._warming.set()
        self._courier = threading.Thread(target=self._run_errands, name="spot-courier", daemon=True)
        self._courier.start()

    # -- on the training thread -----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a snapshot can begin now without waiting for slots to be made."""
        return self._warming.is_set()

    def warm(self, nbytes: int, *, cuda: bool = False) -> None:
        """Make, map and (for a GPU) pin every slot in the background, so that no snapshot meets a cold one.

        Args:
            nbytes: expected size of a snapshot.
            cuda: whether tensors will come from a GPU.
        """
        self._warming.clear()
        self._errands.put(lambda: self._warm(nbytes, cuda))

    def begin(
        self,
        checkpoint: Any,
        manifest: Manifest,
        *,
        owned: frozenset[int] | set[int] = frozenset(),
        wait_s: float = 0.0,
        destinations: list[str] | None = None,
    ) -> Future[Manifest]:
        """Begin a snapshot. What is not in ``owned`` is copied before this returns.

        Args:
            checkpoint: what to save; its tensors in ``owned`` must not change until :meth:`copied` returned.
            manifest: what it is; size and checksums are filled in.
            owned: addresses of storages that only the optimizer changes.
            wait_s: how long to wait for a clean slot.
            destinations: tiers below, if not the run's.

        Returns:
            a future that becomes the manifest once the snapshot is committed in memory.

        Raises:
            SpotError: if no snapshot can be begun now; nothing that is saved already is touched.
        """
        host = self.host
        if host is None:
            raise NodeUnreachable("the memory node on this host has gone; a new one is being started")
        self._warming.wait()
        watches = {storage_address(tensor): tensor for tensor in tensors_in(checkpoint)}
        steady = (set(owned) & set(watches)) - self._unsteady
        guess = self._guess
        lease = self._lease(host, guess.nbytes, wait_s) if guess is not None else None
        # Copying starts at the places the last layout had while this one is made: they are nearly always the same.
        early = self._start(guess.pieces_of(watches, steady), lease, watches) if guess and lease else None
        try:
            layout = self._lay_out(checkpoint)
        except Exception as error:  # pickling runs the user's code, which may raise anything
            if early is not None and lease is not None:
                _finish_early(early)
                host.abort(lease)
            raise NotSerialisable(
                f"the training state cannot be serialised ({type(error).__name__}: {error}); look at what"
                " on_save_checkpoint, state_dict and hyperparameters put into the checkpoint"
            ) from error
        if lease is None or layout.nbytes > len(lease.map):
            if early is not None and lease is not None:
                _finish_early(early)
                host.abort(lease)
            lease, early = self._lease(host, layout.nbytes, wait_s), None
        try:
            job = self._copy(layout, lease, watches, steady, early)
        except BaseException:
            host.abort(lease)
            raise
        self._guess = Guess.of(layout)
        pending = Pending(replace(manifest, nbytes=layout.nbytes), lease, job, Future(), destinations)
        self._pending.append(pending)
        self._errands.put(lambda: self._finish(host, pending))
        return pending.done

    def copied(self) -> None:
        """Return when the tensors may change: call it before every optimizer step, swap of weights, and at the end."""
        for pending in self._pending:
            try:
                pending.job.wait_cpu()
            except SpotError:
                continue  # the courier reports it through the future
            self._copier.fence()
            pending.job.settle()
        self._pending = [pending for pending in self._pending if not pending.done.done()]

    def settle(self, wait_s: float) -> None:
        """Wait until every snapshot begun so far is committed or given up."""
        self.copied()
        deadline = time.monotonic() + wait_s
        for pending in list(self._pending):
            try:
                pending.done.result(timeout=max(0.0, deadline - time.monotonic()))
            except (SpotError, futures.TimeoutError) as error:
                logger.debug("snapshot %s: %s", pending.manifest.name, error)

    def close(self) -> None:
        """Stop the threads. The host stays open: it is the caller's."""
        self._errands.put(None)
        self._courier.join()
        self._copier.close()
        self._views.clear()

    def say_once(self, key: str, message: str, *facts: Any) -> None:
        """Warn, but only the first time for ``key``."""
        if key not in self._said:
            self._said.add(key)
            logger.warning("lightning_spot: " + message, *facts)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _lay_out(self, checkpoint: Any) -> Layout:
        try:
            return lay_out(checkpoint, self._scratch)
        except LayoutUnsupported as error:
            self.say_once("layout", "%s; snapshots are serialised with plain torch.save (slower)", error)
        except OSError as error:
            self.say_once("scratch", "%s has no room for a file's outline (%s)", self._scratch, error)
            self._scratch = None
            try:
                return lay_out(checkpoint)
            except OSError as full:
                self.say_once("scratch-tmp", "nor has the temporary directory (%s); using plain torch.save", full)
        return lay_out_plain(checkpoint)

    def _lease(self, host: Host, nbytes: int, wait_s: float) -> Lease:
        try:
            lease = host.lease(nbytes, wait_s)
        except NodeUnreachable:
            self._lost(host)
            raise
        self._say_backing(lease)
        return lease

    def _start(self, pieces: list[Piece], lease: Lease, watches: dict[int, torch.Tensor]) -> CopyJob:
        """Begin to copy pieces that only the optimizer changes."""
        tensors = [watches[piece.storage.data_ptr()] for piece in pieces]
        return self._copier.start(pieces, self._view(lease.map), watch(tensors))

    def _copy(
        self,
        layout: Layout,
        lease: Lease,
        watches: dict[int, torch.Tensor],
        steady: set[int],
        early: CopyJob | None,
    ) -> CopyJob:
        """Copy now what forward may change, and let the optimizer's own follow until its next step."""
        view = self._view(lease.map)
        later = [piece for piece in layout.pieces if piece.storage.data_ptr() in steady]
        if early is not None and not same_places(early.pieces, later):
            _finish_early(early)  # the guess was wrong: its bytes lie in the wrong places, and are written over
            early = None
        job = early or self._start(later, lease, watches)
        for offset, data in layout.frame:
            view.map[offset : offset + len(data)] = data
        now = self._copier.start([piece for piece in layout.pieces if piece.storage.data_ptr() not in steady], view)
        now.wait_cpu()
        self._copier.fence()
        return job

    def _view(self, shared: mmap.mmap) -> SlotView:
        view = self._views.get(id(shared))
        if view is None:
            view = self._views[id(shared)] = SlotView(shared)
            if len(self._views) > _MOST_VIEWS:
                self._views.popitem(last=False)
        return view

    def _say_backing(self, lease: Lease) -> None:
        if lease.backing == "memfd" and self._scratch is not None:
            self.say_once(
                "memfd",
                "%s is too small for the slots; they are memory files held by the node instead. Same speed; a new"
                " node cannot take them over if the node itself is killed (docker: give it --shm-size)",
                self._scratch,
            )

    # -- on the courier -------------------------------------------------------------------------------------------

    def _run_errands(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand()

    def _finish(self, host: Host, pending: Pending) -> None:
        name = pending.manifest.name
        try:
            pending.job.wait()
            if pending.job.moved:
                self._unsteady |= pending.job.moved
                self.torn += 1
                raise TornSnapshot(
                    f"snapshot {name} was dropped: {len(pending.job.moved)} tensors changed between two optimizer"
                    " steps while they were copied. From now on these are copied before the step goes on"
                )
            host.seal(pending.lease, pending.manifest, pending.destinations)
        except BaseException as error:
            self._failed(host, pending, error)
        else:
            if self.committed is None or pending.manifest.order >= self.committed.order:
                self.committed = pending.manifest
            pending.done.set_result(pending.manifest)

    def _failed(self, host: Host, pending: Pending, error: BaseException) -> None:
        if isinstance(error, NodeUnreachable):
            self._lost(host)
        else:
            try:
                host.abort(pending.lease)
            except SpotError as second:
                logger.debug("a slot could not be given back: %s", second)
        if isinstance(error, TornSnapshot):
            self.say_once("torn", "%s", error)
        else:
            logger.warning("lightning_spot: snapshot %s was not committed: %s", pending.manifest.name, error)
        pending.done.set_exception(error)

    def _lost(self, host: Host) -> None:
        """The ring has gone (killed): get a new one in the background."""
        if self.host is host and self._reconnect is not None:
            self.host = None
            logger.warning("lightning_spot: the memory node on this host has gone; starting a new one")
            threading.Thread(target=self._find_host, name="spot-reconnect", daemon=True).start()

    def _find_host(self) -> None:
        assert self._reconnect is not None
        pause_s = _FIRST_RETRY_S
        while self._courier.is_alive():
            try:
                self.host = self._reconnect()
                return
            except Fenced as error:
                logger.warning("lightning_spot: %s", error)
                return
            except Exception as error:  # whatever it is, training goes on and it is tried again
                logger.warning("lightning_spot: no new memory node yet (%s)", error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _warm(self, nbytes: int, cuda: bool) -> None:
        leases: list[Lease] = []
        host = self.host
        try:
            while host is not None:
                leases.append(host.lease(nbytes, 0.0))
                view = self._view(leases[-1].map)
                if cuda:
                    self._copier.pin(view)
        except (RingFull, SnapshotTooLarge, TierError) as error:
            logger.debug("warmed %d slots: %s", len(leases), error)
        except Exception:
            logger.exception("lightning_spot: slots could not be warmed")
        finally:
            for lease in leases:
                try:
                    host.abort(lease)  # type: ignore[union-attr] # there are leases only where there was a host
                except SpotError as error:
                    logger.debug("a slot could not be given back: %s", error)
            self._warming.set()


def _finish_early(job: CopyJob) -> None:
    """Wait for copies that turned out to be useless: their memory is about to be used again."""
    job.wait_cpu()
    job.wait()
