"""What each rank has for itself is named when a run goes on; buffers come back to the rank that had them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_sharded_fit import log, two_ranks

PARAMETERS = "each rank trains parameters of its own, and snapshots have them as rank 0 has them"
VALUES = "optimizers keep something for each rank by itself beside parameters in shards"


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("ddp", f"{PARAMETERS}: all ranks go on with its own.weight."),
        ("manual", f"{PARAMETERS}: all ranks go on with its own.weight."),
        ("fsdp2", f"{PARAMETERS}: all ranks go on with its own.weight."),
        ("kernels", f"{VALUES}, and snapshots have it as rank 0 has it: all ranks go on with its net.0.weight"),
    ],
)
def test_what_is_of_each_rank_is_named_and_buffers_come_back(
    strategy: str, names: str, tmp_path: Path, warm_python: str
) -> None:
    two_ranks([warm_python, "-m", "tests.support.exact_own", str(tmp_path), strategy], tmp_path)
    said = log(tmp_path)
    assert said.count("it was stopped\n") == said.count("there differ: []\n") == 2, said[-3000:]
    assert said.count("norm.running_mean, norm.running_var") == 2 * (strategy == "manual")
    assert said.count(names) == 1
