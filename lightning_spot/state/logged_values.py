"""Metric states and what ``self.log`` keeps between steps: captured as plain values, and put back.

Lightning's checkpoints hold none of it: a mean over an epoch would be one over its rest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torchmetrics import Metric

from lightning_spot.snapshot.manifest import MOST_METRICS, is_metric_name
from lightning_spot.state import compat, namespaces
from lightning_spot.trees import mapped

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]
Modules = Iterable[tuple[str, torch.nn.Module]]

_SAID = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_LOGGED = {"callback": compat.CALLBACK_METRICS, "log": compat.LOGGED_METRICS, "progress_bar": compat.BAR_METRICS}
_PLAIN = (torch.Tensor, int, float, str)
_COUNTERS = (compat.UPDATE_COUNT.name, "_num_vals_seen")  # the second belongs to torchmetrics' Running


def capture_results(trainer: pl.Trainer) -> list[State]:
    """The epoch's accumulators."""
    results = compat.RESULTS.of(trainer.fit_loop.epoch_loop)
    return [_result_state(item) for item in results.values() if not item.has_reset and _is_plain(item)]


def restore_results(trainer: pl.Trainer, saved: list[State]) -> None:
    """Put them back, just before the next batch (or the end of the epoch)."""
    results = compat.RESULTS.of(trainer.fit_loop.epoch_loop)
    for each in saved:
        _restore_result(trainer, results, each)


def is_in_epoch(trainer: pl.Trainer) -> bool:
    """Whether a batch of the epoch has been logged."""
    return compat.FIRST_ITERATION.of(trainer) is not None


def restore_in_epoch(trainer: pl.Trainer, saved: bool) -> None:
    """Have the next batch not be taken for the first, which would reset what was accumulated."""
    if saved:
        compat.FIRST_ITERATION.set(trainer, False)


def capture_last(trainer: pl.Trainer) -> State:
    """The values logged last."""
    present = ((name, values.of(trainer).items()) for name, values in _LOGGED.items())
    return {name: _copy({key: each for key, each in items if isinstance(each, _PLAIN)}) for name, items in present}


def restore_last(trainer: pl.Trainer, saved: State) -> None:
    """Put them back; a program may read them when ``fit`` has returned."""
    for name, values in _LOGGED.items():
        values.of(trainer).update(saved[name])


def last_values(trainer: pl.Trainer) -> dict[str, torch.Tensor | float]:
    """The last logged value of each metric, where it lies. Asking changes nothing of it."""
    results = compat.RESULTS.of(trainer.fit_loop.epoch_loop)
    found = results.metrics(is_in_epoch(trainer))["callback"] if trainer.training else {}
    return {**compat.CALLBACK_METRICS.of(trainer), **found}


class LoggedNumbers:
    """The finite numbers among the values that were logged last, for manifests: as many as one may have.

    Args:
        monitor: the one of those on a GPU that is read: training waits for that, once for each value.
    """

    def __init__(self, monitor: str | None) -> None:
        self._monitor = monitor
        self._read: tuple[torch.Tensor | None, float] = (None, math.nan)

    def now(self, trainer: pl.Trainer) -> dict[str, float]:
        """Those of now: what Lightning keeps; nothing is computed."""
        if compat.CALLBACK_METRICS.problem(trainer) is not None:
            return {}
        logged = compat.CALLBACK_METRICS.of(trainer)
        names = sorted(filter(is_metric_name, logged), key=lambda name: name != self._monitor)[:MOST_METRICS]
        found = {name: self._number(logged[name], is_wanted=name == self._monitor) for name in names}
        return {name: number for name, number in found.items() if math.isfinite(number)}

    def _number(self, value: object, *, is_wanted: bool) -> float:
        if not isinstance(value, torch.Tensor):
            return float(value) if isinstance(value, (int, float)) else math.nan
        if value.numel() != 1 or value.is_complex() or (value.device.type != "cpu" and not is_wanted):
            return math.nan
        if value.device.type == "cpu":
            return float(value)
        if self._read[0] is not value:
            self._read = value, float(value)
        return self._read[1]


