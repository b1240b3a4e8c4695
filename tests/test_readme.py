"""What README and docs show works as it stands: code runs, commands are understood, names and files are there."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import lightning as L
import pytest

import lightning_spot
from lightning_spot import config
from lightning_spot.cli.command import command_parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((*ROOT.glob("docs/*.md"), ROOT / "examples/restart/README.md")))]
COMMAND = re.compile(r"^lightning-spot .*?(?=\s+#|$)|(?<=`)lightning-spot [^`]+", re.MULTILINE)


def test_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    shortened = code.replace("max_epochs=1000", "max_epochs=1, limit_train_batches=2, limit_val_batches=1")
    assert shortened != code
    names: dict[str, object] = {}
    exec(compile(shortened, "README.md", "exec"), names)  # it is what is tested
    run = names["trainer"]
    assert isinstance(run, L.Trainer)
    assert run.state.finished
    assert list((tmp_path / "checkpoints" / "run-1").glob("step-*/model.ckpt"))


@pytest.mark.parametrize("command", sorted(set(COMMAND.findall("\n".join(PAGES)))))
def test_commands_are_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    if len(words) > 1:
        command_parser().parse_args(words)  # exits where it is not
    else:  # it is only named
        with pytest.raises(SystemExit, match=r"^0$"):
            command_parser().parse_args([*words, "--help"])


@pytest.mark.parametrize(("text", "folder"), [(README, ROOT), (GUIDE, ROOT / "docs")])
def test_links_lead_somewhere(text: str, folder: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert targets
    assert [target for target in targets if not (folder / target).exists()] == []


def test_the_guide_names_every_variable() -> None:
    known = set(re.findall(r"LIGHTNING_SPOT_[A-Z_]+", inspect.getsource(config)))
    of_the_drill = {"LIGHTNING_SPOT_DRILL"}  # which sets it by itself
    assert set(re.findall(r"LIGHTNING_SPOT_[A-Z_]+", GUIDE)) == known - of_the_drill


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "examples/restart").iterdir()))
def test_recipes_name_variables_that_are_read(recipe: str) -> None:
    named = set(re.findall(r"LIGHTNING_SPOT_[A-Z_]+", (ROOT / "examples/restart" / recipe).read_text()))
    assert named <= set(re.findall(r"LIGHTNING_SPOT_[A-Z_]+", inspect.getsource(config)))


def test_the_settings_of_the_guide_are_there() -> None:
    made_here = [lightning_spot.SpotCheckpoint, lightning_spot.EverySteps, lightning_spot.EverySeconds]
    made_here += [lightning_spot.ConvergenceAware, lightning_spot.PreemptionGuard, lightning_spot.SpotCheckpointIO]
    known = {name for kind in made_here for name in inspect.signature(kind).parameters}
    of_lightning = {"callbacks", "ckpt_path", "plugins", "enable_checkpointing", "monitor", "state_dict_type"}
    named = set(re.findall(r"(?<![-\w])([a-z_]+)=", "".join(re.findall(r"`[^`\n]+`", GUIDE))))
    assert named - of_lightning <= known
