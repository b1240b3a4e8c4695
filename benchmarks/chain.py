"""1 GB over an emulated 5 Gbit/s link: how long after its first copied byte a snapshot is safe at the snapshot server.

Two network namespaces, a veth pair between them with the MTU of cloud networks, and ``tc`` that shapes both ends. Needs
root; without it nothing is measured, and said so. Everything made for it is removed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, scratch

BITS_PER_S = 5e9
MTU = 9001
TARGET = 1.15
_TOKEN = "chain-benchmark"


class NotPermitted(Exception):
    """This machine gives no network namespaces, or no shaping of their traffic."""


class Link:
    """Two namespaces with a shaped link between them.

    Attributes:
        near: the trainer's namespace.
        far: the snapshot server's.
        address: of the snapshot server.
    """

    def __init__(self, name: str) -> None:
        self.near, self.far = f"{name}-n", f"{name}-f"
        subnet = f"10.77.{os.getpid() % 250}"
        self.address = f"{subnet}.2"
        self._commands = [
            f"ip netns add {self.near}",
            f"ip netns add {self.far}",
            f"ip link add veth0 netns {self.near} mtu {MTU} type veth peer name veth0 netns {self.far} mtu {MTU}",
            f"ip -n {self.near} addr add {subnet}.1/24 dev veth0",
            f"ip -n {self.far} addr add {subnet}.2/24 dev veth0",
        ]
        for namespace in (self.near, self.far):
            shape = f"root tbf rate {int(BITS_PER_S)}bit burst 1mb latency 20ms"
            self._commands += [
                f"ip -n {namespace} link set lo up",
                f"ip -n {namespace} link set veth0 up",
                f"tc -n {namespace} qdisc add dev veth0 {shape}",
            ]

    def __enter__(self) -> Link:
        try:
            for command in self._commands:
                done = subprocess.run(command.split(), capture_output=True, check=False)
                if done.returncode != 0:
                    raise NotPermitted(f"{command}: {done.stderr.decode().strip()}")
        except (NotPermitted, OSError) as error:
            self.remove()
            raise NotPermitted(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        for namespace in (self.near, self.far):  # its end of the link goes with it, and so does the other
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def run(quick: bool) -> list[Result]:
    try:
        with Link(f"ls-chain-{os.getpid()}") as link:
            found = measure(link, rounds=3 if quick else 7)
    except NotPermitted as reason:
        print(f"chain: not measured, {reason}", file=sys.stderr)
        return []
    print(f"chain: {json.dumps(found)}", file=sys.stderr)
    ideal_s = found["nbytes"] * 8 / BITS_PER_S
    return [
        Result(
            "1 GB safe at a snapshot server over 5 Gbit/s / bytes over bandwidth",
            _over(found["safe_s"], ideal_s),
            TARGET,
        ),
        Result("the same bytes over plain sockets", _over(found["raw_s"], ideal_s), None),
    ]


def _over(values: list[float], ideal_s: float) -> list[float]:
    return [value / ideal_s for value in values]


def measure(link: Link, rounds: int) -> dict[str, Any]:
    """Seconds from the first copied byte until the snapshot server has committed, for each round."""
    with scratch() as folder, _node(link, folder):
        command = ["ip", "netns", "exec", link.near, sys.executable, "-m", "benchmarks.chain_trainer"]
        command += [f"spot://{link.address}:7070", str(folder / "run-1"), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(folder / "run"), check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-3000:])
        return dict(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def _node(link: Link, folder: Path) -> Iterator[None]:
    command = ["ip", "netns", "exec", link.far, sys.executable, "-m", "lightning_spot", "serve"]
    command += ["--listen", f"{link.address}:7070", "--memory-limit", "4GiB", "--allow-storage", str(folder)]
    with open(folder / "node.log", "wb") as log:
        node = subprocess.Popen(command, stdout=log, stderr=log, env=_environment(folder / "far"))
    raw = subprocess.Popen(
        ["ip", "netns", "exec", link.far, sys.executable, "-m", "benchmarks.chain_trainer", "receive", link.address]
    )
    try:
        deadline = time.monotonic() + 60
        while "listening" not in (folder / "node.log").read_text():
            if node.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "node.log").read_text())
            time.sleep(0.05)
        yield
    finally:
        for process in (raw, node):
            process.kill()
            process.wait()


def _environment(runtime: Path) -> dict[str, str]:
    """Each end has a runtime directory of its own, as two machines have."""
    runtime.mkdir(exist_ok=True, mode=0o700)
    return {**os.environ, "LIGHTNING_SPOT_TOKEN": _TOKEN, "LIGHTNING_SPOT_RUNTIME_DIR": str(runtime)}
