"""What DDP keeps to itself: the order in which gradients became ready in a run's first step, and who has buffers.

DDP rebuilds its buckets after that step, once. They decide in which order ranks add each element up, so with more than
two of them a resumed run would round its first step in another way than an undisturbed one: its DDP is new and has its
first buckets. Before that step, a backward pass without values goes through DDP in the recorded order, and DDP rebuilds
the buckets it had. (torch 2.6 to 2.13: ``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_spot.exact import private

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


class GradientOrder:
    """Records the order in the first step of a run, and has DDP see it again after a resume."""

    def __init__(self) -> None:
        self._indices: dict[int, None] = {}
        self._known = False
        self._begin_step = 0
        self._hooks: list[Callable[[], None]] = []

    def saved(self) -> list[int]:
        """Indices into ``parameters()`` in the order of the first step; empty where it plays no role."""
        return list(self._indices) if self._known else []

    def begin(self, trainer: pl.Trainer, saved: list[int]) -> None:
        """When training begins: rehearse what was saved, or record.

        Args:
            trainer: whose model it is.
            saved: of a snapshot; empty in a fresh run.
        """
        ddp = trainer.model
        if not isinstance(ddp, DistributedDataParallel) or not _rebuilds(ddp):
            return
        parameters = list(ddp.parameters())
        if saved and all(index < len(parameters) for index in saved):
            _rehearse(ddp, [parameters[index] for index in saved])
            self._indices, self._known = dict.fromkeys(saved), True
            return
        self._begin_step = trainer.global_step
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._ready, index)
                )
                self._hooks.append(hook.remove)

    def stepped(self, trainer: pl.Trainer) -> None:
        """A batch is done, and maybe the first step."""
        if self._hooks and trainer.global_step > self._begin_step:
            self.end()
            wanted = sum(parameter.requires_grad for parameter in trainer.lightning_module.parameters())
            self._known = len(self._indices) == wanted

    def end(self) -> None:
        """Stop recording."""
        while self._hooks:
            self._hooks.pop()()

    def _ready(self, index: int, _: torch.Tensor) -> None:
        self._indices.pop(index, None)  # of several backward passes the last counts: DDP looks at the one it reduces in
        self._indices[index] = None


def _rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether DDP rebuilds buckets, and nobody's communication hook would take the rehearsal for a step."""
    return not (ddp.find_unused_parameters or ddp.static_graph or private.COMM_HOOKS.of(ddp))


def _rehearse(ddp: DistributedDataParallel, parameters: list[torch.nn.Parameter]) -> None:
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    reducer = private.REDUCER.of(ddp)
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    with torch.enable_grad():
        total = torch.zeros((), device=parameters[0].device)
        for parameter in reversed(parameters):  # autograd runs what was made last first
            total = total + parameter.flatten()[:0].sum().to(total)  # of no element: no value can spoil it
    total.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    logger.debug("the order in which %d gradients become ready was rehearsed", len(parameters))


def shares_buffers(trainer: pl.Trainer) -> bool | None:
    """Whether DDP gives all ranks the buffers of rank 0 before the next step; ``None`` without DDP.

    It does not behind a step that only gathered gradients, nor behind the first one by hand. From then on each rank has
    statistics of its own, and a DDP that is made anew for a resume would take them away.
    """
    ddp = trainer.model
    return bool(private.SHARES_BUFFERS.of(ddp)) if isinstance(ddp, DistributedDataParallel) else None


def restore_sharing(trainer: pl.Trainer, saved: bool | None) -> None:
    """Have it do as :func:`shares_buffers` found."""
    if saved is not None and isinstance(trainer.model, DistributedDataParallel):
        private.SHARES_BUFFERS.set(trainer.model, saved)
