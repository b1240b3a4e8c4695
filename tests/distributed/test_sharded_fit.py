"""Training in shards (FSDP2): exact to the bit on as many ranks, weights and optimizers as they were on any number."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_spot.errors import SettingsError
from lightning_spot.exact.compare import differences
from lightning_spot.exact.compare import main as compare_files
from lightning_spot.fit.preflight import takes_part
from lightning_spot.fit.selection import load_shards
from lightning_spot.image.manifest import Manifest
from lightning_spot.sharded.file_plan import load_state
from lightning_spot.sharded.reader import ImageReader, consolidated, load_all, read_folder, write_plain
from lightning_spot.tiers.local import LocalStore
from tests.support.exact_cases import loader
from tests.support.exact_sharded import Sharded, train, train_with, undisturbed_and_stopped
from tests.support.trainer import digest, trainer
from tests.support.waiting import kept_port, new_process


def snapshots(root: Path) -> list[Manifest]:
    return LocalStore(root / "run").survey().manifests


def content(root: Path, manifest: Manifest) -> dict[str, Any]:
    """All that is in a snapshot."""
    image, manifest = read_folder(root / "run" / manifest.name)
    found = load_all(ImageReader(image, manifest))
    found |= consolidated(image, manifest)
    for file in manifest.files:
        if file.name.startswith("rank-") or file.name == "meta.pt":
            found[file.name] = load_state(image[file.offset : file.stop])
    return found


def final(root: Path) -> dict[str, Any]:
    newest = snapshots(root)[0]
    assert newest.complete
    return content(root, newest)


def two_ranks(command: list[str], root: Path) -> None:
    """Run a training on two ranks, as a launcher does, to its end."""
    with kept_port() as port, open(root / "log", "w") as output:
        launched = {"WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **launched, "LOCAL_RANK": str(rank)}
            )
            for rank in range(2)
        ]
        try:
            assert [rank.wait(300) for rank in ranks] == [0, 0], log(root)[-3000:]
        finally:
            for rank in ranks:
                rank.kill()


def check_states(root: Path) -> dict[str, str]:
    """Every snapshot holds the parameters of its step."""
    steps = dict(line.split() for line in (root / "steps").read_text().splitlines())
    for manifest in snapshots(root):
        assert digest(content(root, manifest)["state_dict"]) == steps[str(manifest.step)], manifest.name
    return steps


def without_what_came_later(root: Path, target: Path, step: int) -> Path:
    """A copy of a run as it was after a step."""
    shutil.copytree(root / "run", target / "run")
    for manifest in snapshots(target):
        if manifest.step > step or manifest.complete:
            shutil.rmtree(target / "run" / manifest.name)
    return target


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process becomes a rank, and is none afterwards."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


class Weights(pl.Callback):
    """Notes the weights and states of the first optimizer when training begins."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.step = trainer.global_step
        self.seen = {name: full(value).clone() for name, value in module.state_dict().items()}
        self.states = [
            {key: full(value).clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
            for state in trainer.optimizers[0].state.values()
        ]
        self.never = [dict(optimizer.state) for optimizer in trainer.optimizers[2:]]


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.usefixtures("one_rank")
@pytest.mark.soak
def test_one_rank_is_stopped_and_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    start = Weights()
    undisturbed_and_stopped(tmp_path, start, ranks=1)
    assert start.step > 3
    assert start.never == [{}]  # it has never stepped, and does not for a snapshot
    assert list(differences(final(tmp_path / "whole"), final(tmp_path / "broken"))) == []


@pytest.mark.usefixtures("one_rank")
def test_others_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "whole", seed=11, ranks=1)

    # A drill compares two of them.
    last, *_, first = (str(tmp_path / "whole" / "run" / manifest.name) for manifest in snapshots(tmp_path / "whole"))
    for other, is_equal in ((last, True), (first, False)):
        capsys.readouterr()
        assert compare_files([last, other]) == 0
        different = json.loads(capsys.readouterr().out)["different"]
        kinds = {line.partition(".")[0] for line in different}
        assert is_equal == (not kinds)
        assert is_equal or {"state_dict", "optimizer_0", "ranks"} <= kinds

    # Lightning alone reads the same directory; the optimizer that has not stepped is not in it.
    newest = snapshots(tmp_path / "whole")[0]
    alone = Weights()
    small(ModelParallelStrategy(1, 1), alone).fit(
        Stepped(), loader(), ckpt_path=tmp_path / "whole" / "run" / newest.name
    )
    saved = final(tmp_path / "whole")
    assert list(differences(saved["state_dict"], alone.seen)) == []

    # So does a single device, once it is one plain file.
    write_plain(tmp_path / "whole" / "run" / newest.name, tmp_path / "plain.ckpt")
    on_one_device = Weights()
    small("auto", on_one_device).fit(Plain(), loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert list(differences(saved["state_dict"], on_one_device.seen)) == []
    assert on_one_device.states == [] or len(on_one_device.states) == 2

    image, manifest = read_folder(tmp_path / "whole" / "run" / newest.name)
    with pytest.raises(SettingsError, match="SingleDeviceStrategy"):
        load_shards(small("auto"), image, manifest, trusts=False)


@pytest.mark.usefixtures("one_rank")
def test_a_directory_that_the_user_names_is_gone_on_from_exactly(tmp_path: Path) -> None:
    """Each rank's own state is beside what Lightning loads; it ended with an ``IndexError``."""

    def stepped(root: Path, seed: int, **more: Any) -> None:
        train_with(tmp_path / root, Stepped, ModelParallelStrategy(1, 1), seed=seed, ranks=1, **more)

    stepped(Path("whole"), 11)
    middle = snapshots(tmp_path / "whole")[2]
    assert not middle.complete
    named = tmp_path / "whole" / "run" / middle.name
    new_process()
    stepped(Path("named"), 99, ckpt_path=named)
    found = {name: final(tmp_path / name) for name in ("whole", "named")}
    assert list(differences(found["whole"]["state_dict"], found["named"]["state_dict"])) == []
    assert found["whole"]["global_step"] == found["named"]["global_step"]
    (named / "rank-0000.pt").unlink()
    with pytest.raises(SettingsError, match=middle.name):
        stepped(Path("torn"), 99, ckpt_path=named)


class Stepped(Sharded):
    """The same without the optimizer that never steps: Lightning looks for a state of each."""

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        return optimizers[:2], schedulers


class Plain(Sharded):
    def configure_model(self) -> None:
        pass


def small(strategy: Any, *callbacks: pl.Callback) -> pl.Trainer:
    limits: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 1, "limit_val_batches": 0}
    return trainer(*callbacks, devices=1, strategy=strategy, **limits)


