"""Benchmarks: ``python -m benchmarks [NAME …]``. See ``docs/benchmarks.md``."""

import os
import sys

# GNU's OpenMP, with which torch computes: its threads wait for each other by spinning as long as there are no more of
# them than processors. One thread more that has ever computed with torch in parallel, and they spin little. So beside
# anything else that runs, trainings with such a thread (ours have some) were ten times as fast as those without. The
# same for all. Read once, when torch is imported; a test that imports a benchmark stays as it is.
if sys.argv[0] == "-m":  # which it is while ``python -m`` looks for the module
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
