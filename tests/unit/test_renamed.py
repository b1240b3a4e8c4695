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

AT = {"dirpath": "s3://bucket/run-1"}
OLD: list[tuple[type, dict[str, Any], str]] = [
    *(
        (kind, {**AT, **old}, new)
        for kind in (SpotCheckpoint, RemoteSnapshot)
        for old, new in (
            ({"memory": "spot://10.0.0.5:7070"}, "servers="),
            ({"memory": None}, "local_server=False"),
            ({"run": "name"}, "run_name="),
            ({"durable_every_s": 60}, "min_upload_interval_s="),
            ({"flush_timeout_s": 60}, "upload_timeout_s="),
            ({"idle_timeout_s": 60}, "server_idle_timeout_s="),
            ({"max_stall_s": 1}, "server_call_timeout_s="),
            ({"strict": True}, 'on_error="raise"'),
            ({"partitions": "eager"}, "copy_mode="),
            ({"partitions": "still"}, '"blocking"'),
            ({"copy_mode": "still"}, 'copy_mode="blocking"'),
            ({"compression": "delta"}, 'compression="always"'),
            ({"compression": None}, 'compression="off"'),
            ({"compression": "topk"}, 'lossy="topk"'),
        )
    ),
    (SpotCheckpoint, {**AT, "grace_s": 30}, "grace_period_s="),
    (SpotCheckpoint, {**AT, "rewind": "replay"}, "data_resume="),
    (AutoResume, {**AT, "rewind": "skip"}, '"seek"'),
    (AutoResume, {**AT, "data_resume": "skip"}, 'data_resume="seek"'),
    (AutoResume, {**AT, "memory": "auto"}, "servers="),
    (AutoResume, {**AT, "run": "name"}, "run_name="),
    (PreemptionGuard, {"grace_s": 30}, "grace_period_s="),
    (SpotCheckpointIO, {"memory": None}, "local_server=False"),
    (SpotCheckpointIO, {"flush_timeout_s": 60}, "upload_timeout_s="),
    (SpotCheckpointIO, {"idle_timeout_s": 60}, "server_idle_timeout_s="),
    (COCI, {"ts": 1.0}, "snapshot_cost_s="),
    (COCI, {"theta_1": -1.0}, "slope="),
    (COCI, {"theta_2": 1.0}, "offset="),
    (COCI, {"ft_lambda": 1.0}, "failure_rate_per_s="),
]
RUN = "s3://bucket/run-1"
OLD_LINES = [
    (["node", "--listen", "127.0.0.1:0"], "lightning-spot serve"),
    (["pull", RUN], "lightning-spot cp"),
    (["ls", RUN, "--memory", "spot://10.0.0.5:7070"], "--server spot://"),
    (["ls", RUN, "--memory=spot://10.0.0.5:7070"], "--server spot://"),
    (["serve", "--memory", "8GiB"], "--memory-limit SIZE"),
    (["cp", RUN, "--to", "model.ckpt"], "DEST"),
    (["serve", "--flush-to", RUN], "--storage URL"),
    (["serve", "--allow", RUN], "--allow-storage PREFIX"),
    (["serve", "--run-memory", "1GiB"], "--run-memory-limit SIZE"),
    (["ls", RUN, "--json"], "-o json"),
    (["simulate", "--nodes", "8"], "--hosts N"),
    (["simulate", "--state", "10GB"], "--snapshot-size SIZE"),
    (["simulate", "--stall", "2s"], "--blocked TIME"),
    (["simulate", "--durable-speed", "1GB/s"], "--storage-speed SIZE/s"),
    (["simulate", "--memory-node-speed", "1GB/s"], "--server-speed SIZE/s"),
    (["simulate", "--memory-node-price", "1"], "--server-price PRICE"),
    (["simulate", "--memory-node-lifetime", "30d"], "--server-lifetime TIME"),
]


@pytest.mark.parametrize(("kind", "old", "new"), OLD, ids=lambda value: str(value))
def test_an_old_setting_names_the_new_one(kind: type, old: dict[str, Any], new: str) -> None:
    with pytest.raises(SettingsError) as raised:
        kind(**old)
    assert new in str(raised.value)


@pytest.mark.parametrize(("line", "new"), OLD_LINES, ids=" ".join)
def test_an_old_command_is_one_line(line: list[str], new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    said = capsys.readouterr().err
    assert new in " ".join(said.split())
    assert len(said.splitlines()) == 1


def test_the_old_variable_names_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_GRACE_S", "30")
    with pytest.raises(SettingsError, match="LIGHTNING_SPOT_GRACE_PERIOD_S"):
        read_environment()


def test_every_old_name_is_tried_here() -> None:
    settings = {f"{name}=" for _, old, _ in OLD for name in old} | {
        f"{name}={value!r}" for _, old, _ in OLD for name, value in old.items()
    }
    words = {word.partition("=")[0] for line, _ in OLD_LINES for word in line}
    assert NEW.keys() <= settings | words | {"LIGHTNING_SPOT_GRACE_S"}


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
