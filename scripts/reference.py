"""MkDocs hook: writes what the code knows where a page says ``<!-- generated: NAME -->``."""

from __future__ import annotations

import argparse
import enum
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_spot import errors
from lightning_spot.cli.command import command_parser
from lightning_spot.config import Environment
from lightning_spot.http.metrics import METRICS

ROOT = Path(__file__).resolve().parents[1]
_MARK = re.compile(r"<!-- generated: ([a-z-]+) -->")
_ROLE = re.compile(r":(?:attr|class|func|meth|mod):<code>[~.]?(.*?)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark of a page by its text."""
    return _MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name code as Sphinx does; Markdown knows no roles."""
    return _ROLE.sub(r"<code>\1</code>", html)


def commands() -> str:
    """Every command's help, as ``--help`` prints it."""
    parser = command_parser()
    [each] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return "\n\n".join(
        f"## `lightning-spot {name}`\n\n```text\n{command.format_help().strip()}\n```"
        for name, command in each.choices.items()
    )


def environment() -> str:
    """A table of the variables that are read."""
    rows = []
    for _, text in _section(inspect.getdoc(Environment) or "", "Attributes"):
        names = ", ".join(re.findall(r"`[A-Z0-9_]{6,}`", text))
        rows.append(f"| {names} | {text.rpartition('`: ')[2]} |")
    return "\n".join(["| Variable | Meaning |", "|---|---|", *rows])


def error_tree() -> str:
    """The tree of errors, then each class with its reasons."""
    tree = (errors.__doc__ or "").split("::\n\n", 1)[1].split("\n\nErrors are", 1)[0]
    lines = ["```text", textwrap.dedent(tree).rstrip(), "```"]
    for reasons in (each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, enum.Enum)):
        if not list(reasons):
            continue
        lines += ["", f"### `{reasons.__name__}`", "", "| Reason | When |", "|---|---|"]
        lines += [f"| `{reason.value}` | {text} |" for reason, text in zip(reasons, _texts_below(reasons), strict=True)]
    return "\n".join(lines)


def benchmarks() -> str:
    """The published results as a table."""
    published = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())
    rows = []
    for result in published["results"]:
        target = result["target"]
        bound = "–" if target is None else f"{'≤' if result['better'] == 'lower' else '≥'} {target:g}"
        missed = target is not None and (result["value"] > target) == (result["better"] == "lower")
        figure = f"{result['value']:g} {result['unit']}"
        rows.append(f"| {result['name']} | {figure} | {bound}{' **missed**' if missed else ''} | {result['commit']} |")
    head = ["| What | Result | Target | Commit |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, "", f"Machine: {published['machine']}."])


def guarantees() -> str:
    """Which tests enforce which guarantee, by their marker."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        for number in sorted(set(re.findall(r'mark\.guarantee\("(G\d+)"', source))):
            tests.setdefault(number, []).append(f"`{path.name}`")
    rows = [f"| {number} | {', '.join(tests[number])} |" for number in sorted(tests, key=lambda each: int(each[1:]))]
    return "\n".join(["| Guarantee | Tests |", "|---|---|", *rows])


def metrics() -> str:
    """A table of what servers show to Prometheus."""
    rows = [
        f"| `lightning_spot_{name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"
        for name, metric in METRICS.items()
    ]
    return "\n".join(["| Metric | Type | Labels | Meaning |", "|---|---|---|---|", *rows])


def changelog() -> str:
    """The changelog, without its title."""
    return (ROOT / "CHANGELOG.md").read_text().split("\n", 1)[1]


def contributing() -> str:
    """The page for contributors, without its title."""
    return (ROOT / "CONTRIBUTING.md").read_text().split("\n", 1)[1]


GENERATED: dict[str, Callable[[], str]] = {
    "benchmarks": benchmarks,
    "changelog": changelog,
    "commands": commands,
    "contributing": contributing,
    "environment": environment,
    "errors": error_tree,
    "guarantees": guarantees,
    "metrics": metrics,
}


def _section(doc: str, name: str) -> Iterator[tuple[str, str]]:
    """Each name of a section of a docstring, with its text on one line."""
    body = doc.split(f"{name}:\n", 1)[1].split("\n\n", 1)[0]
    for entry in re.split(r"\n(?=    \w)", "\n" + body):
        if name_and_text := re.match(r"\s*(\w+): (.*)", entry, re.DOTALL):
            yield name_and_text[1], re.sub(r"``", "`", " ".join(name_and_text[2].split()))


def _texts_below(kind: type[enum.Enum]) -> list[str]:
    """The string below each member of an enum."""
    return [
        " ".join(text.split()) for text in re.findall(r'= "[^"]+"\n\s+"""(.*?)"""', inspect.getsource(kind), re.DOTALL)
    ]
