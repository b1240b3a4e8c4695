"""``lightning-spot drill``: runs a user's training undisturbed and with kills, and compares the ends bit by bit."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_spot.cli.arguments import add_program, program_of, takes_number, takes_time
from lightning_spot.cli.diff import Verdict, compare_states
from lightning_spot.cli.output import add_output, error_console, print_answer
from lightning_spot.config import DRILL_VARIABLE, NOTICE_FILE_VARIABLE, format_count
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.protocol.process import descendants
from lightning_spot.protocol.record import find_record
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore

WAYS = ("notice", "SIGTERM", "SIGKILL")
_POLL_S = 0.02
_ENDED = (143, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGKILL)
"""With what a training ends that was disturbed."""


@dataclass(frozen=True, slots=True)
class Training:
    """The command that trains, while it runs.

    Attributes:
        process: it leads its process group.
        folder: below which it keeps its run.
    """

    process: subprocess.Popen[bytes]
    folder: Path

    def launched(self) -> list[int]:
        """Processes that a launcher such as torchrun has put into groups of their own, and not the run's server."""
        if self.process.poll() is not None:  # its number may be another process's by now
            return []
        servers = [find_record(str(run)).process() for run in (self.folder / "runs").glob("*")]
        known = {server.pid for server in servers if server is not None}
        return [pid for pid in descendants(self.process.pid) if pid not in known and not self._is_in_group(pid)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process group; what ends them at once, to what was launched as well."""
        launched = self.launched() if number == signal.SIGKILL else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        for pid in launched:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_in_group(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) == self.process.pid
        except ProcessLookupError:  # it has ended, and needs no signal
            return True


@contextlib.contextmanager
def training(command: list[str], folder: Path, notice: Path) -> Iterator[Training]:
    """Run a command until it is left: then all of it is ended, but its server.

    Args:
        command: that trains.
        folder: for its run, and its log.
        notice: a file that is a notice to it, once it is there.

    Raises:
        SettingsError: if it cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours = {DRILL_VARIABLE: str(folder), NOTICE_FILE_VARIABLE: str(notice), "LIGHTNING_SPOT_CLOUD": "none"}
    environment = {**os.environ, **ours}
    with open(folder / "log", "ab") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        except OSError as error:
            raise SettingsError(f"{command[0]!r} cannot be started: {error.strerror}") from error
    found = Training(process, folder)
    try:
        yield found
    finally:
        found.send(signal.SIGKILL)  # its ranks, if it was killed itself
        process.wait()


class DrillFailedError(SpotError):
    """The drill could not be carried out: the training itself failed, or never took a snapshot."""


@dataclass(kw_only=True)
class Drill:
    """One drill.

    Attributes:
        command: that trains.
        folder: where everything is kept.
        kills: how often the second run is disturbed.
        limit_s: the longest that an undisturbed run may take.
        chance: decides when and how.
        disturbances: what was done, for the report.
    """

    command: list[str]
    folder: Path
    kills: int
    limit_s: float
    chance: random.Random
    disturbances: list[str] = field(default_factory=list)
    _is_launched: bool = False  # by a launcher, which ends with a code of its own

    def run(self) -> Verdict:
        """Carry it out."""
        undisturbed, disturbed = self.folder / "undisturbed", self.folder / "disturbed"
        started = time.monotonic()
        self._undisturbed(undisturbed, disturbed)
        self._disturbed(disturbed, time.monotonic() - started, _newest_step(undisturbed))
        if not self.disturbances:
            raise DrillFailedError("the second run was done before it was disturbed: the training has to take longer")
        return compare_states(_final(undisturbed), _final(disturbed))

    def _undisturbed(self, undisturbed: Path, disturbed: Path) -> None:
        """Train to the end. The second run begins with the first snapshot of this one, so that no seed is needed."""
        with training(self.command, undisturbed, undisturbed / "no-notice") as trained:
            for _ in self._moments(trained):
                if not disturbed.exists():
                    self._is_launched = self._is_launched or bool(trained.launched())
                    _begin_with_first_snapshot(undisturbed, disturbed)
        if code := trained.process.returncode:
            raise DrillFailedError(f"the undisturbed training ended with exit code {code}:\n{_tail(undisturbed)}")
        if not disturbed.exists():
            raise DrillFailedError(
                "the training took no snapshot before its last one: it must use SpotCheckpoint, and take longer than"
                " its first few steps"
            )

    def _disturbed(self, disturbed: Path, took_s: float, steps: int) -> None:
        """Train to the end, after each disturbance again."""
        for _ in range(self.kills + 1):
            (notice := disturbed / "notice").unlink(missing_ok=True)
            done = len(self.disturbances)
            with training(self.command, disturbed, notice) as trained:
                while self._comes_to_a_moment(trained, took_s, steps):
                    attempts = _attempts(disturbed)
                    self._disturb(trained, notice)
                    if not self._goes_on(trained, attempts):
                        break
                self._goes_on(trained)
            if (code := trained.process.returncode) == 0:
                return
            if len(self.disturbances) == done or (code not in _ENDED and not self._is_launched):
                raise DrillFailedError(f"a resumed training ended with exit code {code}:\n{_tail(disturbed)}")

    def _moments(self, trained: Training) -> Iterator[None]:
        """Moments until a training ends."""
        deadline_s = time.monotonic() + self.limit_s
        while trained.process.poll() is None:
            if time.monotonic() > deadline_s:
                late = f"the training is not done after {self.limit_s:.0f} s: give it less, or --limit"
                raise DrillFailedError(f"{late}\n{_tail(trained.folder)}")
            yield
            time.sleep(_POLL_S)

    def _goes_on(self, trained: Training, attempts: float = math.inf) -> bool:
        """Whether a launcher has started the training again after so many attempts, instead of ending.

        Or it has started it only now, and that one is told: then it ends a moment later.
        """
        return any(_attempts(trained.folder) > attempts for _ in self._moments(trained))

    def _comes_to_a_moment(self, trained: Training, took_s: float, steps: int) -> bool:
        """Wait for a random moment of an undisturbed run's time, or of the steps that are left if sooner.

        Returns:
            whether it is to be disturbed now: it runs, and was disturbed too seldom until now.
        """
        if len(self.disturbances) >= self.kills:
            return False
        begin = _newest_step(trained.folder)
        until_s = time.monotonic() + self.chance.uniform(0.2, 0.9) * took_s
        until_step = begin + self.chance.uniform(0.1, 0.6) * (steps - begin)
        reached = (
            time.monotonic() >= until_s or _newest_step(trained.folder) >= until_step for _ in self._moments(trained)
        )
        return any(reached)

    def _disturb(self, trained: Training, notice: Path) -> None:
        way = WAYS[len(self.disturbances) % len(WAYS)]
        self.disturbances.append(f"{way}, newest snapshot at step {_newest_step(trained.folder)}")
        if way == "notice":
            notice.write_text("60")
        else:
            trained.send(signal.Signals[way])


def add_drill_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--kills", default=3, help="how often the second run is disturbed (3)", **takes_number(1))
    parser.add_argument("--limit", default=3600.0, help="longest training (1h)", **takes_time(above=True))
    parser.add_argument("--seed", help="of the moments of the kills (default: random, printed)", **takes_number())
    parser.add_argument("--keep", metavar="DIR", help="keep snapshots and logs there")
    add_output(parser)
    add_program(parser)


def drill(arguments: argparse.Namespace) -> int:
    """Carry out a drill and report; 0 if the final states are equal bit by bit, 1 if not."""
    command, keep = program_of(arguments), arguments.keep
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**31)
    folder = Path(keep or tempfile.mkdtemp(prefix="lightning-spot-drill-")).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=not keep)
    except OSError as error:
        raise SettingsError(f"--keep {keep} cannot be made: {error.strerror}. Name a new directory") from error
    kills, chance = arguments.kills, random.Random(seed)
    one = Drill(command=command, folder=folder, kills=kills, limit_s=arguments.limit, chance=chance)
    console = error_console()
    console.print(f"drill: seed {seed}, in {folder}: first undisturbed, then with {format_count(kills, 'kill')}")
    try:
        found = one.run()
    except BaseException:
        if not keep and any(folder.glob("*/runs")):
            console.print(f"what the training wrote is in {folder}")
        elif not keep:  # the end of its log is in the error
            shutil.rmtree(folder)
        raise
    done = format_count(len(one.disturbances), "kill")
    shown = [*(f"  {each}" for each in one.disturbances)]
    shown += [f"the final state after {done}, and that of the undisturbed run:", *found.shown()]
    if found.different:
        shown.append(f"again with --seed {seed}; both runs are in {folder}")
    print_answer(arguments.output, {**found.document(), "kills": one.disturbances, "seed": seed}, shown)
    if not keep and not found.different:
        shutil.rmtree(folder)
    return 1 if found.different else 0