def is_metric(value: object) -> TypeGuard[Metric]:
    """Whether it is a metric; ``isinstance`` would ask all hundred kinds of metrics about each class it meets first."""
    return Metric in type(value).__mro__


def metrics_of(modules: Modules) -> State:
    """States of the metrics among modules."""
    return {name: _metric_state(item) for name, item in modules if is_metric(item)}


def restore_metrics(modules: Modules, state: State) -> None:
    """Put back what :func:`metrics_of` returned."""
    for name, item in modules:
        if is_metric(item) and name in state:
            _restore_metric(item, state[name])


def _metric_state(metric: Metric) -> State:
    return {
        "states": {name: _copy(getattr(metric, name)) for name in compat.DEFAULTS.of(metric)},
        "counters": {name: getattr(metric, name) for name in _COUNTERS if isinstance(getattr(metric, name, None), int)},
        "last": _last(metric),
    }


def _restore_metric(metric: Metric, saved: State) -> None:
    for name, value in saved["states"].items():
        if name in compat.DEFAULTS.of(metric):
            setattr(metric, name, _to(value, metric.device))
    for name, value in saved["counters"].items():
        setattr(metric, name, value)
    compat.FORWARD_CACHE.set(metric, _to(saved["last"], metric.device))
    compat.COMPUTED.set(metric, None)


def _is_plain(item: Any) -> bool:
    """Whether an accumulator can be made again from plain values: its process group cannot."""
    return item.meta.sync.group is None and (item.is_tensor or item.meta.metric_attribute is not None)


def _result_state(item: Any) -> State:
    meta = item.meta
    return {
        **{name: getattr(meta, name) for name in _SAID},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": (getattr(meta.sync, compat.SHOULD_SYNC), meta.sync.rank_zero_only),
        "is_tensor": item.is_tensor,
        "value": _copy(item.value) if item.is_tensor else None,
        "batch_size": _copy(item.cumulated_batch_size) if item.is_tensor and meta.is_mean_reduction else None,
        "last": _last(item),
        "updates": compat.UPDATE_COUNT.of(item),
    }


def _restore_result(trainer: pl.Trainer, results: Any, saved: State) -> None:
    home = namespaces.of(trainer, compat.RESULT_MODULE)
    said = {name: saved[name] for name in _SAID}
    meta = compat.METADATA.of(home)(**said, reduce_fx=getattr(torch, saved["reduce_fx"]))
    should, rank_zero_only = saved["sync"]
    sync = {compat.SHOULD_SYNC: should, "fn": trainer.strategy.reduce, "rank_zero_only": rank_zero_only}
    meta.sync = compat.SYNC.of(home)(**sync)
    item = compat.RESULT_METRIC.of(home)(meta, saved["is_tensor"])
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
    compat.FORWARD_CACHE.set(item, _to(saved["last"], device))
    compat.UPDATE_COUNT.set(item, saved["updates"])
    suffix = f".{meta.dataloader_idx}" if meta.add_dataloader_idx and meta.dataloader_idx is not None else ""
    # What other ranks have left would be refused when it is logged in the next epoch, as something else.
    apart = "of other ranks: " if saved.get("apart") else ""
    results[f"{apart}{meta.fx.removesuffix(suffix)}.{meta.name}{suffix}"] = item


def _last(metric: Any) -> torch.Tensor | None:
    """What a metric returned last, if it is one tensor."""
    value = compat.FORWARD_CACHE.of(metric)
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def _copy(value: Any) -> Any:
    """A copy of a state that later updates do not change."""
    return mapped(lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, value)


def _to(value: Any, device: torch.device) -> Any:
    return mapped(lambda item: item.to(device) if isinstance(item, torch.Tensor) else item, value)
