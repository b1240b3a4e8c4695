"""``lightning-spot simulate --gpus N --state S``: what to rent for a job of many machines."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_spot.cli.output import wide_console
from lightning_spot.config import check_number, format_bytes, format_seconds
from lightning_spot.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_spot.simulation.sizing import Demand, Rent

_HOPELESS = 0.9
_ONLY_TO_RENT: dict[str, int | None] = {
    "--gpus-per-host": 8,
    "--sending-hosts": 0,
    "--host-speed": 1_250_000_000,
    "--memory-node-memory": 0,
    "--memory-nodes": None,
    "--replicas": None,
}
"""Flags that say nothing of a job that is simulated, and what they are where they are not given."""


def add_arguments(parser: argparse.ArgumentParser, size: Callable[[str], int]) -> None:
    """Add the arguments that say how large a job is.

    Args:
        parser: of ``simulate``.
        size: reads a size, or a size per second.
    """
    rent = parser.add_argument_group("what to rent (nothing is simulated then)")
    rent.add_argument("--gpus", type=int, metavar="N", help="GPUs of the job: say which memory node it needs")

    def add(flag: str, kind: Callable[[str], int], metavar: str, what: str) -> None:
        rent.add_argument(flag, type=kind, default=_ONLY_TO_RENT[flag], metavar=metavar, help=what)

    add("--gpus-per-host", int, "N", "GPUs of a machine (8)")
    add("--sending-hosts", int, "N", "machines that send a share of each snapshot (all)")
    add("--host-speed", size, "SIZE/s", "what a machine can send (1.25GB/s)")
    add("--memory-node-memory", size, "SIZE", "of a memory node (as much as it needs)")
    add("--memory-nodes", int, "N", "spread a model in shards over so many (one a replica)")
    add("--replicas", int, "N", "nodes that keep each snapshot (1 or 2, which pays)")


def check_none(arguments: argparse.Namespace) -> None:
    """Refuse what only :func:`rent` looks at.

    Raises:
        SettingsError: if it was given.
    """
    for flag, default in _ONLY_TO_RENT.items():
        if (value := given(arguments, flag)) != default:
            raise SettingsError(
                f"{flag}={value}: it says what to rent for a job of so many --gpus, which are not given"
            )


def given(arguments: argparse.Namespace, flag: str) -> object:
    """What a flag was given, or is where it was not."""
    value: object = getattr(arguments, flag[2:].replace("-", "_"))
    return value


def rent(arguments: argparse.Namespace) -> int:
    """Print what to rent."""
    from lightning_spot.simulation.failures import NODE_MTBF_S
    from lightning_spot.simulation.sizing import Demand, size

    if arguments.trace:
        raise SettingsError("--trace is of single machines: with --gpus, give their mean --lifetime")
    for flag, value in (("--gpus", arguments.gpus), ("--gpus-per-host", arguments.gpus_per_host)):
        check_number(flag, value, 1, whole=True)
    check_number("--sending-hosts", arguments.sending_hosts, 0, whole=True)
    for flag in ("--memory-nodes", "--replicas"):
        if (count := given(arguments, flag)) is not None:
            check_number(flag, count, 1, whole=True)
    node_lifetime_s = arguments.memory_node_lifetime
    demand = Demand(
        gpus=arguments.gpus,
        state_bytes=arguments.snapshot_size,
        gpus_per_host=arguments.gpus_per_host,
        sending_hosts=arguments.sending_hosts,
        nodes=arguments.memory_nodes or 0,
        host_bytes_per_s=arguments.host_speed,
        node_bytes_per_s=arguments.memory_node_speed or 1.25e9,
        node_memory_bytes=arguments.memory_node_memory,
        durable_bytes_per_s=arguments.durable_speed,
        stall_s=arguments.stall,
        lifetime_s=arguments.lifetime,
        node_lifetime_s=NODE_MTBF_S if node_lifetime_s is None else node_lifetime_s,
        node_back_s=arguments.restart,
        node_price=arguments.memory_node_price / arguments.price if arguments.price > 0 else None,
    )
    found = size(demand, arguments.replicas)
    if arguments.json:
        print(json.dumps({"hosts": demand.hosts, "mtbf_s": demand.mtbf_s, **asdict(found)}, indent=1))
        return 0
    console = wide_console()
    for name, value in described(demand, found).items():
        console.print(f"{name:<24} {value}")
    for line in _advice(demand, found, arguments.memory_node_price):
        console.print(f"→ {line}")
    return 0


def described(demand: Demand, found: Rent) -> dict[str, str]:
    """A job and what to rent for it, for people."""
    return {
        "GPUs": str(demand.gpus),
        "state": format_bytes(demand.state_bytes),
        "machines": str(demand.hosts),
        "one is lost every": format_seconds(demand.mtbf_s),
        "memory nodes": str(found.nodes),
        "memory of each": format_bytes(found.memory_bytes),
        "each receives": f"{format_bytes(found.in_bytes_per_s)}/s",
        "processors of each": str(found.processors),
        "a snapshot every": format_seconds(found.interval_s),
        "safe in": format_seconds(found.safe_s),
        "lost": f"{100 * found.lost:.1f} %",
        "lost without nodes": f"{100 * found.alone:.1f} %",
    }


def _advice(demand: Demand, found: Rent, price: float) -> list[str]:
    if min(found.lost, found.alone) >= _HOPELESS:
        return [f"a machine is lost every {format_seconds(demand.mtbf_s)}: no snapshots make up for that"]
    if not found.pays and found.alone < _HOPELESS:
        return ["what memory nodes would save is less than they cost: the durable tier alone will do"]
    nodes = f"{found.nodes} memory node{'s' if found.nodes > 1 else ''}"
    speeds = f"{format_bytes(found.in_bytes_per_s)}/s in and {format_bytes(found.out_bytes_per_s)}/s out"
    cost = f", {price * found.nodes:.2f} an hour" if price else ""
    lines = [f"rent {nodes} with {format_bytes(found.memory_bytes)} for snapshots, {speeds}{cost}"]
    if demand.nodes > found.nodes:
        lines.append(f"of {demand.nodes} nodes the others get nothing: there is a portion of each machine, no more")
    if not found.pays:
        lines.append(f"without them {100 * found.alone:.0f} % of the time is lost; yet they cost more than they save")
    if found.replicas > 1:
        lines.append(f"SpotCheckpoint(replicas={found.replicas})")
    if found.by_hosts:
        lines.append(f"the machines' own network bounds it ({demand.senders} send): a faster node changes nothing")
    else:
        most = format_bytes(demand.senders * demand.host_bytes_per_s / found.nodes)
        lines.append(f"the node's network bounds it: the machines can send {most}/s (--memory-node-speed)")
    return lines
