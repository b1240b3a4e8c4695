"""The order of an epoch over all ranks: which samples were seen, and what is left dealt to another number of ranks.

torch's ``DistributedSampler`` puts the samples in one order, which all ranks know, and gives every rank each N-th of
it. So what N ranks have seen after some batches is the beginning of that order. The rest is dealt in the same way to as
many ranks as there are now; when these are stopped in turn, what was seen is a beginning of the same order again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_spot.exact.indices import draws_at_once
from lightning_spot.exact.randomness import State


def order_of(loader: Any, at_iter: State, at_first: State | None) -> State | None:
    """The order of the epoch that a loader is in, as plain values; ``None`` if it is not known.

    Args:
        loader: in an epoch that began at its start.
        at_iter: the generators when the epoch began.
        at_first: the generators when its first batch was asked for, if it was.
    """
    batch = batch_of(loader)
    sampler = getattr(loader, "sampler", None)
    if batch is None or sampler is None:
        return None
    order: State = {"length": len(loader.dataset), "batch": batch, "world": 1, "first": 0, "seed": None}
    if type(sampler) is DistributedSampler:
        seed = sampler.seed + sampler.epoch if sampler.shuffle else None
        return {**order, "length": len(sampler.dataset), "world": sampler.num_replicas, "seed": seed}  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return order
    is_plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    if (
        not is_plain
        or sampler.num_samples != order["length"]
        or loader.persistent_workers
        or loader.generator is not None
    ):
        return None
    generator = torch.Generator()
    if loader.num_workers:  # the sampler draws when the workers are made, after the seed of these
        generator.set_state(at_iter["torch"])
        _seed_from(generator)
    elif at_first is not None:
        generator.set_state(at_first["torch"])
    else:
        return None
    return {**order, "seed": _seed_from(generator)}


def _seed_from(generator: torch.Generator) -> int:
    """What torch's samplers and loaders draw as a seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def batch_of(loader: Any) -> int | None:
    """Samples in a batch of a loader whose batches are consecutive samples of a sampler; ``None`` for others."""
    if not draws_at_once(loader):
        return None
    if loader.batch_sampler is None:
        return 1 if loader.batch_size is None else None
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None


def is_dealt_to(loader: Any, order: State, world: int) -> bool:
    """Whether an order can be dealt in ``world`` shares through such a loader."""
    sampler = getattr(loader, "sampler", None)
    if batch_of(loader) is None or len(loader.dataset) != order["length"]:
        return False
    if type(sampler) is DistributedSampler:
        return sampler.num_replicas == world
    return world == 1 and type(sampler) in (RandomSampler, SequentialSampler)


def seen(order: State, batches: int) -> int:
    """How many samples of an order all ranks have seen after so many batches each."""
    return min(int(order["length"]), int(order["first"] + batches * order["batch"] * order["world"]))


def rest_of(order: State, batches: int, loader: DataLoader[Any], rank: int, world: int) -> State:
    """The rest of an order after so many batches of each rank, dealt to other ranks; see :func:`dealt`.

    Args:
        order: in which the samples were seen.
        batches: that each of its ranks has seen.
        loader: through which this rank goes on.
        rank: number of the share that goes through it.
        world: number of shares now.
    """
    return {**order, "first": seen(order, batches), "world": world, "rank": rank, "batch": batch_of(loader)}


def dealt(order: State, loader: DataLoader[Any]) -> list[Any]:
    """What a rank draws of the :func:`rest_of` an order: batches of indices; indices where its loader makes no batches.

    All ranks draw equally many. As a ``DistributedSampler`` does, the rest is filled up from the beginning of the order
    to a multiple of the number of ranks, or cut with ``drop_last``; a loader's own ``drop_last`` drops a batch that is
    not full.
    """
    drop = type(loader.sampler) is DistributedSampler and loader.sampler.drop_last
    share = _share(_indices(order), order["first"], order["rank"], order["world"], drop_last=drop)
    batches = loader.batch_sampler
    return share if batches is None else list(BatchSampler(share, batches.batch_size, batches.drop_last))  # type: ignore[attr-defined]


def _share(indices: Sequence[int], first: int, rank: int, world: int, *, drop_last: bool) -> list[int]:
    rest = list(indices[first:])
    each, over = divmod(len(rest), world)
    if over and not drop_last:
        each += 1
        missing = each * world - len(rest)
        rest += (list(indices) * (missing // len(indices) + 1))[:missing]
    return rest[rank : each * world : world]


def _indices(order: State) -> list[int]:
    if order["seed"] is None:
        return list(range(order["length"]))
    generator = torch.Generator()
    generator.manual_seed(order["seed"])
    indices: list[int] = torch.randperm(order["length"], generator=generator).tolist()
    return indices
