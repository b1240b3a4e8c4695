"""Metric states and what ``self.log`` keeps between steps: captured as plain values, and put back.

Lightning's checkpoints hold none of it: a mean over an epoch would be one over its rest.
"""

from __future__ import annotations

import operator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

State = dict[str, Any]

_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx")
_COUNTERS = ("_update_count", "_num_vals_seen")  # the second belongs to torchmetrics' Running


def capture(trainer: pl.Trainer) -> State:
    """States of the module's metrics, the epoch's accumulators, and the values logged last."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    return {
        "metrics": metrics_of(trainer.lightning_module),
        "results": [_result_state(item) for item in results.values() if not item.has_reset and _is_plain(item)],
        "logged": {
            "callback": _copy(connector._callback_metrics),
            "log": _copy(connector._logged_metrics),
            "progress_bar": _copy(connector._progress_bar_metrics),
        },
        "in_epoch": connector._first_loop_iter is not None,
    }


def restore(trainer: pl.Trainer, state: State) -> None:
    """Put back what :func:`capture` returned, just before the next batch (or the end of the epoch)."""
    restore_metrics_of(trainer.lightning_module, state["metrics"])
    connector = trainer._logger_connector
    connector._callback_metrics.update(state["logged"]["callback"])
    connector._logged_metrics.update(state["logged"]["log"])
    connector._progress_bar_metrics.update(state["logged"]["progress_bar"])
    results = trainer.fit_loop.epoch_loop._results
    for saved in state["results"]:
        _restore_result(trainer, results, saved)
    if state["in_epoch"]:  # otherwise the next batch would be taken for the first, and reset what was accumulated
        connector._first_loop_iter = False


def metrics_of(module: torch.nn.Module) -> State:
    """States of the metrics in a module, or of a metric."""
    return {name: _metric_state(metric) for name, metric in _metrics(module)}


def restore_metrics_of(module: torch.nn.Module, state: State) -> None:
    """Put back what :func:`metrics_of` returned."""
    metrics = dict(_metrics(module))
    for name, saved in state.items():
        if name in metrics:
            _restore_metric(metrics[name], saved)


def _metrics(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    return [(name, item) for name, item in module.named_modules() if isinstance(item, Metric)]


def _metric_state(metric: Metric) -> State:
    return {
        "states": {name: _copy(getattr(metric, name)) for name in metric._defaults},
        "counters": {name: getattr(metric, name) for name in _COUNTERS if isinstance(getattr(metric, name, None), int)},
        "last": _copy(metric._forward_cache) if isinstance(metric._forward_cache, torch.Tensor) else None,
    }


def _restore_metric(metric: Metric, saved: State) -> None:
    for name, value in saved["states"].items():
        if name in metric._defaults:
            setattr(metric, name, _to(value, metric.device))
    for name, value in saved["counters"].items():
        setattr(metric, name, value)
    metric._forward_cache = _to(saved["last"], metric.device)
    metric._computed = None


def _is_plain(item: _ResultMetric) -> bool:
    """Whether an accumulator can be made again from plain values: its process group cannot."""
    return item.meta.sync.group is None and (item.is_tensor or item.meta.metric_attribute is not None)


def _result_state(item: _ResultMetric) -> State:
    meta = item.meta
    return {
        "fx": meta.fx,
        "name": meta.name,
        **{flag: getattr(meta, flag) for flag in _FLAGS},
        "reduce_fx": meta.reduce_fx.__name__,
        "metric_attribute": meta.metric_attribute,
        "sync": (meta.sync._should, meta.sync.rank_zero_only),
        "is_tensor": item.is_tensor,
        "value": _copy(item.value) if item.is_tensor else None,
        "batch_size": _copy(item.cumulated_batch_size) if item.is_tensor and meta.is_mean_reduction else None,
        "last": _copy(item._forward_cache) if isinstance(item._forward_cache, torch.Tensor) else None,
        "updates": item._update_count,
    }


def _restore_result(trainer: pl.Trainer, results: _ResultCollection, saved: State) -> None:
    meta = _Metadata(
        fx=saved["fx"],
        name=saved["name"],
        reduce_fx=getattr(torch, saved["reduce_fx"]),
        metric_attribute=saved["metric_attribute"],
        **{flag: saved[flag] for flag in _FLAGS},
    )
    should, rank_zero_only = saved["sync"]
    meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    item = _ResultMetric(meta, saved["is_tensor"])
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
    item._forward_cache = _to(saved["last"], device)
    item._update_count = saved["updates"]
    suffix = f".{meta.dataloader_idx}" if meta.add_dataloader_idx and meta.dataloader_idx is not None else ""
    results[f"{meta.fx.removesuffix(suffix)}.{meta.name}{suffix}"] = item


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
