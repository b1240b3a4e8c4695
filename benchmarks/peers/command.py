"""``python -m benchmarks peers``: trains the same models with every way of saving, and compares.

What a way costs is measured within one training, in which all take turns; memory, bytes and the restore of each in a
process of its own. Nothing is begun when the budget is used up; what is missing, or failed, is named, and what was
measured is kept. ``--publish`` measures all that ``benchmarks/LOG.md`` shows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.peers.compare import compare
from benchmarks.peers.models import MODELS, SCALES
from benchmarks.peers.plan import Found, together
from benchmarks.peers.report import write_docs, write_report
from benchmarks.peers.ways import WAYS

QUICK = ["none", "ours", "ModelCheckpoint", "AsyncCheckpointIO", "dash", "oteacheck"]
OTHERS = ["AsyncCheckpointIO", "DCP thread staged", "torchsnapshot"]
MAIN = ["none", "none again", "ours still", "ours eager", "datastates", *OTHERS]
LARGE = ["none", "ours blocking own pace", "ours still", "datastates", *OTHERS]
FULL = {"scale": "full", "warm_up": 4, "measured": 4, "longest": 5}  # whose steps take seconds
VARIOUS = ["bert", "roberta", "bloom", "resnet", "vit"]
PUBLISHED: list[dict[str, Any]] = [
    {"models": ["gpt2"], "intervals": [1, 10], "ways": list(WAYS), "cells": 1, "share": 0.36, "measured": 8},
    {"models": ["gpt2"], "intervals": [100], "ways": [*MAIN, "ours"], "cells": 0, "share": 0.07},
    {"models": VARIOUS, "intervals": [10], "ways": MAIN, "cells": 0, "share": 0.17},
    {"models": ["gpt2"], "intervals": [1, 10], "ways": LARGE, "cells": 1, "share": 0.40, **FULL},
]
"""What ``--publish`` measures, one comparison after the other, each in its share of the budget."""
DOCS = Path(__file__).parents[2] / "benchmarks" / "LOG.md"


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
    found.add_argument("--rounds", type=int, default=12, help="turns of each way, at most (default: 12)")
    found.add_argument("--cells", type=int, default=1, help="processes of its own for each way (default: 1)")
    found.add_argument("--longest", type=int, default=20, help="steps of a turn, at most (default: 20)")
    found.add_argument("--warm-up", type=int, default=6, help="steps before the measured ones, at least (default: 6)")
    found.add_argument("--measured", type=int, default=20, help="steps of a cell that are measured (default: 20)")
    found.add_argument("--budget", type=_seconds, default=900.0, help="nothing is begun after that (default: 15m)")
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument("--scale", choices=SCALES, default="small", help="of the models (default: small, for 2 cores)")
    found.add_argument("--seed", type=int, default=0, help="of the random order")
    found.add_argument("--limit", type=_seconds, default=300.0, help="a cell fails after that (default: 300s)")
    found.add_argument("--folder", type=Path, help="a directory on the disk to save to (default: a temporary one)")
    found.add_argument("--out", type=Path, default=Path("peers"), help="where results go (default: peers)")
    found.add_argument("--docs", action="store_true", help="also write the tables into benchmarks/LOG.md")
    found.add_argument("--note", default="", help="a sentence about the machine, for the report")
    found.add_argument("--quick", action="store_true", help="a tiny model, few ways, one round: does it all work?")
    found.add_argument("--publish", action="store_true", help="all that the documentation shows, and --docs")
    found.add_argument(
        "--again", type=Path, metavar="JSON", nargs="+", help="measure nothing, report on these results together"
    )
    return found


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status: 0 if everything was measured."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.scale, options.rounds, options.intervals = "tiny", 1, [10]
        options.models, options.ways = ["plain"], [way for way in options.ways if way in QUICK]
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[Path] = list(options.again or ())
    try:
        for path, asked in _comparisons(options):
            path.unlink(missing_ok=True)
            results.append(path)
            compare(asked, path)
    finally:  # also where somebody ends it; before, it would no longer be the commit that is measured
        found = [Found(**json.loads(path.read_text())) for path in results if path.exists()]
        text = write_report(together(found), options.out)
        if found and (options.docs or options.publish):
            write_docs(DOCS, text)
        print(text)
    return 1 if any(one.missing or one.failed for one in found) else 0


def _comparisons(options: argparse.Namespace) -> list[tuple[Path, argparse.Namespace]]:
    if options.again:
        return []
    if not options.publish:
        return [(options.out / "peers.json", options)]
    found = []
    for number, part in enumerate(PUBLISHED, 1):
        asked = argparse.Namespace(**{**vars(options), **part, "budget": options.budget * part["share"]})
        found.append((options.out / f"peers-{number}.json", asked))
    return found
