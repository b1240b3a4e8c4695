"""What tests of GPUs share: where they run, and what each snapshot copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_spot.capture.writer import SnapshotWriter

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
"""For a trainer."""


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each snapshot copies."""
    each: list[int] = []
    begin = SnapshotWriter.begin

    def counting(self: SnapshotWriter, *args: Any, **more: Any) -> Any:
        before = self.copied_bytes
        done = begin(self, *args, **more)
        each.append(self.copied_bytes - before)
        return done

    monkeypatch.setattr(SnapshotWriter, "begin", counting)
    return each
