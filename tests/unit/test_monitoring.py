"""The profile `monitoring`: its metrics, labels and files exist; its alerts are documented."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from fastapi.testclient import TestClient
from flower.events import get_prometheus_metrics
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from api.health.judgement import Level
from api.node_metrics.families import ALL, GPU, HOST
from poc_core.machine_figures import GpuFigures, MachineFigures
from poc_core.records import Lease, RoundState
from poc_core.serving.deployments import HostReport, HostState
from poc_core.serving.places import WorkerPlace
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness import compose_file
from tests.harness.compose_file import ROOT
from tests.harness.samples import complete_lease, lease_nonces, round_config, worker_record
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import FakeWorker
from tests.vllm_metrics import metrics_text
from workers.chat_gate import GateStats

HERE = ROOT / "docker" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((HERE / "dashboards" / "proofline.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
TARGETS = [
    pytest.param(target, id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
PROMETHEUS: dict[str, Any] = yaml.safe_load((HERE / "prometheus.yaml").read_text())
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
BY_ALERT = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
# Metrics of Prometheus' own, and the labels it adds to each target's.
ITS_OWN = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity"}}
OF_A_TARGET = {"job", "instance"}
Labels = dict[str, set[str]]


@pytest.fixture
def ours(
    client: TestClient,
    rounds: RoundStore,
    workers: WorkerRegistry,
    redis: Redis,
    settings: Settings,
) -> Labels:
    """The labels of each metric of a node in whose round a worker with chat has computed, after a
    restart.
    """
    chat = GateStats(chat_active=1, chat_total=2, chat_refused=3, skips=4, proof_busy_s=5.0)
    stats = vars(chat) | {"validations_pass": 1, "validation_pass_s": 2.0}
    workers.heartbeat(replace(worker_record("w1"), stats=stats, host_id="h1-1-a"))
    ended: dict[str, Any] = {"restarts": 1, "last_exit": "exit code 70", "last_exit_at": 1.0}
    place = WorkerPlace(name="h1/cpu0", pid=1, is_ready=True, since=1.0, **ended)
    serves = {"id": "h1-1-a", "host": "h1", "state": HostState.SERVING}
    host = HostReport(**serves, generation=0, places=(place,))
    DeploymentStore(redis, settings).report(host)
    record = rounds.read(rounds.store(round_config(), RoundState.GENERATING))
    assert record is not None
    lease = lease_nonces(rounds, record, "w1", 1)
    assert isinstance(lease, Lease)
    complete_lease(rounds, lease, "w1", ["a"])
    chats = client.app.state.services.chats  # type: ignore[attr-defined]
    for histogram in (chats.first_token, chats.whole):
        histogram.labels("m").observe(1)
    return labels_told(client, "/metrics")


@pytest.fixture
def networks(
    client: TestClient, workers: WorkerRegistry, redis: Redis, settings: Settings
) -> Labels:
    """Those of schema v1, of a node of two hosts whose GPUs have all sensors."""
    gpu = GpuFigures(
        uuid="1",
        model="NVIDIA H200",
        sensors={family.name.removeprefix("mlnode_gpu_"): 1 for family in GPU},
        xid_events={79: 1},
    )
    store = DeploymentStore(redis, settings)
    for name in ("a", "b"):
        sensors = {family.name.removeprefix("mlnode_host_"): 1.0 for family in HOST}
        figures = MachineFigures(host=name, read_at=1, gpus=(gpu,), sensors=sensors)
        store.report(HostReport(id=name, host=name, state=HostState.IDLE, generation=0))
        store.store_machine(name, figures)
    with FakeWorker("w1", lambda call: call.answer(metrics_text().encode())) as worker:
        workers.heartbeat(worker.record)
        expected = {sample for family in ALL for sample in family.sample_names}
        found: Labels = {}

        def all_told() -> bool:
            nonlocal found
            found = labels_told(client, "/api/v1/metrics")
            return expected == found.keys()

        # On a busy machine the first answer does not wait for the engine's.
        wait_until(all_told, "all families")
    return found


def labels_told(client: TestClient, path: str) -> Labels:
    found: Labels = {}
    for family in text_string_to_metric_families(client.get(path).text):
        for one in family.samples:
            found.setdefault(one.name, set()).update(one.labels)
    return found


@cache
def once() -> Labels:
    return {}


@pytest.fixture
def known(request: pytest.FixtureRequest) -> Labels:
    """Read once a process: it takes ten times as long as a test."""
    found = once()
    if not found:
        ours, networks = (request.getfixturevalue(name) for name in ("ours", "networks"))
        found |= ours | networks | flowers() | ITS_OWN
    return found


def flowers() -> Labels:
    """As Flower declares them."""
    found: Labels = {}
    for metric in vars(get_prometheus_metrics()).values():
        labels = set(metric._labelnames)
        (family,) = metric.describe()
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(
            family.type, [""]
        )
        found |= {family.name + ending: labels for ending in endings}
    return found


def parsed(expr: str) -> promql.Expr:
    return promql.parse(expr.replace("$__rate_interval", "5m"))


def nodes(expr: str) -> Iterator[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(parsed(expr), lambda node: found.append(node))
    return iter(found)


def metrics_of(expr: str) -> set[str]:
    return {node.name or "" for node in nodes(expr) if isinstance(node, promql.VectorSelector)}


def labels_of(expr: str, known: Labels) -> set[str]:
    return OF_A_TARGET.union(*(known[name] for name in metrics_of(expr)))


def check(expr: str, known: Labels) -> None:
    assert metrics_of(expr)
    assert metrics_of(expr) <= known.keys()
    for node in nodes(expr):
        if isinstance(node, promql.VectorSelector):
            assert {matcher.name for matcher in node.matchers.matchers} <= known[
                node.name or ""
            ] | OF_A_TARGET
            for matcher in node.matchers.matchers:
                check_value(matcher.name, matcher.value)
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= labels_of(expr, known)


def check_value(label: str, value: str) -> None:
    """Of labels whose values are known."""
    values = {
        "job": {job["job_name"] for job in PROMETHEUS["scrape_configs"]},
        "state": {state.value for state in RoundState},
        "level": {level.value for level in Level},
        "type": {"task-failed"},
        "alertstate": {"firing"},
    }
    assert value in values[label]


def test_a_query_of_what_is_not_there_is_found_out(known: Labels) -> None:
    for expr in (
        "proofline_nonsense",
        'proofline_worker_up{gpu="0"}',
        "sum by (gpu) (proofline_worker_up)",
        "vector(1)",
    ):
        with pytest.raises(AssertionError):
            check(expr, known)
    with pytest.raises(ValueError, match="parenthesis"):
        check("sum(", known)


@pytest.mark.parametrize("target", TARGETS)
def test_a_panel_asks_for_metrics_and_labels_that_exist(
    target: dict[str, Any], known: Labels
) -> None:
    check(target["expr"], known)
    named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert named <= labels_of(target["expr"], known)


@BY_ALERT
def test_an_alert_asks_for_metrics_and_labels_that_exist(
    alert: dict[str, Any], known: Labels
) -> None:
    check(alert["expr"], known)
    told = " ".join(alert["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels_of(alert["expr"], known)


@BY_ALERT
def test_an_alert_says_what_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["annotations"].keys() == {"summary", "action"}
    assert re.fullmatch(r"\d+m", alert.get("for", "1m"))
    # which .env may not hold: docker/make_secrets.sh refuses it
    assert "METRICS_KEY" not in alert["annotations"]["action"]


def test_the_alert_of_failed_tasks_sees_the_first_failure() -> None:
    """Flower counts by worker, from its first failure on, and a series that begins has risen by
    nothing: what was not there before is looked for itself.
    """
    (alert,) = [alert for alert in ALERTS if alert["alert"] == "ProoflineTasksFail"]
    (fresh,) = [
        node
        for node in nodes(alert["expr"])
        if isinstance(node, promql.BinaryExpr) and str(node.op) == "unless"
    ]
    now, before = fresh.lhs, fresh.rhs
    assert isinstance(now, promql.VectorSelector)
    assert isinstance(before, promql.VectorSelector)
    assert (now.offset, now.prettify()) != (before.offset, before.prettify())
    assert f"{now.prettify()} offset" in before.prettify()


@cache
def shown() -> set[str]:
    """The metrics that some panel asks for."""
    targets = (target for panel in PANELS for target in panel["targets"])
    return {name for target in targets for name in metrics_of(target["expr"])}


def test_each_metric_of_ours_is_shown(ours: Labels) -> None:
    assert ours.keys() - shown() == set()


def test_each_family_of_the_networks_schema_is_shown() -> None:
    """But for those that say how things are set up."""
    figures = [family for family in ALL if not family.name.endswith("_info")]
    assert [family.name for family in figures if not shown() & set(family.sample_names)] == []


def test_the_document_has_the_alerts() -> None:
    document = (ROOT / "docs/monitor.md").read_text()
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert set(re.findall(r"^\| `(Proofline\w+)` \|", document, flags=re.MULTILINE)) == set(names)


def test_no_panel_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    (source,) = yaml.safe_load((HERE / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    used = {
        json.dumps(part["datasource"]) for panel in PANELS for part in (panel, *panel["targets"])
    }
    assert used == {json.dumps({"type": source["type"], "uid": source["uid"]})}
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    mounted = mounts("grafana")
    (provider,) = yaml.safe_load((HERE / "dashboards" / "proofline.yaml").read_text())["providers"]
    assert mounted[provider["options"]["path"]] == HERE / "dashboards"
    assert mounted["/etc/grafana/provisioning/datasources"] == HERE / "datasources"
    home = compose_file.services()["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert home == f"{provider['options']['path']}/proofline.json"


def test_prometheus_finds_its_rules_and_its_targets() -> None:
    services = compose_file.services()
    (folder,) = [path for path, here in mounts("prometheus").items() if here == HERE]
    assert f"--config.file={folder}/prometheus.yaml" in services["prometheus"]["command"]
    assert PROMETHEUS["rule_files"] == [f"{folder}/alerts.yaml"]
    (alertmanagers,) = PROMETHEUS["alerting"]["alertmanagers"]
    files = alertmanagers["file_sd_configs"][0]["files"]
    assert [Path(file).parent for file in files] == [Path(folder)]
    for job in PROMETHEUS["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            name, port = target.split(":")
            assert services[name]["ports"][0].endswith(f":{port}")
            assert set(services[name]["networks"]) & set(services["prometheus"]["networks"])


def mounts(service: str) -> dict[str, Path]:
    """Path in the container -> what of the checkout is there."""
    volumes = [volume.split(":") for volume in compose_file.services()[service]["volumes"]]
    return {path: ROOT / source for source, path, *_ in volumes if source.startswith("./")}


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_a_service_starts_with_the_profile_alone_and_cannot_reach_redis(name: str) -> None:
    service = compose_file.services()[name]
    assert service["profiles"] == ["monitoring"]
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    assert service["networks"] == ["outside"]
    assert [port.split(":")[0] for port in service["ports"]] == ["127.0.0.1"]
    assert all(path.exists() for path in mounts(name).values())


def test_grafana_lets_nobody_in_without_its_password() -> None:
    environment = compose_file.services()["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/proofline/grafana_password"
    opens = (
        *("GF_AUTH_", "GF_USERS_", "GF_SNAPSHOTS_"),
        *("GF_SECURITY_ALLOW_", "GF_SECURITY_ADMIN_PASSWORD"),
    )
    assert [name for name in environment if name.startswith(opens)] == [
        "GF_SECURITY_ADMIN_PASSWORD__FILE"
    ]


def test_prometheus_can_be_changed_by_nobody_and_read_by_no_page_of_a_stranger() -> None:
    command = compose_file.services()["prometheus"]["command"]
    web = [argument for argument in command if argument.startswith("--web.")]
    # Neither its administration nor its end, nor metrics that others write.
    assert web == ["--web.cors.origin=none"]
