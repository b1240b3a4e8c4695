"""A laid-out, filled file holds what ``torch.save`` would have written, however often it is laid out."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lightning_spot.errors import SpotError
from lightning_spot.snapshot.layout import Layout, filled, lay_out, lay_out_first
from tests.support.filled import check_archive, fill

pytestmark = pytest.mark.guarantee("G12")


def loaded(image: bytes | bytearray, **how: Any) -> Any:
    return torch.load(io.BytesIO(image), **{"weights_only": True, **how})


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def shape_of(value: Any, seen: dict[int, int]) -> Any:
    """All there is to know of a loaded value, sharing of memory and of objects included, as comparable values."""
    number = seen.setdefault(id(value), len(seen))
    if isinstance(value, torch.Tensor):
        form: tuple[Any, ...] = (number, type(value).__name__, value.dtype, value.layout, tuple(value.shape))
        form += (value.requires_grad, value.device.type, sorted(vars(value)))
        if value.device.type == "meta":
            return form
        if value.layout is not torch.strided:
            return (*form, value.to_dense().tolist())
        storage = value.untyped_storage()
        shared = seen.setdefault(storage._cdata, len(seen))
        bits = bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        form += (value.stride(), value.storage_offset(), value.is_conj(), value.is_neg())
        return (*form, shared, bits, id(value._backward_hooks) in seen and value._backward_hooks is not None)
    if isinstance(value, dict):
        items = [(shape_of(key, {}), shape_of(item, seen)) for key, item in value.items()]
        return (
            number,
            type(value).__name__,
            items,
            shape_of(vars(value), seen) if hasattr(value, "__dict__") else None,
        )
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [shape_of(item, seen) for item in value])
    if isinstance(value, Thing):
        return ("Thing", shape_of(vars(value), seen))
    return (type(value).__name__, repr(value))


class Thing:
    """An object of a user's class that holds tensors."""

    def __init__(self, held: Any) -> None:
        self.held = held


def assert_like_torch(state: Any) -> Layout:
    """The file of a state loads to what the file of ``torch.save`` loads to."""
    layout = lay_out(state)
    image = fill(layout)
    check_archive(image)
    assert all(piece.offset % 64 == 0 for piece in layout.pieces)
    ours, theirs = loaded(image, weights_only=False), loaded(saved(state), weights_only=False)
    keep = (ours, theirs)  # so that no address is used twice
    assert shape_of(ours, {}) == shape_of(theirs, {})
    del keep
    return layout


def unusual_state() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32)
    tied = torch.nn.Parameter(torch.randn(3, 5))
    with_attribute = torch.randn(3)
    with_attribute.note = "kept"  # type: ignore[attr-defined] # as users do
    hooked = torch.randn(2, requires_grad=True)
    pair = torch.randn(4)
    parameter = torch.nn.Parameter(torch.randn(2))
    parameter.is_shared = True  # type: ignore[attr-defined]
    return {
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "non-contiguous": torch.randn(6, 4).t(),
        "bf16": torch.randn(7).bfloat16(),
        "half": torch.randn(7).half(),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "bool": torch.tensor([True, False, True]),
        "int8": torch.tensor([-1, 2], dtype=torch.int8),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "meta": torch.empty(3, device="meta"),
        "view-a": base[2:9],
        "view-b": base.view(4, 6)[1],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "tied-a": tied,
        "tied-b": tied,
        "alias-a": pair.detach(),
        "alias-b": pair.detach(),
        "data-of": tied.data,
        "attribute": with_attribute,
        "hooked": hooked,
        "parameter": parameter,
        "buffer": torch.nn.Buffer(torch.ones(3)),
        "storage": torch.randn(3).untyped_storage(),
        "ordered": OrderedDict(a=torch.ones(2), b=[torch.ones(1), (torch.zeros(1),)]),
        "state_dict": torch.nn.Linear(3, 2).state_dict(),
        "thing": Thing([base, tied]),
        "plain": {"step": 7, "lr": 0.1, "names": ["a", "b"], "none": None, "tuple": (1, 2.0, "x"), "big": 2**70},
    }


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Sparse")
def test_whatever_torch_saves_is_saved_alike_again_and_again() -> None:
    state = unusual_state()
    state["quantised"] = torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.qint8)
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    state["per channel"] = torch.quantize_per_channel(torch.randn(2, 3), scales, zeros, 0, torch.qint8)
    quantised = {name: state.pop(name) for name in ("quantised", "per channel")}
    for _ in range(3):
        for name in ("bf16", "tied-a", "view-a"):
            state[name].detach().add_(1)
        assert_like_torch(state)
    found = loaded(fill(lay_out(quantised)))
    for name, tensor in quantised.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].int_repr(), tensor.int_repr())


def test_a_nested_tensor_is_saved_as_torch_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
    found = loaded(fill(lay_out({"n": nested, "w": torch.ones(2)})), weights_only=False)
    assert all(map(torch.equal, found["n"].unbind(), nested.unbind()))


def test_a_file_is_read_without_this_package(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000), "none": torch.zeros(0), "step": 3, "b": torch.ones(3, dtype=torch.bfloat16)}
    path = tmp_path / "model.ckpt"
    path.write_bytes(fill(lay_out(state)))
    for how in ({}, {"mmap": True}, {"map_location": "cpu"}):
        found = torch.load(path, weights_only=True, **how)
        assert torch.equal(found["w"], state["w"])
        assert torch.equal(found["b"], state["b"])
    assert torch.load(path, weights_only=True, map_location="meta")["w"].shape == (1000,)
    check_archive(path)


