"""What tests of GPUs share: where they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
"""For a trainer."""
