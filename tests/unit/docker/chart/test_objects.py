"""All objects that docker/chart renders: schemas, names, references, rights."""

import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from poc_core.settings import Settings
from scripts.manifest import CHART, HELM, MANIFEST, rendered
from tests.cluster.chart import (
    VERSIONS,
    arguments_of,
    containers,
    environment,
    key_of,
    labels_of,
    objects_of,
    pod_of,
    running,
    spec_of_pods,
)
from tests.cluster.values import SETS
from tests.harness.commands import COMMANDS
from tests.harness.compose_file import ROOT

pytestmark = pytest.mark.xdist_group("kubernetes")  # one process reads the schemas

BY_SET = pytest.mark.parametrize("name", list(SETS))
# Of operators that are not Kubernetes' own, so that no schema of it tells their fields.
CUSTOM = ("ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet")


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
