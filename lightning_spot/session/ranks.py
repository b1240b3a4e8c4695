"""What the ranks of a run tell each other outside of collectives, and the scheduler that started them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_spot.config import read_environment
from lightning_spot.errors import SpotError
from lightning_spot.preemption.key_value import KeyValueClient, KeyValueServer
from lightning_spot.preemption.stop_agreement import StopAgreement
from lightning_spot.protocol.listening import LOOPBACK, allow_descriptors, facing, resolved
from lightning_spot.protocol.process import descendants
from lightning_spot.run.export import this_host
from lightning_spot.say import say
from lightning_spot.session.collectives import Agreement
from lightning_spot.state import compat, namespaces
from lightning_spot.state.fit_state import FitState

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

_FILES_OF_A_RANK = 3  # a connection to the key-value channel, besides its own


def main_address(trainer: pl.Trainer) -> str:
    """Address of rank 0, as all ranks know it."""
    return str(compat.CLUSTER_ENVIRONMENT.of(compat.ACCELERATOR_CONNECTOR.of(trainer)).main_address)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a run meet beside the process group.

    Attributes:
        main: name or address of rank 0's host, as all ranks know it.
        hosts: of each rank.
        seen: the address that ``main`` has for each rank, ``""`` if none.
        rank: this one.
    """

    main: str
    hosts: Sequence[str]
    seen: Sequence[str]
    rank: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Meeting:
        """Find out who is where. Every rank calls it."""
        agreement, main = Agreement(trainer), main_address(trainer)
        hosts, seen = zip(*agreement.gather((this_host(), resolved(main))), strict=True)
        return cls(main, hosts, seen, agreement.rank)

    def listen(self) -> str:
        """On rank 0: the one address at which it listens. Where all ranks are on one host, that is loopback.

        Its own name may be loopback to itself, as Debian writes it into /etc/hosts. So the others' view of it counts.

        Raises:
            OSError: if there is no way to the others.
        """
        if len(set(self.hosts)) == 1:
            return LOOPBACK
        others = (seen for host, seen in zip(self.hosts, self.seen, strict=True) if host != self.hosts[0] and seen)
        return facing(next(others, self.main))

    def connect(self, listen: str) -> str:
        """The address at which this rank reaches rank 0, which listens at ``listen``."""
        return listen if self.hosts[self.rank] == self.hosts[0] else self.main


class Ranks:
    """A key-value channel of the run's own, beside the process group; nothing at all for a single rank.

    Args:
        trainer: whose ranks they are; the process group exists.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._agreement = agreement = Agreement(trainer)
        self._stop: StopAgreement | None = None
        self._server: KeyValueServer | None = None
        if agreement.size > 1:
            if agreement.rank == 0:  # what most systems allow a process at first, 1,024, does for 340 ranks
                allow_descriptors(_FILES_OF_A_RANK * agreement.size)
            secret, meeting = secrets.token_hex(16), Meeting.of(trainer)
            self._server = agreement.on_rank_zero(lambda: KeyValueServer(secret, meeting.listen(), agreement.size))
            mine = (meeting.listen(), self._server.port, secret) if self._server is not None else None
            listen, port, secret = agreement.tell(mine)
            self._address = (meeting.connect(listen), port, secret)

    def stop_agreement(self, called: Callable[[], dict[str, Any] | None]) -> StopAgreement:
        """The agreement on where to stop. Every rank makes it, once.

        Raises:
            SpotError: on all ranks, if one of them does not reach rank 0.
        """
        rank, size = self._agreement.rank, self._agreement.size
        channel = self._agreement.together(self._channel) if size > 1 else None
        self._stop = StopAgreement(rank=rank, world_size=size, channel=channel, called=called)
        return self._stop

    def _channel(self) -> KeyValueClient:
        host, port, _ = self._address
        try:
            return KeyValueClient(*self._address)
        except OSError as error:
            raise SpotError(
                f"rank 0 cannot be reached at {host}:{port} ({error}), where ranks agree on a stop. Let hosts connect"
                " to each other at any port, or pass notices=None"
            ) from error

    def part(self, wait_s: float) -> None:
        """Return when the first rank has left, or after ``wait_s`` seconds; on the first rank, at once.

        It leaves first because launchers end all ranks once one has ended, and it has the snapshot to bring to safety.
        """
        self.close()
        if self._agreement.size == 1 or self._agreement.rank == 0:
            return
        try:
            with contextlib.closing(KeyValueClient(*self._address)) as channel:
                channel.get("never published", wait_s)
        except OSError as error:  # which is what was waited for; it may have gone before this rank came to wait
            logger.debug("rank 0 has left: %s", error)

    def close(self) -> None:
        """Let the channel go. The first rank's stays until its process ends: see :meth:`part`."""
        if self._stop is not None:
            self._stop.close()

    def end(self, *, over: bool) -> None:
        """Close the channel for all ranks.

        Args:
            over: training has come to its end, or to another ``fit``; else an exception has ended it.
        """
        self.close()
        if self._server is not None:
            self._server.close(over=over)


def is_requeued_by_slurm(trainer: pl.Trainer) -> bool:
    """Whether Lightning is to ask SLURM for another turn when a job is cut off."""
    if not FitState.of(trainer).can(compat.ENVIRONMENT):
        return False
    environment = compat.CLUSTER_ENVIRONMENT.of(compat.ACCELERATOR_CONNECTOR.of(trainer))
    kinds = namespaces.classes("fabric.plugins.environments", "SLURMEnvironment")
    return isinstance(environment, kinds) and bool(environment.auto_requeue)


def requeue_slurm_job() -> None:
    """Ask SLURM to queue this job again, as Lightning does on its requeue signal."""
    job = read_environment().slurm_job or ""
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=30, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        text = "SLURM did not take job {about} back ({error}). Submit it again"
        say(logging.WARNING, "not-requeued", text, about=job, error=error)
    else:
        say(logging.INFO, "requeued", "SLURM queues job {about} again", about=job)


def end_restarts_here() -> None:
    """When this process ends, tell whoever would start it again on this machine, which will be taken away.

    torchrun starts ranks again whatever they end with: they would only stop again, until the machine is gone or no
    restart is left.
    """
    restarter = read_environment().restarter_pid
    if restarter is None:
        return
    own = os.getpid()
    text = "process {about} is not told that this machine goes ({why}). Let what starts the training set its number"

    def tell() -> None:
        if os.getpid() != own:  # a forked child
            return
        try:
            if own not in descendants(restarter):  # looked at when the state is secured: it takes time, and may fail
                raise ProcessLookupError("it is no parent of this process")  # another one, or that of a container
            os.kill(restarter, signal.SIGTERM)
        except OSError as error:
            say(logging.WARNING, "not-the-restarter", text, about=restarter, why=error)

    atexit.register(tell)
