"""``lightning-spot simulate``: what a job would cost with each interval policy, and with a snapshot server."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_spot.cli.output import add_output, plain_table, print_answer
from lightning_spot.config import check_number, format_seconds, parse_flag_bytes
from lightning_spot.errors import SettingsError
from lightning_spot.http.flags import add_time
from lightning_spot.interval.costs import PROCESS_MTBF_S, SERVER_MTBF_S

if TYPE_CHECKING:
    from lightning_spot.simulation.failures import Failures
    from lightning_spot.simulation.simulator import PolicyRow, SimulatedJob

_SMALL = 0.01
_MOST_RUNS = 10**6
_LOSS_RATE = 5.0
"""The loss falls to ``exp(-5)`` in the run."""
_OUTLIVES = {"process": "process", "machine": "machine", "server": "snapshot server"}


def _add_size(add_argument: Callable[..., object], flag: str, default_bytes: int | None, text: str) -> None:
    """Add a flag that takes a size, or a speed: a size with ``/s`` behind it."""
    metavar = "SIZE/s" if flag.endswith("-speed") else "SIZE"
    add_argument(flag, type=_nbytes, default=default_bytes, metavar=metavar, help=text)


def _nbytes(text: str) -> int:
    try:
        return parse_flag_bytes(text.removesuffix("/s"))
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``."""
    job = parser.add_argument_group("job")
    add_time(job.add_argument, "--work", 86400.0, "training time without losses (24h)")
    _add_size(job.add_argument, "--snapshot-size", 10**9, "a snapshot of the complete job (1GB)")
    add_time(job.add_argument, "--blocked", 1.0, "how long training waits for a snapshot (1s)")
    spot = parser.add_argument_group("machines")
    add_time(spot.add_argument, "--lifetime", 7200.0, "of a machine, mean (2h; Weibull, k = 0.6)")
    spot.add_argument("--hosts", type=int, default=1, metavar="N", help="machines of the job (1)")
    spot.add_argument("--trace", metavar="CSV", help="recorded preemptions instead: a file with a column 'time'")
    add_time(spot.add_argument, "--restart", 600.0, "from a loss until a machine is back (10min)")
    add_time(spot.add_argument, "--restore", 60.0, "from then until training continues (1min)")
    spot.add_argument("--price", type=float, default=0.0, metavar="PRICE", help="price of a machine for an hour (0)")
    add_time(spot.add_argument, "--crash-every", PROCESS_MTBF_S, "mean between crashes of the process (7d)")
    tiers = parser.add_argument_group("storage and server")
    _add_size(tiers.add_argument, "--storage-speed", 80 * 10**6, "bytes that storage takes in a second (80MB/s)")
    speed = "bytes that a snapshot server takes; given, the job is simulated with one and without"
    _add_size(tiers.add_argument, "--server-speed", None, speed)
    tiers.add_argument(
        "--server-price", type=float, default=0.0, metavar="PRICE", help="price of the snapshot server for an hour (0)"
    )
    lifetime = "mean lifetime of the snapshot server, which is no spot machine (30d)"
    add_time(tiers.add_argument, "--server-lifetime", SERVER_MTBF_S, lifetime)
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help="simulate only this policy; may be given several times (all)"
    )
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs (1000)")
    add_output(parser)


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table for each choice of tiers."""
    from lightning_spot.simulation.simulator import POLICIES, compare

    check_number("--price", arguments.price, 0)
    check_number("--server-price", arguments.server_price, 0)
    check_number("--work", arguments.work, 0, above=True)
    check_number("--lifetime", arguments.lifetime, 0, above=True)
    check_number("--crash-every", arguments.crash_every, 0, above=True)
    check_number("--server-lifetime", arguments.server_lifetime, 0, above=True)
    check_number("--hosts", arguments.hosts, 1, whole=True)
    check_number("--runs", arguments.runs, 1, whole=True)
    if arguments.runs > _MOST_RUNS:
        raise SettingsError(f"--runs={arguments.runs}: at most {_MOST_RUNS}, which fit the memory; a thousand will do")
    unknown = [name for name in arguments.policy or () if name not in POLICIES]
    if unknown:
        raise SettingsError(f"--policy {unknown[0]!r} is not known; there are {', '.join(map(repr, POLICIES))}")
    policies = {name: make for name, make in POLICIES.items() if not arguments.policy or name in arguments.policy}
    failures = _failures(arguments)
    groups = {name: compare(job, failures, policies, runs=arguments.runs) for name, job in _jobs(arguments).items()}
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
    table = plain_table([*headings, *(["PRICE"] if priced else [])], left=["POLICY"], title=name)
    for row in rows:
        hours = f"{row.total_s / 3600:.2f} ± {row.error_s / 3600:.2f}" if math.isfinite(row.total_s) else "never"
        shares = (f"{100 * share:.2f} %" for share in (row.goodput, row.blocked, row.lost))
        values = [hours, *shares, f"{row.failures:.1f}", f"{100 * row.progress_lost:.3f} %"]
        table.add_row(row.name, str(row.snapshots), *values, *([_money(row.price)] if priced else []))
    return table


def _tier_table(row: PolicyRow, priced: bool) -> Table:
    headings = ["TIER", "OUTLIVES THE", "TAKES ONE IN", "NEWEST IS BEHIND", "RESUMED FROM", "LOST EACH"]
    table = plain_table([*headings, *(["PRICE"] if priced else [])], left=headings[:2], title=f"  under {row.name}")
    for tier in row.tiers:
        values = [format_seconds(tier.drain_s), format_seconds(tier.behind_s), f"{100 * tier.resumed:.2f} %"]
        lost = format_seconds(tier.lost_s) if tier.resumed else ""
        table.add_row(tier.name, _OUTLIVES[tier.survives], *values, lost, *([_money(tier.price)] if priced else []))
    return table


def _money(price: float) -> str:
    """What a run that never ends costs, nobody knows."""
    return f"{price:.2f}" if math.isfinite(price) else "unknown"
