"""AsymCheck with its compression: after a whole base, only the largest 1 % of what changed is kept. It is not exact.

As published: the delta to the previous snapshot is cut into chunks, of each the largest changes are kept as values and
indices (a share of 0.01, chunks in parallel), where that is expected to be faster than the raw bytes.

Simplified: always compressed; small tensors and those that are no floating point go raw, as published.

Mended, without which nothing could be restored: values keep their signs (published code drops them), indices count
from the tensor's start, not the chunk's, files name their step, and a replay exists. Not mended: deltas are taken
against the exact previous state, not against what a reader has reconstructed, so errors add up.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.asymcheck import AsymCheck
from benchmarks.baselines.baseline import DURABLE
from benchmarks.baselines.files import newest, read_whole, write_whole
from benchmarks.baselines.flat import Flat, Place, as_blocks, from_blocks, rebuilt

SHARE = 0.01
CHUNK = 2**20
SMALL = 10_000
Entry = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def largest(delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and signed values of the largest changes of each chunk of a flat tensor."""
    indices = []
    for start in range(0, delta.numel(), CHUNK):
        chunk = delta[start : start + CHUNK]
        indices.append(chunk.abs().topk(max(1, int(chunk.numel() * SHARE)), sorted=False).indices + start)
    found = torch.cat(indices)
    return found.to(torch.int32), delta[found]


class AsymCheckTopK(AsymCheck):
    """See the top of this file."""

    exact = False

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self._before: list[torch.Tensor] = []

    def write(self, step: int, flat: Flat, buffer: torch.Tensor) -> None:
        now = [place.view(buffer).reshape(-1) for place, _ in flat.sources]
        if [one.numel() for one in now] != [one.numel() for one in self._before]:
            write_whole(self.folder / f"base-{step:09d}.part", *as_blocks(flat, buffer))
            self._before = [tensor.clone() for tensor in now]
        else:
            places = [place for place, _ in flat.sources]
            entries = [self._changed(*both) for both in zip(now, self._before, strict=True)]
            content = pickle.dumps((flat.rest, list(zip(places, entries, strict=True))))
            write_whole(self.folder / f"delta-{step:09d}.part", content)
        self.reached(step, DURABLE)

    def _changed(self, now: torch.Tensor, before: torch.Tensor) -> Entry:
        entry = largest(now - before) if now.is_floating_point() and now.numel() >= SMALL else now.clone()
        before.copy_(now)
        return entry

    def restore(self) -> tuple[int, dict[str, Any]]:
        base = newest(self.folder, "base-*.part")
        step = int(base.stem.removeprefix("base-"))
        rest, buffer = from_blocks(read_whole(base))
        for path in sorted(self.folder.glob("delta-*.part")):
            if (at := int(path.stem.removeprefix("delta-"))) > step:
                step = at
                rest, entries = pickle.loads(path.read_bytes())
                _replay(buffer, entries)
        return step, rebuilt(rest, lambda place: place.view(buffer))


def _replay(buffer: torch.Tensor, entries: list[tuple[Place, Entry]]) -> None:
    for place, entry in entries:
        target = place.view(buffer).reshape(-1)
        if isinstance(entry, torch.Tensor):
            target.copy_(entry)
        else:
            target.index_add_(0, entry[0].long(), entry[1])
