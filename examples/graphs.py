"""A graph network of torch-geometric that tells three kinds of random graphs apart, preemptible by one callback.

    pip install torch_geometric
    python examples/graphs.py --dirpath checkpoints/graphs

Kill it and run the same line again.
"""

from __future__ import annotations

import argparse
import warnings

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.utils import barabasi_albert_graph, degree, erdos_renyi_graph, stochastic_blockmodel_graph
from torchmetrics import Accuracy

from lightning_spot import SpotCheckpoint

KINDS = 3
NODES = 32
MOST_NEIGHBOURS = 16


def make_graphs(count: int) -> list[Data]:
    """Graphs of 32 nodes and about four neighbours each, one third of them of each kind.

    Nodes know how many neighbours they have and nothing else. The kinds are: any two nodes are neighbours with the
    same chance; new nodes prefer nodes with many neighbours; two halves with few neighbours across.
    """
    blocks, chances = torch.tensor([NODES // 2, NODES // 2]), torch.tensor([[0.23, 0.03], [0.03, 0.23]])
    graphs = []
    for number in range(count):
        kind = number % KINDS
        if kind == 0:
            edges = erdos_renyi_graph(NODES, 0.13)
        elif kind == 1:
            edges = barabasi_albert_graph(NODES, 2)
        else:
            edges = stochastic_blockmodel_graph(blocks, chances)
        neighbours = degree(edges[0], NODES, dtype=torch.long).clamp(max=MOST_NEIGHBOURS - 1)
        graphs.append(Data(x=F.one_hot(neighbours, MOST_NEIGHBOURS).float(), edge_index=edges, y=torch.tensor(kind)))
    return graphs


class GraphNet(L.LightningModule):
    """A graph isomorphism network, the sum over all nodes, and a classifier.

    Args:
        width: of the hidden layers.
        learning_rate: of Adam.
    """

    def __init__(self, width: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gnn = GIN(MOST_NEIGHBOURS, width, num_layers=3, dropout=0.1, jk="cat")
        self.classifier = MLP([width, width, KINDS], norm="batch_norm", dropout=0.1)
        self.accuracy = Accuracy(task="multiclass", num_classes=KINDS)

    def forward(self, graphs: Data) -> Tensor:
        """Logits of the kinds for a batch of graphs, of shape ``(graphs, 3)``."""
        nodes = self.gnn(graphs.x, graphs.edge_index)
        return self.classifier(global_add_pool(nodes, graphs.batch))

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Cross entropy of one batch."""
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        """Accuracy on graphs it never trains on."""
        self.accuracy(self(batch), batch.y)
        self.log("val_accuracy", self.accuracy, batch_size=batch.num_graphs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


def main() -> None:
    """Train; the same command line starts the run and, after a preemption, carries on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirpath", default="checkpoints/graphs", help="durable directory or URL (%(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="epochs in all (%(default)s)")
    parser.add_argument("--graphs", type=int, default=1500, help="graphs, a fifth of them held back (%(default)s)")
    arguments = parser.parse_args()

    # The graphs are in memory already, so workers would only cost time; Lightning cannot know that.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    L.seed_everything(1, verbose=False)  # also for the graphs: every attempt makes the same ones
    torch.set_num_threads(1)  # faster than more for graphs this small
    graphs = make_graphs(arguments.graphs)
    split = len(graphs) * 4 // 5
    data = LightningDataset(graphs[:split], graphs[split:], batch_size=32, num_workers=0)
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        callbacks=[SpotCheckpoint(arguments.dirpath)],
        enable_checkpointing=False,  # snapshots are checkpoints: there is no need for others
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GraphNet()
    trainer.fit(model, data)
    (measured,) = trainer.validate(model, data, verbose=False)
    print(f"accuracy on {len(graphs) - split} held-back graphs: {measured['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