def _store(folder: Path) -> tuple[Path, LocalStore]:
    """The run that the training wrote below ``folder``; there is one."""
    runs = [path for path in (folder / "runs").glob("*") if path.is_dir()]
    if not runs:
        raise DrillFailedError(f"the training wrote no snapshots: does it use SpotCheckpoint?\n{_tail(folder)}")
    return runs[0], LocalStore(runs[0])


def _begin_with_first_snapshot(undisturbed: Path, disturbed: Path) -> None:
    with contextlib.suppress(DrillFailedError, SpotError, OSError):
        run, store = _store(undisturbed)
        early = [manifest for manifest in store.survey().manifests if not manifest.complete]
        if not early:
            return
        name = early[-1].name
        partial = disturbed.with_name("disturbed.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(run / name, partial / "runs" / run.name / name)
        shutil.copytree(run / "attempts", partial / "runs" / run.name / "attempts")
        partial.rename(disturbed)


def _attempts(folder: Path) -> int:
    """How many there were of the run."""
    return _store(folder)[1].claimed()


def _newest_step(folder: Path) -> int:
    manifests = _store(folder)[1].survey().manifests
    return manifests[0].step if manifests else 0


def _final(folder: Path) -> Path:
    run, store = _store(folder)
    newest: Manifest | None = next(iter(store.survey().manifests), None)
    if newest is None or not newest.complete:
        raise DrillFailedError(f"the run in {run} has no final snapshot\n{_tail(folder)}")
    return run / newest.data_path


def _tail(folder: Path) -> str:
    log = folder / "log"
    return log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""
