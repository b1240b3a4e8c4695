"""What README and docs show works: code runs, commands are understood, names, links and figures are there."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import tomllib
from pathlib import Path

import lightning as L
import pytest
import yaml

import lightning_spot
from lightning_spot import config
from lightning_spot.cli.command import command_parser
from lightning_spot.http.metrics import METRICS
from scripts import diagrams, reference

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted(path for path in ROOT.glob("docs/**/*.md"))
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/restart/README.md", *PAGES)
}
COMMAND = re.compile(r"^lightning-spot .*?(?=\s+#|$)|(?<=`)lightning-spot [^`]+", re.MULTILINE)
VARIABLE = re.compile(r"LIGHTNING_SPOT_[A-Z_]+")
MOST_WORDS = {"docs/understand/guarantees.md": 2500, "docs/operate/security.md": 1850}
MOST_WORDS_IN_ALL = 23_000


def test_the_code_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code in TEXTS["docs/quick-start.md"]
    shortened = code.replace("max_epochs=1000", "max_epochs=1, limit_train_batches=2, limit_val_batches=1")
    assert shortened != code
    names: dict[str, object] = {}
    exec(compile(shortened, "README.md", "exec"), names)  # it is what is tested
    run = names["trainer"]
    assert isinstance(run, L.Trainer)
    assert run.state.finished
    assert list((tmp_path / "checkpoints" / "run-1").glob("step-*/model.ckpt"))


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_python_blocks_are_python_and_name_what_there_is(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", TEXTS[page], flags=re.DOTALL):
        code = re.sub(r"^ {4}", "", block, flags=re.MULTILINE) if block.startswith("    ") else block
        compile(code, page, "exec")
        for names in re.findall(r"from lightning_spot import (.+)", code):
            assert set(names.split(", ")) <= set(lightning_spot.__all__)
        for kind, arguments in re.findall(
            r"(?<![.\w])(SpotCheckpoint|SpotCheckpointIO|PreemptionGuard)\(([^)]*)\)", code
        ):
            known = inspect.signature(getattr(lightning_spot, kind)).parameters
            assert set(re.findall(r"(\w+)=", arguments)) <= set(known)


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_yaml_and_json_blocks_can_be_read(page: str) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", TEXTS[page], flags=re.DOTALL):
        yaml.safe_load(block)
    for block in re.findall(r"```json\n(.*?)```", TEXTS[page], flags=re.DOTALL):
        json.loads(block)


@pytest.mark.parametrize("command", sorted(set(COMMAND.findall("\n".join(TEXTS.values())))))
def test_commands_are_understood(command: str) -> None:
    words = shlex.split(command.split(" 2>")[0])[1:]
    if len(words) > 1:
        command_parser().parse_args(words)  # exits where it is not
    else:  # it is only named
        with pytest.raises(SystemExit, match=r"^0$"):
            command_parser().parse_args([*words, "--help"])


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_links_lead_somewhere(page: str) -> None:
    """Those within the checkout, also where they are given as the repository's own address. The site's: `make docs`."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", TEXTS[page])
    home = re.compile(r"https://(?:github\.com/lightning-spot/lightning_spot/(?:blob|tree)|raw[^/]*/[^/]*/[^/]*)/main/")
    site = "https://lightning-spot.github.io/lightning_spot/"
    for target in targets:
        if path := home.match(target):
            assert (ROOT / target[path.end() :]).exists()
        elif target.startswith(site):
            name = target.removeprefix(site).strip("/")
            assert (ROOT / "docs" / (f"{name}.md" if name else "index.md")).exists()
        elif "://" not in target:
            assert ((ROOT / page).parent / target).exists()


def test_pages_are_short() -> None:
    words = {page: len(text.split()) for page, text in TEXTS.items() if page.startswith("docs/")}
    words = {page: count for page, count in words.items() if not page.startswith(("docs/reference", "docs/design"))}
    assert {page: count for page, count in words.items() if count > MOST_WORDS.get(page, 1500)} == {}
    assert sum(words.values()) <= MOST_WORDS_IN_ALL
    assert README.count("\n") <= 120


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:", 1)[1]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if "design" not in page.parts}


def test_the_documented_variables_are_those_that_are_read() -> None:
    read = set(VARIABLE.findall(inspect.getsource(config)))
    assert set(VARIABLE.findall(reference.environment())) == read
    files = [*(ROOT / "examples/restart").iterdir(), *(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
    recipes = "".join(path.read_text() for path in files)
    assert set(VARIABLE.findall(recipes + "".join(TEXTS.values()))) <= read


def test_the_benchmarks_can_be_started() -> None:
    """`make bench` imports all of them: what the package no longer has is missed at once."""
    main = importlib.import_module("benchmarks.__main__")
    assert all(callable(each.run) for each in main.ALL.values())


def test_the_protocol_in_the_text_is_the_present_one() -> None:
    named = {int(number) for text in TEXTS.values() for number in re.findall(r"Spot-Protocol: (\d+)", text)}
    assert named == {config.PROTOCOL_VERSION}


def test_settings_in_the_text_are_there() -> None:
    kinds = ("SpotCheckpoint", "RemoteSnapshot", "EverySteps", "EverySeconds", "ConvergenceAware", "Keep")
    known = {name for kind in kinds for name in inspect.signature(getattr(lightning_spot, kind)).parameters}
    page = TEXTS["docs/reference/settings.md"]
    named = set(re.findall(r"(?<![-\w])([a-z_]+)=", "".join(re.findall(r"`[^`\n]+`", page))))
    assert named <= known


def test_generated_parts_are_generated() -> None:
    marks = {name for text in TEXTS.values() for name in re.findall(r"<!-- generated: ([a-z-]+) -->", text)}
    assert marks == reference.GENERATED.keys()
    assert all(write() for write in reference.GENERATED.values())


def test_each_guarantee_is_enforced_by_tests() -> None:
    given = re.findall(r"^\*\*(G\d+)\.", TEXTS["docs/understand/guarantees.md"], re.MULTILINE)
    assert given == [f"G{number}" for number in range(1, len(given) + 1)]
    assert re.findall(r"^\| (G\d+) \|", reference.guarantees(), re.MULTILINE) == given


def test_the_table_of_packages_is_that_of_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    rows = re.findall(r"^\| (`[^|]+) \|", TEXTS["docs/understand/architecture.md"], flags=re.MULTILINE)
    assert [re.findall(r"`(\w+)/?`", row) for row in rows] == [re.findall(r"\.(\w+)", layer) for layer in layers]


def test_metrics_are_documented() -> None:
    source = (Path(lightning_spot.__file__).parent / "callbacks" / "goodput_monitor.py").read_text()
    page = TEXTS["docs/reference/metrics.md"]
    for name in ("goodput", "last_committed_step", "last_persisted_step", "snapshot_blocked_ms", "badput_"):
        assert name in source
        assert f"`spot/{name}" in page
    assert re.findall(r"^\| `lightning_spot_(\w+)` \|", reference.metrics(), re.MULTILINE) == [*METRICS]


def test_diagrams_are_as_drawn() -> None:
    drawn = {path.name: path.read_text() for path in (ROOT / "docs" / "assets").glob("*.svg")}
    assert {name: draw() for name, draw in diagrams.DIAGRAMS.items()} == drawn
