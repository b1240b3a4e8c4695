"""A checkpoint that the user named, ``fit(ckpt_path=)``: read as a resume reads a snapshot, foreign objects and all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import fsspec

from lightning_spot.errors import SettingsError
from lightning_spot.exact.dump import KEY
from lightning_spot.exact.rank_states import states_in_files
from lightning_spot.exact.resumable import check_resumable, put_in_own_objects
from lightning_spot.exact.unpickling import read_checkpoint
from lightning_spot.tiers.filesystem import forget_listings

if TYPE_CHECKING:
    import lightning.pytorch as pl


def load_named(load: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
    """Load a checkpoint as Lightning does; if torch refuses, with placeholders for what it does not know.

    Args:
        load: Lightning's way.
        path: of the file.
        *arguments: more for ``load``.
        **named: likewise.
    """
    forget_listings(str(path))
    try:
        checkpoint: dict[str, Any] = load(path, *arguments, **named)
    except UnpicklingError:
        if False in (*arguments, named.get("weights_only")):  # nothing was refused: the file is broken
            raise
        with fsspec.open(str(path), "rb") as file:
            checkpoint = read_checkpoint(file)
    return checkpoint


def _with_own_states(trainer: pl.Trainer, checkpoint: dict[str, Any], path: Any) -> None:
    """Complete what Lightning has loaded of the directory of a snapshot in shards: each rank's own state is beside it.

    Raises:
        SettingsError: if it is not.
    """
    shared = checkpoint.get(KEY)
    if shared is None or shared["ranks"] or not os.path.isdir(path):
        return
    try:
        shared["ranks"] = states_in_files(trainer, shared, lambda name: memoryview(Path(path, name).read_bytes()))
    except OSError as error:
        raise SettingsError(f"ckpt_path={str(path)!r} is not the whole directory of a snapshot: {error}") from error


def follow_named(trainer: pl.Trainer) -> Callable[[], object]:
    """Have a ``fit`` read the checkpoint that the user names in the way of a resume.

    Returns:
        what takes that back.
    """
    strategy = trainer.strategy
    original = strategy.load_checkpoint

    def load_checkpoint(path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        checkpoint = load_named(original, path, *arguments, **named)
        _with_own_states(trainer, checkpoint, path)
        put_in_own_objects(trainer, checkpoint)
        check_resumable(trainer, checkpoint)
        return checkpoint

    strategy.load_checkpoint = load_checkpoint  # type: ignore[assignment,method-assign] # taken back
    return lambda: vars(strategy).pop("load_checkpoint", None)
