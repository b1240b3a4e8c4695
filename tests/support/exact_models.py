"""Modules, callbacks and data of ``exact_table``: each uses one thing that Lightning or torch offers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from tests.support.exact_cases import Augmented, Lean, Model

SAMPLES = 20
BATCH = 4
BATCHES = SAMPLES // BATCH


class Rows(Augmented):
    """The same, but few."""

    def __init__(self, noise: bool = True, samples: int = SAMPLES) -> None:
        super().__init__(noise, samples)


def rows(noise: bool = True, **more: Any) -> DataLoader[Any]:
    """The usual training loader: shuffled, with noise."""
    return DataLoader(Rows(noise), **{"batch_size": BATCH, "shuffle": True, **more})


def validation(**more: Any) -> DataLoader[Any]:
    """The usual loader for validation."""
    return DataLoader(Rows(samples=8), BATCH, **more)


# -- modules ------------------------------------------------------------------------------------------------------


class Net(Lean):
    """A backbone and a head, each with parameters; the optimizer holds those that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.learning_rate = 0.01
        self.batch_size = 2

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss((self.backbone(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], self.learning_rate)

    def train_dataloader(self) -> Any:
        return rows(batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return validation()


class Measured(Net, Model):
    """With a metric, whose state a trial of a tuner must leave alone."""


class Plain(Lean):
    """Without BatchNorm, and with an own rate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))


class Scheduled(Lean):
    """Any scheduler, at any interval."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], **config: Any) -> None:
        super().__init__()
        self.make, self.config = make, config

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.config}}


class Optimized(Lean):
    """Any optimizer."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class ByParameter(torch.optim.Optimizer):
    """Steps one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(group, parameter, self.state[parameter])
        return loss

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        """Step one of them."""
        raise NotImplementedError


class CountingSGD(ByParameter):
    """Keeps a count of its own and a mask beside each parameter, which are no floating-point numbers."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        gradient = parameter.grad
        if not state:  # a count that float32 cannot hold
            state["hits"] = torch.full_like(parameter, 2**24, dtype=torch.int64)
            state["up"] = torch.zeros_like(parameter, dtype=torch.bool)
        state["hits"] += gradient > 0
        state["up"] ^= gradient > 0
        parameter -= group["lr"] * gradient * (1 + 0.1 * (state["hits"] - 2**24) + state["up"])


class Evaluating(Lean):
    """Freezes its BatchNorm, lowers its dropout and its loss' weight, all when an epoch starts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = 1.0, 0

    def on_train_epoch_start(self) -> None:
        self.weight *= 0.5
        if self.current_epoch == 1:
            self.net[1].eval()
            self.net[2].p = 0.1
            self.net[4].bias.requires_grad_(False)
            self.trainer.gradient_clip_val = 0.3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = super().training_step(batch, batch_idx)
        return (self.weight + 0.01 * self.seen) * loss


class Remembering(Net):
    """Keeps what its validations found, the sanity check's too, and lets its steps depend on it."""

    def __init__(self, *, counts_requests: bool = True) -> None:
        super().__init__()
        self.counts_requests = counts_requests
        self.losses: list[tuple[int, float]] = []
        self.asked = self.seen = 0
        self.register_buffer("lowest", torch.tensor(100.0), persistent=False)

    def val_dataloader(self) -> Any:
        self.asked += self.counts_requests
        return super().val_dataloader()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        weight = (
            (self.losses[0][1] if self.losses else 1.0) + 0.01 * self.lowest + 0.001 * self.asked + 0.001 * self.seen
        )
        return super().training_step(batch, batch_idx) * weight

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.lowest.copy_(torch.minimum(self.lowest, loss))
        self.losses.append((self.global_step, float(loss)))


class Caching(Lean):
    """Makes something at its first step that no checkpoint can hold, and a number that belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.cached, self.cache = 0, None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.cached < 4:
            self.cached, self.cache = 4, Shift()
        return super().training_step(batch, batch_idx)


class Gathering(Lean):
    """Gathers what its steps returned, and lets the next epoch depend on it, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss * self.scale

    def on_train_epoch_end(self) -> None:
        self.scale.fill_(1 / (1 + torch.stack(self.outputs).mean()))
        self.log("gathered", torch.stack(self.outputs).mean())
        self.outputs.clear()


class Skipping(Model):
    """Ends every epoch early, and returns no loss for some batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 6 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class Fetching(Lean):
    """Takes the iterator instead of batches."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Logging(Model):
    """Logs in every way there is."""

    def on_train_epoch_start(self) -> None:
        self.log("at_start", torch.rand(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"least": loss, "most": -loss}, reduce_fx="min", on_epoch=True, batch_size=len(batch[0]))
        self.log("sum", loss, reduce_fx="sum", on_step=True, on_epoch=True, logger=False, prog_bar=True)
        self.log("both", self.correlation, on_step=True, on_epoch=True) if batch_idx % 2 else None
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", float(batch_idx), on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_end", torch.rand(()))


class Several(Lean):
    """Two loaders for training and two for validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = batch
        x, y = first if first is not None else second
        return super().training_step((x if second is None else x + 0.01 * second[0][: len(x)].mean(), y), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class Listed(Lean):
    """Trains on what a combined loader yields as a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["first"]
        return super().training_step((x + 0.01 * batch["more"][0][0].mean(), y), batch_idx)


class WithData(Lean):
    """Makes its loaders anew when Lightning asks; what they hold depends on the epoch and on drawn numbers."""

    def train_dataloader(self) -> Any:
        part = torch.randperm(SAMPLES)[: SAMPLES - 4 * min(self.current_epoch, 1)].tolist()
        generator = torch.Generator().manual_seed(self.current_epoch)
        return DataLoader(Subset(Rows(), part), BATCH, shuffle=True, generator=generator)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(samples=8), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


