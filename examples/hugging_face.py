"""A small GPT-2 of Hugging Face's transformers that learns from Python's own help texts, preemptible by one callback.

    pip install transformers
    python examples/hugging_face.py --dirpath checkpoints/gpt2

Kill it and run the same line again. Nothing is downloaded: the weights are random at first, the text comes with Python
(it is what ``help("topics")`` shows), and a token is a byte.
"""

from __future__ import annotations

import argparse
import warnings
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, GPT2Config, get_linear_schedule_with_warmup

from lightning_spot import SpotCheckpoint

BYTES = 256
END = 0  # a byte that no text holds
CONTEXT = 64


class HelpTexts(L.LightningDataModule):
    """The help texts as one long text, cut into windows; the last tenth is for validation.

    Args:
        batch_size: windows in a batch.
        max_bytes: how much of the text to take.
    """

    def __init__(self, batch_size: int = 16, max_bytes: int = 100_000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        """Put the texts together in the order of their names, so that every attempt sees the same."""
        text = "\n".join(topics[name] for name in sorted(topics)).encode()[: self.max_bytes]
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT, CONTEXT)
        split = len(windows) * 9 // 10
        self.train_set, self.validation_set = TensorDataset(windows[:split]), TensorDataset(windows[split:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled windows."""
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Windows in order."""
        return DataLoader(self.validation_set, batch_size=self.batch_size)


class CausalLM(L.LightningModule):
    """Any causal language model of transformers; here a GPT-2 of two layers.

    Args:
        width: size of the residual stream.
        layers: number of blocks.
        learning_rate: of AdamW, after the warm-up.
    """

    def __init__(self, width: int = 64, layers: int = 2, learning_rate: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = GPT2Config(
            vocab_size=BYTES,
            n_positions=CONTEXT,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            bos_token_id=END,
            eos_token_id=END,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of one batch, in nats per byte; the model itself shifts the labels by one."""
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        """The same, on text it never trains on."""
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[0]).loss)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        """AdamW with the warm-up and the linear decay that transformers' own trainer uses."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    """Train; the same command line starts the run and, after a preemption, carries on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirpath", default="checkpoints/gpt2", help="durable directory or URL (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in all (%(default)s)")
    parser.add_argument("--max-bytes", type=int, default=100_000, help="how much text to take (%(default)s)")
    arguments = parser.parse_args()

    # The text is in memory already, so workers would only cost time; Lightning cannot know that.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)  # faster than more for a model this small
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        callbacks=[SpotCheckpoint(arguments.dirpath)],
        enable_checkpointing=False,  # snapshots are checkpoints: there is no need for others
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = CausalLM(), HelpTexts(max_bytes=arguments.max_bytes)
    trainer.fit(model, data)
    (measured,) = trainer.validate(model, data, verbose=False)
    print(f"nats per byte of text held back: {measured['val_loss']:.3f}")


if __name__ == "__main__":
    main()