def test_torch_computes_no_places_of_its_own(tmp_path: Path) -> None:
    """Its own files say so that it may; in ours it would find other bytes."""
    kept = torch.arange(100.0)
    path = tmp_path / "model.ckpt"
    path.write_bytes(fill(lay_out({"new": torch.zeros(5), "kept": kept})))
    with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
        found = torch.load(path, weights_only=True, mmap=True)
    assert torch.equal(found["kept"], kept)
    assert torch.equal(found["new"], torch.zeros(5))


def test_storages_that_come_early_keep_their_places() -> None:
    weights = {f"w{index}": torch.randn(index + 1) for index in range(20)}
    early = {weight.data_ptr() for weight in weights.values()}
    places = []
    for step in range(5):
        seeds = [torch.arange(step + 3) for _ in range(step)]  # others each time, in front of all
        state = {"g": seeds, "w": {name: weight.detach() for name, weight in weights.items()}, "s": "x" * step}
        layout = lay_out(state, early=early)
        found = loaded(fill(layout))
        assert all(map(torch.equal, found["w"].values(), weights.values()))
        assert all(map(torch.equal, found["g"], seeds))
        by_address = {piece.storage.data_ptr(): piece.offset for piece in layout.pieces}
        places.append([by_address[weight.data_ptr()] for weight in weights.values()])
    assert places[1:] == places[:-1]


@pytest.mark.parametrize("seed", range(4))
def test_first_storages_have_places_by_their_sizes_only(seed: int) -> None:
    """Other ranks, with other tensors of these sizes, find the same; and each writes a range of the file."""
    dice = Random(seed)
    weights = [torch.rand(dice.randrange(1, 300)) for _ in range(12)]
    for step in range(12):
        change = dice.randrange(4) if step > 2 else 3
        if change == 0:  # an optimizer begins to keep something
            weights.append(torch.rand(dice.randrange(1, 300)))
        elif change == 1:
            del weights[dice.randrange(len(weights))]
        elif change == 2:
            weights[dice.randrange(len(weights))] = torch.rand(77)
        first = [weight.untyped_storage() for weight in weights]
        others = [torch.rand(dice.randrange(50)) for _ in range(3)]
        state = {"others": others, "w": list(reversed(weights[1:])), "note": "x" * dice.randrange(100)}
        layout = lay_out(state, first)
        found = loaded(fill(layout))
        assert all(map(torch.equal, found["w"], state["w"]))
        assert all(map(torch.equal, found["others"], others))
        head = lay_out_first([weight.clone().untyped_storage() for weight in weights])
        assert [piece[1:3] for piece in head.pieces] == [piece[1:3] for piece in layout.pieces[: len(weights)]]
        assert list(head.frame) == list(layout.frame[: len(weights)])
        ends = sorted({dice.randrange(layout.nbytes) for _ in range(3)} | {layout.nbytes})
        ranges = [layout.cut(*bounds) for bounds in itertools.pairwise([0, *ends])]
        assert b"".join(bytes(fill(each)) for each in ranges) == bytes(fill(layout))


def test_first_storages_are_in_the_file_in_any_case() -> None:
    weights = [torch.rand(5), torch.rand(6)]
    layout = lay_out({"w": weights[1]}, [weight.untyped_storage() for weight in weights])
    assert [piece.nbytes for piece in layout.pieces] == [20, 24]
    assert torch.equal(loaded(fill(layout))["w"], weights[1])


class Renewed:
    """Each time it is pickled it holds another tensor, twice."""

    def __reduce__(self) -> Any:
        made = torch.ones(3)
        return (list, ((made, made),))


def test_a_tensor_that_is_made_anew_each_time_and_there_twice() -> None:
    found = loaded(fill(lay_out({"w": torch.zeros(2), "made": Renewed()})), weights_only=False)
    assert found["made"][0] is found["made"][1]
    assert torch.equal(found["made"][0], torch.ones(3))


def test_no_storage_is_kept_alive() -> None:
    weight = torch.randn(1000)
    alive = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    lay_out({"w": weight})
    del weight
    assert alive.expired()


def test_one_memory_as_two_dtypes_is_refused_as_torch_does() -> None:
    state = {"a": (base := torch.ones(4)), "b": base.view(torch.int32)}
    lay_out({"a": base})
    for _ in range(2):
        with pytest.raises(RuntimeError):
            saved(state)
        with pytest.raises(RuntimeError):
            lay_out(state)


def test_a_file_above_4_gib(tmp_path: Path) -> None:
    large, behind = torch.empty(2**32 + 100, dtype=torch.uint8), torch.arange(5)
    layout = lay_out({"large": large, "behind": behind})
    path = tmp_path / "model.ckpt"
    with path.open("wb") as file:
        file.truncate(layout.nbytes)
        for offset, data in layout.frame:
            file.seek(offset)
            file.write(data)
        file.seek(layout.pieces[1].offset)
        file.write(behind.numpy().tobytes())
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["large"].shape == large.shape
    assert torch.equal(found["behind"], behind)
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        assert archive.read("model/byteorder") == sys.byteorder.encode()
    assert sizes["model/data/0"] == 2**32 + 100
    listed = subprocess.run(["unzip", "-Zt", str(path)], capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stdout


def test_a_file_is_filled_with_the_bytes_of_its_storages() -> None:
    state = {"mean": torch.arange(5.0), "count": torch.tensor(3), "none": torch.zeros(0), "parts": [torch.ones(2, 7)]}
    layout = lay_out(state)
    assert filled(layout) == fill(layout)
    assert filled(lay_out({})) == fill(lay_out({}))
    gone = torch.ones(9).clone()
    layout = lay_out(gone)
    gone.untyped_storage().resize_(4)
    with pytest.raises(SpotError):
        filled(layout)
