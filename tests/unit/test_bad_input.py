"""Whatever a user may set, of every public class: what cannot be used is one error that names it.

Who writes an old name of a setting, a flag or a command is told the new one; signatures stay what they are.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_spot
from lightning_spot import (
    COCI,
    AutoResume,
    ConvergenceAware,
    EverySeconds,
    EverySteps,
    GoodputMonitor,
    Keep,
    OverheadBudget,
    PreemptionGuard,
    RemoteSnapshot,
    SpotCheckpoint,
    SpotCheckpointIO,
    YoungDaly,
)
from lightning_spot.cli.command import main
from lightning_spot.config import read_environment
from lightning_spot.errors import SettingsError
from lightning_spot.preemption.clouds import AwsSource
from lightning_spot.renamed import NEW, refuse_old_words

PLACE = "s3://bucket/run-1"
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
        kind(**{} if kind in (PreemptionGuard, SpotCheckpointIO, COCI) else {"dirpath": PLACE}, **{name: value})
    assert NEW[key_of(name, value)] in str(raised.value)


@pytest.mark.parametrize("word", [*WORDS, "--memory=8GiB"])
def test_an_old_command_is_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", PLACE, word, "x"] if word.startswith("--") else [word, PLACE]) == 2
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


NOTHING = object()
OF_NO_USE = [NOTHING, b"x", {}, {"a"}, int]
NO_NUMBER = [*OF_NO_USE, "3", [3], True, float("nan"), float("inf"), float("-inf"), 1e300, 10**12]

KINDS: dict[str, list[Any]] = {
    "flag": [*OF_NO_USE, None, 0, 1, "no", "True", []],
    "count": [*NO_NUMBER, 1.5, 0, -1],
    "ring": [*NO_NUMBER, 1.5, 0, -1, 1],
    "from 0": [*NO_NUMBER, -1, -0.5],
    "above 0": [*NO_NUMBER, -1, 0],
    "negative": [*NO_NUMBER, 0, 0.5],
    "number": NO_NUMBER,
    "count from 0": [*NO_NUMBER, None, 1.5, -1],
    "age": [*OF_NO_USE, True, "3", "soon", [3], float("nan"), float("inf"), 10**12, -1],
    "share": [*NO_NUMBER, 0, 1, -0.5, 3],
    "size": [
        *(*OF_NO_USE, True, 0, -1, 1.5, "1.5", "much", "", "-1GiB", "8QB", "8 apples"),
        *(float("nan"), float("inf"), "1e9", 10**30),
    ],
    "choice": [*OF_NO_USE, True, 3, "other", "", []],
    "place": [*OF_NO_USE, None, 3, "", " ", [], "spot://h:1/run", "s3:/bucket/run"],
    "servers": [
        *(*OF_NO_USE, True, 3, "", "atuo", "10.0.0.5:7070", [], (), ["auto"], [None], [3], "spot://", "spot://h:0"),
    ],
    "name": [*OF_NO_USE, 3, "", "a/b", " ", []],
    "metric": [*OF_NO_USE, 3, "", []],
    "policy": [*OF_NO_USE, 30, "EverySteps(3)", EverySteps, []],
    "function": [NOTHING, b"x", {}, {"a"}, 3, "print", []],
    "webhook": [
        *(*OF_NO_USE, True, 3, [], "", "chat.example.com/x", "ftp://chat.example.com/x", "file:///etc/passwd"),
        *("https:///x", "https://[::1/x", "https://chat.example.com:port/x", "https://chat.example.com:0/x"),
        *("https://user:pass@chat.example.com/x", "https://token@chat.example.com/x", "https://chat.example.com/ä"),
        *("https://chat.example.com/a b", "https://chat.example.com/x\r\nHost: other"),
    ],
    "notices": [NOTHING, b"x", {}, {"a"}, int, 3, True, "", "asw", ["aws", "asw"], [3], AwsSource],
}
"""What each kind of setting cannot be."""

TOLD = {"on_event": "function", "webhook": "webhook"}
RUN = {"dirpath": "place", "servers": "servers", "local_server": "flag", "run_name": "name"}
SNAPSHOTS = {
    **RUN,
    "replicas": "count",
    "interval": "policy",
    "keep": "count",
    "slots": "ring",
    "memory_limit": "size",
    "on_full": "choice",
    "min_upload_interval_s": "from 0",
    "compression": "choice",
    "lossy": "choice",
    "upload_timeout_s": "from 0",
    "server_idle_timeout_s": "from 0",
    "server_call_timeout_s": "above 0",
    "on_error": "choice",
    "copy_mode": "choice",
    "device_buffer": "size",
    **TOLD,
}
SETTINGS: dict[type, dict[str, str]] = {
    RemoteSnapshot: SNAPSHOTS,
    SpotCheckpoint: {
        **SNAPSHOTS,
        "notices": "notices",
        "grace_period_s": "above 0",
        "resume": "flag",
        "data_resume": "choice",
        "on_resume_failure": "choice",
        "log_goodput": "flag",
    },
    AutoResume: {**RUN, "data_resume": "choice", "on_resume_failure": "choice"},
    PreemptionGuard: {"notices": "notices", "grace_period_s": "above 0"},
    GoodputMonitor: {"log_every_s": "above 0", "heartbeat_s": "above 0"},
    SpotCheckpointIO: {
        "local_server": "flag",
        "slots": "ring",
        "memory_limit": "size",
        "wait_timeout_s": "from 0",
        "upload_timeout_s": "from 0",
        "server_idle_timeout_s": "from 0",
    },
    Keep: {
        "newest": "count",
        "every_n_steps": "count",
        "newer_than": "age",
        "best": "count from 0",
        "monitor": "metric",
        "mode": "choice",
    },
    EverySteps: {"n": "count", "max_overhead": "share"},
    EverySeconds: {"s": "above 0"},
    OverheadBudget: {"max_overhead": "share"},
    YoungDaly: {"max_overhead": "share"},
    ConvergenceAware: {"monitor": "metric", "mode": "choice", "max_regret": "share", "max_overhead": "share"},
    COCI: {
        "mode": "choice",
        "snapshot_cost_s": "above 0",
        "slope": "negative",
        "offset": "number",
        "failure_rate_per_s": "above 0",
        "fit_interval": "count",
        "profile_threshold": "ring",
    },
}
NEEDED: dict[str, Any] = {"dirpath": "checkpoints/run-1", "n": 1, "s": 1.0}


def cases() -> Iterator[Any]:
    for kind, settings in SETTINGS.items():
        for name, of_what in settings.items():
            yield pytest.param(kind, name, of_what, id=f"{kind.__name__}-{name}")


@pytest.mark.parametrize(("kind", "name", "of_what"), cases())
def test_what_cannot_be_used_is_one_error_that_names_it(kind: type, name: str, of_what: str) -> None:
    needed = {key: value for key, value in NEEDED.items() if key in inspect.signature(kind).parameters}
    assert kind(**needed) is not None
    for value in KINDS[of_what]:
        with pytest.raises(SettingsError) as caught:
            kind(**{**needed, name: value})
        said = str(caught.value)
        assert name in said, (value, said)
        assert "\n" not in said


NUMPYS: dict[str, Any] = {
    "flag": np.False_,
    "count": np.int64(1),
    "ring": np.int32(3),
    "from 0": np.float32(30),
    "above 0": np.float32(30),
    "negative": np.float64(-1),
    "number": np.float32(1),
    "share": np.float32(0.5),
    "size": np.int64(2**30),
}


@pytest.mark.parametrize(("kind", "name", "of_what"), [case for case in cases() if case.values[2] in NUMPYS])
def test_numpys_numbers_are_numbers(kind: type, name: str, of_what: str) -> None:
    needed = {key: value for key, value in NEEDED.items() if key in inspect.signature(kind).parameters}
    made = kind(**{**needed, name: NUMPYS[of_what]})
    held = asdict(made) if isinstance(made, Keep) else vars(made)
    kept = [value for value in held.values() if not isinstance(value, np.generic)]
    assert len(kept) == len(held), "a snapshot, or a server, would be told a number that is no plain one"
    if isinstance(made, SpotCheckpoint | RemoteSnapshot):
        snapshots = made.snapshots if isinstance(made, SpotCheckpoint) else made
        json.dumps(asdict(snapshots._settings.ring))


def test_whole_floats_are_sizes() -> None:
    assert SpotCheckpoint("runs/a", memory_limit=64e9).snapshots._settings.ring.memory_bytes == 64 * 10**9


def test_of_a_timedelta_the_seconds_are_asked_for() -> None:
    with pytest.raises(SettingsError, match=r"s=.*timedelta.*total_seconds"):
        EverySeconds(timedelta(minutes=5))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_tilde_is_the_home_directory_as_in_lightning(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    assert SpotCheckpoint(kind("~/runs/a")).location.url == os.fspath(tmp_path / "runs" / "a")


@pytest.mark.parametrize("unused", [{"resume": False, "data_resume": "back"}, {"notices": None, "grace_period_s": -1}])
def test_what_would_not_be_used_is_checked_all_the_same(unused: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"data_resume='back'|grace_period_s=-1"):
        SpotCheckpoint("checkpoints/run-1", **unused)


def test_every_setting_of_every_public_class_is_tried() -> None:
    for kind, settings in SETTINGS.items():
        assert settings.keys() == inspect.signature(kind).parameters.keys()
    public = {name for name in lightning_spot.__all__ if isinstance(getattr(lightning_spot, name), type)}
    others = {"Costs", "Event", "Goodput", "IntervalPolicy", "Notice", "NoticeSource", "SpotCLI"}  # not to be set
    others |= {"NoticeUnavailableError", "PreemptedError", "SettingsError", "TierError", "SpotError"}
    assert public - others == {kind.__name__ for kind in SETTINGS}
