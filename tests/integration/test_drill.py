"""The drill tells an exact training from one that is not."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_spot.cli import drill as trainings
from lightning_spot.cli import main
from lightning_spot.cli.diff import Verdict
from lightning_spot.cli.drill import Drill
from lightning_spot.config import DRILL_VARIABLE
from lightning_spot.state.compare import compare, differences, shown
from lightning_spot.state.compare import main as compare_files
from lightning_spot.store.local import LocalStore
from tests.conftest import Cli
from tests.support.exact_cases import train_case
from tests.support.program import command


def drill(python: str, tmp_path: Path, case: str, kills: int) -> tuple[int, dict[str, Any]]:
    training = command(python, train_case, tmp_path, case=case, pace_s=0.02)
    called = [python, "-c", "import sys; from lightning_spot.cli import main; sys.exit(main())", "drill"]
    called += ["-o", "json", "--kills", str(kills), "--limit", "300s", "--keep", str(tmp_path / "kept")]
    called += ["--", *training]
    done = subprocess.run(called, capture_output=True, text=True, timeout=550, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "kills", "differs"), [("plain", 3, False), ("clock", 1, True)])
def test_it_tells_an_exact_training_from_one_that_is_not(
    warm_python: str, tmp_path: Path, case: str, kills: int, differs: bool
) -> None:
    code, report = drill(warm_python, tmp_path, case, kills)
    assert code == differs
    assert report["kills"]
    # A shift of inputs may show in statistics.
    assert [each["entry"].startswith("state_dict.net.") for each in report["differences"][:1]] == [True] * differs


def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chance: random.Random, *arguments: str, kills: int
) -> Drill:
    """A drill of ranks that a launcher starts, of whose ends nothing is compared."""
    monkeypatch.setattr("lightning_spot.cli.drill.compare_states", lambda *_: Verdict(different=[], of_the_run=[]))
    command = [sys.executable, "-m", "tests.support.launched_trainer", *arguments]
    one = Drill(command=command, folder=tmp_path, kills=kills, limit_s=300.0, chance=chance)
    one.run()
    heard = (tmp_path / "disturbed" / "rank-heard").read_text().split()
    assert len(heard) == 1  # not by the rank that was started instead
    return one


def is_of(pid: int, folder: Path) -> bool:
    """Whether a process is one of a drill there, by its environment."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return False


