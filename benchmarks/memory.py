"""The trainer's extra resident memory: bounded by slots x state, and flat over 1,000 snapshots."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import Result, scratch

TRAINER = """
import sys, gc
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_spot import EverySteps, SpotCheckpoint
dirpath, elements, snapshots, slots, with_us = sys.argv[1], *map(int, sys.argv[2:])
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(elements))
    def training_step(self, batch, index):
        return self.w.sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
def rss():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss")) // 1024
class Watch(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step in (snapshots // 10, snapshots - 1):
            print(rss(), flush=True)
callbacks = [Watch()]
if with_us:
    callbacks.append(SpotCheckpoint(dirpath, interval=EverySteps(1), slots=slots, on_full="wait"))
trainer = pl.Trainer(max_steps=snapshots, callbacks=callbacks, accelerator="cpu", logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer.fit(Model(), DataLoader(TensorDataset(torch.zeros(2000, 1)), 1))
"""
MIB = 2**20
SLOTS = 3


def _resident_mib(folder: str, elements: int, snapshots: int, *, with_us: bool) -> tuple[int, int]:
    arguments = [folder, str(elements), str(snapshots), str(SLOTS), str(int(with_us))]
    done = subprocess.run([sys.executable, "-c", TRAINER, *arguments], capture_output=True, text=True, check=True)
    early, late = (int(line) for line in done.stdout.split("\n") if line.strip().isdigit())
    return early, late


def run(quick: bool) -> list[Result]:
    # 120 MB with Adam. Blocks of 32 MiB and more are mapped and given back one by one; what malloc keeps of smaller
    # ones, with or without us, differed by 200 MiB from one run to the next.
    elements = 10_000_000
    state_mib = 3 * 4 * elements / MIB
    with scratch() as folder:
        _, base = _resident_mib(str(folder / "none"), elements, 30, with_us=False)
        _, ours = _resident_mib(str(folder / "large"), elements, 30, with_us=True)
        early, late = _resident_mib(str(folder / "small"), 10_000, 200 if quick else 1000, with_us=True)
    print(f"  state {state_mib:.0f} MiB, {SLOTS} slots: {base} MiB without, {ours} MiB with snapshots")
    beyond = ours - base - SLOTS * state_mib
    return [
        Result(f"extra memory of the trainer beyond {SLOTS} slots x state", [beyond], 64, unit="MiB"),
        Result("growth from snapshot 100 to 1,000", [float(late - early)], 8, unit="MiB"),
    ]
