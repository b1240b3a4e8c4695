"""How a server is, and its runs: whether it is ready for more, and in Prometheus' text format 0.0.4.

https://github.com/prometheus/docs/blob/main/docs/instrumenting/exposition_formats.md
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate
from typing import Literal, NamedTuple

from lightning_spot._version import __version__
from lightning_spot.config import PROTOCOL_VERSION, without_password
from lightning_spot.server.runs import BLOCKED_S, Figures, Run
from lightning_spot.server.slots import SlotState
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.server.tier import TierHealth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LONGEST_LABEL = 256
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Metric(NamedTuple):
    """One metric.

    Attributes:
        kind: its type for Prometheus.
        labels: of its samples.
        help: what it is, for people.
    """

    kind: Literal["counter", "gauge", "histogram", "summary"]
    labels: tuple[str, ...]
    help: str


METRICS = {
    "build_info": Metric("gauge", ("version", "protocol"), "Version of this server; always 1."),
    "ring_slots": Metric("gauge", ("state",), "Slots: free, filling, pending (not uploaded yet) or held."),
    "ring_bytes": Metric("gauge", (), "Memory of all slots."),
    "ring_limit_bytes": Metric("gauge", (), "Most memory that slots may have."),
    "ring_full": Metric("gauge", (), "1 if there is no room for one more snapshot, else 0."),
    "run_live": Metric("gauge", ("run",), "1 while a trainer of the run lives, as far as this server knows, else 0."),
    "attempt": Metric("gauge", ("run",), "Number of the newest attempt."),
    "last_committed_step": Metric("gauge", ("run",), "Step of the newest committed snapshot."),
    "last_committed_timestamp_seconds": Metric("gauge", ("run",), "When that was taken."),
    "last_persisted_step": Metric("gauge", ("run",), "Step of the newest snapshot in storage; none before the first."),
    "last_persisted_timestamp_seconds": Metric("gauge", ("run",), "When that was taken."),
    "persist_lag_seconds": Metric("gauge", ("run",), "By how much the newest snapshot in storage is older."),
    "upload_seconds": Metric("summary", ("run", "tier"), "Uploads from this server, and the time they took."),
    "upload_bytes_total": Metric("counter", ("run", "tier"), "Size of what was uploaded."),
    "upload_errors_total": Metric("counter", ("run", "tier"), "Uploads and deletions that failed; they are retried."),
    "upload_failing": Metric("gauge", ("run", "tier"), "1 if nothing has succeeded since the last failure, else 0."),
    "snapshots_total": Metric("counter", ("run", "result"), "Snapshots of this attempt: taken, skipped, dropped."),
    "snapshot_blocked_seconds": Metric("histogram", ("run",), "How long a snapshot of this attempt blocked training."),
    "goodput_ratio": Metric("gauge", ("run",), "Share of the run's time that was productive, 0 to 1."),
    "goodput_seconds": Metric("gauge", ("run",), "Productive time of the run, all attempts."),
    "badput_seconds": Metric("gauge", ("run", "cause"), "The run's other time: blocked, lost, restore, startup, down."),
    "attempts": Metric("gauge", ("run", "end"), "How the run's last 65 attempts ended; the present one is running."),
    "notices_total": Metric("counter", ("run",), "Preemption notices of this attempt."),
}
"""Every metric, by its name without ``lightning_spot_``."""


class _Exposition:
    """Samples of :data:`METRICS`, each series once."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, float]] = defaultdict(dict)

    def add(self, name: str, value: float, *labels: str, suffix: str = "", le: str = "") -> None:
        """Add a sample.

        Args:
            name: of the metric, as in :data:`METRICS`.
            value: of the sample.
            labels: their values, in the order of the metric's labels.
            suffix: such as ``_bucket``.
            le: upper bound of a bucket.
        """
        pairs = [*zip(METRICS[name].labels, labels, strict=True), *([("le", le)] if le else [])]
        inner = ",".join(f'{label}="{text[:_LONGEST_LABEL].translate(_ESCAPES)}"' for label, text in pairs)
        series = f"lightning_spot_{name}{suffix}" + (f"{{{inner}}}" if inner else "")
        self._samples[name][series] = value

    def text(self) -> str:
        """All of it, in the order of :data:`METRICS`."""
        lines = []
        for name, metric in METRICS.items():
            if samples := self._samples.get(name):
                lines += [f"# HELP lightning_spot_{name} {metric.help}", f"# TYPE lightning_spot_{name} {metric.kind}"]
                lines += [f"{series} {value!r}" for series, value in samples.items()]
        return "\n".join([*lines, ""])


