"""docker/chart as Helm renders it, without a cluster: schemas, references, mistakes."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser as promql
import pytest
import typer
import yaml
from kubernetes_validate import utils

from api.edge.perimeter import Perimeter
from cli.main import app
from poc_core.settings import Settings
from scripts.manifest import CHART, HELM, MANIFEST, rendered
from tests.cluster.chart import (
    arguments_of,
    containers,
    environment,
    key_of,
    labels_of,
    objects,
    objects_of,
    pod_of,
    running,
    spec_of_pods,
)
from tests.cluster.values import SETS, Values
from tests.harness.compose_file import ROOT

pytestmark = pytest.mark.xdist_group("kubernetes")  # one process reads the schemas

VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
BY_SET = pytest.mark.parametrize("name", list(SETS))
# Of operators that are not Kubernetes' own, so that no schema of it tells their fields.
CUSTOM = ("ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet")
COMMANDS: Any = typer.main.get_command(app)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# What the chart sets itself.
OWN = {
    *("POC_REDIS_URL", "POC_REDIS_PASSWORD_FILE", "POC_API_KEY", "POC_API_KEYS_FILE"),
    *("POC_API_PORT", "POC_CHAT_HOST", "POC_CHAT_ADVERTISE_HOST", "POC_HOST_NAME"),
    *("POC_CALLBACK_CLIENT_CERT", "POC_CALLBACK_TRUSTED_CERTS"),
}


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """kubernetes_validate reads 2 MB for each object that it looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


def find(name: str, kind: str) -> list[dict[str, Any]]:
    return [found for found in objects_of(name) if found["kind"] == kind]


def test_the_manifest_is_what_the_defaults_render() -> None:
    """If not: `make manifest`."""
    namespace, *manifest = yaml.safe_load_all(MANIFEST.read_text())
    kubernetes_validate.validate(namespace, VERSIONS[0], strict=True)
    assert key_of(namespace) == ("Namespace", "proofline")
    assert {key_of(one): one for one in manifest} == {
        key_of(one): one for one in objects_of("defaults")
    }


