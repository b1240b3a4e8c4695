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


def results(of_ranks: list[list[State]], rank: int, *, is_distributed: bool) -> list[State]:
    """Accumulators of ``self.log``. Of those which are reduced over ranks the first has the sum, others nothing.

    Those which are not are each rank's own: a rank that was not there has those of one that was, since with nothing
    their mean would be no number where it gets no batch of this epoch. What a rank had that is no more is gone, as it
    would be from what is logged. Whether what a single rank had is reduced is left open until it is logged again.

    Args:
        of_ranks: what each rank that was there had.
        rank: of this process.
        is_distributed: whether what ranks log can be reduced now. Without, Lightning notes that nothing is.
    """
    by_name = [{_key(item): item for item in items} for items in of_ranks]
    keys = dict.fromkeys(key for items in by_name for key in items)
    merged = [item for key in keys if (item := _result([items.get(key) for items in by_name], rank)) is not None]
    if not is_distributed:
        return [{**item, "sync": (False, item["sync"][1])} for item in merged]
    alone = len(of_ranks) == 1
    return [{**item, "open": True} if alone and not item["sync"][0] else item for item in merged]


def _key(item: State) -> tuple[Any, ...]:
    return (item["fx"], item["name"], item["dataloader_idx"])


def _result(of_ranks: list[State | None], rank: int) -> State | None:
    """The accumulator of one name for a rank; ``None`` where that rank logged nothing by it."""
    own, items = of_ranks[rank % len(of_ranks)], [item for item in of_ranks if item is not None]
    if own is None or not own["is_tensor"] or len(items) < len(of_ranks):
        return own
    first, is_new = items[0], rank >= len(items)
    values = torch.stack([item["value"] for item in items])
    merge = _LOGGED.get(first["reduce_fx"])
    should_sync = first["sync"][0]
    if merge is not None:
        return {**first, "value": merge(values, dim=0)} if should_sync or is_new else own
    if not should_sync:
        return own
    size = torch.stack([item["batch_size"] for item in items]).sum(0) if first["batch_size"] is not None else None
    if size is not None:
        # Lightning takes the mean of this over ranks, whole numbers where these are: it would be cut off.
        size = size.float() if not rank else torch.zeros_like(size, dtype=torch.float)
    return {**first, "value": values.sum(0) if not rank else torch.zeros_like(first["value"]), "batch_size": size}
