"""What to rent for a job of many machines: how large and how fast a memory node, and how many replicas.

A run goes to one memory node, and with replicas to as many: all of each snapshot is there. Other nodes that it names
are spare; a model in shards on several machines is spread over all that it names, if these are more than the replicas.
Formulas, to first order; docs/scale.md derives them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from lightning_spot.config import format_bytes
from lightning_spot.errors import SettingsError
from lightning_spot.image.portion import MOST_HOSTS
from lightning_spot.simulation.closed_form import FailureClass, lost_s, overhead
from lightning_spot.simulation.failures import NODE_MTBF_S
from lightning_spot.staging.slot import slot_capacity

COPIES = 3
"""Snapshots of a run that a node holds at once: the newest, one that arrives, one that goes on to the durable tier."""

NODE_PRICE, NODE_PRICE_BYTES = 0.05, 256 * 2**30
"""Of a memory node, in prices of a machine of the job, unless it is said: for so much memory, beside eight GPUs."""

CPU_S_PER_BYTE = 0.8 / 2**30
"""Of a node that receives: ``python -m benchmarks scale`` measures it, see docs/scale.md."""

NOTICED_S = 15.0
"""From the loss of a memory node until it is known: it is asked every 10 s, and waited for at most 5 s."""

_WHOLE = 10**9

_MAY_BE_0 = ("nodes", "sending_hosts", "stall_s", "node_memory_bytes", "node_back_s", "node_price")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A job of many machines. Times in seconds.

    Attributes:
        gpus: of the job.
        state_bytes: of one snapshot of the whole job, whatever the number of ranks that have it.
        gpus_per_host: of each machine.
        sending_hosts: machines that send a share of each snapshot; 0 for all. One, where one host has the whole file.
        nodes: memory nodes over which snapshots of a model in shards are spread, by portions of machines; 0 for one for
            each replica.
        host_bytes_per_s: what a machine sends to memory nodes beside training.
        node_bytes_per_s: what a memory node receives.
        node_memory_bytes: what it can have for snapshots; 0 for as much as is needed.
        durable_bytes_per_s: what it brings to the durable tier.
        stall_s: how long training waits for a snapshot.
        lifetime_s: mean of a machine's.
        node_lifetime_s: mean of a memory node's.
        node_back_s: from its loss until there is another one.
        node_price: of a memory node, in prices of a machine; ``None`` for what its memory costs.
    """

    gpus: int
    state_bytes: float
    gpus_per_host: int = 8
    sending_hosts: int = 0
    nodes: int = 0
    host_bytes_per_s: float = 1.25e9
    node_bytes_per_s: float = 1.25e9
    node_memory_bytes: float = 0.0
    durable_bytes_per_s: float = 400e6
    stall_s: float = 1.0
    lifetime_s: float = 7200.0
    node_lifetime_s: float = NODE_MTBF_S
    node_back_s: float = 600.0
    node_price: float | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value, may_be_0 = getattr(self, name), name in _MAY_BE_0
            if value is not None and not (value >= 0 if may_be_0 else value > 0):
                raise SettingsError(f"{name}={value}: it must be {'0 or more' if may_be_0 else 'more than 0'}")
        if self.hosts > MOST_HOSTS:
            raise SettingsError(f"{self.hosts} machines: at most {MOST_HOSTS} bring a snapshot together")

    @property
    def hosts(self) -> int:
        """Machines of the job."""
        return math.ceil(self.gpus / self.gpus_per_host)

    @property
    def senders(self) -> int:
        """Machines that send."""
        return min(self.hosts, self.sending_hosts or self.hosts)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job: each takes one machine."""
        return self.lifetime_s / self.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """What to rent, and what it gains.

    Attributes:
        replicas: memory nodes that have each byte of a snapshot.
        nodes: memory nodes; if there are no more than replicas, each has all of every snapshot.
        memory_bytes: that each needs for snapshots, in whole GB: for it to be given what is printed.
        in_bytes_per_s: that each receives.
        processors: that each needs for that.
        out_bytes_per_s: that the one that carries the run on, or each, if it is spread, brings to the durable tier.
        safe_s: from a snapshot's begin until it is at all of them.
        interval_s: between two snapshots.
        lost: share of the time that snapshots and lost machines take, without the time until new machines run.
        alone: the same without memory nodes, the hosts writing to the durable tier by themselves.
        by_hosts: whether the machines' own network is what bounds it: faster nodes would change nothing.
        pays: whether what the nodes save is more than they cost.
    """

    replicas: int
    nodes: int
    memory_bytes: float
    in_bytes_per_s: float
    processors: int
    out_bytes_per_s: float
    safe_s: float
    interval_s: float
    lost: float
    alone: float
    by_hosts: bool
    pays: bool


def size(demand: Demand, replicas: int | None = None) -> Rent:
    """The memory nodes with which the job costs least: what the machines lose, and the nodes.

    Args:
        demand: the job.
        replicas: how many; ``None`` for one or two, whichever costs less.

    Raises:
        SettingsError: if a node's memory would not do, or ``replicas`` is less than 1, or more than there are nodes.
    """
    most = demand.nodes or replicas or 2
    if replicas is not None and not 1 <= replicas <= most:
        raise SettingsError(f"replicas={replicas}: at least 1, and at most one on each of {most} memory nodes")
    replicas = min(range(1, min(most, 2) + 1), key=partial(_cost, demand)) if replicas is None else replicas
    memory_bytes, nodes = _memory_bytes(demand, replicas), _nodes(demand, replicas)
    if 0 < demand.node_memory_bytes < memory_bytes:
        each = "a run goes to one memory node, which" if nodes == replicas else f"each of {nodes} memory nodes"
        more = "" if nodes == replicas else " more of them,"
        raise SettingsError(
            f"{each} needs {format_bytes(memory_bytes)} for {COPIES} snapshots of"
            f" {format_bytes(demand.state_bytes)}; it has {format_bytes(demand.node_memory_bytes)}: take a larger one,"
            f"{more} or the durable tier alone"
        )
    safe_s = _safe_s(demand, replicas)
    interval_s = _period_s(demand, safe_s)
    in_bytes_per_s = _part(demand, replicas) * demand.state_bytes / safe_s
    alone = _lost(demand, demand.state_bytes / (demand.senders * demand.durable_bytes_per_s))
    return Rent(
        replicas=replicas,
        nodes=nodes,
        memory_bytes=memory_bytes,
        in_bytes_per_s=in_bytes_per_s,
        processors=math.ceil(in_bytes_per_s * CPU_S_PER_BYTE),
        out_bytes_per_s=min(demand.durable_bytes_per_s, _part(demand, 1) * demand.state_bytes / interval_s),
        safe_s=safe_s,
        interval_s=interval_s,
        lost=_lost_with(demand, replicas),
        alone=alone,
        by_hosts=_hosts_s(demand, replicas) >= _node_s(demand, replicas),
        pays=_cost(demand, replicas) < demand.hosts * alone,
    )


def both_lost(demand: Demand) -> float:
    """Share of the time that is lost, with one replica, to a memory node and a machine that go together.

    Until there is another node, and a snapshot at it, a machine that is lost takes the job back to the durable tier.
    """
    safe_s = _safe_s(demand, 1)
    gone_s = NOTICED_S + demand.node_back_s + safe_s
    back_s = lost_s(_period_s(demand, safe_s), demand.state_bytes / demand.durable_bytes_per_s)
    return min(1.0, gone_s / demand.mtbf_s) * back_s * _nodes(demand, 1) / demand.node_lifetime_s


def _cost(demand: Demand, replicas: int) -> float:
    """What the machines lose and the nodes cost, in prices of a machine."""
    price = demand.node_price
    if price is None:
        price = NODE_PRICE * max(1.0, COPIES * _part(demand, replicas) * demand.state_bytes / NODE_PRICE_BYTES)
    return demand.hosts * _lost_with(demand, replicas) + price * _nodes(demand, replicas)


def _lost_with(demand: Demand, replicas: int) -> float:
    return min(1.0, _lost(demand, _safe_s(demand, replicas)) + (both_lost(demand) if replicas == 1 else 0.0))


def _hosts_s(demand: Demand, replicas: int) -> float:
    """Seconds in which the hosts send a snapshot to all its replicas."""
    return replicas * demand.state_bytes / (demand.senders * demand.host_bytes_per_s)


def _nodes(demand: Demand, replicas: int) -> int:
    return max(replicas, min(demand.nodes, replicas * demand.hosts))  # there are so many portions


def _part(demand: Demand, replicas: int) -> float:
    """Which part of a snapshot a node has at most: whole portions of machines, dealt evenly."""
    nodes = _nodes(demand, replicas)
    return 1.0 if nodes == replicas else math.ceil(demand.hosts * replicas / nodes) / demand.hosts


def _memory_bytes(demand: Demand, replicas: int) -> float:
    nbytes = math.ceil(_part(demand, replicas) * demand.state_bytes)
    return math.ceil(COPIES * slot_capacity(nbytes) / _WHOLE) * _WHOLE


def _node_s(demand: Demand, replicas: int) -> float:
    """Seconds in which a node receives what it gets of it; all of them do at the same time."""
    return _part(demand, replicas) * demand.state_bytes / demand.node_bytes_per_s


def _safe_s(demand: Demand, replicas: int) -> float:
    return max(_hosts_s(demand, replicas), _node_s(demand, replicas))


def _period_s(demand: Demand, safe_s: float) -> float:
    """Young's interval, and never shorter than the tier takes one snapshot: see docs/intervals.md."""
    return max(math.sqrt(2 * demand.stall_s * demand.mtbf_s), safe_s)


def _lost(demand: Demand, safe_s: float) -> float:
    classes = [FailureClass(drain_s=safe_s)]
    return min(1.0, overhead(_period_s(demand, safe_s), demand.stall_s, demand.mtbf_s, classes))
