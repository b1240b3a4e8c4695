"""Modules of ``exact_table`` that keep more than parameters: values of many kinds, buffers, objects."""

from __future__ import annotations

import copy
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch.ao import quantization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.exact_cases import Lean

LOST = "Holding.count, Holding.later, Holding.meter, Holding.metrics, Holding.teacher"
MADE = ", ".join(f"{name} (a buffer)" for name in ("later", "latest", "precise", "queue"))
REPLACED = "Replacing.weight, Trainer.callbacks, Trainer.lr_scheduler_configs, net.3"


class Weighted(Lean):
    """Its loss depends on what it keeps."""

    def weight(self) -> float:
        """What it keeps, as one number; called in every step."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.weight())


class Kinds(Weighted):
    """Keeps generators, numbers, text, tensors, and lists, tuples and dictionaries of them."""

    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy, self.old_numpy = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)
        self.torch = torch.Generator().manual_seed(4)
        self.count, self.text, self.bytes, self.mean = 0, "", b"", 0.0
        self.tensor, self.outputs = torch.zeros(3), list[torch.Tensor]()
        self.pairs: dict[tuple[int, int], list[float]] = {}
        self.best: tuple[int, float] | None = None

    def weight(self) -> float:
        step = self.global_step
        self.count += 1
        self.text += "x"
        self.bytes += b"x"
        self.mean = np.mean([self.mean, float(step)])
        self.tensor += 1
        self.outputs.append(torch.full((2,), float(step)))
        self.pairs[0, step] = [1.0]
        self.best = (step, self.mean) if step % 3 == 0 or self.best is None else self.best
        drawn = self.python.random() + self.numpy.random() + self.old_numpy.rand()
        sizes = [len(each) for each in (self.text, self.bytes, self.outputs, self.pairs)]
        numbers = float(self.count + self.mean + self.tensor.sum() + torch.stack(self.outputs).sum() + self.best[0])
        return 0.1 * float(drawn + torch.rand((), generator=self.torch)) + 0.001 * (sum(sizes) + numbers)


class Beside(Weighted):
    """Has buffers that are in no ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {
            "bank": torch.zeros(6, 2),
            "wide": torch.zeros(1).expand(4),
            "sparse": torch.eye(4).to_sparse(),
            "rows": torch.eye(4).to_sparse_csr(),
        }.items():
            self.register_buffer(name, value, persistent=False)

    def weight(self) -> float:
        self.bank = torch.cat([self.bank, torch.rand(1, 2)])[-6:]
        self.wide[:1].add_(torch.rand(1))
        self.sparse = (self.sparse + torch.rand(4, 4).round().to_sparse()).coalesce()
        self.rows.values().mul_(1.01)
        return 0.001 * sum(float(each.to_dense().sum()) for each in (self.bank, self.wide, self.sparse, self.rows))


class Growing(Lean):
    """Has such buffers that are made, or get another shape or dtype, as training goes on."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"queue": torch.zeros(0, 2), "precise": torch.zeros(2), "later": None}.items():
            self.register_buffer(name, value, persistent=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.queue = torch.cat([self.queue, torch.rand(1, 2)])
        self.precise = self.precise.double() + torch.rand(2, dtype=torch.float64)
        if self.later is None:
            self.later = torch.rand(3)
        if not hasattr(self, "latest"):
            self.register_buffer("latest", torch.rand(2), persistent=False)


class Meter:
    """What many scripts have."""

    def __init__(self) -> None:
        self.total = 0.0


class Holding(Weighted):
    """Holds objects that no checkpoint does: they begin anew, and so does what is beside one that is made later."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.metrics = Meter(), {"mean": torchmetrics.MeanMetric()}
        self.teacher = [copy.deepcopy(self.net)]
        self.steady, self.plain = Meter(), {"never": [1, 2]}
        self.count, self.later = 0, None

    def weight(self) -> float:
        self.meter.total += 0.1
        self.metrics["mean"].update(self.meter.total)
        for mean, parameter in zip(self.teacher[0].parameters(), self.net.parameters(), strict=True):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        self.count += 1
        self.later = self.later or Meter()
        self.later.total += 1
        return 0.01 * self.meter.total


