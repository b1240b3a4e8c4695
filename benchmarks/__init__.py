"""Benchmarks: ratios within one run, on the same work, medians of interleaved rounds. ``python -m benchmarks``."""
