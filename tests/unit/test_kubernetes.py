"""docker/k8s/proofline.yaml without a cluster, against compose.yaml; the rest: docker/chart."""

import json
import shlex
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from api.edge.perimeter import Perimeter
from cli.supervise.fleet import WORKER_GRACE_S
from cli.supervise.processes import GUARD_MARGIN_S
from poc_core.settings import Settings
from tests.harness import compose_file
from tests.harness.documents import ROOT, blocks

pytestmark = pytest.mark.xdist_group("kubernetes")  # one process reads the schemas

OBJECTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((ROOT / "docker" / "k8s" / "proofline.yaml").read_text())
)
RUN = {
    found["metadata"]["name"]: found
    for found in OBJECTS
    if found["kind"] in ("Deployment", "StatefulSet")
}
# The oldest Kubernetes that still got patches when this was written, and the newest.
VERSIONS = ("1.34", "1.37")
# Services of compose.yaml, of the same names here.
IN_COMPOSE = ("redis", "api", "courier", "worker-gpu")


def pod(name: str) -> dict[str, Any]:
    return dict(RUN[name]["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    return dict(found)


def environment(name: str) -> dict[str, Any]:
    """What a container's processes find: values, or where Kubernetes takes them from."""
    shared: dict[str, Any] = next(
        found["data"] for found in OBJECTS if found["kind"] == "ConfigMap"
    )
    own = {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in container(name)["env"]
    }
    return shared | own


def test_all_of_a_node_is_there() -> None:
    assert RUN.keys() == set(IN_COMPOSE)
    assert all(
        found["metadata"].get("namespace") == "proofline"
        for found in OBJECTS
        if found["kind"] != "Namespace"
    )


def test_workers_have_what_compose_gives_them() -> None:
    ours, composed = environment("worker-gpu"), compose_file.services()["worker-gpu"]["environment"]
    same = [name for name in composed if not name.startswith("POC_")]
    assert {name for name in same if name not in ours} == set()
    assert {name: ours[name] for name in same if name != "HF_TOKEN"} == {
        name: composed[name] for name in same if name != "HF_TOKEN"
    }
    assert ours["POC_CHAT_HOST"] == composed["POC_CHAT_HOST"] == "0.0.0.0"
    assert ours["POC_CHAT_ADVERTISE_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert ours["POC_REDIS_PASSWORD_FILE"] == composed["POC_REDIS_PASSWORD_FILE"]


def test_redis_keeps_what_it_has_as_under_compose() -> None:
    arguments = container("redis")["args"]
    composed = compose_file.services()["redis"]["command"][1:]
    assert arguments == composed


def test_the_script_of_redis_hands_its_arguments_on() -> None:
    """And the password by a file alone; printf and exec stand in for what they would start."""
    shell, flag, script, name = container("redis")["command"]
    script = script.replace("cat /run/proofline/redis_password", "echo secret").replace(
        "/tmp/redis.conf", "/dev/stdout"
    )
    script = script.replace("exec redis-server", "exec echo redis-server")
    done = subprocess.run(
        [shell, flag, script, name, "--save", "", "--dir", "/data"], capture_output=True, text=True
    )
    assert done.stdout == "requirepass secret\nredis-server /dev/stdout --save  --dir /data\n"


@pytest.mark.parametrize("name", IN_COMPOSE)
def test_processes_have_the_time_to_end(name: str) -> None:
    grace = compose_file.services()[name]["stop_grace_period"]
    assert pod(name)["terminationGracePeriodSeconds"] == int(grace.removesuffix("s"))
    if name == "worker-gpu":
        assert pod(name)["terminationGracePeriodSeconds"] > WORKER_GRACE_S + GUARD_MARGIN_S


def test_memory_of_redis_is_above_what_it_may_hold() -> None:
    limit = container("redis")["args"][container("redis")["args"].index("--maxmemory") + 1]
    assert int(container("redis")["resources"]["limits"]["memory"].removesuffix("Gi")) > int(
        limit.removesuffix("gb")
    )


class TestProbes:
    @pytest.mark.parametrize(
        ("answer", "lives", "ready"),
        [
            ("PONG", True, True),
            ("LOADING Redis is loading the dataset in memory", True, False),
            ("Could not connect to Redis at 127.0.0.1:6379: Connection refused", False, False),
            ("BUSY Redis is busy running a script.", False, False),
        ],
    )
    def test_nothing_kills_a_redis_that_reads_its_file_back(
        self, answer: str, lives: bool, ready: bool, tmp_path: Path
    ) -> None:
        cli = tmp_path / "redis-cli"
        cli.write_text(f"#!/bin/sh\necho '{answer}'\n")
        cli.chmod(0o755)
        for probe, passes in {"startup": lives, "liveness": lives, "readiness": ready}.items():
            command = container("redis")[f"{probe}Probe"]["exec"]["command"]
            env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
            done = subprocess.run(command, env=env, capture_output=True)
            assert (done.returncode == 0) == passes, probe

    def test_the_api_is_asked_for_its_own_sake_alone(self) -> None:
        """A node without a ready worker still tells its state, and can be told to deploy."""
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container("api")[probe]["httpGet"] == {"path": "/livez", "port": "http"}

    def test_the_courier_is_asked_as_under_compose(self) -> None:
        (_, asks) = compose_file.services()["courier"]["healthcheck"]["test"]
        assert container("courier")["livenessProbe"]["exec"]["command"] == [
            "sh",
            "-c",
            asks.replace("$$", "$"),
        ]

    def test_a_worker_is_ready_as_under_compose_and_nothing_kills_one_that_loads(self) -> None:
        healthcheck = compose_file.services()["worker-gpu"]["healthcheck"]
        worker = container("worker-gpu")
        assert ["CMD", *worker["readinessProbe"]["exec"]["command"]] == healthcheck["test"]
        assert not {"startupProbe", "livenessProbe"} & worker.keys()


def test_the_page_makes_the_secret_that_the_objects_ask_for() -> None:
    made = "\n".join(block.text for block in blocks(ROOT / "docs" / "kubernetes.md"))
    for key in ("redis_password", "api_key"):
        assert f"--from-literal={key}=" in made
    assert "create secret generic proofline " in made
    built = {word for line in made.splitlines() if "docker build" in line for word in line.split()}
    for name in ("api", "courier", "worker-gpu"):
        assert any(word.endswith(f"/{container(name)['image']}") for word in built), name


@pytest.mark.parametrize("host", ["api:8000", "api.proofline.svc.cluster.local:8000"])
def test_the_api_answers_to_the_names_of_its_service(host: str) -> None:
    async def nothing(*_: object) -> None: ...

    assert f"`http://{host}`" in (ROOT / "docs" / "kubernetes.md").read_text()
    assert Perimeter(nothing, Settings()).knows(host)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_patch_for_tls_leaves_a_deployment_that_follows_the_schema(version: str) -> None:
    """As kubectl merges it: lists of objects by their names."""
    patch = yaml.safe_load((ROOT / "docker" / "k8s" / "tls.yaml").read_text())
    merged = deepcopy(RUN["api"])
    spec, more = merged["spec"]["template"]["spec"], patch["spec"]["template"]["spec"]
    own, proxy = more["containers"]
    (api,) = spec["containers"]
    assert own.pop("name") == api["name"]
    api["env"] += own.pop("env")
    assert own == {}
    spec["containers"].append(proxy)
    spec["volumes"] += more["volumes"]
    spec["hostAliases"] = more["hostAliases"]
    assert more.keys() == {"containers", "volumes", "hostAliases"}
    kubernetes_validate.validate(merged, version, strict=True)
    assert {one["name"] for one in proxy["volumeMounts"]} == {
        one["name"] for one in more["volumes"]
    }
    assert proxy["securityContext"] == api["securityContext"]
    assert {"name": "POC_TRUSTED_NETWORKS", "value": "127.0.0.1/32"} in api["env"]
    assert spec["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": ["api"]}]
    assert "server api:8000;" in (ROOT / "docker" / "tls" / "nginx.conf").read_text()


def test_the_commands_for_tls_let_the_network_node_through_the_network_policy() -> None:
    """As kubectl runs those in the first lines of tls.yaml."""
    (policy,) = [
        deepcopy(one)
        for one in OBJECTS
        if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "api")
    ]
    text = (ROOT / "docker" / "k8s" / "tls.yaml").read_text()
    found = [line.removeprefix("#   ") for line in text.splitlines() if "#   kubectl" in line]
    commands = [shlex.split(line) for line in found]
    for command in commands:
        if "networkpolicy" in command:
            assert command[command.index("networkpolicy") + 1] == "api"
            for change in json.loads(command[-1]):
                *parents, end = change["path"].removeprefix("/").split("/")
                place: Any = policy
                for parent in parents:
                    place = place[int(parent) if isinstance(place, list) else parent]
                assert (change["op"], end) == ("add", "-")
                place.append(change["value"])
    (expose,) = [command for command in commands if "expose" in command]
    port = expose[expose.index("--target-port") + 1]
    assert {"port": port} in policy["spec"]["ingress"][0]["ports"]
    assert {"port": "http"} in policy["spec"]["ingress"][0]["ports"]
    kubernetes_validate.validate(policy, VERSIONS[-1], strict=True)
