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

NODE_PRICE = 0.05
"""Price of a memory node in prices of a machine of the job, unless it is said: 256 GiB of memory beside eight GPUs."""

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
        node_price: of a memory node, in prices of a machine.
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
    node_price: float = NODE_PRICE

    def __post_init__(self) -> None:
        if self.sending_hosts < 0:
            raise SettingsError(f"sending_hosts={self.sending_hosts}: 0 or more machines send")
        for name in self.__dataclass_fields__:
            if name not in ("sending_hosts", "stall_s", "node_price") and not getattr(self, name) > 0:
                raise SettingsError(f"{name}={getattr(self, name)}: it must be more than 0")
        for name in ("stall_s", "node_price"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}={getattr(self, name)}: it must be 0 or more")

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
        by_hosts: whether the machines' own network is what bounds it: faster nodes would change nothing.
        pays: whether what the nodes save is more than they cost.
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
    pays: bool


def size(demand: Demand, replicas: int | None = None) -> Rent:
    """The memory nodes with which the job costs least: what the machines lose, and the nodes.

    Args:
        demand: the job.
        replicas: how many; ``None`` for one or two, whichever costs less.

    Raises:
        SettingsError: if the memory of thousands of nodes would not do, or ``replicas`` is less than 1.
    """
    if replicas is not None and replicas < 1:
        raise SettingsError(f"replicas={replicas}: at least 1")
    choices = [
        (count, nodes) for count in ((1, 2) if replicas is None else (replicas,)) for nodes in _counts(demand, count)
    ]
    replicas, nodes = min(choices, key=lambda choice: _cost(demand, *choice))
    safe_s = _safe_s(demand, replicas, nodes)
    interval_s = _period_s(demand, safe_s)
    held_bytes = replicas * demand.state_bytes / nodes
    alone = _lost(demand, demand.state_bytes / (demand.senders * demand.durable_bytes_per_s))
    return Rent(
        nodes=nodes,
        replicas=replicas,
        memory_bytes=COPIES * held_bytes,
        in_bytes_per_s=held_bytes / safe_s,
        out_bytes_per_s=min(demand.durable_bytes_per_s, demand.state_bytes / nodes / interval_s),
        safe_s=safe_s,
        interval_s=interval_s,
        lost=_lost_with(demand, replicas, nodes),
        alone=alone,
        by_hosts=_hosts_s(demand, replicas) >= _nodes_s(demand, replicas, nodes),
        pays=_cost(demand, replicas, nodes) < demand.hosts * alone,
    )


def both_lost(demand: Demand, nodes: int) -> float:
    """Share of the time that is lost, with one replica, to a memory node and a machine that go together.

    A lost node's snapshots are sent to another one at once. A machine that is lost before they are there takes the job
    back to the durable tier.
    """
    gone_s = NOTICED_S + _safe_s(demand, 1, nodes)
    durable_s = demand.state_bytes / (nodes * demand.durable_bytes_per_s)
    back_s = lost_s(_period_s(demand, _safe_s(demand, 1, nodes)), durable_s)
    return nodes / demand.node_lifetime_s * min(1.0, gone_s / demand.mtbf_s) * back_s


def _counts(demand: Demand, replicas: int) -> range:
    """Numbers of nodes with enough memory for so many replicas, up to one for each share of each."""
    fewest = max(replicas, math.ceil(COPIES * replicas * demand.state_bytes / demand.node_memory_bytes))
    if fewest > _MOST_NODES:
        raise SettingsError(
            f"{replicas} replicas of {demand.state_bytes:.3g} bytes need {fewest} nodes of"
            f" {demand.node_memory_bytes:.3g} bytes of memory: take larger ones"
        )
    return range(fewest, max(fewest, min(_MOST_NODES, replicas * demand.senders)) + 1)


def _cost(demand: Demand, replicas: int, nodes: int) -> float:
    """What the machines lose and the nodes cost, in prices of a machine."""
    return demand.hosts * _lost_with(demand, replicas, nodes) + demand.node_price * nodes


def _lost_with(demand: Demand, replicas: int, nodes: int) -> float:
    return _lost(demand, _safe_s(demand, replicas, nodes)) + (both_lost(demand, nodes) if replicas == 1 else 0.0)


def _hosts_s(demand: Demand, replicas: int) -> float:
    """Seconds in which the hosts send a snapshot to all its replicas."""
    return replicas * demand.state_bytes / (demand.senders * demand.host_bytes_per_s)


def _nodes_s(demand: Demand, replicas: int, nodes: int) -> float:
    """Seconds in which the nodes receive it; a share goes to one node for each replica, so more than that are idle."""
    used = min(nodes, replicas * demand.senders)
    return replicas * demand.state_bytes / (used * demand.node_bytes_per_s)


def _safe_s(demand: Demand, replicas: int, nodes: int) -> float:
    return max(_hosts_s(demand, replicas), _nodes_s(demand, replicas, nodes))


def _period_s(demand: Demand, safe_s: float) -> float:
    """Young's interval, and never shorter than the tier takes one snapshot: see docs/intervals.md."""
    return max(math.sqrt(2 * demand.stall_s * demand.mtbf_s), safe_s)


def _lost(demand: Demand, safe_s: float) -> float:
    classes = [FailureClass(drain_s=safe_s)]
    return min(1.0, overhead(_period_s(demand, safe_s), demand.stall_s, demand.mtbf_s, classes))