def test_helm_finds_nothing_to_say() -> None:
    done = subprocess.run(
        [str(HELM), "lint", "--strict", "--quiet", str(CHART)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_all_objects_follow_the_schema(version: str) -> None:
    seen = set[str]()
    for name in SETS:
        for found in objects_of(name):
            text = json.dumps(found, sort_keys=True)
            if found["kind"] not in CUSTOM and text not in seen:
                seen.add(text)
                kubernetes_validate.validate(found, version, strict=True)
    assert len(seen) > 50


@BY_SET
def test_names_stand_once_and_lie_in_the_namespace(name: str) -> None:
    keys = [key_of(found) for found in objects_of(name)]
    assert len(keys) == len(set(keys))
    assert {
        found["metadata"].get("namespace")
        for found in objects_of(name)
        if found["kind"] != "PriorityClass"
    } == {"proofline"}


@BY_SET
def test_commands_options_and_settings_exist(name: str) -> None:
    known = {f"POC_{field.upper()}" for field in Settings.model_fields}
    for _, container in containers(objects_of(name)):
        found = environment(objects_of(name), container)
        assert {variable for variable in found if variable.startswith("POC_")} <= known
        plain = {
            key: value.replace("/run/proofline/sentinel_password", "/dev/null")
            for key, value in found.items()
            if isinstance(value, str)
        }
        given = {key: value for key, value in plain.items() if key.startswith("POC_")} | {
            "POC_REDIS_PASSWORD_FILE": "/dev/null"
        }
        if "proofline" in container["image"]:
            command, *arguments = arguments_of(container)
            with COMMANDS.commands[command].make_context(command, arguments):
                pass
            with pytest.MonkeyPatch.context() as patch:
                for key, value in given.items():
                    patch.setenv(key, value)
                Settings()


@BY_SET
def test_what_pods_refer_to_is_there(name: str) -> None:
    """Volumes, ports of probes, Services and policies; selectors, and ConfigMaps."""
    found = objects_of(name)
    config_maps = {one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"}
    services = {one["metadata"]["name"] for one in found if one["kind"] == "Service"}
    for controller in running(found).values():
        pod, spec = pod_of(controller), controller["spec"]
        if controller["kind"] != "LeaderWorkerSet":  # which selects by labels of its own
            assert spec["selector"]["matchLabels"].items() <= labels_of(controller).items()
        assert spec.get("serviceName", "api") in services
        volumes = {volume["name"] for volume in pod["volumes"]} | {
            claim["metadata"]["name"]
            for claim in spec_of_pods(controller).get("volumeClaimTemplates", [])
        }
        mounted = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounted} == volumes
        for container in pod["containers"]:
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(paths) == len(set(paths))
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container.get(probe, {}).get("httpGet", {})
                assert asked.get("port", "http") in ports or not asked
        for volume in pod["volumes"]:
            assert volume.get("configMap", {}).get("name") in {*config_maps, None}


@BY_SET
def test_what_selects_pods_selects_some_and_reaches_a_port(name: str) -> None:
    found = objects_of(name)
    pods = {one: labels_of(controller) for one, controller in running(found).items()}
    ports = {
        label["app"]: {
            port["name"]
            for container in pod_of(running(found)[one])["containers"]
            for port in container.get("ports", [])
        }
        for one, label in pods.items()
    }
    for one in found:
        spec = one.get("spec", {})
        wanted = {
            "Service": lambda spec: spec["selector"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        }.get(one["kind"])
        if wanted is None:
            continue
        selected = wanted(spec)
        assert any(selected.items() <= labels.items() for labels in pods.values()), key_of(one)
        named = [port.get("targetPort") for port in spec.get("ports", [])] + [
            port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])
        ]
        assert {port for port in named if port} <= ports[selected["app"]]


@BY_SET
def test_secrets_are_those_that_the_page_names(name: str) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for _, container in containers(objects_of(name)):
        for value in environment(objects_of(name), container).values():
            if isinstance(value, dict) and "secretKeyRef" in value:
                assert value["secretKeyRef"]["name"] == "proofline"
                assert f"`{value['secretKeyRef']['key']}`" in page
    for controller in running(objects_of(name)).values():
        for volume in pod_of(controller)["volumes"]:
            for item in volume.get("secret", {}).get("items", []):
                assert f"`{item['key']}`" in page


@BY_SET
def test_containers_may_do_little(name: str) -> None:
    for _, container in containers(objects_of(name)):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    for controller in running(objects_of(name)).values():
        pod = pod_of(controller)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False


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


# What the schema refuses, all in one: each is told with its path.
MISTAKES = {
    "workers": [
        *({"name": "a", "gpus": "2"}, {"name": "b", "gpu": 2}, {"gpus": 2}, {"name": "No name"}),
        {"name": "c", "resources": {"requests": {"memory": "20GB"}}},
    ],
    "worker": {"engineArgs": ["--max-model-len", 8192]},
    "settings": {
        "POC_CHAT_POLICI": "off",
        "POC_REDIS_PASSWORD_FILE": "/elsewhere",  # the chart's own
        "POC_MAX_QUEUED_NONCES": 5_000_000,  # Helm would write 5e+06
    },
    "redis": {"url": "redis://:secret@host:6379/0", "memory": "4Gi"},
    "api": {"replicas": 0},
    "networkPolicies": "no",
    "curier": {},
    "images": {"prefix": "registry.example"},
}
TOLD = [
    *("workers.0.gpus: Invalid type. Expected: integer", "workers.1: Additional property gpu "),
    *("workers.2: name is required", "workers.3.name: Does not match"),
    *("workers.4.resources.requests.memory: Does not match", "worker.engineArgs.1: Invalid type"),
    *("settings: Additional property POC_CHAT_POLICI", "settings: Additional property POC_REDIS"),
    *("settings.POC_MAX_QUEUED_NONCES: Invalid type. Expected: string", "redis.url: Does not"),
    *("redis.memory: Does not match", "api.replicas: Must be greater", "networkPolicies: Invalid"),
    *("Additional property curier", "images.prefix: Does not match"),
]


def test_a_mistake_is_an_error_with_its_path() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        objects(MISTAKES)
    assert [told for told in TOLD if told not in caught.value.stderr] == []


@pytest.mark.parametrize(
    "url",
    [
        *("redis.example:6379", "redis://", "redis://u:p@a", "redis://a:6379,b:6379/0"),
        *("redis+sentinel://a:26379", "redis+sentinel://a:26379/0", "redis+sentinel://u:p@a/mine"),
    ],
)
def test_a_redis_that_processes_would_refuse_is_refused_before(url: str) -> None:
    pattern = SCHEMA["properties"]["redis"]["properties"]["url"]["pattern"]
    assert not re.search(pattern, url)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"workers": [{"name": "a"}, {"name": "b", "gpus": 3, "tensorParallel": 2}]},
            "workers[1].gpus: 3 is no multiple of tensorParallel x pipelineParallel, 2",
        ),
        ({"workers": [{"name": "a", "gpus": 0, "tensorParallel": 2}]}, "workers[0].gpus: 0, and"),
        (
            {"workers": [{"name": "a", "hosts": 2, "gpus": 8, "tensorParallel": 8}]},
            "workers[0].hosts: 2 of 8 GPU(s) are not tensorParallel x pipelineParallel, 8",
        ),
        ({"workers": [{"name": "a"}] * 2}, "workers[1].name: a stands there twice"),
        (
            {"workers": [{"name": "a", "autoscale": {"max": 2}}]},
            "workers[0].autoscale.max: 2, and monitoring.prometheus is empty",
        ),
        (
            {
                "workers": [{"name": "a", "autoscale": {"max": 2, "min": 3}}],
                "monitoring": {"prometheus": "http://prometheus:9090"},
            },
            "workers[0].autoscale.max: 2 is below min, 3",
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_an_error_with_its_path(
    values: Values, told: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        objects(values)
    assert told in caught.value.stderr


def test_the_schema_knows_every_value_and_setting() -> None:
    """Each default stands in it, and each of our settings, but for the chart's own."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def paths(part: Any, schema: Any, where: str) -> Iterator[str]:
        for key, value in part.items():
            known = schema.get("properties", {})
            if key not in known and "additionalProperties" not in schema:
                yield f"{where}.{key}"
            elif isinstance(value, dict) and "properties" in known.get(key, {}):
                yield from paths(value, known[key], f"{where}.{key}")

    assert list(paths(defaults, SCHEMA, "")) == []
    assert set(SCHEMA["properties"]["worker"]["properties"]) | {"name"} == set(
        SCHEMA["properties"]["workers"]["items"]["properties"]
    )
    known = set(SCHEMA["properties"]["settings"]["properties"])
    ours = {f"POC_{field.upper()}" for field in Settings.model_fields}
    assert known == ours - OWN | {"GONKA_METRICS"}
    assert set(defaults["settings"]) <= known


def test_the_notes_tell_what_is_next(tmp_path: Path) -> None:
    """Helm shows them beside a cluster alone, so they are rendered as an object's text."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "notes")
    (chart / "templates" / "notes.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: { name: notes }\ndata:\n"
        '  text: {{ tpl (.Files.Get "notes") . | toJson }}\n'
    )
    done = subprocess.run(
        [
            *(str(HELM), "template", "node", str(chart), "--namespace", "somewhere"),
            *("--show-only", "templates/notes.yaml"),
            *("--set", "networkPolicies=false", "--set", "workers[0].name=h200"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    notes = yaml.safe_load(done.stdout)["data"]["text"]
    assert "kubectl --namespace somewhere rollout status statefulset/worker-h200" in notes
    assert "http://api.somewhere.svc.cluster.local:8000" in notes
    assert "WARNING: without network policies" in notes


def test_a_package_of_the_chart_is_whole(tmp_path: Path) -> None:
    """Alerts, dashboard and the proxy's configuration are links to other folders."""
    subprocess.run(
        [str(HELM), "package", str(CHART), "--destination", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    (package,) = tmp_path.glob("proofline-*.tgz")
    done = subprocess.run(
        [str(HELM), "template", "node", str(package), "--namespace", "proofline"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == rendered()
    listed = subprocess.run(["tar", "-tzvf", str(package)], capture_output=True, text=True).stdout
    for name in ("alerts.yaml", "dashboard.json", "nginx.conf"):
        (line,) = (line for line in listed.splitlines() if line.endswith(f"/files/{name}"))
        assert line.startswith("-")
        assert int(line.split()[2]) > 100
