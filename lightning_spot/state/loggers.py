"""Loggers over attempts: a resumed run goes on in the version it had, without what was logged after its snapshot.

CSV and TensorBoard are pointed back to their version. Others choose their run before any callback can act: for those it
is said what to do.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_spot.patches import Patches
from lightning_spot.say import say
from lightning_spot.state import compat, namespaces

if TYPE_CHECKING:
    import lightning.pytorch as pl

_KEPT = ".metrics-of-earlier-attempts.csv"
"""Second name of a CSV file: where the user fixes the version, Lightning deletes the first one at each start."""


def places_of(trainer: pl.Trainer, *, before_validation: bool, at_end: bool) -> list[dict[str, Any]]:
    """Where each logger is, as plain values, on rank 0; what it has buffered is written first.

    Args:
        trainer: whose loggers.
        before_validation: whether the batch's values are logged and its count has not moved yet.
        at_end: whether the run is complete.
    """
    if not trainer.is_global_zero:
        return []
    step = compat.BATCHES_THAT_STEPPED.of(trainer.fit_loop.epoch_loop) + before_validation
    return [_place(logger, step, at_end) for logger in trainer.loggers]


def logged_step(trainer: pl.Trainer) -> int:
    """The step that Lightning itself logs by: it counts batches, where a batch may make several optimizer steps."""
    return int(getattr(trainer.fit_loop.epoch_loop, compat.BATCHES_THAT_STEPPED.name, trainer.global_step))


def continue_in(
    trainer: pl.Trainer, places: list[dict[str, Any]], *, of_another_run: bool = False, is_over: bool = False
) -> None:
    """Point the loggers back to where they were. Called by every rank, before callbacks get their state.

    Args:
        trainer: whose loggers.
        places: what :func:`places_of` gave.
        of_another_run: whether another run has logged there: its log stays as it is.
        is_over: whether nothing is left to train: what was logged later is of a later ``fit`` of this program.
    """
    facts: dict[str, Any]
    for logger, place in zip(trainer.loggers, places, strict=False):
        if type(logger).__name__ != place["kind"] or logger.name != place["name"]:
            continue  # the user has chosen another one
        now = logger.log_dir if _is(logger, "CSVLogger", "TensorBoardLogger") else None
        if _is(logger, "CSVLogger") and (_at_url(logger) or "rows" not in place):
            text = (
                "the rows of {about} are not continued in {now}: a CSV log at a URL begins at the snapshot."
                " For one log, give CSVLogger a directory."
            )
            say(logging.WARNING, "log-not-continued", text, about=place.get("dir"), only_rank_zero=True, now=now)
        elif now is not None and of_another_run:
            text = "{about} begins at the snapshot, in {now}"
            say(logging.INFO, "log-continued", text, about=place["kind"], only_rank_zero=True, now=now)
        elif now is not None:
            _go_back(logger, place, is_over)
            _move_checkpoints(trainer, str(now), str(logger.log_dir))
        elif logger.version != place["version"]:
            hint = " (WANDB_RUN_ID and WANDB_RESUME=allow)" if "Wandb" in place["kind"] else ""
            text = (
                "{about} has begun run {now!r}; the snapshot was logged to {before!r}. For one log, give every"
                " attempt the same id{hint}."
            )
            facts = {"about": place["kind"], "now": logger.version, "before": place["version"]}
            say(logging.WARNING, "log-not-continued", text, only_rank_zero=True, hint=hint, **facts)


def keep_whole(trainer: pl.Trainer, patches: Patches) -> None:
    """Have no row of a CSV file get lost if the run is killed while a column is added to it.

    Lightning then empties the file and writes it anew: for a moment its rows are in the process only.
    """
    loggers: list[Any] = [each for each in trainer.loggers if _is(each, "CSVLogger") and trainer.is_global_zero]
    for writer in [logger.experiment for logger in loggers if os.path.isdir(logger.log_dir)]:
        patches.wrap(writer, "save", partial(partial, _save_whole, writer))


def _save_whole(writer: Any, save: Callable[[], None]) -> None:
    file, added = Path(writer.metrics_file_path), set[str]().union(*writer.metrics).difference(writer.metrics_keys)
    if added and file.exists():
        columns = sorted(added.union(writer.metrics_keys))
        _replace(file, columns, _rows(file)[1])
        writer.metrics_keys = columns
    save()


def _place(logger: Any, step: int, at_end: bool) -> dict[str, Any]:
    version = logger.version if isinstance(logger.version, (int, str)) else None
    place = {"kind": type(logger).__name__, "name": logger.name, "version": version, "step": step}
    if _is(logger, "CSVLogger", "TensorBoardLogger"):
        place["dir"] = str(logger.log_dir)
    if _is(logger, "CSVLogger") and not _at_url(logger):
        logger.save()
        file = Path(logger.log_dir) / "metrics.csv"
        place["rows"] = len(_rows(file)[1])
        _keep(file, at_end)
    return place


def _is(logger: Any, *names: str) -> bool:
    return isinstance(logger, namespaces.classes("loggers", *names))


def _at_url(logger: Any) -> bool:
    """Whether it logs through fsspec: nothing there can be renamed or linked in one step, so we rewrite nothing."""
    return "://" in str(logger.log_dir)


def _keep(file: Path, at_end: bool) -> None:
    kept = file.with_name(_KEPT)
    if at_end:
        kept.unlink(missing_ok=True)
    elif file.exists() and not (kept.exists() and kept.samefile(file)):
        kept.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # no hard links here: then a fixed version starts again, as without us
            os.link(file, kept)


def _go_back(logger: Any, place: dict[str, Any], is_over: bool) -> None:
    """Have a logger go on in the version it had, without what was logged after the snapshot."""
    fresh, is_moved = Path(logger.log_dir), logger.version != place["version"]
    if is_moved and not (isinstance(logger.version, int) and isinstance(place["version"], int)):
        return  # a version that the user has named
    writer = compat.EXPERIMENT.of(logger)  # of rank 0 only
    compat.VERSION.set(logger, place["version"])
    if writer is not None and _is(logger, "CSVLogger"):
        _truncate(writer, Path(logger.log_dir), None if is_over else place["rows"])
    elif writer is not None:
        writer.close()
        compat.EXPERIMENT.set(logger, None)
        compat.TENSORBOARD_OPTIONS.of(logger)["purge_step"] = place["step"]  # where the next writer has it end
    if writer is not None and is_moved:
        _remove_if_unused(fresh)
    text = "{about} continues in {now}"
    say(logging.INFO, "log-continued", text, about=place["kind"], only_rank_zero=True, now=logger.log_dir)


def _truncate(writer: Any, folder: Path, rows: int | None) -> None:
    """Have the writer of a CSV file go on behind the first rows of the one in a folder; ``None`` for all of them."""
    file = folder / writer.NAME_METRICS_FILE
    kept = file.with_name(_KEPT)
    keys, found = _rows(file if file.exists() else kept)
    if keys:
        _replace(file, keys, found[:rows])
    writer.log_dir, writer.metrics_file_path, writer.metrics_keys = str(folder), str(file), keys
    _keep(file, at_end=False)


def _replace(file: Path, columns: Sequence[str], rows: list[dict[str, str]]) -> None:
    """Write a file again; killed meanwhile, the former one is there."""
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as output:
        out = csv.DictWriter(output, fieldnames=columns)
        out.writeheader()
        out.writerows(rows)
    os.replace(temporary, file)


def _rows(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with open(file, newline="", encoding="utf-8") as source:
            reader = csv.DictReader(source)
            # A killed writer may have left half a line.
            rows = [row for row in reader if None not in row and None not in row.values()]
            return list(reader.fieldnames or []), rows
    except FileNotFoundError:
        return [], []


def _remove_if_unused(folder: Path) -> None:
    """Remove the directory of a version that is not needed, if only TensorBoard has begun a file there."""
    with contextlib.suppress(OSError):  # there is something else in it
        for file in folder.glob("events.out.tfevents.*"):
            file.unlink()
        folder.rmdir()


def _move_checkpoints(trainer: pl.Trainer, fresh: str, former: str) -> None:
    """``ModelCheckpoint`` without a ``dirpath`` writes below the logger's directory, and knows its best only there."""
    kinds = namespaces.classes("callbacks", "ModelCheckpoint")
    callbacks: list[Any] = [each for each in trainer.checkpoint_callbacks if isinstance(each, kinds)]
    for callback in callbacks:
        if callback.dirpath and Path(fresh) in Path(callback.dirpath).parents:
            callback.dirpath = os.path.join(former, os.path.relpath(callback.dirpath, fresh))
