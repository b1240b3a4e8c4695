"""Pictures of a comparison and of a run; matplotlib comes with the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_spot.config import format_count, format_seconds
from lightning_spot.errors import SettingsError
from lightning_spot.goodput.ledger import AttemptRecord, spent, total
from lightning_spot.simulation.simulator import PolicyRow

_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_MOST_NUMBERED, _MOST_LARGE = 20, 100  # more numbers, or large dots, would cover one another


def plot_rows(groups: Mapping[str, Sequence[PolicyRow]], path: str | Path) -> None:
    """Draw where the time goes with each policy, and what progress a failure takes away.

    Args:
        groups: rows by the name of their tiers.
        path: of the picture; its ending chooses the format.

    Raises:
        SettingsError: if matplotlib is missing or cannot write such a file.
    """
    axes_of, save = _figure(2, len(groups), path)
    for column, (name, rows) in enumerate(groups.items()):
        labels, (upper, lower) = [row.name for row in rows], (axes_of[0][column], axes_of[1][column])
        left = [0.0] * len(rows)
        for part in ("blocked", "lost", "restore", "down"):
            widths = [100 * getattr(row, part) for row in rows]
            upper.barh(labels, widths, left=left, label=part)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        upper.set(title=name, xlabel="time beyond the work, % of it")
        upper.legend()
        lower.barh(labels, [100 * row.progress_lost for row in rows], color="tab:purple")
        lower.set(xlabel="progress lost per failure, % of the whole fall of the loss")
        upper.invert_yaxis()
        lower.invert_yaxis()
    save()


def plot_run(records: Sequence[AttemptRecord], path: str | Path) -> None:
    """Draw the attempts of a run over time: their steps and snapshots, what was lost, and when nothing ran.

    Args:
        records: at least one, in the order of the attempts.
        path: of the picture; its ending chooses the format.

    Raises:
        SettingsError: as :func:`plot_rows` does.
    """
    axes_of, save = _figure(1, 1, path)
    axes = axes_of[0][0]
    parts = spent(records)
    whole = total(parts)
    begun_s = records[0].begun_unix_s
    unit, unit_s = next((item for item in _UNITS if whole.total_s >= 2 * item[1]), _UNITS[-1])

    marker = 6 if sum(len(record.snapshots) for record in records) <= _MOST_LARGE else 2

    def x_of(unix_s: float) -> float:
        return (unix_s - begun_s) / unit_s

    for record, part, after in zip(records, parts, [*records[1:], None], strict=True):
        end = x_of(max(record.unix_s, record.begun_unix_s))
        trained = x_of(record.trained_unix_s) if record.trained_unix_s is not None else end
        lost = end - part.lost_s / unit_s
        axes.axvspan(
            x_of(record.begun_unix_s), trained, color="tab:blue", alpha=0.15, lw=0, label="starting, restoring"
        )
        axes.axvspan(lost, end, color="tab:red", alpha=0.3, lw=0, label="lost: done again later")
        if after is not None:
            axes.axvspan(end, x_of(after.begun_unix_s), color="0.8", lw=0, label="down")
        marks = [(x_of(at), float(step)) for step, at in record.snapshots]
        line = [(trained, float(record.from_step)), *marks, (end, float(record.step))]
        axes.plot(*zip(*line, strict=True), color="tab:blue", label="training")
        if marks:
            axes.plot(*zip(*marks, strict=True), ".", color="tab:green", ms=marker, label="snapshot")
        if len(records) <= _MOST_NUMBERED:
            axes.annotate(str(record.attempt), (end, record.step), (-4, 3), textcoords="offset points", ha="right")
    attempts = format_count(len(records), "attempt")
    axes.set(
        xlabel=f"{unit} since the run began",
        ylabel="optimizer step",
        title=f"goodput {100 * whole.goodput:.1f} % of {format_seconds(whole.total_s)}, {attempts}",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes.get_legend_handles_labels()
    kinds = dict(zip(labels, handles, strict=True))  # one entry for each kind
    axes.figure.legend(kinds.values(), kinds.keys(), loc="outside lower center", ncols=len(kinds), fontsize="small")
    save()


def _figure(rows: int, columns: int, path: str | Path) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise SettingsError("a plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(8 * columns, 4 * rows), squeeze=False, layout="constrained")

    def save() -> None:
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise SettingsError(f"the plot cannot be written to {path}: {error}") from error
        finally:
            pyplot.close(figure)

    return axes, save
