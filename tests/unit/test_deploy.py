"""The files in ``deploy/``: they name commands, flags, variables and numbers that fit each other and the package."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_spot.cli.command import command_parser
from lightning_spot.config import parse_bytes
from lightning_spot.http.metrics import METRICS
from tests.support.prometheus import PROMTOOL, promtool

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TRAINERS_ONLY = {"lightning", "torch", "torchmetrics"}
LEAST_DRAIN_S = 300


def resources(name: str) -> dict[str, Any]:
    """Of a manifest, by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())}


def serve(words: list[str]) -> Any:
    return command_parser().parse_args(words)


def test_a_server_has_all_requirements_but_those_of_trainers() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = [line.partition("#")[0].strip() for line in (DEPLOY / "requirements-server.txt").read_text().splitlines()]

    def plain(line: str) -> str:
        return line.replace("'", '"').replace(" ", "")

    known = {plain(line) for line in wanted if re.split(r"\W", line)[0] not in TRAINERS_ONLY}
    assert {plain(line) for line in lines if line} == known


def test_the_systemd_unit() -> None:
    lines = (DEPLOY / "lightning-spot.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert serve(unit["ExecStart"].split()[1:]).memory_limit
    assert int(unit["TimeoutStopSec"]) > LEAST_DRAIN_S
    assert unit["User"] not in ("root", "0")
    assert not unit.keys() & {"DynamicUser", "RemoveIPC"}  # what a killed server left in /dev/shm is taken over
    assert [line for line in lines if line.startswith("LoadCredential=token:")]  # no secret in the unit itself


def test_the_image_and_the_compose_file() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER [1-9]", image, re.MULTILINE)
    command = re.findall(r'"([^"]*)"', image.rsplit("CMD", 1)[1])
    assert serve(command).listen
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    assert server["read_only"]
    assert parse_bytes(server["shm_size"]) > parse_bytes(serve(server["command"]).memory_limit)
    assert int(server["stop_grace_period"].rstrip("s")) > LEAST_DRAIN_S


@pytest.mark.parametrize(("name", "kind"), [("server.yaml", "StatefulSet"), ("trainer.yaml", "Job")])
def test_pods_have_no_more_rights_than_they_need(name: str, kind: str) -> None:
    pod = resources(name)[kind]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    variables = {each["name"]: each for each in container["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == set(mounts.values())
    assert mounts.keys() >= {"/dev/shm", "/tmp"}  # what is written to on a read-only root
    folder, _, file = variables["LIGHTNING_SPOT_TOKEN_FILE"]["value"].rpartition("/")
    assert volumes[mounts[folder]]["secret"]["items"] == [{"key": "token", "path": file}]
    assert variables["LIGHTNING_SPOT_WEBHOOK"]["valueFrom"]["secretKeyRef"]["optional"]


def test_the_servers_in_kubernetes() -> None:
    found = resources("server.yaml")
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    [server] = pod["containers"]
    limit = parse_bytes(serve(server["args"]).memory_limit)
    assert pod["terminationGracePeriodSeconds"] > LEAST_DRAIN_S
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    room = parse_bytes(volumes["shm"]["emptyDir"]["sizeLimit"])
    assert limit < room < parse_bytes(server["resources"]["limits"]["memory"])
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert {probe["httpGet"]["path"] for name, probe in server.items() if name.endswith("Probe")} == {
        "/healthz",
        "/readyz",
    }


def test_the_trainer_in_kubernetes() -> None:
    job, servers = resources("trainer.yaml")["Job"], resources("server.yaml")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[1]["onExitCodes"]["values"] == [143]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy needs it
    [trainer] = pod["containers"]
    variables = {each["name"]: each.get("value", "") for each in trainer["env"]}
    assert int(variables["LIGHTNING_SPOT_GRACE_PERIOD_S"]) == pod["terminationGracePeriodSeconds"]
    assert trainer["name"] == rules[1]["onExitCodes"]["containerName"]
    name, count = servers["Service"]["metadata"]["name"], servers["StatefulSet"]["spec"]["replicas"]
    named = [f"spot://{name}-{index}.{name}:7070" for index in range(count)]
    assert variables["LIGHTNING_SPOT_SERVERS"].split(",") == named
    admitted = servers["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert admitted.items() <= job["spec"]["template"]["metadata"]["labels"].items()


# -- Prometheus and Grafana -------------------------------------------------------------------------------------------

RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana" / "lightning-spot.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [rule["expr"] for rule in RULES] + [target["expr"] for panel in PANELS for target in panel["targets"]]
OF_PROMETHEUS = {"instance", "job", "le"}


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_and_labels_that_are_exposed(query: str) -> None:
    asked = set(re.findall(r"lightning_spot_(\w+)", query))
    known = {
        f"{name}{suffix}": metric
        for name, metric in METRICS.items()
        for suffix in {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(
            metric.kind, ("",)
        )
    }
    assert asked or "up{" in query
    assert asked <= known.keys()
    listed = [name for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for name in names.split(", ")]
    labels = {*listed, *re.findall(r"[{,]\s*(\w+)\s*=", query)}
    assert labels <= OF_PROMETHEUS.union(*(known[name].labels for name in asked))
    rated = re.findall(r"\b(?:rate|increase)\(lightning_spot_(\w+)", query)
    assert {known[name].kind for name in rated} <= {"counter", "histogram", "summary"}


def test_every_metric_is_on_the_dashboard_or_in_a_rule() -> None:
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for query in QUERIES
        for name in re.findall(r"lightning_spot_(\w+)", query)
    }
    assert asked == METRICS.keys()


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_reads_rules_queries_and_configuration(tmp_path: Path) -> None:
    assert promtool("check", "rules", str(DEPLOY / "prometheus" / "rules.yaml")) == ""
    assert promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yml")) == ""
    drawn = [query.replace("$__rate_interval", "1m") for query in QUERIES]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(drawn)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert promtool("check", "rules", str(tmp_path / "queries.yaml")) == ""


HEALTHY = {
    "run_live": "1x300",
    "last_persisted_timestamp_seconds": "0+60x300",
    "persist_lag_seconds": "0 60 0 60x297",
    "upload_failing": "0 1 0x298",
    "ring_full": "0 1 0x298",
    "goodput_ratio": "0.2 0.95x299",
    "attempt": "1x100 2x199",
}
SICK = {
    "LightningSpotNothingPersisted": {"last_persisted_timestamp_seconds": "60x300"},
    "LightningSpotLagGrowing": {"persist_lag_seconds": "0+30x300"},
    "LightningSpotUploadsFailing": {"upload_failing": "1x300"},
    "LightningSpotRingFull": {"ring_full": "1x300"},
    "LightningSpotGoodputLow": {"goodput_ratio": "0.5x300"},
    "LightningSpotPreemptionStorm": {"attempt": "1+1x300"},
    "LightningSpotServerDown": {"up": "0x300"},
}


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("sick", ["", "never persisted", *SICK])
def test_each_alert_fires_for_its_cause_and_for_no_other(tmp_path: Path, sick: str) -> None:
    """Two servers show a run for five hours; the second one, which knows less of it, changes nothing."""
    shown = {"up": "1x300", **HEALTHY, **SICK.get(sick, {})}
    if sick == "never persisted":
        sick = "LightningSpotNothingPersisted"
        del shown["last_persisted_timestamp_seconds"]
    series = []
    for instance, values in (("a", shown), ("b", {"run_live": "0x300", "attempt": "1x300", "up": "1x300"})):
        for name, value in values.items():
            prefix, labels = (
                ("", 'job="lightning-spot"') if name == "up" else ("lightning_spot_", 'run="r",tier="storage"')
            )
            series.append({"series": f'{prefix}{name}{{instance="{instance}",{labels}}}', "values": value})
    asked = {"eval_time": "299m", "expr": 'group by (alertname) (ALERTS{alertstate="firing"})'}
    fired = [{"labels": f'{{alertname="{sick}"}}', "value": 1}] if sick else []
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [{**asked, "exp_samples": fired}]}
    rules = str(DEPLOY / "prometheus" / "rules.yaml")
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [rules], "tests": [test]}))
    assert promtool("test", "rules", str(tmp_path / "test.yaml")) == ""


def test_the_pod_monitor_fits_the_servers() -> None:
    servers, [monitor] = resources("server.yaml"), resources("podmonitor.yaml").values()
    pod = servers["StatefulSet"]["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == pod["spec"]["containers"][0]["ports"][0]["name"]
    secret = next(each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "token")
    assert endpoint["authorization"]["credentials"] == {"name": secret["secretName"], "key": "token"}
