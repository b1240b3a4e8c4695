"""Who writes an old name of a setting, a flag or a command is told the new one; signatures stay what they are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import lightning_spot
from lightning_spot import COCI, AutoResume, PreemptionGuard, RemoteSnapshot, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.cli.command import main
from lightning_spot.config import read_environment
from lightning_spot.errors import SettingsError
from lightning_spot.renamed import NEW, refuse_old_words

RUN = "s3://bucket/run-1"
OF_SNAPSHOTS: list[tuple[str, Any]] = [
    *(("memory", "spot://10.0.0.5:7070"), ("memory", None), ("run", "name"), ("strict", True), ("max_stall_s", 1)),
    *((name, 60) for name in ("durable_every_s", "flush_timeout_s", "idle_timeout_s")),
    *(("partitions", "eager"), ("partitions", "still"), ("copy_mode", "still")),
    *(("compression", value) for value in ("delta", None, "topk")),
]
OLD: list[tuple[type, str, Any]] = [
    *((kind, *each) for kind in (SpotCheckpoint, RemoteSnapshot) for each in OF_SNAPSHOTS),
    *((kind, "grace_s", 30) for kind in (SpotCheckpoint, PreemptionGuard)),
    (SpotCheckpoint, "rewind", "replay"),
    *((AutoResume, name, "skip") for name in ("rewind", "data_resume", "memory", "run")),
    *((SpotCheckpointIO, *each) for each in (("memory", None), ("flush_timeout_s", 60), ("idle_timeout_s", 60))),
    *((COCI, name, 1.0) for name in ("ts", "theta_1", "theta_2", "ft_lambda")),
]
WORDS = [name for name in NEW if name.isalpha() or name.startswith("--")]


def key_of(name: str, value: object) -> str:
    return key if (key := f"{name}={value!r}") in NEW else f"{name}="


@pytest.mark.parametrize(("kind", "name", "value"), OLD)
def test_an_old_setting_names_the_new_one(kind: type, name: str, value: object) -> None:
    with pytest.raises(SettingsError) as raised:
        kind(**{} if kind in (PreemptionGuard, SpotCheckpointIO, COCI) else {"dirpath": RUN}, **{name: value})
    assert NEW[key_of(name, value)] in str(raised.value)


@pytest.mark.parametrize("word", [*WORDS, "--memory=8GiB"])
def test_an_old_command_is_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", RUN, word, "x"] if word.startswith("--") else [word, RUN]) == 2
    said = capsys.readouterr().err
    assert NEW[word.partition("=")[0]] in " ".join(said.split())
    assert len(said.splitlines()) == 1


def test_the_old_variable_names_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_GRACE_S", "30")
    with pytest.raises(SettingsError, match="LIGHTNING_SPOT_GRACE_PERIOD_S"):
        read_environment()


def test_every_old_name_is_tried_here() -> None:
    assert NEW.keys() == {*WORDS, "LIGHTNING_SPOT_GRACE_S", *(key_of(name, value) for _, name, value in OLD)}


def test_a_wrong_name_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="memories"):
        SpotCheckpoint("s3://bucket/run-1", memories=None)  # type: ignore[call-arg] # that is the test


def test_a_subclass_may_have_an_argument_of_an_old_name() -> None:
    class Mine(SpotCheckpoint):
        def __init__(self, run: str) -> None:
            super().__init__(f"s3://bucket/{run}")

    assert Mine(run="run-1").location.name == "run-1"


def test_what_a_command_starts_has_flags_of_its_own() -> None:
    refuse_old_words(["run", "python", "train.py", "--json"])
    refuse_old_words(["drill", "python", "train.py", "--memory", "8"])
    refuse_old_words(["drill", "--kills", "1", "--", "python", "train.py", "--run=name"])


@pytest.mark.parametrize("name", ["SpotCheckpoint", "RemoteSnapshot", "AutoResume", "PreemptionGuard", "COCI"])
def test_signatures_have_no_old_name(name: str) -> None:
    parameters = inspect.signature(getattr(lightning_spot, name)).parameters
    assert not {f"{parameter}=" for parameter in parameters} & NEW.keys()
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
