"""The exact state of a snapshot that other ranks have taken, as one of the ranks that go on from it has it.

There were more of them, or fewer, or as many that had other shares of the data (another size of tensor parallelism).
What all ranks had in common, and what each of them had for itself and this one can have, is as it was: the samples of
the epoch that are left are dealt anew. What was gathered in it begins anew. The rest is named.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_spot.config import format_names
from lightning_spot.exact import order, private
from lightning_spot.exact.own_parameters import what_other_ranks_kept
from lightning_spot.exact.position import loader_itself
from lightning_spot.exact.randomness import State, capture_generator
from lightning_spot.exact.sharded import is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl


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
        if self._rank >= len(self._ranks):  # rank 0's are in the checkpoint; what is in no checkpoint, it had, too
            values["buffers"] = self._ranks[0]["buffers"]
            values["own_parameters"] = self._ranks[0].get("own_parameters", {})
        values.pop("own_values", None)
        self.reasons += what_other_ranks_kept([state.get("own_values", {}) for state in self._ranks])
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
        if not (any(found) and is_sharded(trainer)):
            names = dict.fromkeys(name for state in found for name in state)
            held = {name: [state[name] for state in found if name in state] for name in names}
            return {name: torch.stack(each).sum(0) / len(found) for name, each in held.items()}
        self.reasons.append(
            "gradients in mid-accumulation are in shards of the ranks that were there: the batches of that window are"
            " missing in its step"
        )
        return {}

    def _positions(self, index: int) -> list[Any]:
        return [(state["loaders"] or [None] * (index + 1))[index] for state in self._ranks]

    def position(self, loader: Any, index: int) -> State | None:
        """Place at which a training loader goes on; ``None`` for the start of an epoch."""
        positions = self._positions(index)
        own: State | None = positions[self._rank % len(positions)]
        if own is None or "at_iter" not in own:  # between two epochs
            return own
        present = random_of([state["random"] for state in self._ranks], self._rank)
        begun = {**own, "at_iter": {**present, "own": own["at_iter"]["own"]}, "at_first": None, "dealt": False}
        if own["exhausted"]:
            return begun
        inner, shared = loader_itself(loader), own.get("order")
        if shared is not None and self._is_common(positions) and order.is_dealt_to(inner, shared, self._share[1]):
            rest = order.rest_of(shared, own["yielded"], inner, *self._share)
            self._left = max(self._left or 0, shared["length"] - rest["first"])
            self.is_between_batches &= rest["first"] % (rest["batch"] * rest["world"]) == 0
            return {**begun, "order": rest, "dealt": True, "yielded": 0}
        self.is_between_batches = False
        self.reasons.append(
            f"the order of the samples of {_name(inner)} is not known over all ranks: each rank passes over as many of"
            " its batches as were trained on, and some samples of this epoch may be seen twice or not at all. Use a"
            " map-style data set with torch's samplers"
        )
        begun |= {"at_iter": own["at_iter"], "at_first": own["at_first"]}
        if "state" in own and self._rank < len(self._ranks):  # the loader keeps its place itself
            return begun
        begun.pop("state", None)
        return {**begun, "yielded": own["yielded"] * self._shares // self._share[1]}

    def _is_common(self, positions: list[State]) -> bool:
        """Whether all ranks went through one order, dealt among them or among groups of them, equally far."""
        if any(position is None or position.get("order") is None for position in positions):
            return False
        facts = [
            {**{name: value for name, value in position["order"].items() if name != "rank"}, "at": position["yielded"]}
            for position in positions
        ]
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


def _gathered(state: State) -> Iterator[str]:
    """Names of what a rank has gathered in an epoch: of metrics that were updated, and of what was logged."""
    yield from (item["name"] for item in state.get("results") or ())
    for name, metric in (state["metrics"] or {}).items():
        if metric["counters"].get(private.UPDATE_COUNT.name):
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
