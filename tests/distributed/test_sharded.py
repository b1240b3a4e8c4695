"""A sharded snapshot holds every tensor bit for bit: read by torch alone, by us, and on any number of ranks."""

from __future__ import annotations

import json
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_spot.cli.command import main
from lightning_spot.config import format_bytes
from lightning_spot.errors import CorruptSnapshotError, ModelChangedError, NotSerializableError
from lightning_spot.run.reading import SnapshotReader
from lightning_spot.sharded import plan
from lightning_spot.sharded.file_plan import ShardedLayouter, load_state
from lightning_spot.sharded.metadata import metadata_of
from lightning_spot.sharded.plan import Planner, tensors_file
from lightning_spot.sharded.reader import ImageReader, load, load_all, write_plain
from lightning_spot.snapshot.files import check_files
from lightning_spot.snapshot.layout import filled
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.shards import Image
from lightning_spot.snapshot.tensor_index import SHARDS_FILE, Shards, archived
from lightning_spot.state.optimizers import keep_dtypes, precise_of
from lightning_spot.state.sharded import MODEL, Dtensors, _put_back_optimizer
from tests.integration.test_export import read as safetensors_of
from tests.support.filled import check_archive, fill
from tests.support.ranks import Shape, Sharded, as_rank, at_rest, on_rank, snapshot, whole

pytestmark = pytest.mark.guarantee("G12")

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8)


