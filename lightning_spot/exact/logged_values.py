"""Metric states and what ``self.log`` keeps between steps: captured as plain values, and put back.

Lightning's checkpoints hold none of it: a mean over an epoch would be one over its rest.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

from lightning_spot.exact import namespaces, private

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx")
_LOGGED = {"callback": private.CALLBACK_METRICS, "log": private.LOGGED_METRICS, "progress_bar": private.BAR_METRICS}
_COUNTERS = (private.UPDATE_COUNT.name, "_num_vals_seen")  # the second belongs to torchmetrics' Running


def capture(trainer: pl.Trainer) -> State:
    """The epoch's accumulators, and the values logged last."""
    connector = private.LOGGER_CONNECTOR.of(trainer)
    results = private.RESULTS.of(trainer.fit_loop.epoch_loop)
    return {
        "results": [_result_state(item) for item in results.values() if not item.has_reset and _is_plain(item)],
        "logged": {name: _copy(values.of(connector)) for name, values in _LOGGED.items()},
        "in_epoch": private.FIRST_ITERATION.of(connector) is not None,
    }


def restore(trainer: pl.Trainer, state: State) -> None:
    """Put back what :func:`capture` returned, just before the next batch (or the end of the epoch)."""
    restore_last(trainer, state)
    connector = private.LOGGER_CONNECTOR.of(trainer)
    results = private.RESULTS.of(trainer.fit_loop.epoch_loop)
    for saved in state["results"]:
        _restore_result(trainer, results, saved)
    if state["in_epoch"]:  # otherwise the next batch would be taken for the first, and reset what was accumulated
        private.FIRST_ITERATION.set(connector, False)


def restore_last(trainer: pl.Trainer, state: State) -> None:
    """Put back the values logged last, which a program may read when ``fit`` has returned."""
    connector = private.LOGGER_CONNECTOR.of(trainer)
    for name, values in _LOGGED.items():
        values.of(connector).update(state["logged"][name])


def last_value(trainer: pl.Trainer, name: str) -> torch.Tensor | float | None:
    """The last logged value of a metric, where it lies; ``None`` if there is none. Asking changes nothing of it."""
    value: torch.Tensor | float | None = last_values(trainer).get(name)
    return value


def last_values(trainer: pl.Trainer) -> State:
    """The last logged value of each metric, likewise."""
    connector = private.LOGGER_CONNECTOR.of(trainer)
    present = private.RESULTS.of(trainer.fit_loop.epoch_loop) is not None and trainer.training
    found = connector.metrics["callback"] if present else {}
    return {**private.CALLBACK_METRICS.of(connector), **found}


def metrics_of(module: torch.nn.Module) -> State:
    """States of the metrics in a module, or of a metric."""
    return metrics_among(module.named_modules())


def metrics_among(modules: Iterable[tuple[str, torch.nn.Module]]) -> State:
    """States of the metrics among modules."""
    return {name: _metric_state(item) for name, item in modules if isinstance(item, Metric)}


def restore_metrics_of(module: torch.nn.Module, state: State) -> None:
    """Put back what :func:`metrics_of` returned."""
    metrics = dict(metrics_in(module))
    for name, saved in state.items():
        if name in metrics:
            _restore_metric(metrics[name], saved)


def metrics_in(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    """Every metric in a module, by its name."""
    return [(name, item) for name, item in module.named_modules() if isinstance(item, Metric)]


def _metric_state(metric: Metric) -> State:
    return {
        "states": {name: _copy(getattr(metric, name)) for name in private.DEFAULTS.of(metric)},
        "counters": {name: getattr(metric, name) for name in _COUNTERS if isinstance(getattr(metric, name, None), int)},
        "last": _last(metric),
    }


def _restore_metric(metric: Metric, saved: State) -> None:
    for name, value in saved["states"].items():
        if name in private.DEFAULTS.of(metric):
            setattr(metric, name, _to(value, metric.device))
    for name, value in saved["counters"].items():
        setattr(metric, name, value)
    private.FORWARD_CACHE.set(metric, _to(saved["last"], metric.device))
    private.COMPUTED.set(metric, None)


def _is_plain(item: Any) -> bool:
    """Whether an accumulator can be made again from plain values: its process group cannot."""
    return item.meta.sync.group is None and (item.is_tensor or item.meta.metric_attribute is not None)


def _result_state(item: Any) -> State:
    meta = item.meta
    return {
        "fx": meta.fx,
        "name": meta.name,
        **{flag: getattr(meta, flag) for flag in _FLAGS},
        "reduce_fx": meta.reduce_fx.__name__,
        "metric_attribute": meta.metric_attribute,
        "sync": (getattr(meta.sync, private.SHOULD_SYNC), meta.sync.rank_zero_only),
        "is_tensor": item.is_tensor,
        "value": _copy(item.value) if item.is_tensor else None,
        "batch_size": _copy(item.cumulated_batch_size) if item.is_tensor and meta.is_mean_reduction else None,
        "last": _last(item),
        "updates": private.UPDATE_COUNT.of(item),
    }


def _restore_result(trainer: pl.Trainer, results: Any, saved: State) -> None:
    home = namespaces.of(trainer, private.RESULT_MODULE)
    meta = private.METADATA.of(home)(
        fx=saved["fx"],
        name=saved["name"],
        reduce_fx=getattr(torch, saved["reduce_fx"]),
        metric_attribute=saved["metric_attribute"],
        **{flag: saved[flag] for flag in _FLAGS},
    )
    should, rank_zero_only = saved["sync"]
    sync = {private.SHOULD_SYNC: should, "fn": trainer.strategy.reduce, "rank_zero_only": rank_zero_only}
    meta.sync = private.SYNC.of(home)(**sync)
    item = private.RESULT_METRIC.of(home)(meta, saved["is_tensor"])
    device = trainer.strategy.root_device
    if saved["is_tensor"]:
        item.to(device)
        item.value = _to(saved["value"], device)
        if saved["batch_size"] is not None:
            item.cumulated_batch_size = _to(saved["batch_size"], device)
    else:
        try:
            item.value = operator.attrgetter(saved["metric_attribute"])(trainer.lightning_module)
        except AttributeError:
            return  # the module has no such metric any more
    private.FORWARD_CACHE.set(item, _to(saved["last"], device))
    private.UPDATE_COUNT.set(item, saved["updates"])
    suffix = f".{meta.dataloader_idx}" if meta.add_dataloader_idx and meta.dataloader_idx is not None else ""
    # What other ranks have left would be refused when it is logged in the next epoch, as something else.
    apart = "of other ranks: " if saved.get("apart") else ""
    results[f"{apart}{meta.fx.removesuffix(suffix)}.{meta.name}{suffix}"] = item


def _last(metric: Any) -> torch.Tensor | None:
    """What a metric returned last, if it is one tensor."""
    value = private.FORWARD_CACHE.of(metric)
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def _copy(value: Any) -> Any:
    """A copy of a state that later updates do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items() if isinstance(item, (torch.Tensor, int, float, str))}
    return [_copy(item) for item in value] if isinstance(value, (list, tuple)) else value


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_to(item, device) for item in value] if isinstance(value, list) else value