def program(python: str, root: Path, *arguments: str) -> int:
    root.mkdir(exist_ok=True)
    with open(root / "log", "a") as log:
        return subprocess.run(
            [python, "-m", "tests.support.exact_sharded", str(root), *arguments],
            stdout=log,
            stderr=log,
            timeout=300,
            check=False,
        ).returncode


def log(root: Path) -> str:
    return (root / "log").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of two ranks to its end, with all of its snapshots; made once."""
    made: list[Path] = []

    def of(python: str) -> Path:
        if not made:
            root = tmp_path_factory.mktemp("trained")
            assert program(python, root) == 0, log(root)[-3000:]
            made.append(root)
        return made[0]

    return of


def test_two_ranks_are_stopped_and_go_on_as_if_they_had_not_been(tmp_path: Path, warm_python: str) -> None:
    two_ranks([warm_python, "-m", "tests.support.exact_sharded", str(tmp_path), "--in-one"], tmp_path)
    assert "attempt 2 resumes at step" in log(tmp_path)
    for manifest in snapshots(tmp_path / "whole"):
        assert manifest.world_size == 2
        names = {file.name for file in manifest.files}
        assert {"__0_0.distcp", "__1_0.distcp", "rank-0000.pt", "rank-0001.pt"} <= names
    assert list(differences(final(tmp_path / "whole"), final(tmp_path / "broken"))) == []


@pytest.mark.soak
def test_two_ranks_resume_any_snapshot_as_if_uninterrupted(
    tmp_path: Path, warm_python: str, trained: Callable[[str], Path]
) -> None:
    whole = trained(warm_python)
    root = without_what_came_later(whole, tmp_path / "again", 5)
    assert program(warm_python, root, "--seed", "99") == 0, log(root)[-3000:]
    assert "resumes at step" in log(root)
    assert list(differences(final(whole), final(root))) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.soak
def test_one_rank_resumes_from_two_with_weights_and_optimizers(
    tmp_path: Path, warm_python: str, trained: Callable[[str], Path]
) -> None:
    root = without_what_came_later(trained(warm_python), tmp_path / "again", 5)
    newest = snapshots(root)[0]
    saved = content(root, newest)
    start = Weights()
    train(root, start, seed=99, ranks=1)
    assert start.step == newest.step
    assert list(differences(saved["state_dict"], start.seen)) == []
    assert list(differences(list(saved["optimizer_states"][0]["state"].values()), start.states)) == []


@pytest.mark.soak
@pytest.mark.parametrize("rank", ["0", "1", None])
def test_ranks_that_are_killed_go_on_as_if_they_had_not_been(
    rank: str | None, tmp_path: Path, warm_python: str, trained: Callable[[str], Path]
) -> None:
    root = tmp_path / "killed"
    killed = ["--kill-at", "5", *(["--kill-rank", rank] if rank is not None else [])]
    assert program(warm_python, root, *killed) != 0
    assert program(warm_python, root, "--seed", "99") == 0, log(root)[-3000:]
    assert "resumes at step" in log(root)
    assert list(differences(final(trained(warm_python)), final(root))) == []


@pytest.mark.soak
def test_a_notice_to_one_rank_stops_all_after_one_saved_step(
    tmp_path: Path, warm_python: str, trained: Callable[[str], Path]
) -> None:
    root = tmp_path / "noticed"
    # Early: rank 0 must hear of it before the last of the eight batches, also on a busy machine.
    assert program(warm_python, root, "--kill-at", "1", "--kill-rank", "1", "--signal", str(signal.SIGTERM)) == 143
    assert "is safe in" in log(root), log(root)[-3000:]
    assert program(warm_python, root, "--seed", "99") == 0, log(root)[-3000:]
    assert list(differences(final(trained(warm_python)), final(root))) == []


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_are_not_supported_say_what_to_use(kind: type, state_dict_type: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = kind
    trainer.strategy._state_dict_type = state_dict_type  # type: ignore[attr-defined] # FSDPStrategy has it
    with pytest.raises(SettingsError, match=rf"{kind.__name__} .*ModelParallelStrategy"):
        takes_part(trainer, "fit")
