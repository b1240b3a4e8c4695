"""A snapshot server that is told to end by SIGTERM while several hosts train with it: real servers and training."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed import test_sharded_fit, test_together
from tests.distributed.test_together import run_trainer
from tests.support.server import RunningNode
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G18")

STEPS = 60
AT = 8  # a step at which snapshots have begun


@pytest.mark.soak
@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["together_trainer", "sharded_hosts"])
def test_a_draining_server_leaves_a_training_without_loss(
    warm_python: str, tmp_path: Path, start_node: Callable[..., RunningNode], kind: str, replicas: int, leaving: int
) -> None:
    nodes = [start_node("--allow-storage", str(tmp_path), "--drain-timeout", "120s") for _ in range(1 + replicas)]
    root, urls = tmp_path / "run", ",".join(node.url for node in nodes)
    options = ("--steps", STEPS, "--hosts", 2, "--memory", urls, "--replicas", replicas)
    steps = root / "steps"
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(run_trainer, warm_python, f"tests.support.{kind}", root, *options)
        until(
            lambda: training.done() or (steps.exists() and len(steps.read_text().splitlines()) >= AT),
            "it to train",
            120.0,
        )
        assert not training.done(), (root / "log").read_text()
        nodes[leaving].process.send_signal(signal.SIGTERM)
        code = nodes[leaving].process.wait(90.0)
        assert code == 0, nodes[leaving].log.read_text()
        assert training.result(300.0) == 0, (root / "log").read_text()
    if kind == "sharded_hosts":
        test_sharded_fit.check_states(root)
        newest = test_sharded_fit.snapshots(root)[0]
    else:
        test_together.check_states(root)
        newest = test_together.manifests(root)[0]
    assert newest.complete
    assert newest.step == STEPS
