"""``python -m benchmarks peers``: trains the same models with every way of saving, in random order, and compares.

Every cell is a process of its own. No cell is begun when the budget is used up, except for the training that others,
measured already, are compared with; what is missing is named.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from benchmarks.measure import about
from benchmarks.peers import processes
from benchmarks.peers.cell import Cell
from benchmarks.peers.measure import CellFailed, measure
from benchmarks.peers.models import MODELS, SCALES
from benchmarks.peers.plan import Found, blocks
from benchmarks.peers.report import write_docs, write_report
from benchmarks.peers.ways import WAYS

QUICK = ["none", "ours", "ModelCheckpoint", "AsyncCheckpointIO", "dash", "oteacheck"]
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def _names(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _intervals(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give steps between snapshots, at least 1, such as 1,10,100")
    return found


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        return float(number) * units[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a time such as 900s, 15m or 1h") from None


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    found = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    found.add_argument(
        "--models", type=_names(MODELS), default=["gpt2"], help=f"of {', '.join(MODELS)} (default: gpt2)"
    )
    found.add_argument("--intervals", type=_intervals, default=[1, 10], help="steps between snapshots (default: 1,10)")
    found.add_argument("--ways", type=_names(WAYS), default=list(WAYS), help=f"default: all of {', '.join(WAYS)}")
    found.add_argument("--rounds", type=int, default=3, help="how often each cell is measured (default: 3)")
    found.add_argument("--warm-up", type=int, default=50, help="steps before the measured ones, at least (default: 50)")
    found.add_argument("--measured", type=int, default=40, help="steps that are measured, at least (default: 40)")
    found.add_argument("--budget", type=_seconds, default=900.0, help="no way is begun after that (default: 15m)")
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument("--scale", choices=SCALES, default="small", help="of the models (default: small, for 2 cores)")
    found.add_argument("--seed", type=int, default=0, help="of the random order")
    found.add_argument("--limit", type=_seconds, default=600.0, help="a cell fails after that (default: 600s)")
    found.add_argument("--folder", type=Path, help="a directory on the disk to save to (default: a temporary one)")
    found.add_argument("--out", type=Path, default=Path("peers"), help="where results go (default: peers)")
    found.add_argument("--docs", action="store_true", help="also write the tables into docs/benchmarks.md")
    found.add_argument("--note", default="", help="a sentence about the machine, for the report")
    found.add_argument("--quick", action="store_true", help="a tiny model, few ways, one round: does it all work?")
    found.add_argument(
        "--again", type=Path, metavar="JSON", nargs="+", help="measure nothing, report on these results together"
    )
    return found


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status: 0 if every cell was measured."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.scale, options.rounds, options.intervals = "tiny", 1, [10]
        options.models, options.ways = ["plain"], [way for way in options.ways if way in QUICK]
    options.out.mkdir(parents=True, exist_ok=True)
    found = [Found(**json.loads(path.read_text())) for path in options.again] if options.again else [compare(options)]
    text = write_report(found, options.out)
    if options.docs:
        write_docs(DOCS, text)
    print(text)
    return 1 if any(one.missing or one.failed for one in found) else 0


def compare(options: argparse.Namespace) -> Found:
    """Measure what was asked for, within the budget."""
    processes.adopt_orphans()
    if options.device == "cuda":
        resource_tracker.ensure_running()  # once, not as a child that the first cell leaves behind
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask for a GPU must not make forking unsafe
    for name in {"bert", "bloom", "gpt2", "resnet", "roberta", "vit"} & set(options.models):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")  # once, not in every cell
    began_s = time.monotonic()
    planned = list(
        blocks(
            options.models,
            options.intervals,
            options.ways,
            options.rounds,
            seed=options.seed,
            scale=options.scale,
            device=options.device,
            warm_up=options.warm_up,
            least=options.measured,
        )
    )
    machine = about() | {"device": options.device, "scale": options.scale, "note": options.note}
    found = Found(machine, missing=[vars(cell) for block in planned for cell in block])
    with tempfile.TemporaryDirectory(prefix="ls-peers-", dir=options.folder) as folder:
        for block in planned:
            _measure_block(block, found, Path(folder), options, began_s + options.budget)
    found.about["load_after"] = os.getloadavg()[0]
    found.about["took_s"] = time.monotonic() - began_s
    _write(found, options.out)
    return found


def _measure_block(block: list[Cell], found: Found, folder: Path, options: argparse.Namespace, end_s: float) -> None:
    begun = False
    for cell in block:
        # What was measured in a block says nothing without the training that it is compared with.
        if time.monotonic() > end_s and not (begun and cell.way == "none"):
            continue
        begun = True
        found.missing.remove(vars(cell))
        label = f"{cell.model}, every {cell.interval}, round {cell.round + 1}: {cell.way}"
        try:
            values = measure(cell, folder, options.limit)
            found.cells.append(values)
            print(f"{label}: {values['wall_s'] / cell.measured:.4f} s a step", flush=True)
        except CellFailed as error:
            found.failed.append({**vars(cell), "error": str(error)})
            print(f"{label}: FAILED: {error}", file=sys.stderr, flush=True)
        _write(found, options.out)  # whoever ends this command keeps what it has measured


def _write(found: Found, folder: Path) -> None:
    (folder / "peers.json").write_text(json.dumps(found.plain(), indent=1))
