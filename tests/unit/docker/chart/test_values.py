"""Values change the chart: workers, Redis, policies, monitoring, autoscaling."""

import json
import re
from typing import Any

import kubernetes_validate
import promql_parser as promql
import pytest
import yaml

from api.edge.perimeter import Perimeter
from poc_core.settings import Settings
from tests.cluster.chart import (
    VERSIONS,
    containers,
    environment,
    labels_of,
    objects,
    objects_of,
    pod_of,
    running,
)
from tests.cluster.values import SETS, Values
from tests.harness.compose_file import ROOT

pytestmark = pytest.mark.xdist_group("kubernetes")  # one process reads the schemas


def find(name: str, kind: str) -> list[dict[str, Any]]:
    return [found for found in objects_of(name) if found["kind"] == kind]


def test_each_kind_of_gpu_has_pods_of_its_own() -> None:
    found = running(objects_of("three kinds"))
    h200, a100, cpu = (
        pod_of(found[f"worker-{kind}"])["containers"][0] for kind in ("h200", "a100", "cpu")
    )
    assert h200["resources"] == {
        "requests": {"cpu": "4", "memory": "32Gi"},
        "limits": {"nvidia.com/gpu": 8},
    }
    assert [a100["resources"]["limits"], cpu["resources"]["limits"]] == [
        {"nvidia.com/gpu": 1},
        {},
    ]
    assert h200["image"] == a100["image"] == "proofline-worker-gpu"
    assert cpu["image"] == "proofline-worker-cpu"
    assert h200["args"][-3:] == ["--", "--max-model-len", "8192"]
    assert h200["args"][h200["args"].index("--tensor-parallel") :][:4] == [
        *("--tensor-parallel", "2", "--pipeline-parallel", "2")
    ]
    assert "--gpus" not in cpu["args"]
    assert pod_of(found["worker-h200"])["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert "nodeSelector" not in pod_of(found["worker-a100"])
    assert {key: one["spec"]["replicas"] for key, one in found.items() if "worker" in key} == {
        "worker-h200": 2,
        "worker-a100": 4,
        "worker-cpu": 1,
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_an_engine_over_hosts_is_a_group_of_pods(version: str) -> None:
    """LeaderWorkerSet's schema is not here: its own fields by name, pods as a StatefulSet's."""
    pair, shared = find("an engine over two hosts", "LeaderWorkerSet")
    for one in (pair, shared):
        assert one["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert one["spec"].keys() == {"replicas", "leaderWorkerTemplate"}
        group = dict(one["spec"]["leaderWorkerTemplate"])
        assert (group.pop("size"), group.pop("restartPolicy")) == (2, "None")
        pods = {"template": group.pop("workerTemplate"), "serviceName": "worker"}
        selects = {"selector": {"matchLabels": labels_of(one)}}
        assert group.keys() <= {"volumeClaimTemplates"}
        as_set = one | {"apiVersion": "apps/v1", "kind": "StatefulSet"}
        kubernetes_validate.validate(
            as_set | {"spec": pods | selects | group}, version, strict=True
        )
    container = pod_of(pair)["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    said = " ".join(container["args"])
    assert "--tensor-parallel 16 --pipeline-parallel 1 --hosts 2" in said
    assert "--rank $(LWS_WORKER_INDEX) --head $(LWS_LEADER_ADDRESS):7070" in said
    assert "volumeClaimTemplates" not in shared["spec"]["leaderWorkerTemplate"]


def test_hosts_of_an_engine_reach_each_other_and_nobody_else_reaches_them() -> None:
    policies = {
        one["metadata"]["name"]: one["spec"]
        for one in find("an engine over two hosts", "NetworkPolicy")
    }
    own = {"podSelector": {"matchLabels": {"app": "worker", "kind": "pair"}}}
    assert policies["worker-pair-hosts"] == own | {
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [own]}],
    }
    assert "worker-gpu-hosts" not in {
        one["metadata"]["name"] for one in find("defaults", "NetworkPolicy")
    }


def test_nothing_and_none_are_values_too() -> None:
    """0 and "" of a kind are not taken for what the kind does not say."""
    found = running(
        objects({"workers": [{"name": "a", "model": "", "replicas": 0, "gpus": 0}, {"name": "b"}]})
    )
    assert found["worker-a"]["spec"]["replicas"] == 0
    (a,), (b,) = (pod_of(found[f"worker-{kind}"])["containers"] for kind in "ab")
    assert a["args"] == ["workers", "--verbose"]
    assert (b["args"][3], b["resources"]["limits"]) == ("Qwen/Qwen3-8B", {"nvidia.com/gpu": 1})


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("defaults", "redis://redis:6379/0"),
        ("a Redis of theirs", "redis://redis.example:6379/0"),
        ("a Redis of theirs with users", "redis://{user}@redis.example:6379"),
        ("TLS to their Redis", "rediss://redis.example:6379/0?ssl_ca_certs=/run/redis/ca.pem"),
        ("users in the chart's Redis", "redis://{user}@redis:6379/0"),
        (
            "Sentinels of theirs",
            "redis+sentinel://{user}@sentinel.example:26379/theirs/0"
            "?sentinel_password_file=/run/proofline/sentinel_password",
        ),
    ],
)
def test_each_process_finds_its_redis(name: str, url: str) -> None:
    found = objects_of(name)
    for one, container in containers(found):
        if one == "redis":
            continue
        user = one.partition("-")[0]
        assert environment(found, container)["POC_REDIS_URL"] == url.format(user=user)
        secret = pod_of(running(found)[one])["volumes"][0]["secret"]
        key = f"{user}_redis_password" if "{user}" in url else "redis_password"
        assert secret["items"][0] == {"key": key, "path": "redis_password"}
        mounted = {item["path"] for item in secret["items"]}
        assert ("sentinel_password" in mounted) == ("sentinel" in url)
    assert ("redis" in running(found)) == (".example" not in url)


