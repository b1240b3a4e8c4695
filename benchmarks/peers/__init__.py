"""Ours beside everybody: ``python -m benchmarks peers``. The same training, once for each way of saving it."""
