"""Benchmarks: ``python -m benchmarks [NAME …]``. See ``docs/benchmarks.md``."""
