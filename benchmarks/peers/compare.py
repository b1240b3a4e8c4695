"""One comparison: all trainings in turns, then all cells, within a budget. What was measured is kept in any case."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from benchmarks.measure import about
from benchmarks.peers import processes
from benchmarks.peers.cell import Cell
from benchmarks.peers.measure import CellFailed, measure, measure_in_turns
from benchmarks.peers.plan import Found, blocks
from benchmarks.peers.results import NONE
from benchmarks.peers.turns import Training

IN_TURNS = 0.7
"""The share of the budget for trainings in turns where there are cells as well."""
_ALL = "all of it"


def compare(options: argparse.Namespace, path: Path) -> None:
    """Measure what was asked for, within the budget.

    Args:
        options: of the command.
        path: where the results go, after each cell, and each round of a training.
    """
    processes.adopt_orphans()
    if options.device == "cuda":
        resource_tracker.ensure_running()  # once, not as a child that the first cell leaves behind
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask for a GPU must not make forking unsafe
    for name in {"bert", "bloom", "gpt2", "resnet", "roberta", "vit"} & set(options.models):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")  # once, not in every cell
    began_s = time.monotonic()
    machine = about() | {"device": options.device, "scale": options.scale, "note": options.note, "state_bytes": {}}
    trainings, cells = _trainings(options), _cells(options)
    found = Found(machine, missing=[*map(_named, trainings), *(vars(cell) for block in cells for cell in block)])
    try:
        with tempfile.TemporaryDirectory(prefix="ls-peers-", dir=options.folder) as folder:
            in_turns_s = options.budget * (IN_TURNS if cells else 1.0)
            for number, training in enumerate(trainings):
                left_s = began_s + in_turns_s - time.monotonic()
                if left_s > 0:
                    training = Training(**vars(training) | {"seconds": left_s / (len(trainings) - number)})
                    _train(training, found, Path(folder), path)
            for block in cells:
                _measure_block(block, found, Path(folder), path, began_s + options.budget, options.limit)
    finally:
        found.about["load_after"] = os.getloadavg()[0]
        found.about["took_s"] = time.monotonic() - began_s
        _write(found, path)


def _trainings(options: argparse.Namespace) -> list[Training]:
    names = ("scale", "device", "rounds", "warm_up", "longest", "seed")
    settings = {name: getattr(options, name) for name in names} | {"ways": tuple(options.ways)}
    return [
        Training(model=model, interval=interval, **settings)
        for model in options.models
        for interval in options.intervals
    ]


def _cells(options: argparse.Namespace) -> list[list[Cell]]:
    """Of each model at its least interval: the one of which the report has more."""
    settings = {name: getattr(options, name) for name in ("scale", "device", "warm_up", "seed")}
    intervals = [min(options.intervals)]
    return list(blocks(options.models, intervals, options.ways, options.cells, least=options.measured, **settings))


def _named(training: Training) -> dict[str, Any]:
    return {"model": training.model, "interval": training.interval, "way": _ALL}


def _train(training: Training, found: Found, folder: Path, path: Path) -> None:
    found.missing.remove(_named(training))
    say = _progress(training)

    def tell(said: dict[str, Any]) -> None:
        if "turn" in said:
            found.turns.append(said["turn"])
            if said["turn"]["way"] == NONE:  # one line a turn would be a thousand
                say(said["turn"])
                _write(found, path)
        elif "failed" in said:
            found.failed.append(said["failed"])
        else:
            found.about["state_bytes"][training.model] = said["state_bytes"]

    try:
        measure_in_turns(training, folder, tell)
    except Exception as error:  # whatever it is, the others are measured
        found.failed.append(_named(training) | {"error": _said(error)})
        print(f"  {training.model}, every {training.interval}: FAILED: {_said(error)}", flush=True)
    _write(found, path)


def _progress(training: Training) -> Callable[[dict[str, Any]], None]:
    began_s = time.monotonic()

    def say(turn: dict[str, Any]) -> None:
        print(
            f"  {training.model} ({training.scale}), every {training.interval}: round {turn['round'] + 1},"
            f" {turn['wall_s'] / turn['steps']:.3f} s a step without, {time.monotonic() - began_s:.0f} of"
            f" {training.seconds:.0f} s",
            flush=True,
        )

    return say


def _measure_block(block: list[Cell], found: Found, folder: Path, path: Path, end_s: float, limit_s: float) -> None:
    begun = False
    for cell in block:
        # What was measured in a block says nothing without the training that it is compared with.
        if time.monotonic() > end_s and not (begun and cell.way == NONE):
            continue
        begun = True
        found.missing.remove(vars(cell))
        print(f"  {cell.model}, every {cell.interval}, round {cell.round + 1}: {cell.way}", end="", flush=True)
        began_s = time.monotonic()
        try:
            found.cells.append(measure(cell, folder, limit_s))
            print(f", {time.monotonic() - began_s:.0f} s", flush=True)
        except Exception as error:
            found.failed.append(vars(cell) | {"error": _said(error)})
            print(f": FAILED: {_said(error)}", flush=True)
        _write(found, path)


def _said(error: Exception) -> str:
    """For the report; what was not foreseen is also shown where it comes from."""
    if isinstance(error, CellFailed):
        return str(error)
    traceback.print_exception(error)
    return repr(error)


def _write(found: Found, path: Path) -> None:
    """Whole or not at all: an earlier one stays where this is cut off."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(found.plain(), indent=1))
    temporary.replace(path)
