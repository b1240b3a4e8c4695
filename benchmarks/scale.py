"""One snapshot server under many clients on loopback: throughput, fairness, memory, and how long a commit takes.

Each client is a run of its own that commits one snapshot after the other, as fast as it can: more than any training
would. The same is measured with one client; both share the processors with the server, and what either takes of them is
told apart. Small snapshots in small parts show what a commit costs, larger ones what bytes do. What it takes to make
slots is not measured: that is done once for each run.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scale_clients import SLOTS

CLIENTS = 64
NBYTES, PART_BYTES = 8 * 2**20, 2**20
_PROCESSES = 4


@dataclass(frozen=True)
class Kind:
    """What the clients send.

    Attributes:
        name: for people.
        nbytes: of a snapshot.
        part_bytes: of its parts.
        carried: whether the server brings each run on to a directory in memory.
    """

    name: str
    nbytes: int = NBYTES
    part_bytes: int = PART_BYTES
    carried: bool = False

    @property
    def memory_bytes(self) -> int:
        """That a server must be allowed, so that nobody waits for room."""
        return (CLIENTS + 1) * SLOTS * self.nbytes * 2


SMALL = Kind("8 MiB in parts of 1 MiB")
CARRIED = Kind("8 MiB in parts of 1 MiB, carried on to a directory", carried=True)
LARGE = Kind("32 MiB in parts of 8 MiB", 32 * 2**20, 8 * 2**20)


@dataclass(frozen=True)
class Load:
    """What a server did under a number of clients.

    Attributes:
        clients: how many.
        commits: snapshots that were committed, by client.
        bytes_per_s: of all of them together.
        median_s, p99_s, longest_s: of one commit, from the asking for a slot on.
        fairness: Jain's index of the clients' commits: 1 if all have the same number, 1/n if one has them all.
        node_cpu_s_per_gib: processor time of the server.
        client_cpu_s_per_gib: processor time of all clients together.
        own_bytes: most memory of the server beyond slots.
        threads: most threads of the server.
        errors: what any client met with.
    """

    clients: int
    commits: list[int]
    bytes_per_s: float
    median_s: float
    p99_s: float
    longest_s: float
    fairness: float
    node_cpu_s_per_gib: float
    client_cpu_s_per_gib: float
    own_bytes: int
    threads: int
    errors: list[str]


@contextlib.contextmanager
def node(folder: Path, memory_bytes: int, allow: Path | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """A server as a process with a runtime directory of its own; it may write below ``allow``."""
    command = [
        sys.executable,
        "-m",
        "lightning_spot",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--memory-limit",
        str(memory_bytes),
    ]
    command += ["--allow-storage", str(allow)] if allow is not None else []
    environment = {**os.environ, "LIGHTNING_SPOT_RUNTIME_DIR": str(folder)}
    with open(folder / "node.log", "wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split("listening on ")[1].split(",")[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def measure(
    url: str,
    process: psutil.Process,
    *,
    clients: int,
    seconds: float,
    kind: Kind = SMALL,
    first: int = 0,
    durable: Path | None = None,
) -> Load:
    """Let so many clients commit snapshots for so long.

    Args:
        url: of the server.
        process: of the server.
        clients: how many.
        seconds: how long.
        kind: of snapshots.
        first: number of the first run.
        durable: directory that the server brings the runs on to, if it does.
    """
    counts = [count for count in (_share(clients, place) for place in range(_PROCESSES)) if count]
    places = [first + sum(counts[:place]) for place in range(len(counts))]
    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(_sender(url, place, count, kind, seconds, durable))
            for place, count in zip(places, counts, strict=True)
        ]
        for sender in senders:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "ready\n"
        cpu_s = sum(process.cpu_times()[:2])
        for sender in senders:
            assert sender.stdin is not None
            sender.stdin.write("go\n")
            sender.stdin.flush()
        own_bytes, threads = _watch(process, senders)
        cpu_s = sum(process.cpu_times()[:2]) - cpu_s
        found: list[dict[str, Any]] = []
        clients_cpu_s = 0.0
        for sender in senders:
            assert sender.stdout is not None
            told = json.loads(sender.stdout.read())
            found += told["clients"]
            clients_cpu_s += told["cpu_s"]
    return _load(found, kind.nbytes, (cpu_s, clients_cpu_s), own_bytes, threads)


def _share(clients: int, place: int) -> int:
    return clients * (place + 1) // _PROCESSES - clients * place // _PROCESSES


@contextlib.contextmanager
def _sender(
    url: str, first: int, count: int, kind: Kind, seconds: float, durable: Path | None
) -> Iterator[subprocess.Popen[str]]:
    numbers = (str(value) for value in (first, count, kind.nbytes, kind.part_bytes, seconds))
    command = [sys.executable, "-m", "benchmarks.scale_clients", url, *numbers]
    command += [str(durable)] if durable is not None else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _watch(process: psutil.Process, senders: list[subprocess.Popen[str]]) -> tuple[int, int]:
    """The server's memory beyond shared one, and its threads, at most, until the senders end."""
    own_bytes = threads = 0
    waiting = list(senders)
    while waiting:
        with contextlib.suppress(subprocess.TimeoutExpired):
            waiting[0].wait(0.2)
        memory = process.memory_info()
        own_bytes = max(own_bytes, memory.rss - memory.shared)
        threads = max(threads, process.num_threads())
        waiting = [sender for sender in waiting if sender.poll() is None]
    return own_bytes, threads


