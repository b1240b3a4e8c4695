"""Kill -9 and full disks: what recovery returns is a whole committed snapshot, and never older than was promised.

Promised is, for a killed trainer, the last step it was told is committed; once the server was killed too, or the whole
machine went with its memory, what the durable tier held before. Both are written down outside the killed processes.

Recovery itself is called too, Adam and BatchNorm are looked at, machines are lost, trainers outlive their server, and
writes stop half-way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.cli import main
from lightning_spot.client import starting
from lightning_spot.config import run_key
from lightning_spot.errors import SnapshotNotFoundError, SpotError
from lightning_spot.run.choice import open_newest
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.survey import survey
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import assemble
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep, retain
from tests.support import shard_scenarios
from tests.support.folders import files_below
from tests.support.oracle import FILES, Server, check_checkpoint, file_of, image_of, lines, manifest_of
from tests.support.server import RUN_ID, server_pid
from tests.support.shards import sealed_shard
from tests.support.waiting import lives, until

pytestmark = pytest.mark.guarantee("G3")

TRAINER, SERVER, BOTH, MACHINE = "trainer", "server", "both", "machine"
KINDS = (TRAINER, SERVER, BOTH, MACHINE)
Order = tuple[int, int]  # attempt, step
Check = Callable[[Path, dict[str, int]], None]
long = functools.partial(pytest.param, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
_MOST_SHOWN = 12


# -- random points of real trainings ----------------------------------------------------------------------------------


class Training:
    """A run whose trainers are killed, and what was promised about it."""

    def __init__(self, python: str, root: Path, ballast: int, pace_s: float) -> None:
        self.dirpath = root / "run-1"
        self.ballast, self.pace_s = ballast, pace_s
        self.promised: Order = (0, 0)
        self.seen = {"host": 0, "storage": 0, "nowhere": 0}
        self._root = root
        self._trials = 0
        self._trainers = Server("tests.support.crash_trainer", root / "trainers.log", python)
        self._running: int | None = None

    def close(self) -> None:
        """End the trainer that runs, too: killing who forked it does not."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running, signal.SIGKILL)
        self._trainers.close()

    def start(self, **more: Any) -> tuple[int, Path]:
        """Start a trainer and check what it resumed from."""
        self._trials += 1
        oracle = self._root / f"oracle-{self._trials}"
        request = {"elements": 3000, "ballast": self.ballast, "pace_s": self.pace_s, "alarm_s": 120}
        self._running = pid = self._trainers.spawn(dirpath=self.dirpath, oracle=oracle, **request, **more)
        ((step, tier, whole),) = until(lambda: lines(oracle, "from"), f"trainer {self._trials} to begin")
        assert whole == "whole", f"trainer {self._trials}: the state of step {step} from {tier} is no single step's"
        assert int(step) >= self.promised[1], f"trainer {self._trials} resumed at {step}, promised was {self.promised}"
        self.seen[tier] += 1
        return pid, oracle

    def kill(self, pid: int, oracle: Path, kind: str, chance: random.Random) -> None:
        """Kill, note what is promised now, and recover by hand."""
        resumed = int(lines(oracle, "from")[0][0])
        attempt = int(lines(oracle, "attempt")[0][0])
        durable = newest_durable(self.dirpath)
        if kind == SERVER:
            self._outlive_the_server(oracle, attempt, chance)
        elif kind != TRAINER and chance.random() < 0.5:
            kill_server(self.dirpath)
        os.kill(pid, signal.SIGKILL)
        assert self._trainers.read() == "-9"
        self._running = None
        if kind in (BOTH, MACHINE):
            kill_server(self.dirpath)
        if kind == MACHINE:
            shutil.rmtree(area_of(self.dirpath), ignore_errors=True)
        told = max([int(words[0]) for words in lines(oracle, "told")], default=0)
        if kind in (BOTH, MACHINE):
            self.promised = durable
        elif told:
            self.promised = (attempt, told)
        begun = max([int(words[0]) for words in lines(oracle, "begun")], default=resumed)
        self._recover(f"after trial {self._trials} ({kind})", begun)

    def _outlive_the_server(self, oracle: Path, attempt: int, chance: random.Random) -> None:
        """Kill the server alone: training goes on, a new server comes, and steps are committed in it."""
        old = kill_server(self.dirpath)
        if old is None:
            return

        before = max([int(words[0]) for words in lines(oracle, "begun")], default=0)

        def committed_again() -> bool:
            if (host := starting.attach(str(self.dirpath), self.dirpath.name)) is None:
                return False
            with contextlib.closing(host.session):
                pid = server_pid(host)
                steps = [item.step for item in host.manifests() if item.attempt == attempt]
            told = max([int(words[0]) for words in lines(oracle, "told")], default=0)
            return pid != old and any(before < step <= told for step in steps)

        until(committed_again, "a new server to commit what an old trainer sends")
        time.sleep(chance.random() * 0.2)

    def _recover(self, when: str, begun: int) -> None:
        def check(snapshot: OpenSnapshot) -> None:
            manifest = snapshot.manifest
            assert (manifest.attempt, manifest.step) >= self.promised, f"{when}: {manifest.name} is too old"
            assert manifest.step <= begun, f"{when}: {manifest.name} was never trained"
            with snapshot.reader() as file:
                check_checkpoint(file, manifest.step)

        if open_newest(survey(Location.of(self.dirpath)), check) is None:
            assert self.promised == (0, 0), f"{when}: nothing is left, promised was {self.promised}"


