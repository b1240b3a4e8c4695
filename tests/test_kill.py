"""Kill -9 of the trainer, of the node and of both, at random points: what is recovered is whole and new enough.

The next trainer itself is the witness: it says from which step it resumed and whether its state is whole. The oracle
lies outside the killed processes: what the trainer had been told was committed, and what the durable tier held.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_spot.client import starting
from lightning_spot.tiers.local import LocalStore
from tests.conftest import until
from tests.zygote import Zygote

KINDS = ("trainer", "node then trainer", "both")


@pytest.fixture
def zygote(warm_python: str, tmp_path: Path) -> Iterator[Zygote]:
    made = Zygote(warm_python, tmp_path / "trainers.log")
    yield made
    made.process.kill()
    made.process.wait()


def lines(oracle: Path, word: str) -> list[list[str]]:
    text = oracle.read_text() if oracle.exists() else ""
    return [line.split()[1:] for line in text.split("\n")[:-1] if line.startswith(word + " ")]


def durable_step(run_dir: Path) -> int:
    return max((manifest.step for manifest in LocalStore(run_dir).survey().manifests), default=0)


def kill_node(run_dir: Path) -> None:
    host = starting.attach(str(run_dir), run_dir.name)
    if host is None:
        return
    pid = int(host.client.call("GET", "/v1/status")["pid"])
    host.session.close()
    os.kill(pid, signal.SIGKILL)


def kill_again_and_again(zygote: Zygote, root: Path, kinds: list[str], chance: random.Random) -> dict[str, int]:
    """Start, kill and start again; after each kill, check what the next trainer resumed from."""
    run_dir, seen = root / "run-1", {"host": 0, "storage": 0, "nowhere": 0, "steps kept beyond the promise": 0}
    promised, last_told = 0, 0
    for trial, kind in enumerate(kinds):
        oracle = root / f"oracle-{trial}"
        # Where the trainer alone is killed, the newest is durable nowhere: memory has it, however slow the machine is.
        pid = zygote.spawn(run_dir, oracle, **({"min_upload_interval_s": 3600.0} if kind == "trainer" else {}))
        ((step, tier, whole),) = until(lambda oracle=oracle: lines(oracle, "from"), "the trainer to start", 60)
        assert whole == "whole", f"trial {trial}: the state of step {step} from {tier} is no single step's"
        assert int(step) >= promised, f"trial {trial}: resumed at {step}, promised was {promised}"
        seen[tier] += 1
        seen["steps kept beyond the promise"] += int(step) - promised
        until(lambda oracle=oracle: len(lines(oracle, "told")) > 1, "two snapshots to be committed", 60)
        time.sleep(chance.random() * 0.4)
        if kind == "trainer":
            os.kill(pid, signal.SIGKILL)
        elif kind == "both":
            kill_node(run_dir)
            os.kill(pid, signal.SIGKILL)
        else:
            kill_node(run_dir)
            time.sleep(chance.random() * 2.0)  # long enough, at times, for a new node
            os.kill(pid, signal.SIGKILL)
        assert zygote.read() == "-9"
        told = max((int(words[0]) for words in lines(oracle, "told")), default=0)
        last_told = max(told, int(step))
        promised = last_told if kind == "trainer" else durable_step(run_dir)
    return seen


def test_killed_at_random_points(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kinds = list(KINDS)
    chance.shuffle(kinds)
    seen = kill_again_and_again(zygote, tmp_path, [*kinds, "trainer"], chance)
    assert seen["host"] >= kinds.count("trainer"), seen


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_at_a_hundred_random_points(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kinds = [KINDS[trial % 3] for trial in range(102)]
    chance.shuffle(kinds)
    seen = kill_again_and_again(zygote, tmp_path, [*kinds, "trainer"], chance)
    print(seen)
    assert seen["host"] >= 60, seen


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_with_a_large_state_in_mid_copy_and_mid_flush(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    """40 MB, so that kills fall into copies, seals and flushes."""
    chance = random.Random(seed)
    run_dir, promised = tmp_path / "run-1", 0
    for trial in range(40):
        oracle = tmp_path / f"oracle-{trial}"
        pid = zygote.spawn(run_dir, oracle, elements=8_000_000, pace_s=0.02)
        ((step, tier, whole),) = until(lambda oracle=oracle: lines(oracle, "from"), "the trainer to start", 60)
        assert whole == "whole", f"trial {trial}: step {step} from {tier}"
        assert int(step) >= promised
        time.sleep(chance.random() * 1.5)
        if trial % 2:
            kill_node(run_dir)
        os.kill(pid, signal.SIGKILL)
        assert zygote.read() == "-9"
        told = max((int(words[0]) for words in lines(oracle, "told")), default=int(step))
        promised = durable_step(run_dir) if trial % 2 else max(told, int(step))


def test_the_run_completes_in_spite_of_all(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run_dir = tmp_path / "run-1"
    for trial in range(2):
        pid = zygote.spawn(run_dir, tmp_path / f"oracle-{trial}", max_steps=100, pace_s=0.01)
        until(lambda trial=trial: lines(tmp_path / f"oracle-{trial}", "told"), "a snapshot", 60)
        time.sleep(chance.random() * 0.3)
        os.kill(pid, signal.SIGKILL)
        assert zygote.read() == "-9"
    zygote.spawn(run_dir, tmp_path / "oracle-2", max_steps=100)
    assert zygote.read() == "0"
    newest = LocalStore(run_dir).survey().manifests[0]
    assert (newest.step, newest.complete) == (100, True)
    until(lambda: not starting.find_record(str(run_dir)).running(), "the node to end with the run")
