"""Waits for slots on the event loop: however many trainers wait, they hold no thread."""

from __future__ import annotations

import asyncio
import functools
import time
from concurrent.futures import ThreadPoolExecutor

from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import MOST_HOSTS
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.node import Node
from lightning_spot.memory.slots import Making
from lightning_spot.memory.upload import Upload
from lightning_spot.service.quotas import Quota

MOST_WAITING = 2 * MOST_HOSTS
"""All hosts of one snapshot wait until it begins, even at one address; those of others are served, too."""

_LEASE_THREADS = 32  # of their own: memory is made on them, for seconds, and what else is asked is answered meanwhile
ASKED_AGAIN_S = 10.0
"""So long after its connection broke, the first of several hosts counts as gone unless it was heard of again."""

_LOOK_S = 1.0  # how often a rank that waits for its share looks whether there will be one
_LOOK_AGAIN_S = 0.02  # what changes often is looked at now and then


class Waiting:
    """Who waits for a slot of a node. Make it on the event loop; its methods are called there.

    Args:
        node: whose slots.

    Attributes:
        asked_s: when a slot was asked for last (monotonic), 0 for never.
    """

    def __init__(self, node: Node) -> None:
        self.asked_s = 0.0
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._count, self._places = 0, Quota(MOST_WAITING)
        self._woken = False
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._threads = ThreadPoolExecutor(_LEASE_THREADS, thread_name_prefix="spot-lease")
        node.ring.watch(self._notice)

    async def lease(
        self,
        client: str,
        gone: asyncio.Future[None],
        run: str,
        attempt: int,
        nbytes: int,
        wait_s: float,
        *,
        session: str = "",
        name: str = "",
        manifest: Manifest | None = None,
        upload_id: str = "",
        shared: Shared | None = None,
        layout_id: str = "",
        making: Making = Making.NOW,
    ) -> Upload:
        """Take a slot, see :meth:`Begins.lease`.

        Args:
            client: who asks, see :func:`client_of`, and for which run.
            gone: done once whoever asks has hung up: then nothing is taken.
            run: the run.
            attempt: who writes.
            nbytes: size of the snapshot.
            wait_s: how long to wait.
            session: live connection of the trainer, if it is on this host.
            name: of the snapshot.
            manifest: of it, if its parts may go on as they arrive.
            upload_id: chosen by who asks.
            shared: if several ranks of this host will fill it.
            layout_id: of the layout that is meant, likewise.
            making: see :meth:`Begins.lease`.

        Raises:
            SnapshotFailedError: if no slot became free in time, or too many wait.
            ConnectionResetError: if nobody waits for the answer any more.
        """
        self.asked_s = time.monotonic()
        deadline_s = time.monotonic() + wait_s
        ask = functools.partial(
            self._node.lease,
            run,
            attempt,
            nbytes,
            session=session,
            name=name,
            manifest=manifest,
            upload_id=upload_id,
            shared=shared,
            layout_id=layout_id,
            making=making,
        )
        self._take_place(client)
        try:
            while True:
                changed = self._changed
                try:
                    upload = await self._loop.run_in_executor(self._threads, ask)
                    break
                except SnapshotFailedError as error:
                    left_s = deadline_s - time.monotonic()
                    if error.reason is not FailureReason.RING_FULL or left_s <= 0 or gone.done():
                        raise
                await asyncio.wait([gone, changed], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._count -= 1
            self._places.give_back(client)
        if gone.done():
            if upload.is_gathered:  # only its answer may be lost, and other hosts may be at it already
                self._loop.call_later(ASKED_AGAIN_S, self._give_up, upload, upload.touched_s)
            else:  # nobody will ever fill it
                self._node.abort(upload.id)
            raise ConnectionResetError("the trainer has gone")
        return upload

    def _take_place(self, client: str) -> None:
        if not self._places.take(client):
            raise SnapshotFailedError(
                f"{self._count} requests wait for a slot already, and this client has its share of them",
                reason=FailureReason.RING_FULL,
            )
        self._count += 1

    def _give_up(self, upload: Upload, touched_s: float) -> None:
        """Free the slot of an upload of which nothing was heard since."""
        if upload.touched_s == touched_s:
            self._threads.submit(self._node.abort, upload.id)

    async def join(
        self,
        client: str,
        gone: asyncio.Future[None],
        run: str,
        attempt: int,
        name: str,
        share: int,
        session: str | None,
        digest: str,
        is_led_here: bool = True,
        *,
        wait_s: float,
        again: bool = False,
    ) -> Upload | None:
        """Take a share of a snapshot, see :meth:`Shares.join`; ``None`` if it has not begun, and is asked for again.

        Raises:
            SnapshotFailedError: if there will be none, or not in time.
            ConnectionResetError: if nobody waits for the answer any more; then no share is taken.
        """
        deadline_s = time.monotonic() + wait_s
        shares = self._node.uploads.shares
        ask = functools.partial(shares.join, run, attempt, name, share, session, digest, is_led_here=is_led_here)
        self._take_place(client)
        try:
            while True:
                changed = self._changed
                if gone.done():
                    raise ConnectionResetError("the rank has gone")
                upload = await asyncio.to_thread(ask)
                if upload is not None:
                    return upload
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 and again:
                    return None
                if left_s <= 0:
                    raise await asyncio.to_thread(shares.not_begun, run, name, share, wait_s)
                await asyncio.wait([gone, changed], timeout=min(left_s, _LOOK_S), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._count -= 1
            self._places.give_back(client)

    async def all_there(self, upload: Upload) -> None:
        """Return when all hosts have brought their portions, or it shows that one will not.

        Args:
            upload: that they fill.
        """
        shares, joint = self._node.uploads.shares, upload.joint
        self._count += 1
        try:
            while joint is not None and joint.missing and not (joint.failed or upload.ended):
                shares.fail_if_silent(upload)  # here: who seals it has been heard
                await asyncio.wait([self._changed], timeout=_LOOK_S)
        finally:
            self._count -= 1

    def _notice(self) -> None:
        """Something changed at the ring. Called on any thread."""
        if self._count and not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._woken = False
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)
