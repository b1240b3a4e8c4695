"""Sharded states that are laid out one after the other: what is kept of the last one never makes a difference."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_spot.errors import NotSerializableError
from lightning_spot.sharded.file_plan import ShardedLayouter
from lightning_spot.sharded.plan import Planner, items_of
from lightning_spot.sharded.reader import ImageReader, load_all, load_value
from lightning_spot.snapshot import layout
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.tensor_index import Path
from tests.support.filled import fill
from tests.support.ranks import Sharded, as_rank, on_rank


def random_item(dice: Random, depth: int) -> Any:
    kind = dice.randrange(8 if depth else 4)
    if kind >= 6:
        return [random_item(dice, depth - 1) for _ in range(dice.randrange(4))]
    if kind >= 4:
        return {dice.choice(["a", "b", "c.d", "0"]): random_item(dice, depth - 1) for _ in range(dice.randrange(4))}
    return [1.5, "text", (torch.ones(1), {"x": 1}), torch.ones(2)][kind]


def empty_dicts(state: Any, path: Path) -> Iterator[Path]:
    """Where torch finds nothing."""
    if state == {}:
        yield path
    elif isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from empty_dicts(value, (*path, key if isinstance(state, list) else str(key)))


def test_items_and_paths_match_torch_and_include_empty_dicts() -> None:
    dice, found, empty = Random(3), 0, 0
    for _ in range(400):
        state = {name: random_item(dice, 3) for name in ("model", "optimizer")}
        flat, paths = flatten_state_dict(state)
        named = list(zip(*items_of(state), strict=True))
        full = [(path, item) for path, item in named if item != {}]
        assert [path for path, _ in full] == list(paths.values())
        assert all(one is other for (_, one), other in zip(full, flat.values(), strict=True))
        assert [path for path, item in named if item == {}] == list(empty_dicts(state, ()))
        found += len(full)
        empty += len(named) - len(full)
    assert found > 400
    assert empty > 100


def test_two_items_of_one_name_are_named() -> None:
    with pytest.raises(NotSerializableError, match=r"a\.b\.c'.*\['a', 'b\.c'\] .*\['a', 'b', 'c'\]"):
        Planner(1).plan({"a": {"b.c": 1, "b": {"c": 2}}})


def image_of(layouter: ShardedLayouter, state: Any) -> tuple[bytes, str]:
    """What a layouter makes of a state."""
    written = layouter.lay_out(state, {"epoch": 3})
    image = fill(written.layout)
    return bytes(image), written.digest


def new_state() -> Any:
    return {
        "model": {
            "rows": Sharded(torch.rand(8, 4), (Shard(0),)),
            "all": Sharded(torch.rand(6), (Replicate(),)),
            "plain": torch.rand(3, 2),
        },
        "optimizer": {"state": {"rows": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "names": ["rows"]}]},
    }


def local(state: Any, name: str = "rows") -> torch.Tensor:
    return state["model"][name]._local_tensor  # type: ignore[no-any-return]


def _groups(state: Any) -> list[dict[str, Any]]:
    return state["optimizer"]["param_groups"]  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "other local": lambda state: setattr(state["model"]["rows"], "_local_tensor", torch.rand(4, 4)),
    "other memory": lambda state: setattr(local(state), "data", torch.rand(4, 4)),
    "part of other memory": lambda state: local(state).set_(torch.rand(100).untyped_storage(), 7, (4, 4)),
    "turned": lambda state: setattr(local(state), "data", torch.rand(4, 4).T),
    "turned in place": lambda state: setattr(local(state), "data", local(state).data.T),
    "reshaped": lambda state: setattr(state["model"]["plain"], "data", torch.rand(5)),
    "of other dtype": lambda state: setattr(state["model"]["plain"], "data", torch.rand(3, 2).to(torch.float16)),
    "otherwise sharded": lambda state: state["model"].update(rows=_replicated(state["model"]["rows"])),
    "value to tensor": lambda state: _groups(state)[0].update(lr=torch.tensor(0.1)),
    "tensor to value": lambda state: state["optimizer"]["state"]["rows"].update(step=4),
    "tensor to none": lambda state: state["optimizer"]["state"]["rows"].update(step=None),
    "renamed": lambda state: state["model"].update(columns=state["model"].pop("rows")),
    "other order": lambda state: state.update(model=dict(reversed(state["model"].items()))),
    "another group": lambda state: _groups(state).append({"lr": 0.2}),
    "moved to the next dict": lambda state: state["optimizer"].update(plain=state["model"].pop("plain")),
    "list with a tensor": lambda state: _groups(state)[0]["names"].append(torch.ones(1)),
    "written": lambda state: torch._foreach_add_([state["model"]["rows"], state["model"]["all"]], 1.0),  # type: ignore[no-untyped-call]
    "another tensor": lambda state: state["model"].update(all=state["model"]["all"].detach() + 1),
}


def _replicated(rows: DTensor) -> DTensor:
    return DTensor.from_local(rows.to_local(), rows.device_mesh, (Replicate(),), run_check=False)


@pytest.mark.parametrize("change", CHANGES)
def test_after_any_change_the_layout_equals_a_fresh_one(change: str) -> None:
    with as_rank(0, (2,)) as mesh:
        state = on_rank(new_state(), mesh)
        layouter = ShardedLayouter(0, 2)
        before = image_of(layouter, state)
        assert image_of(layouter, state) == before == image_of(ShardedLayouter(0, 2), state)
        CHANGES[change](state)
        after = image_of(layouter, state)
        assert after == image_of(ShardedLayouter(0, 2), state)
        assert after != before
    assert image_of(layouter, state) == after  # kept in turn


@pytest.mark.parametrize("fails", [False, True], ids=["laid out", "as torch saves it"])
def test_the_rest_of_a_checkpoint_is_read_by_torch(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {"epoch": 3, "callbacks": {"average": torch.arange(5.0), "same": [torch.ones(2)] * 2}}
    with as_rank(0, (1,)):
        layouter = ShardedLayouter(0, 1)
        layouter.lay_out({"w": torch.ones(2)}, rest)
        if fails:
            monkeypatch.setattr(layout, "lay_out", lambda *_: 1 / 0)
        for step in range(3):
            written = layouter.lay_out({"w": torch.ones(2)}, rest | {"step": step})
            (file,) = [file for file in written.files if file.name == "meta.pt"]
            data = next(data for at, data in written.layout.frame if at == file.offset)
            read = torch.load(io.BytesIO(data), weights_only=True)
            assert (read["epoch"], read["step"]) == (3, step)
            assert torch.equal(read["callbacks"]["average"], torch.arange(5.0))
        with pytest.raises(NotSerializableError, match="checkpoint"):
            layouter.lay_out({"w": torch.ones(2)}, {"bad": lambda: 0})


def test_a_shard_that_is_not_what_its_placements_say_is_named() -> None:
    with as_rank(0, (2,)) as mesh:
        state = on_rank(new_state(), mesh)
        layouter = ShardedLayouter(0, 2)
        image_of(layouter, state)
        for other in (local(state).detach().view(-1)[:12].view(4, 3), torch.rand(4, 3)):
            local(state).data = other
            with pytest.raises(NotSerializableError, match=r"model\.rows .*\(4, 3\).*\(4, 4\)"):
                image_of(layouter, state)


def test_new_memory_around_an_old_address_is_read_at_the_tensor() -> None:
    """As parameters that are put into one buffer come to lie: the bytes before them were taken for theirs."""
    memory = np.arange(48, dtype=np.float32)
    weight = torch.from_numpy(memory[16:32])
    state = {"weight": weight, "other": torch.ones(3)}
    with as_rank(0, (1,)):
        layouter = ShardedLayouter(0, 2)
        images = [image_of(layouter, state) for _ in range(2)]
        weight.data = torch.from_numpy(memory)[16:32]
        images += [image_of(layouter, state) for _ in range(2)]
        assert images == [image_of(ShardedLayouter(0, 2), state)] * 4


@pytest.mark.parametrize(
    ("values", "mark"),
    [([1 + 2j, 3 - 4j], torch.Tensor.conj), ([1.0, -2.0], torch._neg_view)],
    ids=["conjugated", "negative"],
)
def test_what_torch_only_marks_is_written_as_it_is(values: list[Any], mark: Callable[[Any], Any]) -> None:
    """It was written with the other sign, and without a word: it lies where it lay."""
    state = {"weight": torch.tensor(values), "other": torch.ones(3)}
    with as_rank(0, (1,)):
        layouter, images = ShardedLayouter(0, 2), []
        for _ in range(3):
            images += [image_of(layouter, state), image_of(layouter, state)]
            assert images[-2:] == [image_of(ShardedLayouter(0, 2), {**state, "weight": state["weight"].clone()})] * 2
            state["weight"].data = mark(state["weight"].data)
    assert images[0] == images[4] != images[2]


def test_no_tensor_is_kept_alive() -> None:
    with as_rank(0, (2,)) as mesh:
        state = on_rank(new_state(), mesh)
        layouter = ShardedLayouter(0, 2)
        image_of(layouter, state)
        storage = StorageWeakRef(layouter.lay_out(state, {}).layout.pieces[0].storage)
        alive = [storage.expired()]
        state.clear()
        assert [*alive, storage.expired()] == [False, True]


def test_a_model_that_was_laid_out_can_be_moved() -> None:
    """``module.cpu()`` puts another tensor in the place of a DTensor, which torch refuses where it is referred to."""
    with as_rank(0, (2,)) as mesh:
        state = on_rank(new_state(), mesh)
        layouter = ShardedLayouter(0, 2)
        rows = state["model"]["rows"]
        layouter.lay_out(state, {})
        torch.utils.swap_tensors(rows, rows.detach())  # type: ignore[no-untyped-call]
        assert image_of(layouter, state) == image_of(ShardedLayouter(0, 2), state)


def test_numbers_of_numpy_come_back_and_what_will_not_is_said() -> None:
    layouter = ShardedLayouter(0, 2)
    state: Any = {"groups": [{"lr": np.float64(0.25), "steps": np.int32(3), "betas": (np.float32(0.5), 0.9)}]}
    with as_rank(0, (2,)):
        image, _ = image_of(layouter, state)
        files = layouter.lay_out(state, {"epoch": 3}).files
        assert layouter.unreadable == ""
        state["groups"][0]["mean"] = np.random.default_rng(1)
        image_of(layouter, copy.deepcopy(state))
    assert "groups.0.mean holds an object that is not loaded" in layouter.unreadable
    manifest = Manifest(run="r", name="n", step=0, attempt=0, nbytes=len(image), files=files)
    read = load_all(ImageReader(memoryview(image), manifest))["groups"][0]
    assert read == {"lr": 0.25, "steps": 3, "betas": (0.5, 0.9)}
    assert type(read["lr"]) is np.float64
    data = io.BytesIO()
    torch.save(np.float64(2.0), data)
    data.seek(0)
    assert load_value(data, "lr") == 2.0
