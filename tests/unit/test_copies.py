"""Copies of what training will change: on its GPU where that has room for them, else in memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_spot.capture import tensors
from lightning_spot.capture.tensors import copies_of
from lightning_spot.state import fit_state
from lightning_spot.state.fit_state import FitState
from tests.support.said import said_about

GPU = torch.device("cuda:0")
NBYTES = 400


@pytest.fixture
def spare_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says what a GPU has beside the most that training ever had."""

    def spare_is(nbytes: int) -> None:
        facts: dict[str, Any] = {
            "mem_get_info": (nbytes - 50, 1000),
            "memory_reserved": 600,
            "max_memory_allocated": 550,
        }
        for name, fact in facts.items():
            monkeypatch.setattr(torch.cuda, name, lambda _device, fact=fact: fact)

    return spare_is


class OnGpu:
    """As far as a copy sees it, a tensor of a GPU; ``room`` is that of the GPU for clones."""

    device, nbytes, is_sparse = GPU, NBYTES, False

    def __init__(self, value: float, room: list[int]) -> None:
        self.value, self._room = torch.full((100,), value), room

    def clone(self) -> Any:
        if self._room[0] < NBYTES:
            raise torch.cuda.OutOfMemoryError("no room")
        self._room[0] -= NBYTES
        return SimpleNamespace(device=GPU, value=self.value.clone())

    def cpu(self) -> torch.Tensor:
        return self.value.clone()


@pytest.mark.parametrize(
    ("spare", "room", "is_there", "cloned"),
    [
        pytest.param(2 * NBYTES, 2 * NBYTES, GPU, 2, id="room"),
        pytest.param(2 * NBYTES - 1, 2 * NBYTES, torch.device("cpu"), 0, id="training needs it"),
        pytest.param(2 * NBYTES, NBYTES, torch.device("cpu"), 1, id="memory is in pieces"),
    ],
)
def test_what_a_gpu_has_no_room_for_is_copied_to_the_host(
    spare_is: Callable[[int], None], spare: int, room: int, is_there: torch.device, cloned: int
) -> None:
    spare_is(spare)
    left, here = [room], torch.full((3,), 7.0)
    copies = copies_of(cast(dict[str, torch.Tensor], {"a": OnGpu(1.0, left), "b": OnGpu(2.0, left), "c": here}))
    assert {copies[name].device for name in "ab"} == {is_there}
    assert (room - left[0]) // NBYTES == cloned
    here.zero_()
    assert copies["c"].tolist() == [7.0] * 3  # a copy on the host, too
    if is_there.type == "cpu":
        assert [copies[name][0].item() for name in "ab"] == [1.0, 2.0]


def test_a_sparse_gradient_of_a_gpu_counts_by_what_it_has(spare_is: Callable[[int], None]) -> None:
    """Torch raises where such a tensor is asked for its bytes: training ended with the first snapshot."""
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.ones(2, 3), (1000, 3), check_invariants=True)

    class Sparse:
        device = GPU

        def __getattr__(self, name: str) -> Any:
            return getattr(gradient, name)

    for spare, is_there in ((40, True), (39, False)):  # two indices of 8 bytes, six numbers of 4
        spare_is(spare)
        assert tensors._have_room([cast(torch.Tensor, Sparse())]) is is_there


def test_storages_are_copied_likewise() -> None:
    storage = torch.arange(4.0).untyped_storage()
    copy = copies_of({0: storage})[0]
    assert copy.data_ptr() != storage.data_ptr()
    assert copy.tolist() == storage.tolist()


class Fake(SimpleNamespace):
    """One to which there can be weak references."""


def test_training_that_waits_for_its_gradients_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = torch.nn.Linear(2, 2)
    module.automatic_optimization = False
    trainer: Any = Fake(lightning_module=module, global_rank=3, fit_loop=Fake(epoch_loop=None))
    parts = FitState(trainer)
    assert parts.gradients() == {}
    module(torch.ones(1, 2)).sum().backward()
    copies = parts.gradients()
    assert torch.equal(copies["weight"], cast(torch.Tensor, module.weight.grad))
    assert copies["weight"] is not module.weight.grad
    assert not caplog.records
    monkeypatch.setattr(fit_state, "copies_of", lambda found: {name: value.to("meta") for name, value in found.items()})
    for _ in range(3):
        parts.gradients()
    assert said_about(caplog, "no-gradient-copies") == ["3"]
