"""Whether DDP gives all ranks the buffers of rank 0 before the next step: of some steps it does not.

It does not behind one that only gathered gradients, nor behind the first one by hand. From then on each rank has
statistics of its own, and a DDP that is made anew for a resume would take them away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from lightning_spot.exact import private

if TYPE_CHECKING:
    import lightning.pytorch as pl


def are_shared(trainer: pl.Trainer) -> bool | None:
    """Whether it will; ``None`` without DDP."""
    ddp = trainer.model
    return bool(private.SHARES_BUFFERS.of(ddp)) if isinstance(ddp, DistributedDataParallel) else None


def restore(trainer: pl.Trainer, saved: bool | None) -> None:
    """Have it do as :func:`are_shared` found."""
    if saved is not None and isinstance(trainer.model, DistributedDataParallel):
        private.SHARES_BUFFERS.set(trainer.model, saved)