def test_only_the_nodes_own_processes_reach_redis() -> None:
    for name, others in {"defaults": set[str](), "monitored": {"flower"}}.items():
        (policy,) = (
            one for one in find(name, "NetworkPolicy") if one["metadata"]["name"] == "redis"
        )
        ((source,),) = [rule["from"] for rule in policy["spec"]["ingress"]]
        (expression,) = source["podSelector"]["matchExpressions"]
        assert set(expression["values"]) == {"api", "courier", "worker"} | others
    policies = {one["metadata"]["name"]: one["spec"] for one in find("defaults", "NetworkPolicy")}
    assert policies["worker"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"app": "api"}}}]}
    ]
    assert "ingress" not in policies["courier"]
    assert find("no policies, no budgets", "NetworkPolicy") == []


def test_budgets_never_hold_a_drain_up_for_good() -> None:
    """One replica may go; and whoever is not ready may, as an API without workers is not."""
    for name in SETS:
        for budget in find(name, "PodDisruptionBudget"):
            assert budget["spec"]["maxUnavailable"] == 1
            assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert len(find("three kinds", "PodDisruptionBudget")) == 4
    assert find("no policies, no budgets", "PodDisruptionBudget") == []


def test_priorities() -> None:
    name = "priorities, settings, a model to be deployed"
    classes = {one["metadata"]["name"]: one for one in find(name, "PriorityClass")}
    assert classes["spare"]["value"] < classes["proofline-node"]["value"]
    assert classes["spare"]["preemptionPolicy"] == "Never"
    used = {
        one: pod_of(controller)["priorityClassName"]
        for one, controller in running(objects_of(name)).items()
    }
    assert used == {one: "spare" if "worker" in one else "proofline-node" for one in used}


def test_a_change_of_settings_starts_pods_anew() -> None:
    def marks(name: str) -> set[str]:
        return {
            json.dumps(one["spec"]["template"]["metadata"].get("annotations"))
            for key, one in running(objects_of(name)).items()
            if key != "redis"
        }

    assert len(marks("defaults")) == 1
    assert marks("defaults").isdisjoint(marks("mutual TLS, Ingress, keys"))
    assert marks("defaults") == marks("three kinds")


def test_names_and_proxies_are_added_to_what_the_settings_say() -> None:
    found = objects_of("mutual TLS, Ingress, keys")
    api = environment(found, pod_of(running(found)["api"])["containers"][0])
    assert api["POC_TRUSTED_NETWORKS"] == "10.9.0.0/16,127.0.0.1/32"
    assert api["POC_ALLOWED_HOSTS"] == "node.example.org"
    (proxy,) = (
        one for one in find("mutual TLS, Ingress, keys", "ConfigMap") if "nginx.conf" in one["data"]
    )
    assert proxy["data"]["nginx.conf"] == (ROOT / "docker" / "tls" / "nginx.conf").read_text()


