"""Whatever a user may set, of every public class: what cannot be used is one error that names it."""

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
from lightning_spot.errors import SettingsError
from lightning_spot.preemption.clouds import AwsSource

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
    "size": [*OF_NO_USE, True, 0, -1, 1.5, "1.5", "much", "", "8 apples", float("nan"), float("inf"), "1e9", 10**30],
    "choice": [*OF_NO_USE, True, 3, "other", "", []],
    "place": [*OF_NO_USE, None, 3, "", " ", [], "spot://h:1/run", "s3:/bucket/run"],
    "servers": [
        *OF_NO_USE,
        True,
        3,
        "",
        "atuo",
        "10.0.0.5:7070",
        [],
        (),
        ["auto"],
        [None],
        [3],
        "spot://",
        "spot://h:0",
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
    others = {
        "Costs",
        "Event",
        "Goodput",
        "IntervalPolicy",
        "Notice",
        "NoticeSource",
        "NoticeUnavailableError",
        "PreemptedError",
        "SettingsError",
        "SpotCLI",
        "TierError",
        "SpotError",
    }  # not to be set
    assert public - others == {kind.__name__ for kind in SETTINGS}
