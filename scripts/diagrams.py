"""Draws the diagrams of the documentation: ``python scripts/diagrams.py`` writes them below ``docs/assets``."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
_WIDTH, _HEIGHT = 900, 250
_HEAD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="title"'
    ' font-family="system-ui, sans-serif" font-size="15">'
)
_STYLE = """<style>
  .place { fill: none; stroke: #7e57c2; stroke-width: 2; rx: 10 }
  .box { fill: #7e57c2; rx: 6 }
  .word { fill: #ffffff; text-anchor: middle }
  .name { fill: #7e57c2; font-weight: 600 }
  .note { fill: #757575; font-size: 13px }
  .way { stroke: #7e57c2; stroke-width: 3; marker-end: url(#tip) }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">
  <path d="M0,0 L8,4 L0,8 z" fill="#7e57c2"/></marker></defs>"""


def tiers() -> str:
    """The way of a snapshot: trainer, local server, snapshot server, storage."""
    title = "Snapshots go from the trainer to the local server, then to an optional snapshot server and to storage"
    return "\n".join([
        _HEAD,
        f'<title id="title">{title}</title>',
        _STYLE,
        *_place(10, 370, "spot VM", "survives a kill of the trainer"),
        *_place(430, 210, "reliable VM (optional)", "survives the spot VM"),
        *_place(690, 200, "storage", "survives both"),
        *_box(30, 120, "trainer"),
        *_box(230, 130, "local server"),
        *_box(460, 150, "snapshot server"),
        *_box(715, 150, "bucket or mount"),
        *_way(150, 228, "copy", "memory"),
        *_way(360, 458),
        *_way(610, 713),
        "</svg>\n",
    ])  # fmt: skip


def _place(x: int, width: int, name: str, note: str) -> list[str]:
    return [
        f'<rect class="place" x="{x}" y="40" width="{width}" height="170"/>',
        f'<text class="name" x="{x}" y="28">{name}</text>',
        f'<text class="note" x="{x + 12}" y="196">{note}</text>',
    ]


def _box(x: int, width: int, word: str) -> list[str]:
    return [
        f'<rect class="box" x="{x}" y="90" width="{width}" height="60"/>',
        f'<text class="word" x="{x + width // 2}" y="125">{word}</text>',
    ]


def _way(start: int, end: int, above: str = "", below: str = "") -> list[str]:
    middle = (start + end) // 2
    words = [(above, 108), (below, 142)]
    return [
        f'<line class="way" x1="{start}" y1="120" x2="{end}" y2="120"/>',
        *(f'<text class="note" x="{middle}" y="{y}" text-anchor="middle">{word}</text>' for word, y in words if word),
    ]


def every_step() -> str:
    """Bars: how much longer a step is with a snapshot at every step, for each way of saving."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())["every_step"]
    bars, row, left, scale = figures["bars"], 30, 250, 2.4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {row * len(bars) + 40}" role="img"'
        ' aria-labelledby="title" font-family="system-ui, sans-serif" font-size="15">',
        f'<title id="title">{figures["caption"]}</title>',
        _STYLE,
    ]
    for index, (name, value) in enumerate(bars):
        y = 10 + index * row
        lines += [
            f'<text class="note" x="{left - 10}" y="{y + 16}" text-anchor="end">{name}</text>',
            f'<rect class="box" x="{left}" y="{y}" width="{value * scale:.0f}" height="22"/>',
            f'<text class="note" x="{left + value * scale + 8:.0f}" y="{y + 16}">+{value:g} {figures["unit"]}</text>',
        ]
    lines.append(f'<text class="note" x="10" y="{row * len(bars) + 30}">{figures["caption"]}</text>')
    return "\n".join([*lines, "</svg>\n"])


DIAGRAMS = {"tiers.svg": tiers, "every_step.svg": every_step}

if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (ASSETS / name).write_text(draw())