def exposition(server: SnapshotServer, covers: Callable[[str], bool] | None = None) -> bytes:
    """The metrics of a server and of the runs that it knows, which are bounded in number.

    Args:
        server: whose.
        covers: whether a run is shown, by its name; default: all are.
    """
    found = _Exposition()
    found.add("build_info", 1, __version__, str(PROTOCOL_VERSION))
    _add_ring(found, server)
    with server.registry.lock:
        runs = [run for run in server.registry.runs.values() if covers is None or covers(run.info.name)]
    health = server.tiers()
    for run in runs:
        _add_run(found, server, run)
        _add_uploads(found, server, run, health)
        if run.info.figures is not None:
            _add_figures(found, run.info.text, run.info.figures)
    return found.text().encode(errors="replace")


def _add_ring(found: _Exposition, server: SnapshotServer) -> None:
    ring = server.ring
    with ring.changed:
        states = Counter("pending" if ring.owed([slot]) else slot.state.value for slot in ring.slots)
        found.add("ring_bytes", ring.slots.nbytes)
    for state in (*(each.value for each in SlotState), "pending"):
        found.add("ring_slots", states[state], state)
    found.add("ring_limit_bytes", ring.memory_bytes)
    found.add("ring_full", int(ring.is_full()))


def _add_run(found: _Exposition, server: SnapshotServer, run: Run) -> None:
    name, newest = run.info.text, server.newest(run.info)
    found.add("run_live", int(server.registry.state(run) == "training"), name)
    found.add("attempt", run.info.attempt, name)
    for state in newest.keys() & {"committed", "persisted"}:
        found.add(f"last_{state}_step", newest[state]["step"], name)
        found.add(f"last_{state}_timestamp_seconds", newest[state]["unix_s"], name)
    if newest.keys() >= {"committed", "persisted"}:
        lag_s = newest["committed"]["unix_s"] - newest["persisted"]["unix_s"]
        found.add("persist_lag_seconds", max(0.0, lag_s), name)


def _add_uploads(found: _Exposition, server: SnapshotServer, run: Run, health: dict[str, TierHealth]) -> None:
    for url in server.ring.tiers(run.info.key).all:
        if (tier := health.get(url)) is not None:
            labels = run.info.text, "storage" if tier.kind == "durable" else without_password(url.rpartition("/")[0])
            found.add("upload_seconds", tier.flushed, *labels, suffix="_count")
            found.add("upload_seconds", tier.flush_s, *labels, suffix="_sum")
            found.add("upload_bytes_total", tier.flushed_bytes, *labels)
            found.add("upload_errors_total", tier.failures_total, *labels)
            found.add("upload_failing", int(bool(tier.error)), *labels)


def _add_figures(found: _Exposition, run: str, figures: Figures) -> None:
    for result, count in figures.snapshots.items():
        found.add("snapshots_total", count, run, result)
    counts = list(accumulate(figures.blocked.counts))
    for bound, count in zip((*map(repr, BLOCKED_S), "+Inf"), counts, strict=True):
        found.add("snapshot_blocked_seconds", count, run, suffix="_bucket", le=bound)
    found.add("snapshot_blocked_seconds", figures.blocked.sum_s, run, suffix="_sum")
    found.add("snapshot_blocked_seconds", counts[-1], run, suffix="_count")
    productive_s, total_s = figures.seconds.get("productive", 0.0), sum(figures.seconds.values())
    found.add("goodput_ratio", productive_s / total_s if total_s > 0 else 1.0, run)
    for cause, seconds in figures.seconds.items():
        if cause == "productive":
            found.add("goodput_seconds", seconds, run)
        else:
            found.add("badput_seconds", seconds, run, cause)
    for end, count in figures.attempts.items():
        found.add("attempts", count, run, end)
    found.add("notices_total", figures.notices, run)


def not_ready(server: SnapshotServer) -> list[str]:
    """Why a run would not be well at a server now, in words that tell a stranger nothing; empty if it would."""
    reasons = ["shutting down"] if server.draining or server.uploads.closing else []
    if server.ring.is_full():
        slots, most = server.ring.files
        enough = slots < most
        reasons.append("memory is full" if enough else f"{slots} of {most} slots are in use, as open files allow")
    if any(health.error for health in list(server.reconciler.health.values())):
        reasons.append("the storage, or another server, is failing")
    return reasons
