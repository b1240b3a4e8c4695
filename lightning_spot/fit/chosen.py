"""The snapshot that a ``fit`` goes on from: read on rank 0, with its bytes for other ranks, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import torch

from lightning_spot.errors import CorruptSnapshot
from lightning_spot.exact.unpickling import read_checkpoint
from lightning_spot.run.choice import open_newest
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.survey import Survey, look_again

Checkpoint = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResumedFrom:
    """The snapshot a run was resumed from.

    Attributes:
        name: of the snapshot.
        step: its ``global_step``.
        epoch: its ``current_epoch``.
        attempt: that took it.
        tier: ``"memory"``, ``"durable"`` or the URL of a memory node.
        url: where exactly.
        complete: whether the run had reached its end.
    """

    name: str
    step: int
    epoch: int
    attempt: int
    tier: str
    url: str
    complete: bool

    @classmethod
    def of(cls, snapshot: OpenSnapshot) -> ResumedFrom:
        """What is known of a snapshot that was read."""
        manifest = snapshot.manifest
        return cls(
            name=manifest.name,
            step=manifest.step,
            epoch=manifest.epoch,
            attempt=manifest.attempt,
            tier=snapshot.tier,
            url=snapshot.url,
            complete=manifest.complete,
        )


def open_checkpoint(
    found: Survey, *, trusts: bool, with_bytes: bool
) -> tuple[OpenSnapshot, tuple[Checkpoint, bytes | None]] | None:
    """Read the newest snapshot that is whole; see :func:`open_newest`.

    Args:
        found: what the tiers have.
        trusts: whether to load objects of any class.
        with_bytes: whether its bytes are wanted, too.

    Returns:
        the snapshot, closed, its checkpoint and its bytes; ``None`` if there is none.
    """

    def use(snapshot: OpenSnapshot) -> tuple[Checkpoint, bytes | None]:
        return _load(snapshot, trusts=trusts, with_bytes=with_bytes)

    try:
        return open_newest(found, use)
    except CorruptSnapshot:
        again = look_again(found)
        if [item[0] for item in again.candidates] == [item[0] for item in found.candidates]:
            raise
        return open_newest(again, use)  # a write that was under way when the run was claimed took their place


def read(file: IO[bytes], *, trusts: bool) -> Checkpoint:
    """Read a checkpoint; unless the user trusts it, nothing in it runs code."""
    checkpoint: Checkpoint = (
        torch.load(file, map_location="cpu", weights_only=False) if trusts else read_checkpoint(file)
    )
    return checkpoint


def _load(snapshot: OpenSnapshot, *, trusts: bool, with_bytes: bool) -> tuple[Checkpoint, bytes | None]:
    """Read a snapshot. What could not be read raises as such."""
    with snapshot.reader() as reader:
        try:
            checkpoint = read(reader.as_file(), trusts=trusts)
            if not with_bytes:
                return checkpoint, None
            reader.seek(0)
            return checkpoint, reader.read()
        except Exception:
            if reader.problem is not None:  # torch may have made something else of it
                raise reader.problem from None
            raise
