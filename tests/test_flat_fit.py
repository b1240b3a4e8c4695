"""Training under FSDP1: exact to the bit on as many ranks; Lightning alone reads its snapshots, so does one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_spot.errors import SettingsError
from lightning_spot.exact.compare import differences
from lightning_spot.fit.taking_part import takes_part
from tests.exact_cases import loader
from tests.exact_flat import Flat, OnCpus, train
from tests.test_sharded_fit import (
    Weights,
    content,
    final,
    log,
    one_rank,
    small,
    snapshots,
    two_ranks,
    without_what_came_later,
)

__all__ = ["one_rank"]


def trained_by_two(python: str, root: Path, *arguments: str) -> Path:
    """Two ranks that train to the end, and two that are stopped and go on."""
    two_ranks([python, "-m", "tests.exact_flat", str(root), *arguments], root)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    return trained_by_two(warm_python, tmp_path_factory.mktemp("trained"))


def check_exact(root: Path) -> None:
    assert "attempt 2 resumes at step" in log(root)
    assert "no snapshot now" not in log(root)
    steps = [manifest.step for manifest in snapshots(root / "whole")]
    assert steps == [8, 8, 6, 4, 2], log(root)[-3000:]
    assert list(differences(final(root / "whole"), final(root / "broken"))) == []


def test_two_ranks_are_stopped_and_go_on_as_if_they_had_not_been(trained: Path) -> None:
    check_exact(trained)
    state = final(trained / "whole")["optimizer_0"]["state"]
    assert {"net.0.weight", "net.4.bias", "tied.weight"} <= state.keys()
    assert not {"still.weight", "still.bias", "tied.again"} & state.keys()  # frozen, or the same as another


def states_of(saved: dict[str, Any]) -> list[Any]:
    """Those of the optimizer, in the order of its parameters."""
    states = saved["optimizer_states"][0]["state"]
    return [states[number] for number in sorted(states)]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.soak
def test_lightning_alone_reads_it(trained: Path) -> None:
    newest = snapshots(trained / "whole")[0]
    alone = Weights()
    trainer = small(OnCpus(), alone)
    trainer.fit(Flat(), loader(), ckpt_path=trained / "whole" / "run" / newest.name, weights_only=False)
    saved = final(trained / "whole")
    assert alone.step == newest.step
    assert list(differences(saved["state_dict"], alone.seen)) == []
    assert list(differences(states_of(saved), alone.states)) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.soak
def test_one_rank_goes_on_from_two(trained: Path, tmp_path: Path) -> None:
    root = without_what_came_later(trained / "whole", tmp_path / "again", 5)
    newest = snapshots(root)[0]
    saved = content(root, newest)
    start = Weights()
    train(root, OnCpus(), start, seed=99, ranks=1)
    assert start.step == newest.step == 4
    assert list(differences(saved["state_dict"], start.seen)) == []
    assert list(differences(states_of(saved), start.states)) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    "arguments",
    [
        ["--units"],
        ["--flat", "--units"],
        ["--sharding", "SHARD_GRAD_OP"],
        ["--sharding", "NO_SHARD"],
        ["--sharding", "NO_SHARD", "--flat", "--units"],
        ["--precision", "bf16-mixed", "--units"],
        ["--precision", "bf16-true"],
    ],
    ids=" ".join,
)
def test_however_it_is_sharded(arguments: list[str], tmp_path: Path, warm_python: str) -> None:
    check_exact(trained_by_two(warm_python, tmp_path, *arguments))


def test_a_whole_state_dict_is_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = type("FSDPStrategy", (type(trainer.strategy),), {"_state_dict_type": "full"})
    with pytest.raises(SettingsError, match=r"FSDPStrategy is not supported: .*state_dict_type='sharded'"):
        takes_part(trainer, "fit")
