"""Objects of classes that torch does not know: read as inert placeholders, needed or not, said at once or never."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import io
import os
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors import checkpoint_connector

from lightning_spot import EverySteps, SpotCheckpointIO
from lightning_spot.errors import NotSerializableError, SpotError
from lightning_spot.snapshot.safe_load import Placeholder, kind_of, placeholders_in
from lightning_spot.state.dump import read_checkpoint
from tests.support.said import said, said_about
from tests.support.snapshots import manifests, serverless, spot
from tests.support.trainer import Net, Stop, StopAt, data, trainer
from tests.support.waiting import new_process
from tests.unit.test_safe_load import call, text
from tests.unit.test_safe_load import file as written

pytestmark = pytest.mark.guarantee("G8")

RAN: list[str] = []


class Colour(enum.Enum):
    RED = 1

    def __reduce_ex__(self, protocol: Any) -> Any:  # Python 3.11.0 to 3.11.3 name it otherwise
        return Colour, (self.value,)


class Thing:
    """Notes whatever of it runs."""

    def __init__(self, value: Any = None) -> None:
        RAN.append("__init__")
        self.value = value

    def __setstate__(self, state: Any) -> None:
        RAN.append("__setstate__")
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return 1


class Reduced:
    def __reduce__(self) -> Any:
        return run, ("__reduce__",)


class Items(list[Any]):
    pass


class Outer:
    class Inner:
        pass


class Slotted:
    __slots__ = ("value",)


class Keyword:
    def __new__(cls, *, value: int) -> Keyword:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (), {"value": 1}


def run(what: str) -> str:
    RAN.append(what)
    return what


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    RAN.clear()
    return file


def cyclic() -> Any:
    thing = Thing()
    thing.value = (thing, [thing])
    return thing


FOREIGN: dict[str, Callable[[], Any]] = {
    "an object": lambda: Thing({"a": torch.ones(2)}),
    "an object with a reduction": Reduced,
    "a member of an enum": lambda: Colour.RED,
    "a class": lambda: Thing,
    "a function": lambda: run,
    "a partial": lambda: functools.partial(run, what="x"),
    "a mapping of mappings": lambda: collections.ChainMap({"a": 1}),
    "a class within a class": Outer.Inner,
    "an object with slots": Slotted,
    "an object that holds itself": cyclic,
    "a module": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()),
    "a loss": lambda: torch.nn.MSELoss(),
    "a generator": lambda: random.Random(1),
    "a generator of numpy": lambda: np.random.default_rng(1),
    "a default dictionary": lambda: collections.defaultdict(run, a=1),
    "a subclass of list": lambda: Items([1, 2]),
    "an object made with a keyword": lambda: Keyword(value=1),
    "a function of the system": lambda: os.getcwd,
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_object_becomes_a_stub_and_the_rest_comes_back(make: Callable[[], Any]) -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    thing = make()
    file = saved({"before": weights, "thing": [thing, 3], "key": {(1, "x"): 2}, "again": thing, "after": weights[1]})
    found = read_checkpoint(file)
    assert RAN == []
    assert torch.equal(found["before"], weights)
    assert torch.equal(found["after"], weights[1])
    assert found["after"].untyped_storage().data_ptr() == found["before"].untyped_storage().data_ptr()
    assert found["key"] == {(1, "x"): 2}
    placeholder = found["thing"][0]
    assert isinstance(placeholder, Placeholder)
    assert found["again"] is placeholder
    assert found["thing"][1] == 3
    assert "not loaded" in repr(placeholder)
    copy.deepcopy(placeholder)
    with pytest.raises(NotSerializableError, match=r"thing\[0\] .*add_safe_globals"):
        _ = placeholder.value
    with pytest.raises(NotSerializableError, match=r"thing\[0\]"):
        placeholder()
    assert [where for where, _ in placeholders_in(found)] == ["thing[0]", "again"]


def test_a_foreign_object_as_a_key() -> None:
    found = read_checkpoint(saved({Colour.RED: 1, "x": {Thing(): torch.ones(1)}}))
    assert [kind_of(key) for key in found if isinstance(key, Placeholder)] == [f"{__name__}.Colour"]
    assert RAN == []
    assert len(list(placeholders_in(found))) == 2


def test_nothing_is_imported_to_read() -> None:
    module = types.ModuleType("a_module_of_the_user")
    exec("class Kind:\n    pass", vars(module))
    sys.modules[module.__name__] = module
    file = saved({"hyper_parameters": {"kind": module.Kind, "one": module.Kind()}})
    del sys.modules[module.__name__]
    found = read_checkpoint(file)["hyper_parameters"]
    assert kind_of(found["kind"]) == kind_of(found["one"]) == "a_module_of_the_user.Kind"
    assert module.__name__ not in sys.modules


def test_what_the_user_allows_comes_back() -> None:
    file = saved({"thing": Thing([1, Colour.RED]), "other": Reduced()})
    with torch.serialization.safe_globals([Thing]):
        found = read_checkpoint(file)
    assert type(found["thing"]) is Thing
    assert RAN == ["__setstate__"]
    assert [where for where, _ in placeholders_in(found)] == ["thing.value[1]", "other"]


@pytest.mark.parametrize(
    "pickled",
    [
        *(call(function, text("1")) for function in ("os.system", "posix.system", "builtins.eval", "torch.load")),
        call("posix.system", text("true"))[:-1] + b"\x81",  # made as an object
        b"ctorch._utils\n_rebuild_tensor\n)b",  # a state for a function
        call("torch.tensor.deepcopy", text("x")),  # torch.load takes it for torch._tensor's
    ],
)
def test_a_hostile_pickle_runs_nothing(pickled: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: Any, **__: Any) -> None:
        RAN.append("ran")

    RAN.clear()
    monkeypatch.setattr("os.system", ran)
    monkeypatch.setattr("posix.system", ran)
    with contextlib.suppress(SpotError):
        assert isinstance(read_checkpoint(written(pickled)), Placeholder)
    assert RAN == []


# -- in training ------------------------------------------------------------------------------------------------------


class WithHyperparameters(Net):
    """As pytorch-forecasting's and chemprop's models: losses, classes and callables among its hyperparameters."""

    def __init__(self, thing: Any, kind: Any = Thing) -> None:
        super().__init__()
        self.save_hyperparameters()


class Keeping(pl.Callback):
    """Saves what it must not."""

    def __init__(self, *, loads: bool = False, late: bool = False) -> None:
        self.step = 0
        self.late = late
        if loads:
            self.load_state_dict = self._load  # type: ignore[method-assign] # an instance's own counts for nothing

    def _load(self, state: dict[str, Any]) -> None:
        raise AssertionError

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tracker": None if self.late and self.step < 10 else {"kept": Thing()}}


class Loading(Keeping):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["tracker"]


NO_SERVER: dict[str, Any] = {"local_server": False, "notices": None}


def test_hyperparameters_of_any_class_do_not_block_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def model() -> Net:
        return WithHyperparameters(torch.nn.MSELoss(), Colour)

    with pytest.raises(Stop):
        trainer(spot(tmp_path, **NO_SERVER), Keeping(), StopAt(13)).fit(model(), data())
    assert said(caplog, "not-resumable") == []
    RAN.clear()
    callback = spot(tmp_path, **NO_SERVER)
    trainer(callback, Keeping()).fit(model(), data())
    assert callback.resumed_from.step == 12
    assert manifests(tmp_path)[0].complete


class Configuration(collections.UserDict[str, Any]):
    """As omegaconf's, which pytorch-tabular's models have for hyperparameters: a value may be left open."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] == "???":
            raise RuntimeError(f"{name} is left open")
        return self.data[name]


