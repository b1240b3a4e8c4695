"""Scikit-learn's breast cancer table (569 rows, 30 columns) in a small network, preemptible by one callback.

    python examples/tabular.py --dirpath checkpoints/tabular

Kill it and run the same line again.
"""

from __future__ import annotations

import argparse
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC

from lightning_spot import SpotCheckpoint

COLUMNS = 30


class TableData(L.LightningDataModule):
    """The table, standardised with what its training rows tell; a quarter of the rows is held back.

    Args:
        batch_size: rows in a training batch.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Split with a seed of its own, so that every attempt sees the same rows."""
        columns, labels = load_breast_cancer(return_X_y=True)
        split = train_test_split(columns, labels, test_size=0.25, random_state=0, stratify=labels)
        train, validation, train_labels, validation_labels = split
        scaler = StandardScaler().fit(train)
        self.train_set = _rows(scaler.transform(train), train_labels)
        self.validation_set = _rows(scaler.transform(validation), validation_labels)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled training rows."""
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The rows held back, in one batch."""
        return DataLoader(self.validation_set, batch_size=len(self.validation_set))


class TableNet(L.LightningModule):
    """Two hidden layers with dropout, and one logit.

    Args:
        width: of the hidden layers.
        learning_rate: of Adam.
    """

    def __init__(self, width: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(COLUMNS, width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )
        self.auroc = AUROC(task="binary")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Binary cross entropy of one batch."""
        rows, labels = batch
        loss = F.binary_cross_entropy_with_logits(self.net(rows).squeeze(-1), labels.float())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The area under the ROC curve on the rows held back."""
        rows, labels = batch
        logits = self.net(rows).squeeze(-1)
        self.auroc(logits, labels)
        self.log("val_auroc", self.auroc)
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, labels.float()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


def _rows(columns: object, labels: object) -> TensorDataset:
    return TensorDataset(torch.as_tensor(columns, dtype=torch.float32), torch.as_tensor(labels, dtype=torch.long))


def main() -> None:
    """Train; the same command line starts the run and, after a preemption, carries on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirpath", default="checkpoints/tabular", help="durable directory or URL (%(default)s)")
    parser.add_argument("--epochs", type=int, default=60, help="most epochs (%(default)s)")
    arguments = parser.parse_args()

    # The table is in memory already, so workers would only cost time; Lightning cannot know that.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)  # faster than more for a table this small
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        callbacks=[SpotCheckpoint(arguments.dirpath), EarlyStopping("val_loss", patience=10)],
        enable_checkpointing=False,  # snapshots are checkpoints: there is no need for others
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = TableNet(), TableData()
    trainer.fit(model, data)
    (measured,) = trainer.validate(model, data, verbose=False)
    print(f"area under the ROC curve, rows held back: {measured['val_auroc']:.4f}")


if __name__ == "__main__":
    main()