class Checking(Lean):
    """Changes something in the sanity check that is no plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: set[int] = set()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.sanity_checking:
            self.checked.add(batch_idx)


class Averaging(torch.optim.SGD):
    """Keeps averages to itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.01, momentum=0.9)
        self.seen = 0
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.seen += 1
        for mean, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            mean.add_(parameter.detach() - mean, alpha=0.5)
        return loss


class Apart(Lean):
    """Has a scheduler of its own, beside one that Lightning has, too."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        self.given = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
        return [optimizer], [self.given]

    def on_train_batch_end(self, *_: Any) -> None:
        self.rate.step()


class Averager(pl.Callback):
    """Keeps an average of weights, that the weights follow."""

    def on_fit_start(self, _: Any, module: Any) -> None:
        self.average = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
        self.average.update_parameters(module.net)
        with torch.no_grad():
            module.net[0].weight.lerp_(self.average.module[0].weight, 0.1)


class Replacing(Weighted):
    """Has another schedule, layer and method, and one callback more, from its second epoch on."""

    def weight(self) -> float:
        return 0.0

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            optimizer = self.trainer.optimizers[0]
            self.trainer.lr_scheduler_configs[0].scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            self.trainer.callbacks.append(pl.Callback())  # type: ignore[attr-defined] # Lightning's Trainer has it
            self.net[3] = torch.nn.Tanh()
            self.weight = lambda: 0.1  # type: ignore[method-assign] # as scripts do


class Limited(Lean):
    """Trains for other epochs than were asked for, which it finds out in its second one."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.fit_loop.max_epochs = self.epochs


class Toggling(Lean):
    """Toggles an optimizer in one batch, and back two batches later; nothing else toggles one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[misc] # there are two
        if batch_idx % 4 == 0:
            self.toggle_optimizer(first)
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        first.zero_grad()
        if batch_idx % 4 == 2:
            self.untoggle_optimizer(first)
        if batch_idx % 4 == 3:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters(), 0.01), torch.optim.Adam(self.net[4].parameters(), 0.01)


class Extra(Weighted):
    """Gives more than tensors as its state, and has a layer that takes its shape later."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.drawn, self.lazy = {"steps": 0}, torch.zeros(2), torch.nn.LazyLinear(3)

    def get_extra_state(self) -> Any:
        return {"counts": dict(self.counts), "drawn": self.drawn}

    def set_extra_state(self, state: Any) -> None:
        self.counts, self.drawn = dict(state["counts"]), state["drawn"]

    def weight(self) -> float:
        self.counts["steps"] += 1
        self.drawn = self.drawn + torch.rand(2)
        return 0.01 * float(self.counts["steps"] + self.drawn.sum())

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.lazy(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        self.lazy(torch.ones(1, 8))
        return super().configure_optimizers()


class Odd(Weighted):
    """Has buffers without a shape of their own: those that a lazy layer is to make, and a nested one.

    A quantisation that it learns takes another shape in its first step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lazy = torch.nn.LazyBatchNorm1d()
        layer = torch.nn.Sequential(torch.nn.Linear(8, 3)).train()
        layer.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        self.learned = quantization.prepare_qat(layer)
        nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)
        self.register_buffer("nested", nested, persistent=False)

    def weight(self) -> float:
        self.nested = self.nested * 0.9 + torch.rand(())
        return 0.01 * sum(float(part.sum()) for part in self.nested.unbind())

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.learned(self.lazy(batch[0])).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)  # takes parameters that are not there yet


class LeavingOut(Lean):
    """Saves neither an encoder nor its last layer, though both change."""

    def __init__(self) -> None:
        super().__init__()
        encoder = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.InstanceNorm1d(1, track_running_stats=True)]
        self.encoder = torch.nn.Sequential(*encoder).requires_grad_(False)
        torch.nn.init.eye_(self.encoder[0].weight)
        torch.nn.init.zeros_(self.encoder[0].bias)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        saved = super().state_dict(*arguments, **named)
        return {name: value for name, value in saved.items() if not name.startswith(("encoder.", "net.4."))}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False, assign=assign)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        linear, norm, other = self.encoder
        return super().loss((other(norm(linear(x))[:, None])[:, 0], y))
