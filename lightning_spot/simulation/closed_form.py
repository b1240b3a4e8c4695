"""What is known exactly, to check the simulator against."""

from __future__ import annotations

import math


def expected_total_s(
    work_s: float, interval_s: float, stall_s: float, mtbf_s: float, *, restore_s: float = 0.0, restart_s: float = 0.0
) -> float:
    """Expected time to finish with evenly spaced snapshots and a constant hazard (Daly 2006, eq. 20).

    Args:
        work_s: of the job; a whole number of intervals.
        interval_s: work between two snapshots.
        stall_s: of one snapshot, which is safe when it ends.
        mtbf_s: mean time between failures, which may come at any time but while no machine is there.
        restore_s: from a restart until training goes on.
        restart_s: from a failure until machines run again.
    """
    segment_s = mtbf_s * math.exp(restore_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    running_s = segment_s * work_s / interval_s
    return running_s * (1 + restart_s / mtbf_s)  # failures are a Poisson process of the running time
