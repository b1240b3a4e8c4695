"""Hyperparameters as Lightning saves them: a dictionary, or omegaconf's configuration, which may leave values open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OF_MODEL, OF_DATA = "hyper_parameters", "datamodule_hyper_parameters"
"""Their names in a checkpoint."""


def held(value: Mapping[Any, Any] | Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each key or index with its value, ``None`` for one that cannot be had: a configuration may leave some open."""
    for key in value if isinstance(value, Mapping) else range(len(value)):
        try:
            item = value[key]
        except Exception:  # of omegaconf, or a class of the user's
            item = None
        yield key, item


def as_saved(hyperparameters: Any) -> Any:
    """What Lightning puts into a checkpoint for them: its own kind of dictionary as a plain one, others as they are."""
    return dict(hyperparameters) if isinstance(hyperparameters, dict) else hyperparameters