def random_tensor(dice: Random, shape: Shape) -> torch.Tensor:
    dtype = dice.choice(DTYPES)
    count = int(torch.Size(shape).numel())
    bits = torch.tensor([dice.randrange(2) for _ in range(count * dtype.itemsize)], dtype=torch.uint8)
    return bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def random_state(dice: Random, mesh_dims: int) -> dict[str, Any]:
    """Sharded, replicated and plain tensors of all kinds and sizes, and values."""
    model: dict[str, Any] = {}
    for number in range(dice.randrange(1, 6)):
        shape = tuple(dice.choice((0, 1, 2, 3, 7, 16)) for _ in range(dice.randrange(1, 4)))
        kinds: list[Any] = [Replicate(), Shard(0), Shard(len(shape) - 1)]
        placements = tuple(dice.choice(kinds) for _ in range(dice.choice((1, mesh_dims))))
        model[f"layer.{number}"] = Sharded(random_tensor(dice, shape), placements)
    model["buffer"] = random_tensor(dice, (3,))
    model["scalar"] = torch.tensor(dice.random())
    state = {name: {"step": torch.tensor(4.0), "exp_avg": value} for name, value in model.items()}
    groups = [{"lr": dice.random(), "betas": (0.9, 0.999), "params": list(model), "foreach": None}]
    return {"state_dict": model, "optimizer_0": {"state": state, "param_groups": groups}}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape
        return equal and one.contiguous().view(-1).view(torch.uint8).equal(
            other.contiguous().view(-1).view(torch.uint8)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("seed", range(12))
def test_torch_and_we_read_it_bit_for_bit_on_any_number_of_ranks(seed: int, tmp_path: Path) -> None:
    dice = Random(seed)
    mesh_shape: Shape = dice.choice(((1,), (2,), (3,), (5,), (2, 2), (3, 2)))
    state = random_state(dice, len(mesh_shape))
    image, manifest = snapshot(state, mesh_shape)
    assert check_files(manifest.files, manifest.nbytes) is None
    between = bytearray(image)
    for file in manifest.files:
        between[file.offset : file.stop] = bytes(file.nbytes)
    assert not any(between)

    at_rest(image, manifest, tmp_path)
    read = on_rank_whole(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(read, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert same(read, whole(state))

    there: Image = memoryview(bytes(image))
    if seed % 2:  # as from a disk, where there is no memory for all of it
        (tmp_path / "image").write_bytes(image)
        there = SnapshotReader([os.open(tmp_path / "image", os.O_RDONLY)], manifest, "here")
    reader = ImageReader(there, manifest)
    assert same(load_all(reader), whole(state))
    others: Shape = dice.choice(((1,), (2,), (4,))) if len(mesh_shape) == 1 else (2, 3)
    for rank in range(int(torch.Size(others).numel())):
        with as_rank(rank, others) as mesh:
            mine = on_rank(state, mesh, empty=True)
            load(mine["state_dict"], reader, "state_dict")
            wanted = on_rank(state, mesh)
            for name, tensor in wanted["state_dict"].items():
                found = mine["state_dict"][name]
                assert same(local(found), local(tensor)), name


def local(tensor: Any) -> torch.Tensor:
    """What this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_rank_whole(state: Any) -> Any:
    """A state of plain tensors to load into."""
    if isinstance(state, dict):
        return {key: on_rank_whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [on_rank_whole(value) for value in state]
    return torch.zeros_like(whole(state)) if isinstance(whole(state), torch.Tensor) else "another"


@pytest.fixture(scope="module")
def one() -> tuple[dict[str, Any], bytearray, Any]:
    weight = Sharded(torch.arange(35.0).view(7, 5), (Shard(0),))
    empty = Sharded(torch.empty(0, 4), (Shard(0),))
    state = {
        "state_dict": {"weight": weight, "bias": Sharded(torch.arange(7.0), (Shard(0),)), "none": empty},
        "optimizer_0": {
            "state": {"weight": {"step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 0.1, "params": ["weight"]}],
        },
    }
    return state, *snapshot(state, (2,))


def test_every_archive_is_complete_and_its_elements_are_aligned(one: Any) -> None:
    _, image, manifest = one
    shards = Shards.read(memoryview(image), manifest)
    starts = {file.name: file.offset for file in manifest.files}
    places = [(shard.at, shard.data) for tensor in shards.tensors for shard in tensor.shards]
    for at, data in [*places, *((at, 0) for _, at in shards.values)]:
        check_archive(archived(memoryview(image), manifest, at))
        assert (starts[at.file] + at.offset + data) % 64 == 0
    for rank in range(2):
        span = next(file for file in manifest.files if file.name == f"rank-000{rank}.pt")
        data = memoryview(image)[span.offset : span.stop]
        check_archive(data)
        assert load_state(data) == {"mine": rank}


def test_values_of_several_ranks_are_written_once_and_evenly() -> None:
    state = {"a": Sharded(torch.ones(64), (Replicate(),)), "b": Sharded(torch.ones(64), (Replicate(),))}
    with as_rank(1, (2,)) as mesh:
        plan = Planner(2).plan(on_rank(state, mesh))[0]
    assert [[box.at.file for box in tensor.shards] for tensor in plan.tensors] == [[tensors_file(0)], [tensors_file(1)]]


@pytest.mark.parametrize("mesh_shape", [(3, 2), (4, 2), (3, 3), (2, 2)])
def test_rows_split_unevenly_by_tp_and_fsdp_are_counted_as_cut(mesh_shape: Shape) -> None:
    """Torch 2.13 takes one rank's for another's: with 7 rows over 3 x 2, no snapshot was taken, and none resumed."""
    many = (1, 2, 5, 7, 9, 11, 13, 17)
    plain = {str(rows): torch.arange(1.0, rows + 1).view(rows, 1) for rows in many}
    image, manifest = snapshot({"m": plain}, (1,))
    planned: dict[str, dict[float, float]] = {name: {} for name in plain}
    for rank in range(mesh_shape[0] * mesh_shape[1]):
        with as_rank(rank, mesh_shape) as mesh:
            model = torch.nn.ModuleDict({name: torch.nn.Linear(1, int(name), bias=False) for name in plain})
            for name, layer in model.items():
                layer.weight.data.copy_(plain[name])  # type: ignore[operator,union-attr]
            parallelize_module(model, mesh["tensor"], dict.fromkeys(plain, ColwiseParallel()), src_data_rank=None)
            for layer in model.values():
                fully_shard(layer, mesh=mesh["data"])
            state = {name: model[name].state_dict()["weight"] for name in plain}
            locals_ = {name: value.to_local().flatten().tolist() for name, value in state.items()}
            for tensor in Planner(mesh.size()).plan({"m": dict(state)})[0].tensors:
                name = str(tensor.path[-1])
                for box in tensor.shards:
                    if box.at.file == tensors_file(rank):
                        assert box.sizes[0] == len(locals_[name])
                        planned[name] |= {box.offsets[0] + row: each for row, each in enumerate(locals_[name])}
            for value in state.values():
                value.to_local().detach().zero_()
            load(state, ImageReader(memoryview(image), manifest), "m")
            assert {name: value.to_local().flatten().tolist() for name, value in state.items()} == locals_
    assert planned == {name: {row: row + 1 for row in range(int(name))} for name in plain}


def test_storage_slices_and_non_contiguous_tensors_are_saved() -> None:
    padded = torch.arange(12.0)
    with as_rank(0, (1,)):
        state = {"part": padded[2:8].view(2, 3), "turned": torch.arange(6.0).view(2, 3).T}
        layouter = ShardedLayouter(0, 1)
        written = layouter.lay_out(state, {})
    piece = written.layout.pieces[0]
    assert piece.storage.data_ptr() + piece.start == padded[2:].data_ptr()  # not copied yet
    padded += 100
    image = fill(written.layout)
    manifest = Manifest(run="r", name="n", step=0, attempt=0, nbytes=len(image), files=written.files)
    read = load_all(ImageReader(memoryview(image), manifest))
    assert same(read, {"part": padded[2:8].view(2, 3), "turned": state["turned"].contiguous()})


def test_what_cannot_be_saved_is_named() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(NotSerializableError, match=r"model\.odd .*\bOdd\b"):
        Planner(1).plan({"model": {"odd": torch.ones(2).as_subclass(Odd)}})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for kind, tensor in (("nested", nested), ("sparse_coo", torch.eye(2).to_sparse())):
        with pytest.raises(NotSerializableError, match=rf"model\.odd .*{kind}.* persistent=False"):
            Planner(1).plan({"model": {"odd": tensor}})
    with pytest.raises(NotSerializableError, match=r"groups\.0\.bad"):
        ShardedLayouter(0, 1).lay_out({"groups": [{"bad": lambda: 0}]}, {})


def test_nothing_in_it_runs_code(one: Any, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    with as_rank(0, (1,)):
        written = ShardedLayouter(0, 1).lay_out({"evil": Evil()}, {})
    image = fill(written.layout)
    manifest = replace(one[2], nbytes=len(image), files=written.files, checksums=())
    with pytest.raises(CorruptSnapshotError, match="evil"):
        load_all(ImageReader(memoryview(image), manifest))
    assert not (tmp_path / "ran").exists()


HOSTILE: dict[str, Any] = {
    "no list": lambda f: f.update(tensors=4),
    "another format": lambda f: f.update(format=9),
    "a file that is not there": lambda f: f.update(files=["../../etc/passwd"]),
    "a file's number": lambda f: f["tensors"][0][3][0][2].__setitem__(0, 77),
    "an offset below zero": lambda f: f["tensors"][0][3][0][2].__setitem__(1, -64),
    "beyond the file": lambda f: f["tensors"][0][3][0][2].__setitem__(2, 2**40),
    "beyond the tensor": lambda f: f["tensors"][0][3][0][0].__setitem__(0, 6),
    "a tensor too large": lambda f: f["tensors"][0][2].__setitem__(0, 2**50),
    "a shard less": lambda f: f["tensors"][0][3].pop(),
    "elements beyond the archive": lambda f: f["tensors"][0][3][0].__setitem__(3, 2**30),
    "other dimensions": lambda f: f["tensors"][0][3][0][1].pop(),
    "an item twice": lambda f: f["values"].append(f["values"][0]),
    "a path of lists": lambda f: f["values"][0].__setitem__(0, [["x"]]),
    "a list as long as memory": lambda f: f["values"][0].__setitem__(0, ["x", 2**40]),
    "a place below zero": lambda f: f["values"][0].__setitem__(0, ["x", -1]),
    "a list at the top": lambda f: f["values"][0].__setitem__(0, [0]),
    "a list that is a dict": lambda f: f["values"].extend([["x", key], f["values"][0][1]] for key in (0, "y")),
    "an item in another": lambda f: f["values"].append([[*f["tensors"][0][0], "x"], f["values"][0][1]]),
    "one archive for all": lambda f: f["values"].extend([[f"x{n}"], f["tensors"][0][3][0][2]] for n in range(999)),
    "a number that is none": lambda f: f.update(world_size="2"),
    "dtype": lambda f: f["tensors"][0].__setitem__(1, 7),
}


def forged(one: Any, change: Callable[[Any], Any]) -> tuple[memoryview, Manifest]:
    """A snapshot that says something else of where its tensors are."""
    _, image, manifest = one
    span = next(file for file in manifest.files if file.name == SHARDS_FILE)
    fields = json.loads(image[span.offset : span.stop])
    change(fields)
    text = json.dumps(fields).encode()
    changed = bytearray(image) + text
    files = [file for file in manifest.files if file.name != SHARDS_FILE]
    files.append(replace(span, offset=len(image), nbytes=len(text)))
    return memoryview(changed), replace(manifest, nbytes=len(changed), files=tuple(files), checksums=())


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_places_that_cannot_be_are_refused(one: Any, change: Any) -> None:
    with pytest.raises(CorruptSnapshotError):
        Shards.read(*forged(one, change))


def test_a_tensor_larger_than_what_holds_it_is_refused(one: Any) -> None:
    """It was made first, as large as it was said to be."""

    def change(fields: Any) -> None:
        _, _, shape, shards = fields["tensors"][0]
        for sizes in (shape, *(shard[1] for shard in shards)):
            sizes[1] = 2**50

    with pytest.raises(CorruptSnapshotError):
        load_all(ImageReader(*forged(one, change)))


def test_a_dtype_that_torch_does_not_know_is_named(one: Any) -> None:
    _, image, manifest = one
    shards = Shards.read(memoryview(image), manifest)
    odd = replace(shards.tensors[0], dtype="nn")
    with pytest.raises(NotSerializableError, match=r"state_dict\.weight .*'nn'"):
        metadata_of(replace(shards, tensors=(odd,)))


def test_a_state_that_asks_for_what_is_not_there_is_refused(one: Any) -> None:
    state, image, manifest = one
    with as_rank(0, (2,)) as mesh:
        mine = on_rank(state, mesh, empty=True)
        mine["state_dict"]["more"] = torch.ones(2)
        with pytest.raises(ModelChangedError, check=lambda error: error.missing == ["state_dict.more"]):
            load(mine["state_dict"], ImageReader(memoryview(image), manifest), "state_dict")
        other = {"weight": torch.ones(8, 5), "none": mine["state_dict"]["none"]}
        with pytest.raises(
            ModelChangedError,
            match=r"weight \(7, 5\)→\(8, 5\)",
            check=lambda error: error.unexpected == ["state_dict.bias"],
        ):
            load(other, ImageReader(memoryview(image), manifest), "state_dict")


def test_ranks_with_other_states_have_other_digests() -> None:
    digests = set()
    for rank, shape in ((0, (4, 2)), (1, (4, 3))):
        state = {"w": Sharded(torch.ones(shape), (Shard(0),))}
        with as_rank(rank, (2,)) as mesh:
            digests.add(ShardedLayouter(rank, 2).lay_out(on_rank(state, mesh), {}).digest)
    assert len(digests) == 2


def test_other_metadata_bytes_of_a_ranks_torch_change_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    digests, (archive, data) = set(), plan.archive_of(torch.float32, (4,))
    for more in (0, 64):
        monkeypatch.setattr(plan, "archive_of", lambda *_, more=more: (replace(archive, nbytes=4096 + more), data))
        digests.add(ShardedLayouter(0, 1).lay_out({"w": torch.ones(4)}).digest)
    assert len(digests) == 2


def test_the_consolidated_file_equals_that_of_a_single_device(
    tmp_path: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.5}])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"state_dict": get_model_state_dict(model), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    sharded = {
        name: Sharded(value, (Shard(0),)) if value.ndim else value for name, value in state["state_dict"].items()
    }
    image, manifest = snapshot({**state, "state_dict": sharded}, (3,))
    folder = tmp_path / manifest.name
    folder.mkdir()
    at_rest(image, manifest, folder)
    (folder / "manifest.json").write_text(manifest.to_json())

    synced: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced.append)
        write_plain(folder, tmp_path / "plain.ckpt")
    assert len(synced) == 1
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert same({key: plain[key] for key in ("epoch", "rank")}, {"epoch": 3, "rank": 0})
    assert same(plain["state_dict"], dict(model.state_dict()))
    wanted = optimizer.state_dict()
    other = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters()}])
    other.load_state_dict(plain["optimizer_states"][0])
    assert same(other.state_dict(), wanted)

    assert main(["show", str(tmp_path)]) == 0
    assert f"\ndirectory   {manifest.name}, " in capsys.readouterr().out
    assert main(["cp", f"{tmp_path}@{manifest.name}", "--consolidate", str(tmp_path / "pulled.ckpt")]) == 0
    assert (tmp_path / "pulled.ckpt").read_bytes() == (tmp_path / "plain.ckpt").read_bytes()
    assert (tmp_path / "pulled.ckpt").stat().st_mode == (folder / "manifest.json").stat().st_mode
    assert format_bytes((tmp_path / "pulled.ckpt").stat().st_size) in capsys.readouterr().out
    (tmp_path / "pulled.ckpt").unlink()
    weights = tmp_path / "weights.safetensors"
    assert main(["export", f"{tmp_path}@{manifest.name}", str(weights), "--safetensors"]) == 0
    found = safetensors_of(weights.read_bytes())[0]
    assert same(dict(sorted(found.items())), dict(sorted(model.state_dict().items())))
    weights.unlink()

    damaged = folder / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes().replace(b"PK", b"PX", 1))
    with pytest.raises(CorruptSnapshotError, check=lambda error: error.part is not None):
        write_plain(folder, tmp_path / "plain.ckpt")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["plain.ckpt", manifest.name]


class Hides(torch.nn.Linear):
    """Leaves its bias out of the state dict."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}bias"]


@pytest.mark.parametrize("kind", [torch.nn.Linear, Hides])
def test_names_of_parameters_are_those_of_now(kind: type[torch.nn.Linear]) -> None:
    module = torch.nn.Sequential(kind(2, 2), torch.nn.BatchNorm1d(2), kind(2, 2))
    for step in range(5):
        if step == 1:
            module[2].weight = torch.nn.Parameter(torch.ones(2, 2))
        elif step == 2:
            module[2].bias = torch.nn.Parameter(torch.ones(2))
        elif step == 3:
            module[2].weight = module[0].weight  # tied
        elif step == 4:
            module.append(torch.nn.Linear(2, 2))
        optimizer = torch.optim.Adam(module.parameters())
        holder = Dtensors(module)
        holder.model_state()
        expected = [name for name, _ in module.named_parameters()]
        assert holder.optimizer_state(optimizer)["param_groups"][0]["params"] == expected


def resumed(
    tweak: Callable[[torch.optim.Optimizer], Any],
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of an optimizer that has stepped, and of one that goes on from the snapshot of it."""
    optimizers = []
    for _ in range(2):
        module = torch.nn.Linear(3, 2, dtype=dtype)
        optimizers.append((Dtensors(module), kind(module.parameters(), **settings)))
        module(torch.ones(1, 3, dtype=dtype)).sum().backward()
    (holder, optimizer), (other, resuming) = optimizers
    optimizer.step()
    tweak(optimizer)
    state = {MODEL: holder.model_state(), "optimizer_0": holder.optimizer_state(optimizer)}
    image = ShardedLayouter(0, 1).lay_out(state, {})
    data = filled(image.layout)
    manifest = Manifest(run="run", name=snapshot_name(1, 1), step=1, attempt=1, nbytes=len(data), files=image.files)
    _put_back_optimizer(other, resuming, ImageReader(memoryview(data), manifest), "optimizer_0")
    resuming.step()
    return optimizer.state_dict(), resuming.state_dict()


def test_groups_of_an_optimizer_hold_what_they_held() -> None:
    """A learning rate that was a tensor was gone after a resume, and of a dict its last value was left."""
    more = {"warmup": 3, "ends": [1, {"at": torch.ones(2)}]}
    before, after = resumed(lambda optimizer: optimizer.param_groups[0].update(more=more), lr=torch.tensor(0.25))
    assert torch.equal(after["param_groups"][0]["lr"], torch.tensor(0.25))
    groups = [flatten_state_dict(state["param_groups"][0])[0] for state in (before, after)]
    assert same(*[dict(sorted(group.items())) for group in groups])


def test_optimizer_state_of_a_higher_precision_is_not_rounded() -> None:
    """Torch casts it to their dtype: averages of a product, and master weights, came back as bfloat16."""

    def tweak(optimizer: torch.optim.Optimizer) -> None:
        for number, values in enumerate(optimizer.state.values()):
            values["master"] = {"weight": torch.tensor([number + 1 / 3])}

    before, after = resumed(tweak, torch.optim.NAdam, torch.bfloat16)
    for number in before["state"]:
        old, new = before["state"][number], after["state"][number]
        assert {key: value.dtype for key, value in old.items() if key != "master"} == {
            key: value.dtype for key, value in new.items() if key != "master"
        }
        assert torch.equal(old["master"]["weight"], new["master"]["weight"])
        product = new["mu_product"] / old["mu_product"]  # one step more
        assert torch.isclose(product, torch.tensor(0.9 * (1 - 0.5 * 0.96 ** (2 * 4e-3))), rtol=1e-6)


def test_optimizer_state_that_is_no_float_keeps_its_type() -> None:
    """Torch casts it to the dtype of the parameters, too: counts were rounded, and masks were numbers."""

    def tweak(optimizer: torch.optim.Optimizer) -> None:
        for number, values in enumerate(optimizer.state.values()):
            values["hits"] = torch.tensor([2**24 + 1 + 2 * number])
            values["masks"] = [torch.tensor([True, False])]
            values["wave"] = torch.tensor([1.0 + 2.0j])

    before, after = resumed(tweak)
    for number, old in before["state"].items():
        new = after["state"][number]
        assert same(*({key: state[key] for key in ("hits", "masks", "wave")} for state in (old, new)))
    plain = {"optimizer_states": [{"state": {0: {"mean": torch.ones(2)}}}], "state_dict": {"weight": torch.ones(2)}}
    assert precise_of(plain) == []
    plain["optimizer_states"][0]["state"][0]["hits"] = torch.tensor([1])  # type: ignore[index]
    assert precise_of(plain) != []


def test_optimizers_with_a_state_format_of_their_own_are_kept() -> None:
    """One around another optimizer ended the resume with a ``KeyError``."""
    other = {"lookahead_state": {"slow": torch.ones(2, dtype=torch.float64)}, "base_optimizer": None}
    assert precise_of({"optimizer_states": [other], "state_dict": {"weight": torch.ones(2)}}) == [other]
    keep_dtypes(torch.optim.SGD([torch.ones(2)], 0.1), other, lambda _parameter: None)
    assert precise_of({"state_dict": {"weight": torch.ones(2)}}) == []


def test_empty_dicts_of_an_optimizer_come_back() -> None:
    """Torch leaves them out of a directory: who looked for one after a resume raised a ``KeyError``."""

    def tweak(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0].update(seen={}, deep={"one": {}, "other": {}}, listed=[{}, {"x": 1}])
        first, second = optimizer.state.values()
        first["more"] = {"none": {}}
        second.clear()  # as where it was asked for only

    before, after = resumed(tweak)
    group = after["param_groups"][0]
    assert [group[name] for name in ("seen", "deep", "listed")] == [{}, {"one": {}, "other": {}}, [{}, {"x": 1}]]
    assert after["state"][0]["more"] == before["state"][0]["more"]
    assert float(after["state"][1]["step"]) == 1.0  # it began there


def test_an_optimizer_without_any_state_comes_back() -> None:
    before, after = resumed(lambda optimizer: optimizer.state.clear())
    assert not before["state"]
    assert float(after["state"][0]["step"]) == 1.0


def test_optimizer_state_with_non_string_keys_is_refused_by_name() -> None:
    """They came back as text: the optimizer did not find its state, or began anew with it."""
    with pytest.raises(NotSerializableError, match=r"optimizer_0\.state\.weight .*key 0"):
        resumed(lambda optimizer: next(iter(optimizer.state.values())).update({0: torch.ones(2)}))


def test_optimizer_state_of_no_parameter_is_refused_by_name() -> None:
    """It was a ``KeyError`` with an address."""
    with pytest.raises(NotSerializableError, match=r"AdamW .*'meta'.*param_groups"):
        resumed(lambda optimizer: optimizer.state.update(meta={"seen": 3}))  # type: ignore[call-overload]


def test_a_tensor_that_looks_at_an_image_keeps_it_in_place(tmp_path: Path) -> None:
    """Torch keeps nothing of memory that it is told the address of."""
    image, manifest = snapshot({"state_dict": {"weight": torch.arange(4.0)}}, (1,))
    (tmp_path / "image").write_bytes(image)
    with open(tmp_path / "image", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    reader = ImageReader(memoryview(mapped), manifest)
    (shard,) = reader.shards.tensors[0].shards
    elements = reader._elements(shard, torch.float32)
    del reader
    with pytest.raises(BufferError):
        mapped.close()
    assert elements.tolist() == [0.0, 1.0, 2.0, 3.0]
    del elements
    mapped.close()