class Drawing:
    """A sampler that draws a number when an epoch starts, and none to sample by."""

    def __init__(self, draw: Callable[[], object]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        self.draw()
        return iter(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class SharedGenerator(Lean):
    """Draws from a generator that its sampler draws from, too, and does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def draw(self) -> torch.Tensor:
        return torch.rand((), generator=self.generator)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), BATCH, sampler=Drawing(lambda: self.draw()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.draw())


class DrawingForValidation(WithData):
    """Validates on what is drawn when Lightning asks."""

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(Rows(), torch.randperm(SAMPLES)[:8].tolist()), BATCH)


class Data(pl.LightningDataModule):
    """A data module with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return DataLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(self.made))

    def val_dataloader(self) -> Any:
        return validation()

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]


# -- callbacks ----------------------------------------------------------------------------------------------------


class Tally(pl.Callback):
    """Counts and draws, and keeps it to itself."""

    def __init__(self) -> None:
        self.rng, self.name, self.longest, self.seen = random.Random(3), "tally", [0.0], 0
        self.counts = {"batches": [0]}

    def on_train_start(self, *_: Any) -> None:
        self.seen = 0  # a resumed run does that, too

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts["batches"][0] += 1
        self.rng.random()


class Keeping(Tally):
    """The same, in its checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}


class Folds(pl.LightningDataModule):
    """Has its hooks change what is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.fold, self.sizes = 0, torch.zeros(2)

    def train_dataloader(self) -> Any:
        return rows()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_step == 1:
            self.fold = 1
            self.sizes.add_(1)
        return batch


class Thaw(shipped.BaseFinetuning):
    """Trains the backbone from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


def half(epoch: int) -> float:
    return 1.5


# -- data ---------------------------------------------------------------------------------------------------------


class Order(Sampler[int]):
    """Has as many indices as the usual data."""

    def __len__(self) -> int:
        return SAMPLES


class Own(Order):
    """Shuffles by a generator of its own, when an epoch starts."""

    def __init__(self, generator: Any, *, eager: bool = False) -> None:
        self.generator, self.eager = generator, eager

    def _order(self) -> list[int]:
        if isinstance(self.generator, random.Random):
            return self.generator.sample(range(SAMPLES), SAMPLES)
        if isinstance(self.generator, torch.Generator):
            return torch.randperm(SAMPLES, generator=self.generator).tolist()
        return list(map(int, self.generator.permutation(SAMPLES)))

    def __iter__(self) -> Iterator[int]:
        order = self._order() if self.eager else None
        return iter(order) if order is not None else iter(self._lazy())

    def _lazy(self) -> Iterator[int]:
        yield from self._order()


class Holding(Own):
    """Holds its generator deeper down, and its order between epochs."""

    def __init__(self) -> None:
        super().__init__(None)
        self.state = {"rng": [np.random.default_rng(5)]}
        self.order = list(range(SAMPLES))

    def _order(self) -> list[int]:
        self.state["rng"][0].shuffle(self.order)
        return list(self.order)


class Popping(Order):
    """Takes one index after the other out of a pool, by numbers that the whole process draws from."""

    def __iter__(self) -> Iterator[int]:
        pool = list(range(SAMPLES))
        while pool:
            yield pool.pop(random.randrange(len(pool)))


class Batches(Sampler[list[int]]):
    """A batch sampler with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(3)

    def __iter__(self) -> Iterator[list[int]]:
        for chunk in self.rng.permutation(SAMPLES).reshape(-1, BATCH):
            yield chunk.tolist()

    def __len__(self) -> int:
        return BATCHES


class Noisy(Rows):
    """Draws its noise from generators of its own."""

    def __init__(self) -> None:
        super().__init__(noise=False)
        self.rng, self.transform = np.random.default_rng(7), Shift()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return self.transform(x + 0.1 * float(self.rng.normal())), y


class Shift:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(9)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.rng.random()


class Epochs(Rows):
    """Is told the epoch by a hook, and yields other samples then."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x + self.epoch, y


def tell_the_epoch(trainer: pl.Trainer, _: Any) -> None:
    trainer.train_dataloader.dataset.epoch = trainer.current_epoch


class Generating(DataLoader[Any]):
    """Iterates in its own way."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Collate:
    """Puts noise on whole batches."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self, samples: list[Any]) -> Any:
        x = torch.stack([x for x, _ in samples])
        return x + 0.1 * torch.randn(x.shape, generator=self.generator), torch.stack([y for _, y in samples])


class Stream(IterableDataset[Any]):
    """Yields the same samples each time, with noise; with workers, each yields its share."""

    noise = True

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info is not None else (0, 1)
        data = Rows(self.noise)
        for index in range(start, SAMPLES, step):
            yield data[index]


class Silent(Stream):
    """Without noise."""

    noise = False


class Shuffling(Stream):
    """A stream that is in another order each time, by a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        data = Rows()
        for index in self.rng.permutation(SAMPLES):
            yield data[int(index)]


def seed_worker(worker_id: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def combined(mode: str) -> Callable[[], Any]:
    def make() -> Any:
        short = DataLoader(Rows(samples=12), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
        return CombinedLoader([rows(), short], mode)

    return make


class Chunks(Rows):
    """Whole batches under one index."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        first = super().__getitem__
        samples = [first(i) for i in range(index * BATCH, (index + 1) * BATCH)]
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class HandMade:
    """Anything that can be iterated over is a loader to Lightning."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(False, shuffle=False))
