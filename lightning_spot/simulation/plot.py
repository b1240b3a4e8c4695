"""Pictures of a comparison and of a run; matplotlib comes with the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_spot.errors import SettingsError
from lightning_spot.simulation.compare import Row


def plot_rows(groups: Mapping[str, Sequence[Row]], path: str | Path) -> None:
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
        for part in ("stall", "lost", "restore", "down"):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One attempt in the picture of a run.

    Attributes:
        name: for people.
        points: from where to where it went.
        marks: snapshots.
        lost_from: height from which on it was done again, if any was.
    """

    name: str
    points: list[tuple[float, float]]
    marks: list[tuple[float, float]]
    lost_from: float | None


def plot_lines(lines: Sequence[Line], xlabel: str, ylabel: str, path: str | Path) -> None:
    """Draw attempts over time, with their snapshots and what was lost.

    Raises:
        SettingsError: as :func:`plot_rows` does.
    """
    axes_of, save = _figure(1, 1, path)
    axes = axes_of[0][0]
    for number, line in enumerate(lines):
        (x0, y0), (x1, y1) = line.points
        axes.plot([x0, x1], [y0, y1], color="tab:blue", label="attempt" if number == 0 else None)
        if line.marks:
            x, y = zip(*line.marks, strict=True)
            axes.plot(x, y, ".", color="tab:green", label="snapshot" if number == 0 else None)
        if line.lost_from is not None and y1 > y0:
            begin = x0 + (x1 - x0) * (line.lost_from - y0) / (y1 - y0)
            axes.plot([begin, x1], [line.lost_from, y1], color="tab:red", linewidth=3, label=f"lost by {line.name}")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()
    save()


def _figure(rows: int, columns: int, path: str | Path) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise SettingsError('a plot needs matplotlib: pip install "lightning_spot[plot]"') from error
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
