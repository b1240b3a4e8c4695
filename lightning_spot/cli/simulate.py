"""``lightning-spot simulate``: what a job would cost with each interval policy, and with a snapshot server."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_spot.cli.output import add_output, plain_table, print_answer
from lightning_spot.config import check_number, format_seconds, parse_flag_bytes
from lightning_spot.errors import SettingsError
from lightning_spot.http.flags import seconds

if TYPE_CHECKING:
    from lightning_spot.simulation.failures import Failures
    from lightning_spot.simulation.job import SimulatedJob
    from lightning_spot.simulation.simulator import PolicyRow

_SMALL = 0.01
_MOST_RUNS = 10**6
_OUTLIVES = {"process": "process", "machine": "machine", "server": "snapshot server"}
LOSSES = ("exponential", "power", "floor", "steps")


def _bytes(text: str) -> int:
    try:
        return parse_flag_bytes(text.removesuffix("/s"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``."""
    job = parser.add_argument_group("job")
    job.add_argument("--work", type=seconds, default=86400.0, metavar="TIME", help="training time without losses (24h)")
    job.add_argument(
        "--snapshot-size", type=_bytes, default=10**9, metavar="SIZE", help="a snapshot of the complete job (1GB)"
    )
    job.add_argument(
        "--blocked", type=seconds, default=1.0, metavar="TIME", help="how long training waits for a snapshot (1s)"
    )
    job.add_argument("--loss", choices=LOSSES, default="exponential", help="shape of the loss curve (exponential)")
    job.add_argument(
        "--loss-rate", type=float, default=5.0, metavar="N", help="an exponential loss falls to exp(-N) in the run (5)"
    )
    spot = parser.add_argument_group("machines")
    spot.add_argument(
        "--hazard",
        choices=("exponential", "weibull", "bathtub"),
        default="weibull",
        help="distribution of a machine's lifetime (weibull)",
    )
    spot.add_argument(
        "--lifetime", type=seconds, default=7200.0, metavar="TIME", help="mean lifetime of a machine (2h)"
    )
    spot.add_argument("--hosts", type=int, default=1, metavar="N", help="machines of the job (1)")
    spot.add_argument("--correlated", type=int, default=1, metavar="N", help="machines lost in one event (1)")
    spot.add_argument("--trace", metavar="CSV", help="recorded preemptions instead: a file with a column 'time'")
    spot.add_argument(
        "--restart", type=seconds, default=600.0, metavar="TIME", help="from a loss until a machine is back (10min)"
    )
    spot.add_argument(
        "--restore", type=seconds, default=60.0, metavar="TIME", help="from then until training continues (1min)"
    )
    spot.add_argument("--price", type=float, default=0.0, metavar="PRICE", help="price of a machine for an hour (0)")
    spot.add_argument(
        "--crash-every", type=seconds, default=None, metavar="TIME", help="mean between crashes of the process (7d)"
    )
    tiers = parser.add_argument_group("storage and server")
    tiers.add_argument(
        "--storage-speed",
        type=_bytes,
        default=80 * 10**6,
        metavar="SIZE/s",
        help="bytes that storage takes in a second (80MB/s)",
    )
    tiers.add_argument(
        "--server-speed",
        type=_bytes,
        metavar="SIZE/s",
        help="bytes that a snapshot server takes; given, the job is simulated with one and without",
    )
    tiers.add_argument(
        "--server-price", type=float, default=0.0, metavar="PRICE", help="price of the snapshot server for an hour (0)"
    )
    tiers.add_argument(
        "--server-lifetime",
        type=seconds,
        default=None,
        metavar="TIME",
        help="mean lifetime of the snapshot server, which is no spot machine (30d)",
    )
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help="simulate only this policy; may be given several times (all)"
    )
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs (1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulated losses (0)")
    parser.add_argument("--plot", metavar="FILE", help="draw the comparison (.png, .svg, .pdf)")
    add_output(parser)


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table for each choice of tiers."""
    from lightning_spot.simulation.simulator import POLICIES, compare

    for flag in ("--price", "--server-price", "--loss-rate", "--seed"):
        check_number(flag, _given(arguments, flag), 0)
    for flag in ("--work", "--lifetime", "--crash-every", "--server-lifetime"):
        if (value := _given(arguments, flag)) is not None:
            check_number(flag, value, 0, above=True)
    check_number("--hosts", arguments.hosts, 1, whole=True)
    if not 1 <= arguments.correlated <= arguments.hosts:
        raise SettingsError(f"--correlated={arguments.correlated}: of --hosts={arguments.hosts}, 1 to all go at a time")
    check_number("--runs", arguments.runs, 1, whole=True)
    if arguments.runs > _MOST_RUNS:
        raise SettingsError(f"--runs={arguments.runs}: at most {_MOST_RUNS}, which fit the memory; a thousand will do")
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
    tables = {name: [asdict(row) for row in rows] for name, rows in groups.items()}
    priced = bool(arguments.price or arguments.server_price)
    shown = [
        table for name, rows in groups.items() for table in (_table(name, rows, priced), _tier_table(rows[0], priced))
    ]
    document = {"mtbf_s": failures.mtbf_s, "tiers": tables, "verdict": verdict}
    print_answer(arguments.output, document, [*shown, *filter(None, [verdict])])
    return 0


def _given(arguments: argparse.Namespace, flag: str) -> object:
    value: object = getattr(arguments, flag[2:].replace("-", "_"))
    return value


def _failures(arguments: argparse.Namespace) -> Failures:
    from lightning_spot.simulation import failures

    machines: Failures
    if arguments.trace:
        machines = failures.Trace.read(arguments.trace)
    else:
        shapes = {"exponential": failures.Exponential, "weibull": failures.Weibull, "bathtub": failures.Bathtub}
        machines = failures.Fleet(shapes[arguments.hazard](arguments.lifetime), arguments.hosts, arguments.correlated)
    process_s = failures.PROCESS_MTBF_S if arguments.crash_every is None else arguments.crash_every
    server_s = failures.SERVER_MTBF_S if arguments.server_lifetime is None else arguments.server_lifetime
    back_s = 0.0
    if arguments.server_speed:  # another machine, and the first snapshot on its way there
        back_s = arguments.restart + arguments.snapshot_size / arguments.server_speed
    return failures.Mixed(machines, process_s, server_s, back_s)


def _jobs(arguments: argparse.Namespace) -> dict[str, SimulatedJob]:
    from lightning_spot.simulation.job import (
        SimulatedJob,
        chain,
        exponential_loss,
        floor_loss,
        power_loss,
        server_tier,
        stepwise_loss,
        storage_tier,
    )

    loss = {
        "exponential": lambda: exponential_loss(arguments.loss_rate),
        "power": power_loss,
        "floor": floor_loss,
        "steps": stepwise_loss,
    }[arguments.loss]()
    job = SimulatedJob(
        work_s=arguments.work,
        stall_s=arguments.blocked,
        restart_s=arguments.restart,
        restore_s=arguments.restore,
        price_per_hour=arguments.price * arguments.hosts,
        loss=loss,
    )
    size, speed = arguments.snapshot_size, arguments.server_speed
    durable = storage_tier(size, arguments.storage_speed)
    jobs = {"storage only": replace(job, tiers=chain(durable))}
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
