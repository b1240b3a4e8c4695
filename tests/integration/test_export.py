"""``lightning-spot export --safetensors``: the weights, as another reader of the format finds them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.errors import CorruptSnapshotError, NotSerializableError
from lightning_spot.sharded.reader import write_tensors, write_weights
from tests.conftest import Cli
from tests.support.snapshots import EachDurable
from tests.support.trainer import Net, data, trainer

try:
    from safetensors.torch import load as library_load
except ImportError:
    library_load = None

KINDS = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}


def read(content: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Written from the specification alone: header, then tensors that cover all of the rest, without gaps."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert content[8:9] == b"{"
    said, place = header.pop("__metadata__"), 0
    assert all(isinstance(text, str) for text in said.values())
    found = {}
    for name, item in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = item["data_offsets"]
        assert begin == place
        place = end
        if item["dtype"] in KINDS:
            values = np.frombuffer(body[begin:end], KINDS[item["dtype"]]).reshape(item["shape"])
            found[name] = torch.from_numpy(values.copy())
        else:
            found[name] = item["shape"], body[begin:end]
    assert place == len(body)
    return found, said


class Tied(Net):
    """Two names of one tensor, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = self.net[0]

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_the_weights_of_a_snapshot(tmp_path: Path, cli: Cli) -> None:
    run, model, target = tmp_path / "run", Tied(), tmp_path / "model.safetensors"
    each = {"interval": EverySteps(5), "on_full": "wait", "keep": 9, "min_upload_interval_s": 0.0}
    spot = SpotCheckpoint(str(run), local_server=False, **each)
    trainer(spot, EachDurable(run, 5), max_steps=10, max_epochs=None).fit(model, data())
    assert "step 10" in cli("export", run, target, "--safetensors")
    found, said = read(target.read_bytes())
    assert {name: said[name] for name in ("format", "step", "run")} == {"format": "pt", "step": "10", "run": "run"}
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    tied = {name for name in expected if name.startswith("twin.")}
    assert {name: said[name] for name in tied} == {name: name.replace("twin.", "net.0.") for name in tied}
    assert found.keys() == expected.keys() - tied
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "--force" in cli("export", run, target, "--safetensors", code=2)
    cli("export", f"{run}@5", target, "--safetensors", "--force")
    assert read(target.read_bytes())[1]["step"] == "5"
    if library_load is not None:
        loaded = library_load(target.read_bytes())
        assert all(torch.equal(loaded[name], read(target.read_bytes())[0][name]) for name in loaded)


def test_tensors_of_all_kinds() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {
        "part": whole[1],
        "whole": whole,
        "turned": whole.t(),
        "same": whole,
        "none": torch.empty(0, 3),
        "one": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "half": torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
        "double": torch.tensor([1.0], dtype=torch.float64),
        "text": "left out",
    }
    file = io.BytesIO()
    write_tensors(file, state, {"format": "pt"}, 2**20)
    found, said = read(file.getvalue())
    assert said == {"format": "pt", "whole": "same"}
    assert found["half"] == ([2], state["half"].view(torch.uint8).numpy().tobytes())  # type: ignore[attr-defined]
    for name in ("part", "same", "turned", "none", "one", "flags", "double"):
        assert torch.equal(found[name], state[name])  # type: ignore[arg-type]
        assert found[name].dtype == state[name].dtype  # type: ignore[attr-defined]
    if library_load is not None:
        assert torch.equal(library_load(file.getvalue())["turned"], whole.t())


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("odd", torch.zeros(3).to_sparse()),
        ("odd", torch.zeros(2, dtype=torch.complex64)),
        ("__metadata__", torch.zeros(1)),  # where the format has its texts
    ],
    ids=["sparse", "complex", "name"],
)
def test_what_the_format_has_no_place_for(name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(NotSerializableError, match=name):
        write_tensors(io.BytesIO(), {name: tensor}, {}, 2**20)


def test_a_mask_that_is_expanded_may_be_more_than_the_file(tmp_path: Path) -> None:
    torch.save({"state_dict": {"mask": torch.ones(1).expand(1000, 1000)}}, tmp_path / "small.ckpt")
    write_weights(tmp_path / "small.ckpt", tmp_path / "weights", {})
    assert torch.equal(read((tmp_path / "weights").read_bytes())[0]["mask"], torch.ones(1000, 1000))


def test_a_forged_file_is_not_exported_larger_than_it_is(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.zeros(1).expand(2**40)}}, tmp_path / "forged.ckpt")
    with pytest.raises(CorruptSnapshotError, match="forged"):
        write_weights(tmp_path / "forged.ckpt", tmp_path / "weights", {})
    assert [path.name for path in tmp_path.iterdir()] == ["forged.ckpt"]