def _load(found: list[dict[str, Any]], nbytes: int, cpu_s: tuple[float, float], own_bytes: int, threads: int) -> Load:
    commits = [len(client["commits"]) for client in found]
    times = sorted((began_s, ended_s) for client in found for began_s, ended_s in client["commits"])
    took_s = sorted(ended_s - began_s for began_s, ended_s in times)
    total_bytes = nbytes * len(times)
    span_s = max(ended_s for _, ended_s in times) - times[0][0]
    return Load(
        clients=len(found),
        commits=commits,
        bytes_per_s=total_bytes / span_s,
        median_s=statistics.median(took_s),
        p99_s=took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))],
        longest_s=took_s[-1],
        fairness=sum(commits) ** 2 / (len(commits) * sum(count**2 for count in commits)),
        node_cpu_s_per_gib=cpu_s[0] / (total_bytes / 2**30),
        client_cpu_s_per_gib=cpu_s[1] / (total_bytes / 2**30),
        own_bytes=own_bytes,
        threads=threads,
        errors=[error for client in found for error in client["errors"]],
    )


def run(quick: bool) -> list[Any]:
    kinds = [SMALL] if quick else [SMALL, CARRIED, LARGE]
    return [result for kind in kinds if _fits(kind) for result in _of(kind, quick)]


def _fits(kind: Kind) -> bool:
    """Whether slots, and the clients' own copies, fit the memory that is free; else it is said."""
    needed = kind.memory_bytes // 2 + (CLIENTS + 1) * kind.nbytes * (1 + SLOTS * kind.carried)
    available: int = psutil.virtual_memory().available
    if needed > available:
        print(f"  {kind.name} is left out: {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} are free", flush=True)
    return needed <= available


def _of(kind: Kind, quick: bool) -> list[Any]:
    from benchmarks.measure import Result, scratch  # torch, which nothing else here needs

    seconds = 4.0 if quick else 10.0
    one: list[Load] = []
    many: list[Load] = []
    print(f"  {kind.name}:")
    with scratch() as folder:
        below = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"]) / "durable" if kind.carried else None
        with node(folder, kind.memory_bytes, below) as (url, process):
            for _ in range(2 if quick else 3):
                for loads, clients, first, share in ((one, 1, 10**6, 0.5), (many, CLIENTS, 0, 1.0)):
                    load = measure(
                        url,
                        process,
                        clients=clients,
                        seconds=share * seconds,
                        kind=kind,
                        first=first,
                        durable=below,
                    )
                    loads.append(load)
                    print(f"  {_line(load)}", flush=True)
    ratio = [of_many.bytes_per_s / of_one.bytes_per_s for of_one, of_many in zip(one, many, strict=True)]
    cpu = [of_many.node_cpu_s_per_gib / of_one.node_cpu_s_per_gib for of_one, of_many in zip(one, many, strict=True)]
    late = [load.p99_s / (load.clients * kind.nbytes / load.bytes_per_s) for load in many]
    return [
        Result(f"{kind.name}: bytes of {CLIENTS} clients at one server / bytes of one", ratio, 0.8, at_most=False),
        Result("CPU seconds of the server a GiB, likewise", cpu, None),
        Result("fairness between them (Jain's index)", [load.fairness for load in many], 0.9, at_most=False, unit=""),
        Result("99 % of commits / the time in which every client could have one", late, 3.0),
    ]


def _line(load: Load) -> str:
    return (
        f"{load.clients} clients: {load.bytes_per_s / 2**30:.2f} GiB/s, {sum(load.commits)} commits"
        f" ({min(load.commits)}–{max(load.commits)} each, fairness {load.fairness:.3f}), median"
        f" {1000 * load.median_s:.0f} ms, p99 {1000 * load.p99_s:.0f} ms, longest {1000 * load.longest_s:.0f} ms;"
        f" CPU s per GiB: server {load.node_cpu_s_per_gib:.2f}, clients {load.client_cpu_s_per_gib:.2f}; server:"
        f" {load.own_bytes / 2**20:.0f} MiB of its own, {load.threads} threads; errors: {len(load.errors)}"
        f" {load.errors[:2]}"
    )
