"""``GET /metrics``: what stands there is true, can be read by Prometheus, and is bounded whatever a client says."""

from __future__ import annotations

import contextlib
import re
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lightning_spot import EverySteps, PreemptedError, SpotCheckpoint
from lightning_spot.client import starting
from lightning_spot.config import PROTOCOL_VERSION, read_environment
from lightning_spot.errors import MalformedError, SettingsError, TierError
from lightning_spot.http.metrics import METRICS, exposition
from lightning_spot.protocol.record import find_record
from lightning_spot.protocol.wire import PROTOCOL_HEADER
from lightning_spot.server import registry
from lightning_spot.server.runs import BLOCKED_S, Figures, Histogram
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.untrusted import decoded
from tests.support.prometheus import PROMTOOL, promtool
from tests.support.server import (
    FIRST,
    OTHER_ID,
    RUN,
    RUN_ID,
    SECOND,
    Bench,
    MakeWithServers,
    named_run,
    snapshot_server,
)
from tests.support.trainer import At, Net, Stop, StopAt, data, trainer
from tests.support.waiting import until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
SECRET = "correct-horse-battery"


def read(text: str) -> Samples:
    """Every sample, by its name without the prefix and its labels, each once, as Prometheus' own parser finds them."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name.removeprefix("lightning_spot_"), frozenset(sample.labels.items())
            assert key not in samples
            samples[key] = sample.value
    return samples


def names(text: str) -> set[str]:
    """The metrics of the text."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name, _ in read(text)}


def of(server: SnapshotServer) -> Samples:
    return read(exposition(server).decode())


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """The value of the one series that has these labels, and maybe others."""
    found = [each for (of_name, pairs), each in samples.items() if of_name == name and pairs >= labels.items()]
    assert len(found) <= 1
    return found[0] if found else None


def values(samples: Samples, **labels: str) -> dict[str, float]:
    """The values of the series that have exactly these labels, by name."""
    return {name: each for (name, pairs), each in samples.items() if pairs == labels.items()}


def fetched(url: str, token: str | None = None, **headers: str) -> str:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(response.read().decode())