def newest_durable(dirpath: Path) -> Order:
    return max(((item.attempt, item.step) for item in LocalStore(dirpath).survey().manifests), default=(0, 0))


def area_of(dirpath: Path) -> Path:
    return Path(os.environ["LIGHTNING_SPOT_SHM_DIR"]) / f"lightning-spot-{run_key(str(dirpath))}"


def kill_server(dirpath: Path) -> int | None:
    """Kill the local server if it lives; returns its process id once it is dead."""
    host = starting.attach(str(dirpath), dirpath.name)
    if host is None:
        return None
    with contextlib.closing(host.session):
        pid = server_pid(host)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not lives(pid), "a killed server to be gone")
    return pid


def again_and_again(training: Training, kinds: list[str], chance: random.Random, longest_s: float) -> None:
    for number, kind in enumerate(kinds):
        # Where the trainer alone is killed, the newest is durable nowhere: memory has it, however slow the machine is.
        pid, oracle = training.start(**({"min_upload_interval_s": 3600.0} if kind == TRAINER else {}))
        if number == 0:  # however slow the machine is, one is to resume from memory
            until(lambda oracle=oracle: lines(oracle, "told"), "the first snapshot")
        time.sleep(chance.random() * longest_s)
        training.kill(pid, oracle, kind, chance)
    training.start()
    print(training.seen)


@pytest.fixture
def begin(tmp_path: Path, warm_python: str) -> Iterator[Callable[..., Training]]:
    """Begin a run; its trainers end with the test."""
    begun: list[Training] = []

    def start(ballast: int, pace_s: float = 0.002) -> Training:
        root = tmp_path / str(len(begun))
        root.mkdir()
        begun.append(Training(warm_python, root, ballast, pace_s))
        return begun[-1]

    yield start
    for training in begun:
        training.close()


@pytest.mark.parametrize(
    ("ballast", "kills", "longest_s"),
    [(2_000_000, 4, 0.5), *(long(ballast, 36, 1.5) for ballast in (0, 2_000_000, 10**7))],
)
def test_killed_at_random_points(
    begin: Callable[..., Training], chance: random.Random, ballast: int, kills: int, longest_s: float
) -> None:
    kinds = [KINDS[trial % len(KINDS)] for trial in range(kills)]
    chance.shuffle(kinds)
    training = begin(ballast)
    again_and_again(training, [TRAINER, *kinds], chance, longest_s)
    assert training.seen["host"] > 0


def leftovers(folder: Path) -> list[str]:
    """What no committed snapshot and no claim has a use for."""
    data = {"model.ckpt", *(file.name for file in FILES)}
    named = {*data, "manifest.json"}
    files = [path.relative_to(folder) for path in files_below(folder)]
    unknown = [path for path in files if path.name not in named and path.parts[0] != "attempts"]
    headless = [path for path in files if path.name in data and not (folder / path.parent / "manifest.json").exists()]
    return [str(path) for path in [*unknown, *headless]]


# -- every step of a commit -------------------------------------------------------------------------------------------


