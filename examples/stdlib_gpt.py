"""A small byte-level GPT that learns Python from the standard library's own source, run by LightningCLI.

    python examples/stdlib_gpt.py fit --config callbacks/spot.yaml
    python examples/stdlib_gpt.py fit --trainer.callbacks+=lightning_spot.SpotCheckpoint \
        --trainer.callbacks.dirpath=checkpoints/gpt

Kill it and run the same line again. There is nothing about snapshots in this file: they come by configuration. With
the defaults it takes about a minute on two cores, which is enough to learn how words look, not what they mean.
"""

from __future__ import annotations

import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BYTES = 256
VALIDATION_SHARE = 0.1


class StdlibSource(L.LightningDataModule):
    """Python's standard library as one long text, cut into windows; the last tenth is for validation.

    Args:
        context: bytes that the model sees at once.
        batch_size: windows in a batch.
        max_bytes: how much of the library to read.
    """

    def __init__(self, context: int = 128, batch_size: int = 16, max_bytes: int = 2_000_000) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        """Read the files in the order of their names, so that every attempt sees the same text."""
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= self.max_bytes:
                break
        data = torch.frombuffer(text, dtype=torch.uint8)[: self.max_bytes]
        windows = data.unfold(0, self.context + 1, self.context)  # each has the next one's first byte as its last
        split = int(len(windows) * (1 - VALIDATION_SHARE))
        self.train_set, self.validation_set = TensorDataset(windows[:split]), TensorDataset(windows[split:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled windows."""
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Windows in order."""
        return DataLoader(self.validation_set, batch_size=self.batch_size)


class Block(nn.Module):
    """One transformer layer: causal attention, then two linear layers, each behind a layer norm.

    Args:
        width: size of the residual stream.
        heads: attention heads; must divide ``width``.
        dropout: probability of dropping a value on its way back into the stream.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.norm_forward = nn.LayerNorm(width)
        self.forward_net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map a stream of shape ``(batch, length, width)`` to one of the same shape."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.query_key_value(self.norm_attention(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.merge(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.forward_net(self.norm_forward(x)))


class ByteGPT(L.LightningModule):
    """A decoder-only transformer over bytes; its input and output embeddings are one tied tensor.

    Args:
        width: size of the residual stream.
        layers: number of blocks.
        heads: attention heads of each.
        context: most bytes it can look back on; must not be below the data's.
        dropout: probability of dropping a value.
        learning_rate: of AdamW, after the warm-up.
        warmup_steps: steps over which the learning rate rises.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 2e-3,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.embed = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte, ``(batch, length, 256)``, for bytes ``(batch, length)`` of dtype int64."""
        positions = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.embed(text) + self.place(positions))))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of one batch, in nats per byte."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        """The same, on source it never trains on."""
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor]) -> Tensor:
        windows = batch[0].long()
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    """Hand the command line to LightningCLI."""
    # The text is in memory already, so workers would only cost time; Lightning cannot know that.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    LightningCLI(
        ByteGPT,
        StdlibSource,
        seed_everything_default=1,
        save_config_kwargs={"overwrite": True},  # the same command runs again after a preemption
        trainer_defaults={
            "accelerator": "auto",
            "max_steps": 400,
            "val_check_interval": 100,
            "limit_val_batches": 20,
            "log_every_n_steps": 10,
        },
    )


if __name__ == "__main__":
    main()
