"""Private names of others sit in one module, and each may be gone: training goes on without the part that needs it."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.snapshot.safe_load import safe_load
from lightning_spot.state import compat
from lightning_spot.store.local import LocalStore
from tests.support.said import listening, points
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import new_process
from tests.unit.test_house import PACKAGE

USERS = sorted(PACKAGE.rglob("*.py"))
ALLOWED = {
    *("_getframe", "_current_frames"),  # of sys
    "_replace",  # of named tuples
    "_get_kwargs_from_urls",  # of our own file system, as fsspec calls it
    *("_actions", "_SubParsersAction"),  # of argparse: what every completion of its commands reads
    "_version",  # the page of torch on autograd has it
    *("_indices", "_values"),  # the page of torch on sparse tensors has them, for such as are not coalesced
    "_foreach_copy_",  # copied one by one without it: test_copier
}
IN_DDP = {compat.BUCKETS, compat.SHARING}  # nothing has the names of these parts here
IN_TUNERS = {compat.TUNERS}
IN_FSDP = {compat.UNSYNCED}
IN_TENSORBOARD = {compat.TENSORBOARD_OPTIONS}
USED = [name for name in compat.ALL if name.part not in IN_DDP | IN_FSDP | IN_TUNERS and name not in IN_TENSORBOARD]
NAMES, PARTS = sorted({name.name for name in USED}), sorted({name.part for name in USED})


def test_no_private_name_of_others_elsewhere() -> None:
    # What pickling cannot do, plain torch.save does: test_layout.
    # By another reader of zip files than torch's, safe_load could check another pickle than torch then reads.
    # Torch's restricted unpickler is private, all of it: without it, nothing can be read safely.
    may = ("compat.py", "dtensors.py", "layout.py", "safe_load.py")
    assert {path.name: found for path in USERS if path.name not in may and (found := _private_names(path))} == {}


def _private_names(path: Path) -> set[str]:
    """Private names of others that a file uses."""
    text = path.read_text()
    if not re.search(r"(?<!\bself)(?<!\bcls)\s*\.\s*_(?!_)", text):
        return set()  # to parse them all takes long
    tree = ast.parse(text)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {
        ast.unparse(node)
        for node in attributes
        if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own | ALLOWED
    }


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    """Have no object an attribute of these names."""
    real_of, real_set = compat.Name.of, compat.Name.set

    def of(self: compat.Name, owner: Any) -> Any:
        if self.name in hidden:
            raise AttributeError(f"{type(owner).__name__!r} object has no attribute {self.name!r}")
        return real_of(self, owner)

    def set_(self: compat.Name, owner: Any, value: Any) -> None:
        of(self, owner)
        real_set(self, owner, value)

    monkeypatch.setattr(compat.Name, "of", of)
    monkeypatch.setattr(compat.Name, "set", set_)


def fit(root: Path, *more: pl.Callback) -> list[str]:
    """Train with everything that has private names; our warnings."""
    spot = SpotCheckpoint(
        str(root / "run"), local_server=False, interval=EverySteps(2), on_full="wait", notices="signal"
    )
    callbacks = [StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    with listening() as logged:
        run = trainer(*callbacks, spot, *more, max_epochs=1, logger=CSVLogger(str(root)), default_root_dir=root)
        run.fit(Net(), data(4), data(1))
    assert run.global_step >= 4  # averaging adds one
    newest = LocalStore(root / "run").survey().manifests[0]
    assert newest.complete
    assert torch.load(root / "run" / newest.data_path, weights_only=True)["global_step"] == run.global_step
    return points(logged)


class Looks(pl.Callback):
    """Looks in the place of each setup what is said to be missing, with one name after the other gone."""

    def __init__(self) -> None:
        self.missed: dict[str, dict[str, str]] = {}

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        for hidden in NAMES:
            with pytest.MonkeyPatch.context() as patch:
                hide(patch, hidden)
                self.missed[hidden] = compat.problems(trainer)


def parts_with(*hidden: str) -> set[str]:
    return {name.part for name in USED if name.name in hidden}


def test_each_name_that_is_gone_is_missed_by_its_parts(tmp_path: Path) -> None:
    looks = Looks()
    assert fit(tmp_path, looks) == []
    found = {name: set(missed) for name, missed in looks.missed.items()}
    assert found == {name: parts_with(name) for name in NAMES}
    assert [name for name in NAMES if not all(name in reason for reason in looks.missed[name].values())] == []


@pytest.mark.parametrize("part", PARTS)
def test_training_goes_on_without_a_part(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With none of its names there: whatever still uses one of them fails."""
    hidden = {name.name for name in USED if name.part == part}
    hide(monkeypatch, *hidden)
    said = fit(tmp_path)
    for missing in parts_with(*hidden):
        assert len([text for text in said if text.startswith(f"{missing} is off: ")]) == 1, said
    assert all(any(name in text for name in hidden) for text in said), said


def test_a_name_of_another_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compat.Name.of
    shape = "_logger_connector._callback_metrics"
    monkeypatch.setattr(compat.Name, "of", lambda self, owner: [] if self.name == shape else real(self, owner))
    (said,) = fit(tmp_path)
    assert said.startswith(f"{compat.LOGGED} is off: ")
    assert "is of type list here" in said


class Refuses(pl.Callback):
    """Its hook fails, as a collective does from which another rank has gone."""

    calls = 0

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self.calls += 1
        raise RuntimeError("connection reset by peer")


def test_an_error_in_a_checkpoint_hook_is_no_lightning_mismatch(tmp_path: Path) -> None:
    refuses = Refuses()
    with pytest.raises(RuntimeError, match="connection reset by peer"):
        fit(tmp_path, refuses)
    assert refuses.calls == 1  # it is not tried once more by public names


def test_a_missing_resume_hook_is_an_error_if_a_snapshot_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path)
    new_process()
    hide(monkeypatch, "_checkpoint_connector.resume_start")
    with pytest.raises(SettingsError, match="resume=False"):
        fit(tmp_path)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch, "_weights_only_unpickler"),
        (torch._weights_only_unpickler, "_get_allowed_globals"),
        (torch.serialization, "_load"),
        (torch, "_validate_sparse_coo_tensor_args"),
        (torch, "_validate_sparse_compressed_tensor_args"),
    ],
)
def test_a_torch_with_another_unpickler_reads_nothing(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    torch.save({"x": 1}, written)
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(SpotError, match=name) as raised:
            safe_load(written)
    assert type(raised.value) is SpotError  # the snapshot is not damaged
    assert safe_load(written) == {"x": 1}
