"""Other ranks than those that took the snapshot: what one of them takes over, and the samples that are left dealt anew.

There were more of them, or fewer, or as many that had other shares of the data (another size of tensor parallelism).
What all ranks had in common, and what each of them had for itself and this one can have, is as it was: the samples of
the epoch that are left are dealt again. What was gathered in it begins again. The rest is named.

torch's ``DistributedSampler`` puts the samples in one order, which all ranks know, and gives every rank each N-th of
it. So what N ranks have seen after some batches is the beginning of that order. The rest is dealt in the same way to as
many ranks as there are now; when these are stopped in turn, what was seen is a beginning of the same order again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_spot.config import format_names
from lightning_spot.state import compat
from lightning_spot.state.randomness import State, capture_generator
from lightning_spot.state.sharded import is_sharded
from lightning_spot.state.workers import draws_at_once

if TYPE_CHECKING:
    import lightning.pytorch as pl


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
    is_plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == order["length"]
    if not is_plain or loader.persistent_workers or sampler.generator is not None or loader.generator is not None:
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


def rest_of(order: State, batches: int, loader: DataLoader[Any], rank: int, world: int) -> State:
    """The rest of an order after so many batches of each rank, dealt to other ranks; see :func:`dealt`.

    Args:
        order: in which the samples were seen.
        batches: that each of its ranks has seen.
        loader: through which this rank goes on.
        rank: number of the share that goes through it.
        world: number of shares now.
    """
    seen = min(order["length"], order["first"] + batches * order["batch"] * order["world"])
    return {**order, "first": seen, "world": world, "rank": rank, "batch": batch_of(loader)}


def dealt(order: State, loader: DataLoader[Any]) -> list[Any]:
    """What a rank draws of the :func:`rest_of` an order: batches of indices; indices where its loader makes no batches.

    All ranks draw equally many. As a ``DistributedSampler`` does, the rest is filled up from the beginning of the order
    to a multiple of the number of ranks, or cut with ``drop_last``; a loader's own ``drop_last`` drops a batch that is
    not full.
    """
    indices: Sequence[int] = range(order["length"])
    if order["seed"] is not None:
        generator = torch.Generator().manual_seed(order["seed"])
        indices = torch.randperm(order["length"], generator=generator).tolist()
    rest, world = [*indices[order["first"] :]], order["world"]
    each, over = divmod(len(rest), world)
    if over and not (type(loader.sampler) is DistributedSampler and loader.sampler.drop_last):
        each += 1
        rest += islice(cycle(indices), each * world - len(rest))
    share = rest[order["rank"] : each * world : world]
    batches = loader.batch_sampler
    return share if batches is None else list(BatchSampler(share, batches.batch_size, batches.drop_last))  # type: ignore[attr-defined]


class OtherRanks:
    """What one rank takes over from other ranks.

    Args:
        ranks: states of all ranks that took the snapshot.
        rank: number of this one.
        world: number of ranks now.
        share: which share of the data this one has, and of how many; default one for each rank. Ranks of tensor
            parallelism have the same.
        shares: how many there were; default likewise.

    Attributes:
        reasons: why this resume is not what it might be, each with what to do; known once all is taken over.
        is_between_batches: whether the ranks there are now would have seen just these samples after whole batches;
            known once every loader has its place.
    """

    def __init__(
        self, ranks: list[State], rank: int, world: int, share: tuple[int, int] | None = None, shares: int | None = None
    ) -> None:
        self._ranks, self._rank, self._world = ranks, rank, world
        self._share, self._shares = share or (rank, world), shares or len(ranks)
        self._own = ranks[rank % len(ranks)]
        self._left: int | None = None
        self.reasons: list[str] = []
        self.is_between_batches = True

    def values(self, trainer: pl.Trainer) -> State:
        """The state of this rank, but for its place in the data."""
        values = dict(self._own)
        values["random"] = random_of([state["random"] for state in self._ranks], self._rank)
        values["gradients"] = self._gradients(trainer)
        values["gradient_placements"] = {}
        if unsynced := values.get("unsynced_gradients"):
            values["unsynced_gradients"] = {**unsynced, "gradients": {}, "sums": {}}
        if self._rank >= len(self._ranks):  # rank 0's are in the checkpoint; what is in no checkpoint, it had, too
            values["buffers"] = self._ranks[0]["buffers"]
        return values

    def gather_anew(self, values: State, *, is_over: bool) -> None:
        """Have what was gathered in the epoch begin anew: metrics, and what was logged of it.

        Args:
            values: of this rank.
            is_over: whether no batch of the epoch is left. Then there would be no values of it, which callbacks ask
                for: each rank has those of one that was there.
        """
        names = sorted({name for state in self._ranks for name in _gathered(state)})
        if is_over:
            values["results"] = [{**item, "apart": True} for item in values.get("results") or ()]
            what = "are in this epoch those of some of the ranks that were there"
        else:
            values.update(metrics={}, results=[])
            what = "begin anew in this epoch: their values of it are those of the batches that are left"
        if names:
            self.reasons.append(
                f"metrics and logged means ({format_names(names)}) {what}. Those of later epochs are whole"
            )

    def _gradients(self, trainer: pl.Trainer) -> State:
        """In mid-accumulation, every rank has the mean, so that the mean over ranks is what it was."""
        found = [state["gradients"] for state in self._ranks]
        are_there = any(found) or any(map(_has_unsynced, self._ranks))
        if not (are_there and is_sharded(trainer)):
            names = dict.fromkeys(name for state in found for name in state)
            held = {name: [state[name] for state in found if name in state] for name in names}
            return {name: torch.stack(each).sum(0) / len(found) for name, each in held.items()}
        self.reasons.append(
            "gradients in mid-accumulation are in shards of the ranks that were there: the batches of that window are"
            " missing in its step"
        )
        return {}

    def position(self, loader: Any, index: int) -> State | None:
        """Place at which a training loader goes on; ``None`` for the start of an epoch."""
        positions = [state["loaders"][index] if state["loaders"] else None for state in self._ranks]
        own: State | None = positions[self._rank % len(positions)]
        if own is None or "at_iter" not in own:  # between two epochs
            return own
        present = random_of([state["random"] for state in self._ranks], self._rank)
        begun = {**own, "at_iter": {**present, "own": own["at_iter"]["own"]}, "at_first": None, "dealt": False}
        if own["exhausted"]:
            return begun
        shared = own.get("order")
        if shared is not None and self._is_common(positions) and is_dealt_to(loader, shared, self._share[1]):
            rest = rest_of(shared, own["yielded"], loader, *self._share)
            self._left = max(self._left or 0, shared["length"] - rest["first"])
            self.is_between_batches &= rest["first"] % (rest["batch"] * rest["world"]) == 0
            return {**begun, "order": rest, "dealt": True, "yielded": 0}
        self.is_between_batches = False
        self.reasons.append(
            f"the order of the samples of {_name(loader)} is not known over all ranks: each rank passes over as many of"
            " its batches as were trained on, and some samples of this epoch may be seen twice or not at all. Use a"
            " map-style data set with torch's samplers"
        )
        begun |= {"at_iter": own["at_iter"], "at_first": own["at_first"]}
        if "state" in own and self._rank < len(self._ranks):  # the loader keeps its place itself
            return begun
        begun.pop("state", None)
        return {**begun, "yielded": own["yielded"] * self._shares // self._share[1]}

    def _is_common(self, positions: list[Any]) -> bool:
        """Whether all ranks went through one order, dealt among them or among groups of them, equally far."""
        if any(position is None or position.get("order") is None for position in positions):
            return False
        facts = [{**position["order"], "rank": None, "at": position["yielded"]} for position in positions]
        return all(fact == facts[0] for fact in facts) and len(positions) % facts[0]["world"] == 0

    def line(self, trainer: pl.Trainer) -> str:
        """What is said of it."""
        what = "weights, optimizers and schedulers go on as they were"
        if self._left is not None:
            what += f"; the {self._left} samples of epoch {trainer.current_epoch} that no rank has seen are dealt anew"
        if len(self._ranks) == self._world:
            return f"{self._world} ranks with {self._shares} shares of the data -> {self._share[1]}: {what}"
        old = "1 rank" if len(self._ranks) == 1 else f"{len(self._ranks)} ranks"
        return f"{old} -> {self._world}: {what}"


def _has_unsynced(state: State) -> bool:
    """Whether a rank has gradients that FSDP2 has not added up over ranks."""
    unsynced = state.get("unsynced_gradients") or {}
    return bool(unsynced.get("gradients") or unsynced.get("sums"))


def _gathered(state: State) -> Iterator[str]:
    """Names of what a rank has gathered in an epoch: of metrics that were updated, and of what was logged."""
    yield from (item["name"] for item in state.get("results") or ())
    for name, metric in (state["metrics"] or {}).items():
        if metric["counters"].get(compat.UPDATE_COUNT.name):
            yield name


def random_of(ranks: list[State], rank: int) -> State:
    """Generators of a rank: its own, if it was there; else such as no other has, unless all had the same.

    Args:
        ranks: generators of the ranks that were there.
        rank: whose.
    """
    if rank < len(ranks):
        return ranks[rank]
    if all(torch.equal(state["torch"], ranks[0]["torch"]) for state in ranks) and len(ranks) > 1:
        return ranks[0]
    digest = hashlib.sha256(ranks[0]["torch"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:4], "little")
    return {
        "python": capture_generator(random.Random(seed)),
        "numpy": capture_generator(np.random.RandomState(seed)),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }


def _name(loader: Any) -> str:
    for part in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if part is not None and not type(part).__module__.startswith("torch."):
            return type(part).__name__
    return f"a {type(loader).__name__}"