class Points:
    """Runs a scenario once for each of its calls, struck at that call, until it is struck no more."""

    def __init__(self, root: Path, areas: Path, servers: list[Server]) -> None:
        self._root, self._areas, self._servers = root, areas, servers

    def each(self, scenario: str, span: int, check: Check, every: int) -> int:
        """Check after every point, or every so many-th; returns how many were checked."""
        stride, start = len(self._servers) * every, random.randrange(every) + 1
        with ThreadPoolExecutor(len(self._servers)) as pool:
            lanes = [
                pool.submit(self._lane, server, scenario, span, check, range(start + lane * every, 1000, stride))
                for lane, server in enumerate(self._servers)
            ]
            ends = [lane.result() for lane in lanes]
        wrong = [text for _, failures in ends for text in failures]
        assert not wrong, f"{len(wrong)} points:\n" + "\n".join(wrong[:_MOST_SHOWN])
        return sum(count for count, _ in ends)

    def _lane(self, server: Server, scenario: str, span: int, check: Check, numbers: range) -> tuple[int, list[str]]:
        wrong: list[str] = []
        for count, number in enumerate(numbers):
            root = self._areas / f"{scenario}-{span}-{number}"
            root.mkdir()
            server.say({"scenario": scenario, "number": number, "span": span, "root": str(root)})
            answer = json.loads(server.read())
            told: list[list[str]] = answer["told"]
            try:
                assert not [words for words in told if words[0] == "error"]
                assert answer["status"] in ((0,) if span else (0, -signal.SIGKILL)), answer["status"]
                check(root, {word: int(value) for word, value in told if value.isdigit()})
            except (AssertionError, SpotError, OSError) as error:
                first = " ".join(str(error).split("\nassert ")[0].split("\n"))
                wrong.append(f"call {number}: {type(error).__name__}: {first}; told {told[-6:]}")
            shutil.rmtree(root, ignore_errors=True)
            if answer["status"] == 0 and not [words for words in told if words[0] == "struck"]:
                return count, wrong
        raise AssertionError(f"{scenario} does not end")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Iterator[list[Server]]:
    logs = tmp_path_factory.mktemp("servers")
    started = [Server("tests.support.oracle", logs / f"{index}.log", warm_python) for index in range(2)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def points(tmp_path: Path, runtime_dir: Path, servers: list[Server]) -> Points:
    return Points(tmp_path, Path(os.environ["LIGHTNING_SPOT_SHM_DIR"]), servers)


def whole_steps(root: Path) -> list[int]:
    """Steps that storage holds, newest first; every one that it lists must be whole."""
    store, writers = LocalStore(root / "durable"), range(shard_scenarios.WRITERS)
    found = [manifest for manifest in store.survey().manifests if not manifest.shard]
    for manifest in found:
        buffer = bytearray(manifest.nbytes)
        store.fetch(manifest, memoryview(buffer))
        manifest.verify(memoryview(buffer), "durable")
        if not manifest.run_id:
            assert bytes(buffer) == image_of(manifest.step)
            continue
        shards = [sealed for sealed, _ in shard_scenarios.shards_of(manifest.step, writers)]
        ranges = [sealed_shard(manifest.step, writer, len(writers)) for writer in writers]
        assert manifest in (assemble(shards), assemble(ranges)), f"{manifest.name} is mixed"
    return [manifest.step for manifest in found]


def put(root: Path, step: int, attempt: int) -> Manifest:
    image = memoryview(image_of(step))
    manifest = manifest_of(step, attempt).sealed(image)
    LocalStore(root / "durable").put(manifest, image, attempt=attempt)
    return manifest


def check_store(root: Path, told: dict[str, int]) -> None:
    store = LocalStore(root / "durable")
    assert max(whole_steps(root), default=0) >= told.get("durable", 0), "what was durable is lost"
    assert store.claimed() >= told.get("claimed", 0), "an attempt is forgotten"
    retain(store, Keep(newest=1), put(root, 9, attempt=9))  # the next one works, and tidies up
    assert whole_steps(root) == [9]
    assert leftovers(root / "durable") == []


def check_file(root: Path, told: dict[str, int]) -> None:
    store = LocalStore(root / "durable")
    path = store.root / "last.ckpt"
    if told.get("file") or path.exists():
        held = path.read_bytes()
        steps = [step for step in range(1, 6) if image_of(step) == held]
        assert steps, "the file is not whole"
        assert steps[0] >= told.get("file", 0), "the file is too old"
        commit = store.root / file_of(1).manifest_path
        if commit.exists() and (noted := Manifest.from_json(commit.read_bytes())).checksums:
            noted.verify(memoryview(held), "durable")
    image = memoryview(image_of(9))
    store.put(file_of(9).sealed(image), image, attempt=1)
    assert path.read_bytes() == image_of(9)


def check_heir(root: Path, told: dict[str, int], make: Callable[[], SnapshotServer], run: str) -> None:
    durable, committed = told.get("durable", 0), told.get("committed", 0)
    there = whole_steps(root)
    assert max(there, default=0) >= durable, "what was durable is lost with the machine"
    with contextlib.closing(make()) as heir:
        held = [(each, manifest) for each, manifest in heir.ring.readable(run) if not manifest.shard]
        for each, manifest in held if run == "run" else ():
            with contextlib.suppress(SnapshotNotFoundError), heir.ring.reading(each) as view:
                assert view == image_of(manifest.step), "other bytes"  # unless it is durable by now, and has left
        adopted = [manifest.step for _, manifest in held]
        assert run == "run" or shard_scenarios.ABORTED not in adopted, "an aborted one counts"
        assert max([*adopted, *there], default=0) >= committed, "what was committed is lost with the server"
        assert heir.flush("run", 20.0) == [], "the heir does not flush"
    assert max(whole_steps(root), default=0) >= committed, "the heir lost what was committed"
    left = [path.name for path in (root / "area").iterdir()] if (root / "area").exists() else None
    assert left is None, f"memory is not given back: {left}"


def check_server(root: Path, told: dict[str, int]) -> None:
    settings = {"slots": 2, "memory_bytes": 2**26, "open_store": LocalStore, "allow": None}
    check_heir(root, told, lambda: SnapshotServer(**settings, area=root / "area"), "run")


def check_ranks(root: Path, told: dict[str, int]) -> None:
    check_heir(root, told, lambda: shard_scenarios.server_of(root), RUN_ID)


def check_places(root: Path, told: dict[str, int]) -> None:
    store = LocalStore(root / "durable")
    assert max(whole_steps(root), default=0) >= told.get("durable", 0), "what was durable is lost"
    shard_scenarios.claim(root)
    for place in (1, 0):  # their servers bring it once more
        shard_scenarios.bring(root, shard_scenarios.STEPS, place)
    steps = whole_steps(root)
    assert steps[0] == shard_scenarios.STEPS, "another try does not commit it"
    assert shard_scenarios.ABORTED not in steps, "an aborted one counts"
    retain(store, Keep(newest=1), store.survey().manifests[0])
    assert whole_steps(root) == [shard_scenarios.STEPS]


def check_history(root: Path, told: dict[str, int]) -> None:
    """What a kill between any two changes leaves is what was before the command, or what is after it."""
    steps, store = whole_steps(root), LocalStore(root / "durable")
    held = store.survey()
    resumed = next((each.step for each in held.manifests if not held.sets_aside(each.order)), 0)
    if "again" in told:
        assert resumed == 4 or ("pruned" in told and not steps), "the newest went before others"
    elif "rewound" in told:
        assert resumed in {1: (1, 2), 2: (2, 4)}[told["rewound"]]
    else:
        assert resumed >= (told.get("durable", 0) if told.get("durable", 0) < 3 else 1)
    if "again" not in told:
        assert len(steps) >= told.get("durable", 0), "what is set aside was deleted"
    elif "retained" not in told:
        assert {4, 2} <= {*steps}
    elif "pruned" not in told:
        assert steps in ([4, 2], [4])
    if store.root.exists():
        main(["rm", str(store.root), "--all"])
    assert whole_steps(root) == []
    assert store.claimed() == 0
    assert not store.root.exists() or leftovers(store.root) == []


CHECKS = {
    "history": check_history,
    "store": check_store,
    "file": check_file,
    "server": check_server,
    "ranks": check_ranks,
    "places": check_places,
}


SOME_OR_ALL = pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.soak)], ids=["some", "all"])
"""The everyday suite takes every so many-th point, the soak takes each."""


@SOME_OR_ALL
@pytest.mark.parametrize("scenario", CHECKS)
def test_killed_at_every_call_and_in_every_write(points: Points, scenario: str, every: int) -> None:
    count = points.each(scenario, 0, CHECKS[scenario], every)
    print(f"{count} crash points")
    assert count > 40 // every


@SOME_OR_ALL
@pytest.mark.parametrize(
    ("scenario", "span"),
    [("store", 1), ("store", 12), ("file", 1), ("server", 1), ("ranks", 1), ("places", 1), ("places", 12)],
)
def test_disk_full_at_every_call_and_in_every_write(points: Points, scenario: str, span: int, every: int) -> None:
    count = points.each(scenario, span, CHECKS[scenario], every)
    print(f"{count} points")
    assert count > 25 // every
