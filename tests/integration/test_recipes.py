"""The restart recipes, as far as they can be run here."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_spot.session.ranks import end_restarts_here
from tests.support.said import said_about
from tests.support.waiting import until

RECIPES = Path(__file__).parents[2] / "examples" / "restart"


def with_torchrun(**more: str) -> dict[str, str]:
    """The environment in which the recipe finds torchrun."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **more}


def torchrun(script: Path, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(RECIPES / "torchrun.sh"), str(script)]
    return subprocess.run(
        command, env=with_torchrun(**environment), capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.slow
def test_torchrun_restarts_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "rank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "(here / f'ran-{rank}-{attempt}').touch()\n"
        "assert os.environ['LIGHTNING_SPOT_GRACE_PERIOD_S'] == '30'\n"
        "sys.exit(143 if attempt == '0' else 0)\n"
    )
    done = torchrun(script, 120, RANKS="2", MAX_RESTARTS="2")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("ran-*-1")} == {"ran-0-1", "ran-1-1"}


@pytest.mark.slow
def test_torchrun_that_is_told_to_end_says_so(tmp_path: Path) -> None:
    """torchrun itself ends with 1 then, as after an error: what starts it again would give up in the end."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "(pathlib.Path(__file__).parent / ('up-' + os.environ['RANK'])).touch()\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([str(RECIPES / "torchrun.sh"), str(script)], env=with_torchrun())
    try:
        until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both ranks to run")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    finally:
        process.terminate()  # which is passed on
        process.wait(120)


def test_a_process_that_did_not_start_the_training_is_spared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A training outlives its script now and then, or runs in a container: the number may be anybody's."""
    at_exit: list[Callable[[], None]] = []
    told: list[tuple[int, int]] = []
    other = subprocess.Popen(["sleep", "60"])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(atexit, "register", at_exit.append)
            patch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
            patch.setenv("LIGHTNING_SPOT_RESTARTER_PID", str(other.pid))
            end_restarts_here()
            at_exit.pop()()
            assert not told
            assert said_about(caplog, "not-the-restarter") == [str(other.pid)]
            patch.setenv("LIGHTNING_SPOT_RESTARTER_PID", str(os.getppid()))
            end_restarts_here()
            at_exit.pop()()
            assert told == [(os.getppid(), signal.SIGTERM)]
    finally:
        other.kill()
        other.wait(20)


@pytest.mark.slow
def test_torchrun_restarts_no_ranks_on_a_preempted_machine(tmp_path: Path) -> None:
    """The cloud says so to the ranks only: each would stop again at once, until no restart is left."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / ('ran-' + os.environ['TORCHELASTIC_RESTART_COUNT'])).touch()\n"
        "from lightning_spot import PreemptionGuard\n"
        "from tests.support.trainer import Net, data, trainer\n"
        "guard = PreemptionGuard(f'file:{here}/notice', grace_period_s=120.0)\n"
        "trainer(guard, max_epochs=10**6, max_steps=-1).fit(Net(), data())\n"
    )
    (tmp_path / "notice").touch()
    done = torchrun(script, 200, RANKS="1", MAX_RESTARTS="2", PYTHONPATH=str(RECIPES.parents[1]))
    assert done.returncode == 143, done.stderr
    assert [path.name for path in tmp_path.glob("ran-*")] == ["ran-0"]


def fake(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
    (tmp_path / name).chmod(0o755)


def test_slurm_script(tmp_path: Path) -> None:
    script = RECIPES / "slurm.sbatch"
    options = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=USR1@120"} <= set(options)
    assert all(option.startswith("--") for option in options)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    fake(tmp_path, "srun", 'shift; exec "$@"')
    fake(tmp_path, "scontrol", f"echo $@ >{tmp_path}/asked")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SPOT_REQUEUE": "1",
    }
    fake(tmp_path, "leaves", "exit 143")
    for train, code in (("true", 0), (f"{tmp_path}/leaves", 143)):
        done = subprocess.run(["bash", str(script)], env={**environment, "TRAIN": train}, check=False)
        assert done.returncode == code
    assert (tmp_path / "asked").read_text() == "requeue 17\n"


def test_skypilot_task() -> None:
    task: dict[str, Any] = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    assert task["resources"]["use_spot"] is True
    assert "SNAPSHOTS" in task["envs"]


def test_a_requeue_is_asked_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_spot.session.ranks import requeue_slurm_job

    fake(tmp_path, "scontrol", f"echo $@ >>{tmp_path}/asked")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    requeue_slurm_job()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "20")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue_slurm_job()
    assert (tmp_path / "asked").read_text() == "requeue 17\nrequeue 20_3\n"
