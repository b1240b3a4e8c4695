"""Hosts that are network namespaces on one switch, for tests of several machines. Needs root; all of it is removed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

from benchmarks.chain import NotPermitted
from tests.support.link import Link
from tests.support.waiting import until

TOKEN = "secret-of-several-hosts"

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


class Network:
    """Hosts with a link each to a switch.

    Args:
        name: that no other network has.
        hosts: names of the hosts.
        root: folder for what each host has on its own.
        python: that is started there; default: that of this process.
        prefix: of the addresses; with colons, the hosts know no IPv4.

    Attributes:
        address: of each host.
    """

    def __init__(
        self, name: str, hosts: Sequence[str], root: Path, python: str = sys.executable, prefix: str = ""
    ) -> None:
        prefix = prefix or f"10.79.{os.getpid() % 250}."
        self.address = {host: f"{prefix}{number}" for number, host in enumerate(hosts, 1)}
        self._name = name
        self._root, self._python = root, python
        self._processes: list[subprocess.Popen[bytes]] = []
        self._machines = dict.fromkeys(hosts, 0)
        self._switch = f"{name}-switch"
        self._links = dict.fromkeys(hosts, Link())
        self._movers: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Network:
        try:
            self._ip(f"netns add {self._switch}")
            self._ip(f"-n {self._switch} link add hub type bridge")
            self._ip(f"-n {self._switch} link set hub up")
            for host in self.address:
                self._plug_in(host)
            for host in self.address:
                until(lambda host=host: self._is_up(host), f"the link of {host}")  # type: ignore[misc]
        except (NotPermitted, OSError) as error:
            self.remove()
            raise NotPermitted(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def folder(self, host: str) -> Path:
        """What this machine has on its own: gone when it is lost."""
        return self._root / f"{host}-{self._machines[host]}"

    def machine(self, host: str) -> dict[str, Any]:
        """What a process needs to be on that machine: ``namespace``, ``directory``, ``environment``, ``python``."""
        folder = self.folder(host)
        folder.mkdir(exist_ok=True, mode=0o700)
        environment = {
            "LIGHTNING_SPOT_TOKEN": TOKEN,
            "LIGHTNING_SPOT_RUNTIME_DIR": str(folder),
            "LIGHTNING_SPOT_SHM_DIR": "",
            "LIGHTNING_SPOT_CLOUD": "none",
        }
        return {
            "namespace": self._namespace(host),
            "directory": str(folder),
            "environment": environment,
            "python": self._python,
        }

    def start(self, host: str, *arguments: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a Python there."""
        command = ["ip", "netns", "exec", self._namespace(host), self._python, *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **self.machine(host)["environment"]},
            cwd=Path(__file__).parents[2],
        )
        self._processes.append(process)
        return process

    def lose(self, host: str) -> None:
        """The machine is gone: all of its processes, and what it had on its own. Another one takes its address."""
        there = self.processes(host)
        for process in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for started in self._processes:
            if started.poll() is None and started.pid in there:
                started.wait()
        self._machines[host] += 1

    def there(self, host: str, do: Callable[[], T]) -> T:
        """Do something on that host within this process: connections and threads that are made then are there."""
        libc, own = ctypes.CDLL(None, use_errno=True), Path("/run/netns") / self._namespace(host)

        def enter() -> T:
            with open(own) as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "this thread cannot go there")
            return do()

        with ThreadPoolExecutor(1) as thread:  # which ends there
            return thread.submit(enter).result()

    def processes(self, host: str) -> list[int]:
        """That run there."""
        return list(map(int, self._said("ip", f"netns pids {self._namespace(host)}").split()))

    def cut(self, host: str) -> None:
        """Nothing comes from the host any more, or to it; nobody is told."""
        self._ip(f"-n {self._switch} link set {host} down")

    def mend(self, host: str) -> None:
        """Its link works again."""
        self._ip(f"-n {self._switch} link set {host} up")

    def shape(self, host: str, **link: float) -> None:
        """Have what the host sends go by another link; what is not named of it stays as it is. See :class:`Link`.

        A process does it, since few kernels have ``netem``. Where it cannot, the test is skipped.
        """
        self._links[host] = now = dataclasses.replace(self._links[host], **link)  # type: ignore[arg-type] # rates
        try:
            if host not in self._movers:
                self._move_by_process(host)
        except (NotPermitted, OSError) as problem:
            pytest.skip(f"links here have no delay and lose nothing: {problem}")
        self._tell(self._movers[host], now.to_json())

    def _move_by_process(self, host: str) -> None:
        """Put a process between a host and the switch."""
        for command in (
            f"-n {self._namespace(host)} link set eth0 gso_max_segs 1",  # else dozens of packets are lost at once
            f"-n {self._switch} link set {host} nomaster",
            f"-n {self._switch} link add {host}-in type veth peer name {host}-out",
            f"-n {self._switch} link set {host}-in master hub up",
            f"-n {self._switch} link set {host}-out addrgenmode none up",
        ):
            self._ip(command)
        command = ["ip", "netns", "exec", self._switch, sys.executable, "-m", "tests.support.link", host, f"{host}-out"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        mover = subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes)  # type: ignore[call-overload]
        self._movers[host] = mover
        self._heard(mover, "ready")

    def _tell(self, mover: subprocess.Popen[str], line: str) -> None:
        mover.stdin.write(line + "\n")
        mover.stdin.flush()
        self._heard(mover, "taken")

    def _heard(self, mover: subprocess.Popen[str], word: str) -> None:
        if (said := mover.stdout.readline().strip()) != word:
            mover.kill()
            raise NotPermitted(f"{said}{mover.communicate()[1][-500:]}")

    def received(self, host: str) -> int:
        """Bytes that have come to a host."""
        where = "/sys/class/net/eth0/statistics/rx_bytes"
        return int(self._said("ip", f"netns exec {self._namespace(host)} cat {where}"))

    def remove(self) -> None:
        """End what was started, and remove the namespaces with their links."""
        for host in self.address:
            with contextlib.suppress(OSError, NotPermitted):
                self.lose(host)
        for process in (*self._processes, *self._movers.values()):
            process.kill()
            process.wait()
        for mover in self._movers.values():
            for pipe in (mover.stdin, mover.stdout, mover.stderr):
                if pipe is not None:
                    pipe.close()
        for namespace in (self._switch, *map(self._namespace, self.address)):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def _plug_in(self, host: str) -> None:
        inside = self._namespace(host)
        self._ip(f"netns add {inside}")
        self._ip(f"link add {host} netns {self._switch} type veth peer name eth0 netns {inside}")
        self._ip(f"-n {self._switch} link set {host} master hub up")
        if ":" in (address := self.address[host]):
            self._ip(
                f"-n {inside} link set eth0 addrgenmode none"
            )  # ranks would choose one that is good on its link only
            self._ip(f"-n {inside} addr add {address}/64 dev eth0 nodad")
        else:
            self._ip(f"-n {inside} addr add {address}/24 dev eth0")
        for device in ("lo", "eth0"):
            self._ip(f"-n {inside} link set {device} up")

    def _is_up(self, host: str) -> bool:
        """Whether both ends of its link are: what is sent before is lost, and sent again a second later, if at all."""
        ends = (self._namespace(host), "eth0"), (self._switch, host)
        return all("state UP" in self._said("ip", f"-n {inside} -o link show {device}") for inside, device in ends)

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _ip(self, arguments: str) -> None:
        self._said("ip", arguments)

    def _said(self, program: str, arguments: str) -> str:
        done = subprocess.run([program, *arguments.split()], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotPermitted(f"{program} {arguments}: {done.stderr.strip()}")
        return done.stdout


@contextlib.contextmanager
def network_or_skip(
    name: str, hosts: Sequence[str], python: str = sys.executable, prefix: str = ""
) -> Iterator[Network]:
    """A network of this process; where none can be made, the test is skipped. See :class:`Network`."""
    root = Path(os.environ["LIGHTNING_SPOT_RUNTIME_DIR"])  # of the test, and short enough for paths of sockets
    try:
        with Network(f"ls-{name}-{os.getpid()}", hosts, root, python, prefix) as network:
            yield network
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def listening(network: Network, host: str, port: int, log: Path, *more: str) -> str:
    """Start a snapshot server on a host; its URL once it listens."""
    address = network.address[host]
    url = f"spot://[{address}]:{port}" if ":" in address else f"spot://{address}:{port}"
    flags = ["--listen", url.removeprefix("spot://"), "--memory-limit", "512MiB", *more]
    with open(log, "wb") as output:
        process = network.start(host, "-m", "lightning_spot", "serve", *flags, log=output)

    def is_there() -> bool:
        assert process.poll() is None, log.read_text()
        return "listening" in log.read_text()

    until(is_there, f"{url} to listen")
    return url
