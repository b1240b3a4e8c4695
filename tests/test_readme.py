"""What the README shows works as it stands: its code runs, its commands are understood, its files are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import lightning as L
import pytest

from lightning_spot.cli.command import command_parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
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


@pytest.mark.parametrize("command", sorted(set(COMMAND.findall(README))))
def test_commands_are_understood(command: str) -> None:
    command_parser().parse_args(shlex.split(command)[1:])  # exits where it is not


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