@pytest.mark.slow
def test_ranks_that_a_launcher_starts_in_sessions_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts them again after the notice, and ends with a code of its own after the SIGTERM."""
    one = launched(tmp_path, monkeypatch, random.Random(1), "1", kills=3)
    assert [done.partition(",")[0] for done in one.disturbances] == ["notice", "SIGTERM", "SIGKILL"]
    # One is ended as soon as it is started, maybe before it has its number.
    assert 1 + 3 <= LocalStore(tmp_path / "disturbed" / "runs" / "run").claimed() <= 1 + 4
    assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and is_of(int(pid), tmp_path)]  # none is left


class Soon(random.Random):
    """Draws the first of all moments."""

    def uniform(self, a: float, b: float) -> float:
        return a


@pytest.mark.slow
def test_a_notice_may_come_before_a_launcher_starts_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(tmp_path, monkeypatch, Soon(), "0", "2", kills=1)


def test_a_process_with_the_pid_of_an_ended_training_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        monkeypatch.setattr(trainings, "descendants", lambda _pid: [other.pid])
        with trainings.training(["true"], tmp_path / "run", tmp_path / "notice") as trained:
            trained.process.wait(120)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.3)
        other.kill()


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ([], "give the command that trains"),
        (["--", sys.executable, "-c", "raise SystemExit(3)"], "ended with exit code 3"),
        (["--", sys.executable, "-c", "pass"], "took no snapshot"),
        (["--", "no-such-program"], "'no-such-program' cannot be started"),
    ],
)
def test_what_cannot_be_drilled(
    training: list[str],
    says: str,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert says in cli("drill", *training, code=2)
    assert not list(tmp_path.glob("lightning-spot-drill-*"))


def test_a_drill_that_failed_says_where_its_snapshots_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    training = f"import os; os.makedirs(os.environ['{DRILL_VARIABLE}'] + '/runs/run-1'); raise SystemExit(3)"
    assert main(["drill", "--", sys.executable, "-c", training]) == 2
    (folder,) = tmp_path.glob("lightning-spot-drill-*")
    assert f"what the training wrote is in {folder}" in capsys.readouterr().err
    assert (folder / "undisturbed" / "runs" / "run-1").is_dir()


def test_differences_are_told_entry_by_entry() -> None:
    left = {"a": torch.tensor([1.0, 2.0]), "b": [1, 2], "c": "/x/best-v1.ckpt", "d": float("nan"), "Timer": 1}
    assert list(differences(left, {**left, "c": "/y/best.ckpt", "Timer": 2})) == []
    changed = {**left, "a": torch.tensor([1.0, 2.5]), "b": [1, 3]}
    assert list(differences(left, changed)) == [
        "a: 50.0% of 2 values differ, by at most 0.5",
        "b[1]: 2 and 3",
    ]
    assert list(differences({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int64)})) != []
    one = torch.ones(1, dtype=torch.int64).as_strided((1,), (0,))  # torch does not view it as bytes
    assert list(differences({"a": one}, {"a": torch.ones(1, dtype=torch.int64)})) == []
    assert list(differences({"a": -0.0 * torch.ones(1)}, {"a": torch.zeros(1)})) != []  # to the bit
    wide = [torch.full((1,), value).expand(2**40) for value in (0.0, 0.0, 1.0)]  # as a forged file may have them
    assert [len(list(differences({"a": wide[0]}, {"a": other}))) for other in wide[1:]] == [0, 1]
    base = torch.tensor([0.0, 1.0, 2.0])
    rows, one = base[:1].expand(2, 4), torch.zeros(1)
    for equal in (one.expand(2, 4), torch.zeros(4).expand(2, 4), base.clone().fill_(0.0)[2:].expand(2, 4)):
        assert list(differences({"a": rows}, {"a": equal})) == []
    assert list(differences({"a": rows}, {"a": base[1:2].expand(2, 4)})) == [
        "a: 100.0% of 8 values differ, by at most 1"
    ]
    assert list(differences({"a": 1}, {"b": 1})) == ["a: only in the first", "b: only in the second"]
    assert list(differences({"a": [1]}, {"a": [1, 2]})) == ["a: 1 items and 2"]


def test_names_of_what_is_not_kept_are_not_compared() -> None:
    """A resumed run makes no sanity check, and may see other attributes change for the first time."""
    ours = [{"lightning_spot": {"lost": names, "untracked": []}} for names in ([], ["Net.cache"])]
    assert list(compare(*ours)) == []


def quantised(scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(scale * torch.arange(4.0), scale, 0, torch.qint8)


def by_channel(scale: float) -> torch.Tensor:
    scales, zeros = torch.tensor([scale, 1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    return torch.quantize_per_channel(torch.zeros(2, 3), scales, zeros, 0, torch.qint8)


def nested(value: float, layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.full((3,), value)], layout=layout)


def jagged(value: float) -> torch.Tensor:
    return nested(value, torch.jagged)


@pytest.mark.parametrize("make", [quantised, by_channel, nested, jagged])
def test_tensors_of_odd_kinds_are_compared_by_all_that_they_are(make: Callable[[float], torch.Tensor]) -> None:
    """Quantised ones may have the same integers with other scales, nested ones have no shape that they share."""
    assert list(compare(make(0.5), make(0.5))) == []
    assert len(list(compare(make(0.5), make(0.25)))) == 1


def test_arrays_of_objects_are_compared_by_what_they_hold() -> None:
    left, right, other = (np.array([f"column {end}", None], dtype=object) for end in ("a", "a", "b"))
    assert left.tobytes() != right.tobytes()  # as when they come from two processes
    assert differences({"names": left}, {"names": right}) == []
    assert differences({"names": left}, {"names": other}) == ["names[0]: 'column a' and 'column b'"]
    assert differences({"names": left}, {"names": left[:1]}) == ["names: arrays of object (2,) and object (1,) differ"]


def test_what_holds_itself_or_shares_its_parts_is_compared_once() -> None:
    """A few lists, each with the next one twice in it, had a million million entries to compare."""

    def nested(value: float) -> list[Any]:
        found: list[Any] = [value]
        for _ in range(40):
            found = [found, found]
        found.append(found)
        return found

    assert list(compare(nested(1.0), nested(1.0))) == []
    assert [each.text for each in compare(nested(1.0), nested(2.0))] == ["1.0 and 2.0"]
    ours, theirs = (2 * [[value]] for value in (1.0, 2.0))  # a time of the run is no reason to pass the same over
    left, right = ({"seconds": each[0], "rate": each[1]} for each in (ours, theirs))
    assert differences(left, right) == ["rate[0]: 1.0 and 2.0"]


@pytest.mark.parametrize("value", [torch.arange(5000.0), np.zeros((2, 3)), [torch.rand(9)] * 9, "a\n" * 500, object()])
def test_what_is_told_of_a_value_is_one_short_line(value: Any) -> None:
    """Also of one that is a key: whole tensors were printed."""
    assert len(shown(value)) <= 80
    keys = [{value: 1}] if not isinstance(value, (np.ndarray, list, str)) else []
    for left in (value, *keys):
        for text in differences({"a": left}, {"a": {}}):
            assert len(text) < 200
            assert "\n" not in text


NOW = time.time()


@pytest.mark.parametrize(
    ("path", "left", "right", "of_the_run"),
    [
        (("hyper_parameters", "root"), "/tmp/a/undisturbed/x1", "/tmp/a/disturbed/y2", True),
        (("hyper_parameters", "name"), "run-2026-11-21_10-00-01", "run-2026-11-21_10-00-59", True),
        (("hyper_parameters", "path"), Path("/a/one"), Path("/a/two"), True),
        (("callbacks", "Mine", "began"), NOW, NOW + 60, True),
        (("callbacks", "Mine", "elapsed_s"), 3.0, 4.0, True),
        (("callbacks", "Mine", "at"), datetime(2026, 1, 1), datetime(2026, 1, 2), True),
        (("callbacks", "Timer"), {"train": 1}, {"train": 2}, True),
        (("seed",), 1_700_000_000, 1_700_000_060, False),
        (("best",), "/x/epoch=1.ckpt", "/y/epoch=2.ckpt", False),
        (("score",), 3.0, 4.0, False),
        (("folders",), 2, 3, False),
    ],
    ids=lambda each: ".".join(each) if isinstance(each, tuple) else "",
)
def test_paths_and_times_of_the_runs_are_listed_apart(
    path: tuple[str, ...], left: object, right: object, of_the_run: bool
) -> None:
    states = [functools.reduce(lambda inner, name: {name: inner}, path[::-1], value) for value in (left, right)]
    assert [item.of_the_run for item in compare(*states)] == [of_the_run]


def test_states_that_torch_does_not_load_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (value, place) in {"a": (1, "/one/a"), "b": (1, "/two/b"), "c": (2, "/one/a")}.items():
        loss = torch.nn.HuberLoss(delta=float(value))
        torch.save({"hyper_parameters": {"loss": loss, "root": place, torch.nn.Identity: 1}}, tmp_path / name)
    assert compare_files([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "different": [],
        "of_the_run": [["hyper_parameters.root", "'/one/a' and '/two/b'"]],
    }
    assert compare_files([str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    assert json.loads(capsys.readouterr().out)["different"] == [["hyper_parameters.loss.delta", "1.0 and 2.0"]]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("exact", "different"),
    [
        ({"ranks": [1], "world_size": 2**50}, ["lightning_spot.ranks[1]"]),  # and no rank 2: the rest is not looked for
        ({"ranks": [1, 1], "world_size": 2}, []),
        ({"ranks": None, "world_size": 2}, []),
        ({}, []),
    ],
)
def test_ranks_of_any_file_are_compared_as_far_as_they_are_there(
    exact: dict[str, object], different: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"a": 1, "b": 2}.items():
        (tmp_path / name).mkdir()
        torch.save({"state_dict": {}, "lightning_spot": exact}, tmp_path / name / "model.ckpt")
        for rank in (1, 3):
            torch.save(value, tmp_path / name / f"rank-{rank:04d}.pt")
    assert compare_files([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert [path for path, _ in json.loads(capsys.readouterr().out)["different"]] == different
