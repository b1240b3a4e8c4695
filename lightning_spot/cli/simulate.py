"""``lightning-spot simulate``: what a job would cost with each interval policy, and whether it needs a memory node."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lightning_spot.cli.output import plain_table, wide_console
from lightning_spot.config import parse_bytes
from lightning_spot.errors import SettingsError

if TYPE_CHECKING:
    from lightning_spot.simulation.compare import Row
    from lightning_spot.simulation.failures import Failures
    from lightning_spot.simulation.job import Job

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SMALL = 0.01
LOSSES = ("exponential", "power", "floor", "steps")


def seconds(text: str) -> float:
    """A duration with a unit, such as ``90s``, ``10min``, ``2h`` or ``3d``.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    match = re.fullmatch(r"([0-9.]+)\s*(s|min|h|d)", text.strip())
    try:
        return float(match[1]) * _UNITS[match[2]] if match else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 90s, 10min, 2h or 3d") from None


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text.removesuffix("/s"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``."""
    job = parser.add_argument_group("the job")
    job.add_argument("--work", type=seconds, default=86400.0, metavar="TIME", help="undisturbed training time (24h)")
    job.add_argument("--state", type=_bytes, default=10**9, metavar="SIZE", help="size of a snapshot (1GB)")
    job.add_argument("--stall", type=seconds, default=1.0, metavar="TIME", help="training waits for a snapshot (1s)")
    job.add_argument("--loss", choices=LOSSES, default="exponential", help="how the loss falls (exponential)")
    job.add_argument("--rate", type=float, default=5.0, help="of an exponential loss, over the whole run (5)")
    spot = parser.add_argument_group("its machines")
    spot.add_argument("--hazard", choices=("exponential", "weibull", "bathtub"), default="weibull", help="(weibull)")
    spot.add_argument("--lifetime", type=seconds, default=7200.0, metavar="TIME", help="mean, of one machine (2h)")
    spot.add_argument("--nodes", type=int, default=1, help="machines of the job (1)")
    spot.add_argument("--together", type=int, default=1, help="machines that go at a time (1)")
    spot.add_argument("--trace", metavar="CSV", help="recorded losses instead: a column 'time'")
    spot.add_argument("--restart", type=seconds, default=600.0, metavar="TIME", help="until machines are back (10min)")
    spot.add_argument("--restore", type=seconds, default=60.0, metavar="TIME", help="until training goes on (1min)")
    spot.add_argument("--price", type=float, default=0.0, help="of one machine, per hour")
    tiers = parser.add_argument_group("its tiers")
    tiers.add_argument("--durable", type=_bytes, default=80 * 10**6, metavar="SIZE/s", help="speed (80MB/s)")
    tiers.add_argument("--memory-node", type=_bytes, metavar="SIZE/s", help="speed of a memory node: compare with one")
    tiers.add_argument("--memory-node-price", type=float, default=0.0, help="of the memory node, per hour")
    parser.add_argument("--policy", action="append", metavar="NAME", help="only these policies (all)")
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw the comparison (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="for programs")


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table for each choice of tiers."""
    from lightning_spot.simulation.compare import POLICIES, compare

    if arguments.runs < 1:
        raise SettingsError(f"--runs {arguments.runs}: at least 1")
    unknown = [name for name in arguments.policy or () if name not in POLICIES]
    if unknown:
        raise SettingsError(f"--policy {unknown[0]!r} is not known; there are {', '.join(map(repr, POLICIES))}")
    policies = {name: make for name, make in POLICIES.items() if not arguments.policy or name in arguments.policy}
    failures = _failures(arguments)
    groups = {
        name: compare(job, failures, policies, runs=arguments.runs, seed=arguments.seed)
        for name, job in _jobs(arguments).items()
    }
    if arguments.plot:
        from lightning_spot.simulation.plot import plot_rows

        plot_rows(groups, arguments.plot)
    verdict = _verdict(groups)
    if arguments.json:
        tables = {name: [_plain(asdict(row)) for row in rows] for name, rows in groups.items()}
        print(json.dumps({"mtbf_s": failures.mtbf_s, "tiers": tables, "verdict": verdict}, indent=1))
        return 0
    console = wide_console()
    priced = any(row.price for rows in groups.values() for row in rows)
    for name, rows in groups.items():
        console.print(_table(name, rows, priced))
    if verdict:
        console.print(verdict)
    return 0


def _failures(arguments: argparse.Namespace) -> Failures:
    from lightning_spot.simulation.failures import Bathtub, Exponential, Fleet, Trace, Weibull

    if arguments.trace:
        return Trace.read(arguments.trace)
    if not arguments.lifetime > 0:
        raise SettingsError(f"--lifetime {arguments.lifetime}: more than 0 seconds")
    lifetimes = {"exponential": Exponential, "weibull": Weibull, "bathtub": Bathtub}[arguments.hazard]
    return Fleet(lifetimes(arguments.lifetime), arguments.nodes, arguments.together)


def _jobs(arguments: argparse.Namespace) -> dict[str, Job]:
    from lightning_spot.simulation import losses
    from lightning_spot.simulation.job import Job, Tier, with_tiers

    loss = {
        "exponential": lambda: losses.exponential(arguments.rate),
        "power": losses.power,
        "floor": losses.floor,
        "steps": losses.step_schedule,
    }[arguments.loss]()
    job = Job(
        work_s=arguments.work,
        stall_s=arguments.stall,
        restart_s=arguments.restart,
        restore_s=arguments.restore,
        price_per_hour=arguments.price * arguments.nodes,
        loss=loss,
    )
    durable = Tier(name="durable", bytes_per_s=arguments.durable)
    jobs = {"durable tier only": with_tiers(job, arguments.state, [durable])}
    if arguments.memory_node:
        node = Tier(name="memory node", bytes_per_s=arguments.memory_node, price_per_hour=arguments.memory_node_price)
        jobs["with a memory node"] = with_tiers(job, arguments.state, [node, durable])
    return jobs


def _verdict(groups: Mapping[str, Sequence[Row]]) -> str:
    """Whether the memory node is worth it, for the best policy of each."""
    if len(groups) < 2:
        return ""
    without, with_node = (min(rows, key=lambda row: row.total_s) for rows in groups.values())
    saved = 1 - with_node.total_s / without.total_s
    told = f"A memory node makes the run {100 * saved:.1f} % shorter"
    if without.price:
        dearer = with_node.price - without.price
        told += f" and {'costs' if dearer > 0 else 'saves'} {abs(dearer):.2f} of {without.price:.2f}"
        needed = dearer < 0
    else:
        needed = saved > _SMALL
    return f"{told}: {'it is worth having' if needed else 'you need none'}."


def _table(name: str, rows: Sequence[Row], priced: bool) -> Table:
    headings = ["POLICY", "SNAPSHOTS", "TIME h", "GOODPUT", "STALL", "LOST", "FAILURES", "PROGRESS LOST"]
    table = plain_table([*headings, *(["PRICE"] if priced else [])], left=["POLICY"], title=name)
    for row in rows:
        hours = f"{row.total_s / 3600:.2f} ± {row.error_s / 3600:.2f}" if math.isfinite(row.total_s) else "never"
        shares = (f"{100 * share:.2f} %" for share in (row.goodput, row.stall, row.lost))
        values = [hours, *shares, f"{row.failures:.1f}", f"{100 * row.progress_lost:.3f} %"]
        table.add_row(row.name, str(row.snapshots), *values, *([f"{row.price:.2f}"] if priced else []))
    return table


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