def refusal(url: str, *rest: Any, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetched(url, *rest, **headers)
    return caught.value.code


def figures(**more: Any) -> Figures:
    usual = {
        "snapshots": {"taken": 8.0, "skipped": 1.0, "dropped": 1.0},
        "blocked": Histogram(),
        "seconds": {"productive": 75.0, "blocked": 5.0, "lost": 20.0},
        "attempts": {"killed": 2.0, "running": 1.0},
        "notices": 1,
    }
    return Figures(**{**usual, **more})


# -- what a server knows by itself ------------------------------------------------------------------------------------


def test_steps_lag_and_slots_are_those_of_the_ring(bench: Bench) -> None:
    bench.open()
    bench.tier().open.clear()
    bench.save(10, created_unix_s=1000.0)
    before = of(bench.server)
    assert value(before, "last_committed_step", run=RUN) == 10
    assert value(before, "ring_slots", state="pending") == 1
    assert not {"last_persisted_step", "persist_lag_seconds"} & values(before, run=RUN).keys()
    bench.tier().open.set()
    assert bench.flush() == []
    bench.tier().open.clear()
    bench.save(20, created_unix_s=1060.0)
    found = of(bench.server)
    assert values(found, run=RUN) == {
        "run_live": 1,
        "attempt": 1,
        "last_committed_step": 20,
        "last_committed_timestamp_seconds": 1060,
        "last_persisted_step": 10,
        "last_persisted_timestamp_seconds": 1000,
        "persist_lag_seconds": 60,
    }
    of_storage = values(found, run=RUN, tier="storage")
    assert of_storage.pop("upload_seconds_sum") > 0
    assert of_storage == {
        "upload_seconds_count": 1,
        "upload_bytes_total": 1000,
        "upload_errors_total": 0,
        "upload_failing": 0,
    }
    assert value(found, "build_info", protocol=str(PROTOCOL_VERSION)) == 1
    assert value(found, "ring_full") == 0


def test_a_storage_that_fails_is_seen(bench: Bench) -> None:
    bench.open()
    bench.tier().errors = lambda _kind, _manifest: TierError("it fails")
    bench.save(10)
    until(lambda: value(of(bench.server), "upload_failing", run=RUN, tier="storage"), "a failure")
    assert value(of(bench.server), "upload_errors_total", run=RUN, tier="storage") >= 1  # type: ignore[operator]


def test_a_run_that_is_forgotten_vanishes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open(run_id=OTHER_ID, durable=False)
    assert value(of(bench.server), "attempt", run=f"run@{OTHER_ID}") == 1
    monkeypatch.setattr(registry, "MOST_RUNS", 1)
    bench.open()
    assert value(of(bench.server), "attempt", run=f"run@{OTHER_ID}") is None
    assert value(of(bench.server), "attempt", run=RUN) == 1


def test_a_run_lives_as_long_as_its_trainer_asks_for_it(bench: Bench) -> None:
    bench.open()
    assert value(of(bench.server), "run_live", run=RUN) == 1
    bench.server.ring.opened_s[RUN_ID] -= 3600.0
    assert value(of(bench.server), "run_live", run=RUN) == 0


@pytest.mark.parametrize(
    "text", ['"} 1\nlightning_spot_build_info 7\n', "\\", '\\"', "\udcff", "\r\x85\u2028", "x" * 10**4]
)
def test_no_name_breaks_the_format(bench: Bench, text: str) -> None:
    """A left-over of another version may have any name; so has a server that a client names."""
    bench.open()
    known = bench.server.registry.runs[RUN_ID]
    known.info = replace(known.info, name=text)
    found = of(bench.server)
    assert value(found, "attempt") == 1
    assert value(found, "build_info") == 1
    assert max(len(label) for _, pairs in found for pair in pairs for label in pair) <= 600


# -- what trainers tell -----------------------------------------------------------------------------------------------


def test_figures_are_shown_as_they_were_told(bench: Bench) -> None:
    bench.open()
    blocked = Histogram()
    for seconds in (0.001, 0.002, 0.2, 100.0):
        blocked.observe(seconds)
    bench.server.report(RUN, figures(blocked=blocked, persisted_step=30, persisted_unix_s=2000.0))
    found = of(bench.server)
    assert value(found, "snapshots_total", run=RUN, result="taken") == 8
    assert value(found, "badput_seconds", run=RUN, cause="lost") == 20.0
    assert value(found, "attempts", run=RUN, end="killed") == 2
    told = {"goodput_ratio": 0.75, "goodput_seconds": 75.0, "notices_total": 1, "last_persisted_step": 30}
    assert told.items() <= values(found, run=RUN).items()
    bounds = ("0.001", "0.0025", "0.25", "+Inf")
    assert [value(found, "snapshot_blocked_seconds_bucket", run=RUN, le=le) for le in bounds] == [1, 2, 3, 4]
    assert value(found, "snapshot_blocked_seconds_count", run=RUN) == 4
    assert value(found, "snapshot_blocked_seconds_sum", run=RUN) == pytest.approx(100.203)


def test_another_host_keeps_figures_and_another_attempt_does_not(bench: Bench) -> None:
    bench.open()
    bench.server.report(RUN, figures())
    bench.open()
    assert value(of(bench.server), "goodput_ratio", run=RUN) == 0.75
    bench.open(attempt=2)
    assert value(of(bench.server), "goodput_ratio", run=RUN) is None
    assert value(of(bench.server), "attempt", run=RUN) == 2


def test_the_servers_of_a_run_are_told_at_once(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.start(FIRST, SECOND, replicas=2)
    until(lambda: all(bench.servers[each].registry.runs for each in (FIRST, SECOND)), "the servers to have the run")
    bench.server.report(RUN, figures())
    for each in (FIRST, SECOND):
        until(lambda each=each: value(of(bench.servers[each]), "goodput_ratio", run=RUN) == 0.75, "the figures")  # type: ignore[misc]
    bench.server.report(RUN, figures(notices=2))
    until(lambda: value(of(bench.servers[FIRST]), "notices_total", run=RUN) == 2, "newer figures")


TOLD = asdict(figures())


@pytest.mark.parametrize(
    "told",
    [
        {"snapshots": {f"l{chr(97 + number)}": 1 for number in range(17)}},
        {"snapshots": {'x"} 1\ny{a="': 1}},
        {"snapshots": {"x" * 33: 1}},
        {"seconds": {"productive": -1}},
        {"seconds": {"productive": float("inf")}},
        {"seconds": [1]},
        {"attempts": {"killed": "2"}},
        {"blocked": {"counts": [1], "sum_s": 0.0}},
        {"blocked": {"counts": [-1] * (len(BLOCKED_S) + 1), "sum_s": 0.0}},
        {"blocked": {"counts": [0] * 10**5, "sum_s": 0.0}},
        {"blocked": None},
        {"notices": 1.5},
        {"persisted_step": -2},
    ],
)
def test_figures_that_are_none_are_refused(told: dict[str, Any]) -> None:
    assert decoded(Figures, TOLD) == figures()
    with pytest.raises(MalformedError):
        decoded(Figures, {**TOLD, **told})


# -- who may read them ------------------------------------------------------------------------------------------------


# -- a training -------------------------------------------------------------------------------------------------------


def spot(url: Path, **more: Any) -> SpotCheckpoint:
    return SpotCheckpoint(str(url), interval=EverySteps(5), on_full="wait", **more)


def test_a_training_is_seen_at_its_snapshot_server(tmp_path: Path) -> None:
    """Killed, resumed and complete: the second attempt tells how the first one ended, and the server all of it."""
    with snapshot_server(tmp_path) as (server, url):
        with pytest.raises(Stop):
            trainer(spot(tmp_path / "run", servers=url), StopAt(12)).fit(Net(), data())
        [run] = server.registry.runs.values()
        name = run.info.text
        until(lambda: value(of(server), "attempts", run=name, end="running") == 1, "what the trainer has measured")
        trainer(spot(tmp_path / "run", servers=url)).fit(Net(), data())
        until(lambda: value(of(server), "attempts", run=name, end="complete") == 1, "how it has ended")
        found = of(server)
        assert value(found, "attempt", run=name) == 2
        assert value(found, "attempts", run=name, end="failed") == 1
        assert value(found, "snapshots_total", run=name, result="taken") > 0  # type: ignore[operator]
        assert value(found, "snapshot_blocked_seconds_count", run=name) > 0  # type: ignore[operator]
        assert 0 < value(found, "goodput_ratio", run=name) < 1  # type: ignore[operator]
        assert value(found, "last_persisted_step", run=name) == 40
        assert value(found, "badput_seconds", run=name, cause="lost") > 0  # type: ignore[operator]
        assert names(exposition(server).decode()) == METRICS.keys()
        check(exposition(server).decode())


def test_a_notice_is_seen_before_its_trainer_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notice = tmp_path / "notice"
    monkeypatch.setenv("LIGHTNING_SPOT_NOTICE_FILE", str(notice))
    with snapshot_server(tmp_path) as (server, url):
        run = trainer(spot(tmp_path / "run", servers=url), At(5, notice.touch), max_epochs=10**6)
        with pytest.raises(PreemptedError):
            run.fit(Net(), data())
        [name] = [run.info.text for run in server.registry.runs.values()]
        assert value(of(server), "notices_total", run=name) == 1
        assert value(of(server), "attempts", run=name, end="preempted") == 1


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    """Where a local server answers."""
    monkeypatch.setenv("LIGHTNING_SPOT_METRICS", f"127.0.0.1:{port}")
    return f"http://127.0.0.1:{port}"


def test_a_local_server_shows_a_training_where_it_is_told_to(tmp_path: Path, base: str) -> None:
    seen = list[Any]()

    def look() -> None:
        until(lambda: {"goodput_ratio", "last_committed_step"} <= names(fetched(f"{base}/metrics")), "figures")
        seen.append(read(fetched(f"{base}/metrics")))
        seen.append(refusal(f"{base}/v1/status", **{PROTOCOL_HEADER: str(PROTOCOL_VERSION)}))
        with urllib.request.urlopen(f"{base}/healthz") as response:
            seen.append(response.status)

    trainer(spot(tmp_path / "run"), At(30, look)).fit(Net(), data())
    found, other, alive = seen
    assert (other, alive) == (404, 200)
    assert value(found, "last_committed_step") in range(5, 31)
    assert value(found, "run_live") == 1
    until(lambda: not find_record(str(tmp_path / "run")).running(), "the server to end")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{base}/healthz")


def test_the_address_of_metrics_also_asks_for_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", SECRET)
    starting.start(str(tmp_path), "run", **SETTINGS)
    assert refusal(f"{base}/metrics") == 401
    assert value(read(fetched(f"{base}/metrics", SECRET)), "build_info") == 1


SETTINGS: dict[str, Any] = {"slots": 2, "memory_bytes": 2**24, "server_idle_timeout_s": 30.0}


def test_an_address_in_use_is_a_warning(tmp_path: Path, base: str, port: int) -> None:
    """Two runs on one host have one environment."""
    first = starting.start(str(tmp_path / "one"), "run", **SETTINGS)
    second = starting.start(str(tmp_path / "two"), "run", **SETTINGS)
    assert value(read(fetched(f"{base}/metrics")), "build_info") == 1
    assert [str(port) in find_record(str(tmp_path / each)).log.read_text() for each in ("one", "two")] == [False, True]
    for host in (first, second):
        host.check()


def test_a_server_that_is_only_watched_ends(tmp_path: Path, base: str) -> None:
    host = starting.start(str(tmp_path), "run", **{**SETTINGS, "server_idle_timeout_s": 0.5})
    host.open_run(named_run("run", tmp_path))
    record = find_record(str(tmp_path))
    host.session.close()

    def ended() -> bool:
        with contextlib.suppress(OSError):
            fetched(f"{base}/metrics")
        return not record.running()

    until(ended, "the server to end")


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "127.0.0.1:", ":9", "0.0.0.0:9"])
def test_a_bad_address_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_METRICS", address)
    with pytest.raises(SettingsError, match="LIGHTNING_SPOT_METRICS"):
        read_environment()
    monkeypatch.setenv("LIGHTNING_SPOT_METRICS", "0.0.0.0:9")
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", SECRET)
    assert read_environment().metrics == ("0.0.0.0", 9)


# -- others who read the format ---------------------------------------------------------------------------------------


def check(text: str) -> None:
    """Types and labels are those that are documented, for ``promtool``, too, where it is there."""
    if PROMTOOL is not None:
        assert promtool("check", "metrics", stdin=text) == ""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    plain = {f"lightning_spot_{name.removesuffix('_total')}": metric for name, metric in METRICS.items()}
    assert {name: family.type for name, family in families.items()} == {name: each.kind for name, each in plain.items()}
    for name, metric in plain.items():
        for sample in families[name].samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels)
