"""What several ranks have gathered of an epoch, given to other ranks so that its reduction stays the same."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_spot.exact import private
from lightning_spot.exact.logged_values import metrics_in
from lightning_spot.exact.randomness import State

_SAME: dict[Any, Any] = {dim_zero_mean: torch.mean, dim_zero_max: torch.amax, dim_zero_min: torch.amin}
"""Reductions of equal values that give that value: every rank has the result."""

_LOGGED = {"max": torch.amax, "min": torch.amin}


def gradients(of_ranks: list[State]) -> State:
    """Gradients in mid-accumulation: every rank has the mean, so that the mean over ranks is what it was."""
    names = dict.fromkeys(name for state in of_ranks for name in state)
    held = {name: [state[name] for state in of_ranks if name in state] for name in names}
    return {name: torch.stack(found).sum(0) / len(of_ranks) for name, found in held.items()}


def metrics(module: torch.nn.Module, of_ranks: list[State], rank: int) -> tuple[State, list[str]]:
    """States of torchmetrics; what is summed up or joined over ranks has the first one.

    Returns:
        the states for ``rank``, and the names of metrics that have no reduction that is known: each rank has its own.
    """
    merged, lost = dict(of_ranks[rank % len(of_ranks)]), []
    for name, metric in metrics_in(module):
        found = [state[name]["states"] for state in of_ranks if name in state]
        if len(found) < len(of_ranks) or not metric.sync_on_compute:  # no value is one of all ranks
            continue
        states = {
            key: _reduced(private.REDUCTIONS.of(metric).get(key), [state[key] for state in found], rank)
            for key in private.DEFAULTS.of(metric)
            if all(key in state for state in found)
        }
        if any(value is None for value in states.values()):
            lost.append(name)
        else:
            merged[name] = {**merged[name], "states": states}
    return merged, lost


def _reduced(reduction: Any, values: list[Any], rank: int) -> Any:
    """The value for a rank; ``None`` if the reduction is not known."""
    if reduction is dim_zero_cat and all(isinstance(value, list) for value in values):
        return _joined([item for value in values for item in value], rank)
    if not all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
        return None
    if reduction is dim_zero_sum:
        return torch.stack(values).sum(0).to(values[0].dtype) if rank == 0 else torch.zeros_like(values[0])
    if reduction in _SAME:
        return _SAME[reduction](torch.stack(values), dim=0)
    return None


def _joined(items: list[Any], rank: int) -> list[Any]:
    """All items for the first rank, and for the others one with nothing in it.

    torchmetrics joins what is in a list before it gathers it, but not where that is one item. So with no item, or one
    without a dimension, a rank would tell the others of another form than they have, which ends or hangs them all.
    """
    items = [item.unsqueeze(0) if isinstance(item, torch.Tensor) and not item.ndim else item for item in items]
    return items if rank == 0 else [item[:0] for item in items[:1]]


def results(
    of_ranks: list[list[State]], rank: int, *, is_distributed: bool, is_over: bool
) -> tuple[list[State], list[str]]:
    """Accumulators of ``self.log``. Of those which are reduced over ranks the first has the sum, others nothing.

    Those which are not are each rank's own: a rank that was not there has those of one that was, since with nothing
    their mean would be no number where it gets no batch of this epoch. What a rank had that is no more is gone, as it
    would be from what is logged.

    Args:
        of_ranks: what each rank that was there had.
        rank: of this process.
        is_distributed: whether what ranks log can be reduced now. Without, Lightning notes that nothing is.
        is_over: whether no batch of the epoch is left.

    Returns:
        the accumulators for ``rank``, and the names of those that one rank alone had: whether they are to be reduced
        over ranks is not known, so they begin anew; but if the epoch is over, every rank has their value.
    """
    by_name = [{_key(item): item for item in items} for items in of_ranks]
    merged = [_result([items[key] for items in by_name if key in items], rank, len(of_ranks)) for key in by_name[0]]
    if not is_distributed:
        return [{**item, "sync": (False, item["sync"][1])} for item in merged], []
    if len(of_ranks) > 1 or is_over:
        return merged, []
    return [item for item in merged if item["sync"][0]], [item["name"] for item in merged if not item["sync"][0]]


def _key(item: State) -> tuple[Any, ...]:
    return (item["fx"], item["name"], item["dataloader_idx"])


def _result(items: list[State], rank: int, world: int) -> State:
    first = items[0]
    if not first["is_tensor"] or len(items) < world:
        return items[rank] if rank < len(items) else first
    values = torch.stack([item["value"] for item in items])
    merge = _LOGGED.get(first["reduce_fx"])
    should_sync = first["sync"][0]
    if merge is not None:
        return {**first, "value": merge(values, dim=0)} if should_sync or rank >= world else items[rank]
    if should_sync and rank:
        empty = first["batch_size"] * 0 if first["batch_size"] is not None else None
        return {**first, "value": torch.zeros_like(first["value"]), "batch_size": empty}
    if not should_sync:
        return items[rank % world]
    sizes = [item["batch_size"] for item in items]
    return {**first, "value": values.sum(0), "batch_size": torch.stack(sizes).sum(0) if sizes[0] is not None else None}