class Configured(Net):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._hparams: Any = Configuration(width=width)


class ConfiguredData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self._hparams: Any = Configuration(batch_size=batch_size, folder="???")

    def train_dataloader(self) -> Any:
        return data()


def test_a_configuration_as_hyperparameters_blocks_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_connector, "_OMEGACONF_AVAILABLE", True)
    omegaconf = types.ModuleType("omegaconf")
    monkeypatch.setattr(omegaconf, "Container", Configuration, raising=False)
    monkeypatch.setitem(sys.modules, "omegaconf", omegaconf)
    with pytest.raises(Stop):
        trainer(spot(tmp_path, **NO_SERVER), StopAt(7)).fit(Configured(3), ConfiguredData())
    callback = spot(tmp_path, **NO_SERVER)
    with pytest.raises(Stop):
        trainer(callback, StopAt(10)).fit(Configured(3), ConfiguredData())
    assert callback.resumed_from.step == 6
    assert not said(caplog, "hyperparameters-changed")
    trainer(spot(tmp_path, **NO_SERVER)).fit(Configured(5), ConfiguredData(), weights_only=False)  # its class is loaded
    assert [facts["names"] for facts in said(caplog, "hyperparameters-changed")] == ["width 3→5"]


@pytest.mark.parametrize("plugins", [[], [SpotCheckpointIO(local_server=False)]], ids=["callback", "plugin"])
def test_a_snapshot_that_is_named_in_fit_is_read_in_the_same_way(plugins: list[Any], tmp_path: Path) -> None:
    with pytest.raises(Stop):
        trainer(spot(tmp_path, **NO_SERVER), StopAt(13)).fit(WithHyperparameters(torch.nn.MSELoss()), data())
    path = tmp_path / "run-1" / manifests(tmp_path)[0].data_path
    callbacks = [] if plugins else [spot(tmp_path / "other", resume=False, **NO_SERVER)]
    again = trainer(*callbacks, plugins=plugins, max_steps=14)
    steps: list[int] = []
    look = pl.callbacks.LambdaCallback(on_train_batch_start=lambda run, *_: steps.append(run.global_step))
    again.callbacks.insert(0, look)  # type: ignore[attr-defined]
    again.fit(WithHyperparameters(torch.nn.MSELoss()), data(), ckpt_path=path)
    assert steps == [12, 13]
    assert "load_checkpoint" not in vars(again.strategy)


