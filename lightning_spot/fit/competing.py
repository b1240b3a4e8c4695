"""Others at the start of a ``fit``: those that resume it from files of their own, and those that end a second start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.exact import namespaces

if TYPE_CHECKING:
    import lightning.pytorch as pl

_OF_SLURM = re.compile(r"hpc_ckpt_\d+\.ckpt")


def who_found_checkpoint(trainer: pl.Trainer, path: Any) -> str:
    """Who had Lightning go on from a checkpoint where ``fit`` was given none; ``""`` if the user named it.

    One that is passed to ``fit`` is taken for one of these, too, if it is the very file that they would take.

    Args:
        trainer: that is about to load it.
        path: of it; ``None`` if there is none.
    """
    if path is None or trainer.ckpt_path is not None:  # which only the user has set by now
        return ""
    folder, name = os.path.split(str(path))
    if _OF_SLURM.fullmatch(name) and folder == str(trainer.default_root_dir).rstrip("/") and _is_slurm_job():
        return "SLURM's requeue"
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    on_exception = [each for each in callbacks if isinstance(each, _kinds("OnExceptionCheckpoint"))]
    if any(str(each.ckpt_path) == str(path) for each in on_exception):
        return "OnExceptionCheckpoint"
    for each in callbacks if on_exception else ():  # they have Lightning look for any last file
        if isinstance(each, _kinds("ModelCheckpoint")) and name.startswith(each.CHECKPOINT_NAME_LAST):
            return "OnExceptionCheckpoint"
    return ""


def _kinds(name: str) -> tuple[Any, ...]:
    return namespaces.classes("callbacks", name)


def _is_slurm_job() -> bool:
    kinds = namespaces.classes("fabric.plugins.environments", "SLURMEnvironment")
    return any(kind.detect() for kind in kinds)


def let_config_be_saved_again(trainer: pl.Trainer, *, was_started: bool) -> None:
    """Keep LightningCLI from ending a later start of the run, since the first one has saved its configuration.

    Args:
        trainer: that fits. Every rank calls it, in ``setup``.
        was_started: whether this run was started before.
    """
    for callback in _unsaved_configs(trainer):
        if not callback.already_saved:  # its setup comes after ours, also in the starts to come
            callback.overwrite = was_started
            if was_started:
                rank_zero_info(
                    f"lightning_spot: this start goes on with its run: {callback.config_filename} of an earlier one"
                    " may be overwritten"
                )
        elif trainer.logger is None or isinstance(trainer.logger.version, str):  # the same folder each time
            rank_zero_warn(
                f"lightning_spot: the next start of this command will end, since {callback.config_filename} is in"
                f" {trainer.log_dir} by then. Pass save_config_kwargs={{'overwrite': True}} to LightningCLI"
            )


def _unsaved_configs(trainer: pl.Trainer) -> Iterator[Any]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning's Trainer has it
        names = {kind.__name__ for kind in type(callback).__mro__}  # to import it would cost each start time
        if "SaveConfigCallback" in names and callback.save_to_log_dir and not callback.overwrite:
            yield callback
