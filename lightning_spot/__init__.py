"""lightning_spot: train on spot VMs with PyTorch Lightning and lose almost nothing.

The public names are imported when they are first used, so that commands and snapshot servers never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_spot._version import __version__

if TYPE_CHECKING:
    from lightning_spot.callbacks.auto_resume import AutoResume
    from lightning_spot.callbacks.goodput_monitor import GoodputMonitor
    from lightning_spot.callbacks.lightning_cli import SpotCLI
    from lightning_spot.callbacks.preemption_guard import PreemptionGuard
    from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot
    from lightning_spot.callbacks.spot_checkpoint import SpotCheckpoint
    from lightning_spot.checkpoint_io import SpotCheckpointIO
    from lightning_spot.errors import NoticeUnavailableError, PreemptedError, SettingsError, SpotError, TierError
    from lightning_spot.events import Event
    from lightning_spot.goodput.metric import Goodput
    from lightning_spot.interval.adaptive import OverheadBudget, YoungDaly
    from lightning_spot.interval.coci import COCI
    from lightning_spot.interval.convergence import ConvergenceAware
    from lightning_spot.interval.costs import Costs
    from lightning_spot.interval.policy import EverySeconds, EverySteps, IntervalPolicy
    from lightning_spot.preemption.notice import Notice, NoticeSource
    from lightning_spot.store.retention import Keep

__all__ = [
    "AutoResume",
    "COCI",
    "ConvergenceAware",
    "Costs",
    "Event",
    "EverySeconds",
    "EverySteps",
    "Goodput",
    "GoodputMonitor",
    "IntervalPolicy",
    "Keep",
    "Notice",
    "NoticeSource",
    "NoticeUnavailableError",
    "OverheadBudget",
    "PreemptedError",
    "PreemptionGuard",
    "RemoteSnapshot",
    "SettingsError",
    "SpotCLI",
    "SpotCheckpoint",
    "SpotCheckpointIO",
    "SpotError",
    "TierError",
    "YoungDaly",
    "__version__",
]

_NAMES = {
    "callbacks.auto_resume": "AutoResume",
    "callbacks.goodput_monitor": "GoodputMonitor",
    "callbacks.lightning_cli": "SpotCLI",
    "callbacks.preemption_guard": "PreemptionGuard",
    "callbacks.remote_snapshot": "RemoteSnapshot",
    "callbacks.spot_checkpoint": "SpotCheckpoint",
    "checkpoint_io": "SpotCheckpointIO",
    "errors": "NoticeUnavailableError PreemptedError SettingsError SpotError TierError",
    "events": "Event",
    "goodput.metric": "Goodput",
    "interval.adaptive": "OverheadBudget YoungDaly",
    "interval.coci": "COCI",
    "interval.convergence": "ConvergenceAware",
    "interval.costs": "Costs",
    "interval.policy": "EverySeconds EverySteps IntervalPolicy",
    "preemption.notice": "Notice NoticeSource",
    "store.retention": "Keep",
}
"""Modules, and the public names that each has."""
_HOMES = {name: f"lightning_spot.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_spot' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except AttributeError as error:  # Python would say no more than that the name cannot be imported
        raise ImportError(f"lightning_spot.{name} cannot be imported: {error}", name=name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