def test_unloadable_state_is_named_at_first_snapshot_and_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Stop):
        trainer(spot(tmp_path, **NO_SERVER), Loading(late=True), StopAt(22)).fit(Net(), data())
    (about,) = said_about(caplog, "not-resumable")
    assert "callbacks.Loading.tracker.kept is a tests.unit.test_unpickling.Thing" in about
    with pytest.raises(NotSerializableError, match=r"callbacks\.Loading\.tracker\.kept .*add_safe_globals"):
        trainer(spot(tmp_path, **NO_SERVER), Loading()).fit(Net(), data())
    caplog.clear()
    with torch.serialization.safe_globals([Thing]):
        callback, loading = spot(tmp_path, **NO_SERVER), Loading()
        trainer(callback, loading).fit(Net(), data())
    assert callback.resumed_from is not None
    assert isinstance(loading.loaded["kept"], Thing)
    assert said(caplog, "not-resumable") == []


def test_a_user_who_trusts_the_snapshots_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        new_process()
        callback = spot(tmp_path, **NO_SERVER)
        trainer(callback, Loading(), max_steps=6).fit(Net(), data(), weights_only=False)
    assert callback.resumed_from is not None
    assert said(caplog, "not-resumable") == []


NOT_TRIED = "NotImplementedError: torch reads no quantized or nested tensor without its bytes"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.eye(4).to_sparse(), 0),
        (lambda: torch.eye(4).to_sparse_csr(), 0),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), 1),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 1),
    ],
    ids=["sparse", "csr", "quantized", "nested"],
)
def test_no_tensor_is_called_damaged_at_the_first_snapshot(
    make: Callable[[], torch.Tensor],
    said: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    model.register_buffer("special", make())
    with pytest.raises(Stop):
        trainer(spot(tmp_path, **NO_SERVER), StopAt(7)).fit(model, data())
    assert manifests(tmp_path)
    assert said_about(caplog, "resume-untried") == [NOT_TRIED] * said
    assert said_about(caplog, "not-resumable") == []


class Scaler:
    """As the normalizers of pytorch-forecasting: fitted when the model is made, saved and taken back by its hooks."""

    def __init__(self, mean: float) -> None:
        self.mean = mean


class TakingBack(Net):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.nn.MSELoss()
        self.scalers = [Scaler(1.0)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["special"] = {"criterion": self.criterion, "scalers": self.scalers, "kind": Scaler}
        checkpoint["hyper_parameters"] = {**checkpoint.get("hyper_parameters", {}), **checkpoint["special"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, value in checkpoint["special"].items():
            setattr(self, name, value)


def test_objects_that_a_hook_takes_back_are_the_programs_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Stop):
        trainer(spot(tmp_path, **NO_SERVER), StopAt(7)).fit(TakingBack(), data())
    caplog.set_level("INFO")
    callback, model = spot(tmp_path, **NO_SERVER), TakingBack()
    criterion, scalers = model.criterion, list(model.scalers)
    with pytest.raises(Stop):
        trainer(callback, StopAt(10)).fit(model, data())
    (line,) = (record.message for record in caplog.records if getattr(record, "spot_key", "") == "objects-remade")
    assert "scalers.0" in line  # which is one list at both places
    assert callback.resumed_from is not None
    assert model.criterion is criterion
    assert model.scalers == scalers
    assert model.kind is Scaler


class Coded(torch.Tensor):
    """What optimizers of 8 bits keep their moments in."""


class Codes(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("moment", torch.zeros_like(parameter).as_subclass(Coded))
        return loss


class ImportsLate(Net):
    """Its optimizer's package makes its class known to torch where it is imported."""

    def configure_optimizers(self) -> Any:
        torch.serialization.add_safe_globals([Coded])
        return Codes(self.parameters(), lr=0.01)


def test_a_class_torch_knows_only_in_training_is_named_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start said nothing; each resume was refused, and named a function of torch."""
    known = torch.serialization.get_safe_globals()

    def fit(stop: int) -> None:
        new_process()
        torch.serialization.clear_safe_globals()
        trainer(StopAt(stop), serverless(tmp_path / "run", interval=EverySteps(2))).fit(ImportsLate(), data(8))

    try:
        with pytest.raises(Stop):
            fit(7)
        (about,) = said_about(caplog, "not-resumable")
        assert "tests.unit.test_unpickling.Coded" in about
        with pytest.raises(NotSerializableError, match=r"tests\.unit\.test_unpickling\.Coded"):
            fit(9)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)
