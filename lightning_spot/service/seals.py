"""Seals of uploads that several hosts fill: each is done once, however often the first host asks for it.

Its connection may break while hosts still bring their portions, or just before the answer: then it asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from lightning_spot.errors import ShareMissing
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.node import Node
from lightning_spot.memory.upload import Upload
from lightning_spot.service.waiting import ASKED_AGAIN_S

_KEPT = 16  # seals whose outcome is still told; a run brings one snapshot at a time

AllThere = Callable[[Upload], Awaitable[None]]


@dataclass(slots=True)
class _Seal:
    """One that was asked for.

    Attributes:
        done: becomes the checksums.
        asking: requests that wait for it.
    """

    done: asyncio.Task[tuple[str, ...]]
    asking: int = 0


class Seals:
    """The seals of a node. All methods are called on the event loop.

    Args:
        node: whose.
        all_there: waits for all hosts, see :meth:`Waiting.all_there`.
    """

    def __init__(self, node: Node, all_there: AllThere) -> None:
        self._node, self._all_there = node, all_there
        self._seals: dict[str, _Seal] = {}

    async def seal(
        self, gone: asyncio.Future[None], upload_id: str, find: Callable[[], Upload], manifest: Manifest
    ) -> tuple[str, ...]:
        """Have an upload committed once all hosts have brought what they bring; its checksums.

        Args:
            gone: done once who asks has hung up.
            upload_id: which.
            find: finds it, if this is the first time that it is asked for.
            manifest: without checksums.

        Raises:
            ConnectionResetError: if who asks is gone. If it does not ask again, the upload is given up.
        """
        seal = self._seals.get(upload_id)
        if seal is None:
            seal = self._seals[upload_id] = _Seal(asyncio.create_task(self._sealed(find(), manifest)))
            seal.done.add_done_callback(_look_at)
            self._forget()
        seal.asking += 1
        try:
            either: list[asyncio.Future[Any]] = [gone, seal.done]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            seal.asking -= 1
        if seal.done.done():
            return seal.done.result()
        asyncio.get_running_loop().call_later(ASKED_AGAIN_S, self._give_up, upload_id, seal)
        raise ConnectionResetError("the first host has gone")

    async def _sealed(self, upload: Upload, manifest: Manifest) -> tuple[str, ...]:
        await self._all_there(upload)  # holds no thread, however many runs wait
        if upload.given_up and upload.joint is not None:
            raise ShareMissing(f"{upload.name} was given up: {upload.joint.failed or 'nobody says why'}")
        return (await asyncio.to_thread(self._node.seal, upload.id, manifest)).checksums

    def _give_up(self, upload_id: str, seal: _Seal) -> None:
        if not seal.asking and not seal.done.done():
            asyncio.get_running_loop().run_in_executor(None, self._node.abort, upload_id)  # which ends the seal

    def _forget(self) -> None:
        over = [upload_id for upload_id, seal in self._seals.items() if seal.done.done()]
        for upload_id in over[:-_KEPT]:
            del self._seals[upload_id]


def _look_at(done: asyncio.Task[tuple[str, ...]]) -> None:
    """Asyncio would print an error of which nobody asks."""
    if not done.cancelled():
        done.exception()
