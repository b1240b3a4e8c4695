"""What to rent for a job of many machines: how many memory nodes, how large, how fast, and how many replicas.

Formulas, to first order; docs/scale.md derives them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_spot.errors import SettingsError
from lightning_spot.simulation.closed_form import FailureClass, lost_s, overhead
from lightning_spot.simulation.failures import NODE_MTBF_S

COPIES = 3
"""Snapshots of a run that a node holds at once: the newest, one that arrives, one that goes on to the durable tier."""

WORTH = 0.005
"""What saves less than this share of the job's time is not worth another memory node, or a second replica."""

NOTICED_S = 15.0
"""From the loss of a memory node until snapshots go to another one: asked every 10 s, it is waited for at most 5 s."""

_MOST_NODES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A job of many machines. Times in seconds.

    Attributes:
        gpus: of the job.
        state_bytes: of one snapshot of the whole job, whatever the number of ranks that have it.
        gpus_per_host: of each machine.
        sending_hosts: machines that send a share of each snapshot; 0 for all. One, where one host has the whole file.
        host_bytes_per_s: what a machine sends to memory nodes beside training.
        node_bytes_per_s: what a memory node receives.
        node_memory_bytes: what it has for snapshots.
        durable_bytes_per_s: what it brings to the durable tier.
        stall_s: how long training waits for a snapshot.
        lifetime_s: mean of a machine's.
        node_lifetime_s: mean of a memory node's.
    """

    gpus: int
    state_bytes: float
    gpus_per_host: int = 8
    sending_hosts: int = 0
    host_bytes_per_s: float = 1.25e9
    node_bytes_per_s: float = 1.25e9
    node_memory_bytes: float = 256 * 2.0**30
    durable_bytes_per_s: float = 400e6
    stall_s: float = 1.0
    lifetime_s: float = 7200.0
    node_lifetime_s: float = NODE_MTBF_S

    def __post_init__(self) -> None:
        if self.sending_hosts < 0:
            raise SettingsError(f"sending_hosts={self.sending_hosts}: 0 or more machines send")
        for name in self.__dataclass_fields__:
            if name not in ("sending_hosts", "stall_s") and not getattr(self, name) > 0:
                raise SettingsError(f"{name}={getattr(self, name)}: it must be more than 0")
        if self.stall_s < 0:
            raise SettingsError(f"stall_s={self.stall_s}: it must be 0 or more")

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
        nodes: memory nodes.
        replicas: at how many of them each snapshot is kept.
        memory_bytes: that each node needs for snapshots.
        in_bytes_per_s: that each receives.
        out_bytes_per_s: that each brings to the durable tier.
        safe_s: from a snapshot's begin until it is at all its replicas.
        interval_s: between two snapshots.
        lost: share of the time that snapshots and lost machines take, without the time until new machines run.
        alone: the same without memory nodes, the hosts writing to the durable tier by themselves.
        by_hosts: whether the hosts' own network is what bounds it: more nodes would change nothing.
    """

    nodes: int
    replicas: int
    memory_bytes: float
    in_bytes_per_s: float
    out_bytes_per_s: float
    safe_s: float
    interval_s: float
    lost: float
    alone: float
    by_hosts: bool


def size(demand: Demand, replicas: int | None = None) -> Rent:
    """The fewest memory nodes for which one more would save less than :data:`WORTH` of the job's time.

    Args:
        demand: the job.
        replicas: how many; ``None`` for two where a memory node lost together with a machine costs more than that.

    Raises:
        SettingsError: if the memory of thousands of nodes would not do, or ``replicas`` is less than 1.
    """
    if replicas is not None and replicas < 1:
        raise SettingsError(f"replicas={replicas}: at least 1")
    if replicas is None:
        replicas = 2 if both_lost(demand, _nodes(demand, 1)) > WORTH else 1
    nodes = _nodes(demand, replicas)
    safe_s, interval_s = _safe_s(demand, replicas, nodes), _interval_s(demand, replicas, nodes)
    copies = replicas * demand.state_bytes / nodes
    return Rent(
        nodes=nodes,
        replicas=replicas,
        memory_bytes=COPIES * copies,
        in_bytes_per_s=copies / safe_s,
        out_bytes_per_s=min(demand.durable_bytes_per_s, demand.state_bytes / nodes / interval_s),
        safe_s=safe_s,
        interval_s=interval_s,
        lost=_lost(demand, safe_s) + (both_lost(demand, nodes) if replicas == 1 else 0.0),
        alone=_lost(demand, demand.state_bytes / (demand.senders * demand.durable_bytes_per_s)),
        by_hosts=_hosts_s(demand, replicas) >= _nodes_s(demand, replicas, nodes),
    )


def both_lost(demand: Demand, nodes: int) -> float:
    """Share of the time that is lost, with one replica, to a memory node and a machine that go together.

    A lost node's snapshots are sent to another one at once. A machine that is lost before they are there takes the job
    back to the durable tier.
    """
    gone_s = NOTICED_S + _safe_s(demand, 1, nodes)
    durable_s = demand.state_bytes / (nodes * demand.durable_bytes_per_s)
    back_s = lost_s(_interval_s(demand, 1, nodes), durable_s)
    return nodes / demand.node_lifetime_s * min(1.0, gone_s / demand.mtbf_s) * back_s


def _nodes(demand: Demand, replicas: int) -> int:
    """How many, with so many replicas: enough memory, and then as many as are worth it."""
    room = math.ceil(COPIES * replicas * demand.state_bytes / demand.node_memory_bytes)
    fewest = max(replicas, room)
    if fewest > _MOST_NODES:
        raise SettingsError(
            f"{replicas} replicas of {demand.state_bytes:.3g} bytes need {fewest} nodes of"
            f" {demand.node_memory_bytes:.3g} bytes of memory: take larger ones"
        )
    best = _lost(demand, _hosts_s(demand, replicas))
    for nodes in range(fewest, _MOST_NODES):
        if _lost(demand, _safe_s(demand, replicas, nodes)) <= best + WORTH:
            return nodes
    return _MOST_NODES


def _hosts_s(demand: Demand, replicas: int) -> float:
    """Seconds in which the hosts send a snapshot to all its replicas."""
    return replicas * demand.state_bytes / (demand.senders * demand.host_bytes_per_s)


def _nodes_s(demand: Demand, replicas: int, nodes: int) -> float:
    """Seconds in which the nodes receive it; a share goes to one node for each replica, so more than that are idle."""
    used = min(nodes, replicas * demand.senders)
    return replicas * demand.state_bytes / (used * demand.node_bytes_per_s)


def _safe_s(demand: Demand, replicas: int, nodes: int) -> float:
    return max(_hosts_s(demand, replicas), _nodes_s(demand, replicas, nodes))


def _interval_s(demand: Demand, replicas: int, nodes: int) -> float:
    return _period_s(demand, _safe_s(demand, replicas, nodes))


def _period_s(demand: Demand, safe_s: float) -> float:
    """Young's interval, and never shorter than the tier takes one snapshot: see docs/intervals.md."""
    return max(math.sqrt(2 * demand.stall_s * demand.mtbf_s), safe_s, demand.stall_s)


def _lost(demand: Demand, safe_s: float) -> float:
    if safe_s == 0:
        return 0.0
    classes = [FailureClass(drain_s=safe_s)]
    return min(1.0, overhead(_period_s(demand, safe_s), demand.stall_s, demand.mtbf_s, classes))
