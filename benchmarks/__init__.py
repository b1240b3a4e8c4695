"""Benchmarks: ``python -m benchmarks [NAME …]``. See ``benchmarks/LOG.md``."""
