"""``lightning-spot simulate``: what a job would cost with each interval policy, and with a snapshot server."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_spot.cli.arguments import takes_number, takes_size, takes_time
from lightning_spot.cli.output import add_output, plain_table, print_answer
from lightning_spot.config import format_seconds
from lightning_spot.errors import SettingsError
from lightning_spot.interval.costs import PROCESS_MTBF_S, SERVER_MTBF_S

if TYPE_CHECKING:
    from lightning_spot.simulation.failures import Failures
    from lightning_spot.simulation.simulator import PolicyRow, SimulatedJob

_SMALL = 0.01
_MOST_MACHINES = 10**7
_LOSS_RATE = 5.0
"""The loss falls to ``exp(-5)`` in the run."""
_OUTLIVES = {"process": "process", "machine": "machine", "server": "snapshot server"}


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``."""
    size, time, positive = takes_size(), takes_time(), takes_time(above=True)
    speed, price, count = takes_size("/s"), takes_number(whole=False), takes_number(1)
    job = parser.add_argument_group("job")
    job.add_argument("--work", default=86400.0, help="training time without losses (24h)", **positive)
    job.add_argument("--snapshot-size", default=10**9, help="a snapshot of the complete job (1GB)", **size)
    job.add_argument("--blocked", default=1.0, help="how long training waits for a snapshot (1s)", **time)
    spot = parser.add_argument_group("machines")
    spot.add_argument("--lifetime", default=7200.0, help="of a machine, mean (2h; Weibull, k = 0.6)", **positive)
    spot.add_argument("--hosts", default=1, help="machines of the job (1)", **count)
    spot.add_argument("--trace", metavar="CSV", help="recorded preemptions instead: a file with a column 'time'")
    spot.add_argument("--restart", default=600.0, help="from a loss until a machine is back (10min)", **time)
    spot.add_argument("--restore", default=60.0, help="from then until training continues (1min)", **time)
    crashes = "mean between crashes of the process (7d)"
    spot.add_argument("--crash-every", default=PROCESS_MTBF_S, help=crashes, **positive)
    spot.add_argument("--price", default=0.0, help="price of a machine for an hour (0)", **price)
    tiers = parser.add_argument_group("storage and server")
    tiers.add_argument("--storage-speed", default=80 * 10**6, help="what storage takes in a second (80MB/s)", **speed)
    both = "what a snapshot server takes; given, the job is simulated with one and without"
    tiers.add_argument("--server-speed", help=both, **speed)
    tiers.add_argument("--server-price", default=0.0, help="price of the snapshot server for an hour (0)", **price)
    server = "mean lifetime of the snapshot server, which is no spot machine (30d)"
    tiers.add_argument("--server-lifetime", default=SERVER_MTBF_S, help=server, **positive)
    parser.add_argument("--runs", default=1000, help="simulated runs (1000)", **count)
    add_output(parser)


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table for each choice of tiers."""
    from lightning_spot.simulation.simulator import compare

    if arguments.runs * arguments.hosts > _MOST_MACHINES:
        raise SettingsError(
            f"--runs={arguments.runs} with --hosts={arguments.hosts}: {_MOST_MACHINES} machines at most fit the memory"
        )
    failures = _failures(arguments)
    groups = {name: compare(job, failures, runs=arguments.runs) for name, job in _jobs(arguments).items()}
    verdict = _verdict(groups)
    tables = {name: [asdict(row) for row in rows] for name, rows in groups.items()}
    priced = bool(arguments.price or arguments.server_price)
    shown = [
        table for name, rows in groups.items() for table in (_table(name, rows, priced), _tier_table(rows[0], priced))
    ]
    document = {"mtbf_s": failures.mtbf_s, "tiers": tables, "verdict": verdict}
    print_answer(arguments.output, document, [*shown, *filter(None, [verdict])])
    return 0


def _failures(arguments: argparse.Namespace) -> Failures:
    from lightning_spot.simulation.failures import Fleet, Mixed, Trace, Weibull

    lifetimes = Weibull(arguments.lifetime)
    machines = Trace.read(arguments.trace) if arguments.trace else Fleet(lifetimes, arguments.hosts)
    back_s = 0.0
    if arguments.server_speed:  # another machine, and the first snapshot on its way there
        back_s = arguments.restart + arguments.snapshot_size / arguments.server_speed
    return Mixed(machines, arguments.crash_every, arguments.server_lifetime, back_s)


def _jobs(arguments: argparse.Namespace) -> dict[str, SimulatedJob]:
    from lightning_spot.simulation.simulator import SimulatedJob, chain, exponential_loss, server_tier, storage_tier

    size, speed = arguments.snapshot_size, arguments.server_speed
    durable = storage_tier(size, arguments.storage_speed)
    job = SimulatedJob(
        work_s=arguments.work,
        stall_s=arguments.blocked,
        tiers=chain(durable),
        restart_s=arguments.restart,
        restore_s=arguments.restore,
        price_per_hour=arguments.price * arguments.hosts,
        loss=exponential_loss(_LOSS_RATE),
    )
    jobs = {"storage only": job}
    if speed:
        server = server_tier(size, speed, arguments.server_price)
        jobs["with a snapshot server"] = replace(job, tiers=chain(server, durable))
    return jobs


def _verdict(groups: Mapping[str, Sequence[PolicyRow]]) -> str:
    """Whether the snapshot server is worth it, for the best policy of each."""
    if len(groups) < 2:
        return ""
    without, with_server = (min(rows, key=lambda row: row.total_s) for rows in groups.values())
    if not math.isfinite(with_server.total_s):
        return "The run never ends, with a snapshot server or without."
    if not math.isfinite(without.total_s):
        return "The run ends with a snapshot server only: it is worth having."
    saved = 1 - with_server.total_s / without.total_s
    verdict = f"A snapshot server makes the run {100 * abs(saved):.1f} % {'shorter' if saved >= 0 else 'longer'}"
    if without.price:
        dearer = with_server.price - without.price
        verdict += f" and {'costs' if dearer > 0 else 'saves'} {abs(dearer):.2f} of {without.price:.2f}"
        needed = dearer < 0
    else:
        needed = saved > _SMALL
    return f"{verdict}: {'it is worth having' if needed else 'you need no snapshot server'}."


def _table(name: str, rows: Sequence[PolicyRow], priced: bool) -> Table:
    headings = ["POLICY", "SNAPSHOTS", "TIME h", "GOODPUT", "BLOCKED", "LOST", "FAILURES", "PROGRESS LOST"]
    cells = []
    for row in rows:
        hours = f"{row.total_s / 3600:.2f} ± {row.error_s / 3600:.2f}" if math.isfinite(row.total_s) else "never"
        shares = (f"{100 * share:.2f} %" for share in (row.goodput, row.blocked, row.lost))
        values = [hours, *shares, f"{row.failures:.1f}", f"{100 * row.progress_lost:.3f} %"]
        cells.append([row.name, row.snapshots, *values, *([_money(row.price)] if priced else [])])
    headings += ["PRICE"] if priced else []
    return plain_table(headings, cells, left=headings[:1], title=name)


def _tier_table(row: PolicyRow, priced: bool) -> Table:
    headings = ["TIER", "OUTLIVES THE", "TAKES ONE IN", "NEWEST IS BEHIND", "RESUMED FROM", "LOST EACH"]
    cells = []
    for tier in row.tiers:
        values = [format_seconds(tier.drain_s), format_seconds(tier.behind_s), f"{100 * tier.resumed:.2f} %"]
        lost = format_seconds(tier.lost_s) if tier.resumed else ""
        cells.append([tier.name, _OUTLIVES[tier.survives], *values, lost, *([_money(tier.price)] if priced else [])])
    headings += ["PRICE"] if priced else []
    return plain_table(headings, cells, left=headings[:2], title=f"  under {row.name}")


def _money(price: float) -> str:
    """What a run that never ends costs, nobody knows."""
    return f"{price:.2f}" if math.isfinite(price) else "unknown"