class TestMonitoring:
    def test_the_rules_are_those_of_compose(self) -> None:
        (rule,) = find("monitored", "PrometheusRule")
        alerts = (ROOT / "docker" / "monitoring" / "alerts.yaml").read_text()
        assert rule["spec"] == yaml.safe_load(alerts)

    def test_the_dashboard_asks_the_data_source_that_is_named(self) -> None:
        (board,) = (
            one for one in find("monitored", "ConfigMap") if "proofline.json" in one["data"]
        )
        own = (ROOT / "docker" / "monitoring" / "dashboards" / "proofline.json").read_text()
        shown = board["data"]["proofline.json"]
        assert json.loads(shown) == json.loads(own.replace('"uid": "prometheus"', '"uid": "mine"'))
        assert '"uid": "prometheus"' not in shown

    @pytest.mark.parametrize(
        ("values", "secret"), [({}, "mine"), ({"keySecret": "keys"}, "keys")], ids=["same", "other"]
    )
    def test_prometheus_reads_its_keys_in_the_nodes_secret(
        self, values: Values, secret: str
    ) -> None:
        monitored = {"serviceMonitor": {"enabled": True} | values}
        found = objects({"secret": "mine", "flower": {"enabled": True}, "monitoring": monitored})
        named = {
            part["name"]
            for one in found
            if one["kind"] == "ServiceMonitor"
            for endpoint in one["spec"]["endpoints"]
            for part in (
                *endpoint.get("authorization", {}).values(),
                *endpoint.get("basicAuth", {}).values(),
            )
        }
        assert named == {secret}

    def test_all_apis_are_one_target(self) -> None:
        """As Prometheus relabels three pods' endpoints: one label set, so one target."""
        (monitor,) = (
            one
            for one in find("monitored", "ServiceMonitor")
            if one["metadata"]["name"] == "proofline"
        )
        (service,) = (
            one for one in find("monitored", "Service") if one["metadata"]["name"] == "api"
        )
        assert (
            monitor["spec"]["selector"]["matchLabels"].items()
            <= service["metadata"]["labels"].items()
        )
        jobs = {}
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
            targets = {
                tuple(sorted(relabelled(target(n), endpoint["relabelings"]).items()))
                for n in range(3)
            }
            (labels,) = map(dict, targets)
            jobs[labels["job"]] = endpoint["path"]
            assert Perimeter(nothing, Settings()).knows(labels["__address__"])
        own = yaml.safe_load((ROOT / "docker" / "monitoring" / "prometheus.yaml").read_text())
        assert jobs == {
            one["job_name"]: one.get("metrics_path", "/metrics")
            for one in own["scrape_configs"]
            if one["job_name"] != "flower"
        }


async def nothing(*_: object) -> None: ...


def target(n: int) -> dict[str, str]:
    """The labels of an API's endpoint as Prometheus' operator has them."""
    return {
        "__address__": f"10.0.0.{n}:8000",
        "pod": f"api-{n}",
        "container": "api",
        "service": "api",
        "namespace": "proofline",
        "endpoint": "http",
        "job": "api",
    }


def relabelled(labels: dict[str, str], steps: list[dict[str, str]]) -> dict[str, str]:
    for step in steps:
        if step["action"] == "labeldrop":
            labels = {
                key: value for key, value in labels.items() if not re.fullmatch(step["regex"], key)
            }
        else:
            assert step["action"] == "replace"
            labels = labels | {step["targetLabel"]: step["replacement"]}
    return labels


class TestAutoscaling:
    def test_only_whom_the_values_name_is_scaled(self) -> None:
        (scaled,) = find("autoscaled", "ScaledObject")
        found = running(objects_of("autoscaled"))
        assert scaled["spec"]["scaleTargetRef"]["name"] == "worker-gpu"
        assert "replicas" not in found["worker-gpu"]["spec"]
        assert found["worker-cpu"]["spec"]["replicas"] == 1
        assert scaled["spec"]["maxReplicaCount"] == 16

    def test_pods_go_one_by_one_and_each_has_the_time_to_drain(self) -> None:
        (scaled,) = find("autoscaled", "ScaledObject")
        down = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        (policy,) = down["policies"]
        grace = pod_of(running(objects_of("autoscaled"))["worker-gpu"])
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        assert policy["periodSeconds"] >= 2 * grace["terminationGracePeriodSeconds"]

    def test_its_queries_are_prometheus_own(self) -> None:
        (scaled,) = find("autoscaled", "ScaledObject")
        queries = {
            trigger["name"]: trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]
        }
        assert queries.keys() == {"queued-nonces", "waiting-chats", "round"}
        for query in queries.values():
            promql.parse(query)
        assert 'host=~"worker-gpu-[0-9]+"' in queries["round"]
