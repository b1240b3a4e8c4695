"""Adapters on a frozen GPT-2 of 124 million parameters: what a snapshot at every step sends.

The model is that of ``transformers`` with random weights, the adapters are LoRA's as ``peft`` makes them: 0.3 % of the
parameters are trained. A server process holds the snapshots; a proxy before it counts every byte that comes its way.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Result, memory_node, scratch
from benchmarks.throttle import CountingProxy
from lightning_spot import EverySteps, RemoteSnapshot
from lightning_spot.client.stores import open_store

NEEDS = ("peft", "transformers")
WORDS, LENGTH, SEQUENCES = 50_257, 32, 2
RANK = 10
FIRST = 4  # steps until the server has a base
TARGET = 1.1
WAIT_S = 120.0


def run(quick: bool) -> list[Result]:
    steps = 10 if quick else 30
    with scratch() as folder, memory_node(folder) as port, CountingProxy(port) as proxy:
        model = Adapters()
        memory = f"spot://127.0.0.1:{proxy.port}"
        snapshots = RemoteSnapshot(str(folder / "run"), servers=memory, interval=EverySteps(1), on_full="wait")
        watch = Watch(f"spot://127.0.0.1:{port}/run", proxy)
        trainer = pl.Trainer(
            max_steps=steps,
            callbacks=[snapshots, watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, DataLoader(Words(steps), batch_size=SEQUENCES))
    frozen, trained = model.nbytes(trained=False), model.nbytes(trained=True)
    changing = watch.nbytes - frozen
    print(f"  {watch.nbytes} bytes a snapshot: {frozen} frozen, {trained} trained, {changing} may change", flush=True)
    what = "adapters on GPT-2 (124 M): bytes sent / (trained parameters + moments + pickled part)"
    return [Result(what, [nbytes / changing for nbytes in watch.sent[FIRST:]], TARGET)]


class Words(Dataset[torch.Tensor]):
    """Random tokens, the same for each index."""

    def __init__(self, steps: int) -> None:
        self._count = steps * SEQUENCES

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Adapters(pl.LightningModule):
    """GPT-2 as published, random weights, with LoRA on its attention; AdamW trains only what needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(20)
        lora = LoraConfig(r=RANK, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        self.network = get_peft_model(GPT2LMHeadModel(GPT2Config()), lora)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=1e-4)

    def nbytes(self, trained: bool) -> int:
        return sum(weight.nbytes for weight in self.parameters() if weight.requires_grad == trained)


class Watch(pl.Callback):
    """Trains on only once the server holds the snapshot of the step, and notes what that took.

    Attributes:
        sent: bytes that came to the server for it, its control traffic among them.
        nbytes: of a whole snapshot.
    """

    def __init__(self, url: str, proxy: CountingProxy) -> None:
        self._url, self._proxy = url, proxy
        self._before = 0
        self.sent: list[int] = []
        self.nbytes = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            return
        self._wait_for(trainer.global_step)
        now = self._proxy.received_bytes
        self.sent.append(now - self._before)
        self._before = now

    def _wait_for(self, step: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        store = open_store(self._url)
        while time.monotonic() < deadline_s:
            there = {manifest.step: manifest.nbytes for manifest in store.survey().manifests}
            if step in there:
                self.nbytes = there[step]
                return
            time.sleep(0.02)
        raise TimeoutError(f"the snapshot of step {step} is not at the server after {WAIT_S:g} s")
