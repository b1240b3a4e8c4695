"""The models: architectures of ``transformers`` with random weights, and a fixed random batch for each step.

``plain`` needs no ``transformers``: linear layers, to see whether everything works.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

SCALES = ("tiny", "small", "full")
MODELS = ("gpt2", "bert", "roberta", "bloom", "resnet", "vit", "plain")

# Width, layers, words, length and number of sequences. "full" is as published; "small" suits two cores.
_TEXT = {"tiny": (32, 2, 128, 16, 2), "small": (256, 4, 8192, 64, 4), "full": (768, 12, 0, 128, 4)}
# Width, layers, pixels of an edge and number of images.
_VIT = {"tiny": (32, 2, 32, 2), "small": (256, 6, 64, 8), "full": (768, 12, 224, 8)}
_RESNET = {"tiny": (8, 1, 32, 2), "small": (128, 1, 64, 8), "full": (256, 3, 224, 8)}
_CLASSES = 1000


class Network(pl.LightningModule):
    """A model of ``transformers`` under AdamW.

    Args:
        network: returns an output with a ``loss``.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Batches(Dataset[dict[str, torch.Tensor]]):
    """Batch ``index`` is the same in every process."""

    def __init__(self, make: Callable[[torch.Generator], dict[str, torch.Tensor]], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._make(torch.Generator().manual_seed(index))


def build(name: str, scale: str, steps: int) -> tuple[Network, DataLoader[Any]]:
    """A model with random weights, the same each time, and the data of ``steps`` steps.

    Args:
        name: one of ``MODELS``.
        scale: one of ``SCALES``.
        steps: batches.
    """
    torch.manual_seed(20)
    kinds = {"resnet": _image, "vit": _image, "plain": _plain}
    make_network, make_batch = kinds.get(name, _text)(name, scale)
    return Network(make_network()), DataLoader(Batches(make_batch, steps), batch_size=None)


def state_bytes(trainer: pl.Trainer) -> int:
    """Of weights, buffers and what the optimizers keep."""
    tensors = list(trainer.lightning_module.parameters()) + list(trainer.lightning_module.buffers())
    for optimizer in trainer.optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


_Made = tuple[Callable[[], torch.nn.Module], Callable[[torch.Generator], dict[str, torch.Tensor]]]


class _Plain(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.layers(x).square().mean())


def _plain(name: str, scale: str) -> _Made:
    width, layers, _, _, count = _TEXT[scale]
    return lambda: _Plain(width, 2 * layers), lambda generator: {"x": torch.randn(count, width, generator=generator)}


def _text(name: str, scale: str) -> _Made:
    import transformers as hf

    width, layers, words, length, count = _TEXT[scale]
    heads = max(2, width // 64)
    bert = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    bert |= {"intermediate_size": 4 * width, "max_position_embeddings": 514}
    gpt = {"n_embd": width, "n_layer": layers, "n_head": heads}
    # BLOOM's smallest published size is 560 million.
    bloom = {"hidden_size": width, "n_layer": layers, "n_head": heads}
    bloom = {"hidden_size": 1024, "n_layer": 24, "n_head": 16} if scale == "full" else bloom
    vocabulary = {"vocab_size": words} if words else {}
    makers: dict[str, tuple[Any, Any]] = {
        "gpt2": (hf.GPT2LMHeadModel, lambda: hf.GPT2Config(**gpt, **vocabulary)),
        "bert": (hf.BertForMaskedLM, lambda: hf.BertConfig(**bert, **(vocabulary or {"vocab_size": 30_522}))),
        "roberta": (hf.RobertaForMaskedLM, lambda: hf.RobertaConfig(**bert, **(vocabulary or {"vocab_size": 50_265}))),
        "bloom": (hf.BloomForCausalLM, lambda: hf.BloomConfig(**bloom, **vocabulary)),
    }
    kind, config = makers[name]

    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, words or 30_000, (count, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return lambda: kind(config()), batch


def _image(name: str, scale: str) -> _Made:
    import transformers as hf

    width, layers, edge, count = (_VIT if name == "vit" else _RESNET)[scale]
    labels = {"num_labels": _CLASSES}
    if name == "vit":
        size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": max(2, width // 64)}
        size |= {"intermediate_size": 4 * width, "image_size": edge}
        make: Callable[[], torch.nn.Module] = lambda: hf.ViTForImageClassification(hf.ViTConfig(**size, **labels))  # noqa: E731
    else:
        depths = [3, 4, 6, 3] if scale == "full" else [layers] * 4
        widths = [width, 2 * width, 4 * width, 8 * width]
        make = lambda: hf.ResNetForImageClassification(hf.ResNetConfig(hidden_sizes=widths, depths=depths, **labels))  # noqa: E731

    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        images = torch.randn(count, 3, edge, edge, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(_CLASSES, (count,), generator=generator)}

    return make, batch
