"""Runs the benchmarks and prints a table in Markdown. ``python -m benchmarks [NAME ...] [--quick] [--json FILE]``.

``python -m benchmarks peers`` and ``compare`` are commands of their own: see ``benchmarks/peers/command.py`` and
``benchmarks/regressions.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import (
    adapters,
    blocking,
    chain,
    delta,
    ettr,
    every_step,
    far_bucket,
    fleet,
    gpu,
    guard,
    in_a_row,
    in_all,
    ingest,
    layout,
    memory,
    objects,
    partitions,
    regressions,
    restore,
    scale,
    shares,
    thread_in_shards,
    training_thread,
)
from benchmarks.measure import Result, about
from benchmarks.placement import bind_team

ALL = {
    "layout": layout,
    "training-thread": training_thread,
    "thread-in-shards": thread_in_shards,
    "blocking": blocking,
    "ingest": ingest,
    "restore": restore,
    "memory": memory,
    "in-all": in_all,
    "ettr": ettr,
    "partitions": partitions,
    "guard": guard,
    "chain": chain,
    "delta": delta,
    "objects": objects,
    "far-bucket": far_bucket,
    "scale": scale,
    "fleet": fleet,
    "shares": shares,
    "adapters": adapters,
    "every-step": every_step,
    "in-a-row": in_a_row,
    "gpu": gpu,
}


def _all_that_can_run() -> list[str]:
    needed = {"adapters": adapters.NEEDS, "every-step": every_step.NEEDS, "in-a-row": in_a_row.NEEDS}
    there = []
    for name in ALL:
        if missing := [module for module in needed.get(name, ()) if not importlib.util.find_spec(module)]:
            print(f"{name} is left out: it needs {' and '.join(missing)} (the extra bench)", flush=True)
        else:
            there.append(name)
    return there


def main() -> int:
    if sys.argv[1:2] == ["peers"]:
        from benchmarks.peers import command  # needs transformers

        return command.main(sys.argv[2:])
    if sys.argv[1:2] == ["compare"]:
        return regressions.main(sys.argv[2:], _all_that_can_run())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ALL, []], help="which ones (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write all values to this file, after each benchmark")
    arguments = parser.parse_args()
    results: list[Result] = []
    done: dict[str, Any] = {"about": about(), "benchmarks": {}}
    failed = []
    bind_team()
    for name in arguments.names or _all_that_can_run():
        print(f"{name} …", flush=True)
        began_s, found = time.monotonic(), []
        try:
            found = ALL[name].run(arguments.quick)
        except Exception:  # the others are measured all the same
            traceback.print_exc()
            failed.append(name)
        results += found
        took_s = time.monotonic() - began_s
        done["benchmarks"][name] = {"took_s": took_s, "failed": name in failed, "results": list(map(asdict, found))}
        print("".join(f"  {result.row()}\n" for result in found) + f"  {name} took {took_s:.0f} s", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(done, indent=1))
    print(f"\n{', '.join(f'{key} {value}' for key, value in done['about'].items())}\n")
    print("| what | median | min–max | target | met |\n|---|---|---|---|---|")
    for result in results:
        print(result.row())
    print(f"\nFailed: {', '.join(failed) or 'none'}.")
    return 0 if not failed and all(result.met for result in results) else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # on the way out, servers are ended and files removed
    sys.exit(main())
