"""The house keeps its rules: public names, layers, file sizes, no unpickling of what comes over the network."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_spot
from lightning_spot.config import MANIFEST_VERSION, PROTOCOL_VERSION

PACKAGE = Path(lightning_spot.__file__).parent

REPOSITORY = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
NODES = [path for path in SOURCES if path.parent.name in ("memory", "protocol", "client", "service")]


def test_public_names_are_there_and_listed() -> None:
    assert sorted(lightning_spot.__all__) == dir(lightning_spot)
    for name in lightning_spot.__all__:
        assert getattr(lightning_spot, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lightning_spot.Nothing


def test_what_is_printed_says_what_it_is() -> None:
    spot = lightning_spot.SpotCheckpoint("s3://bucket/run-1", interval=lightning_spot.EverySteps(5))
    assert repr(spot) == "SpotCheckpoint('s3://bucket/run-1')"
    assert repr(spot.snapshots) == "RemoteSnapshot('s3://bucket/run-1')"
    assert repr(lightning_spot.AutoResume("s3://bucket/run-1")) == "AutoResume('s3://bucket/run-1')"
    assert repr(spot.interval) == "EverySteps(n=5, max_overhead=None)"
    assert "_" not in repr(lightning_spot.EverySeconds(30))


def test_the_version_is_one() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == lightning_spot.__version__


def test_layers() -> None:
    command = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([str(command)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_files_say_what_they_are_for() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in SOURCES}
    assert [name for name, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []


def test_nodes_never_unpickle() -> None:
    assert {path.parent.name for path in NODES} == {"memory", "protocol", "client", "service"}
    forbidden = {"pickle", "torch", "marshal", "shelve", "dill", "cloudpickle"}
    assert {path.name: found for path in NODES if (found := _imported(path) & forbidden)} == {}


def _imported(path: Path) -> set[str]:
    """Packages of which a file imports anything, anywhere in it."""
    return {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
    }


def test_the_environment_is_read_in_one_place() -> None:
    # These two hand the environment on to a process that they start.
    may = {PACKAGE / "config.py", PACKAGE / "client" / "starting.py", PACKAGE / "cli" / "training.py"}
    assert [path for path in SOURCES if path not in may and re.search(r"os\.environ|getenv", path.read_text())] == []


def test_all_json_comes_in_by_one_decoder() -> None:
    found = [
        str(path.relative_to(PACKAGE)) for path in SOURCES if re.search(r"json\.loads?\b|JSONDecoder", path.read_text())
    ]
    assert found == ["untrusted.py"]


def test_the_architecture_names_every_module() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    rooms = set(re.findall(r"[a-z_]+", page[page.index("## The rooms") : page.index("Beside the package")]))
    in_words = {"cli", "notices", "interval", "simulation"}  # rooms described by what they do
    assert [
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if not path.stem.startswith("_") and path.parent.name not in in_words and path.stem not in rooms
    ] == []


def test_the_changelog_names_the_formats_and_they_change_together() -> None:
    """A node of an earlier protocol would refuse manifests of a later format one by one, and keep nothing."""
    table = (REPOSITORY / "CHANGELOG.md").read_text().partition("### Formats")[2]
    named = tuple(int(re.search(rf"\| {what}[^|]*\| (\d+)", table)[1]) for what in ("`manifest", "protocol"))  # type: ignore[index]
    assert named == (MANIFEST_VERSION, PROTOCOL_VERSION)
    assert named[1] >= {3: 6, 4: 7}[named[0]]
