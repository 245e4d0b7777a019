"""In MLNode's place and back, in the network's layout, by the commands of docs/migrate.md.

Stand-ins (network/): `api` plays the network node, nginx is `inference`, MLNode answers its state
and posts a round's artifacts. The node is ours, from docker/node.Dockerfile.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docker.conftest import MARKS, Project, build, run, wait_until
from tests.harness.compose_file import ROOT

pytestmark = MARKS
SWAP = "docker-compose.proofline.yml"
# From `up` to 200 on an idle machine at most 15 s; builds and other tests may go on beside.
HEALTHY_S = 90
STOP_S = 30
ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


class Network(Project):
    def node(self, *step: str) -> Any:
        """A step of network_node.py in the container `api`."""
        return json.loads(self.exec("api", "python", "/network_node.py", *step))

    def swap(self, *files: str) -> None:
        """To Proofline with the file SWAP, and back without."""
        self("up", "-d", "mlnode-308", files=files)
        self("exec", "-T", "inference", "nginx", "-s", "reload", files=files)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, node_image: str) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("join")
    shutil.copytree(Path(__file__).with_name("network"), folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "docker" / "mlnode" / SWAP, folder)
    cache = folder / "cache" / "hub" / "models--a--b"
    cache.mkdir(parents=True)
    (cache / "weights").write_text("of MLNode")
    files = ("docker-compose.yml", "docker-compose.mlnode.yml")
    project = Network(folder, "pljoin", *files, HF_HOME=str(folder / "cache"))
    project("up", "-d")
    yield project
    project("down", "-v", "-t", "5", files=[SWAP])


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    found = (path for path in folder.rglob("*"))
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_uid) for path in found}


def world(network: Network, url: str) -> int:
    """The status that a client with a public address gets."""
    arguments = ["--rm", "--network", "plworld", "python:3.12-slim-bookworm"]
    return int(run("docker", "run", *arguments, "python", "-c", ASK, url))


@pytest.mark.promise(
    "a client with a public address behind nginx or Docker",
    "needs a key even with POC_TRUSTED_NETWORKS=private",
)
def test_the_node_is_swapped_works_and_is_swapped_back(network: Network) -> None:
    api_began = network.container("api")["State"]["StartedAt"]
    before = contents(network.folder / "cache")
    assert network.node("register")[0]["host"] == "inference"
    network.node("wait_health")
    network.node("start", "old")
    network.node("wait_nonces", "old", "50")
    assert network.node("stop", "old")["missing"] == 0

    began = time.monotonic()
    network.swap(SWAP)
    network.node("wait_health", str(HEALTHY_S))
    print(f"from `docker compose up` to /health 200: {time.monotonic() - began:.1f} s")
    assert network.node("state")["state"] == "STOPPED"
    log = network("logs", "mlnode-308", files=[SWAP])
    assert log.count("ignoring VLLM_ATTENTION_BACKEND, WATCHER_GRACE_FIRST_HEALTHY: ") == 1
    told = network.exec("mlnode-308", "sh", "-c", "proofline status || true")  # 1: no worker
    assert "no model is deployed" in told

    assert network.node("deploy")["loaded_model"] == "tiny-qwen3"
    network.node("start", "new")
    network.node("wait_nonces", "new", "50")
    assert network.node("chat")["completion_tokens"] == 8
    log = network("logs", "mlnode-308", files=[SWAP])
    for wrong in ("ERROR", "Tini is not"):
        assert wrong not in log, log[-4000:]

    # SIGKILL, as of a machine that loses power; the round goes on.
    run("docker", "kill", "-s", "KILL", network.container("mlnode-308")["Id"])
    run("docker", "start", network.container("mlnode-308")["Id"])
    network.node("wait_health", "300")
    network.node("wait_nonces", "new", "50")
    done = network.node("stop", "new")
    assert (done["missing"], done["nonces"] >= 100) == (0, True)
    assert network.node("validate", "new")["n_mismatch"] == 0
    assert network.node("chat")["completion_tokens"] == 8

    run("docker", "network", "create", "--subnet", "203.0.113.0/24", "plworld")
    try:
        for service in ("inference", "mlnode-308"):
            run("docker", "network", "connect", "plworld", network.container(service)["Id"])
        for address in ("inference:8080", "inference:8080/v3.0.8", "mlnode-308:8080"):
            assert world(network, f"http://{address}/api/v1/state") == 401, address
        for address in ("inference:5000", "mlnode-308:5000"):
            assert world(network, f"http://{address}/v1/models") == 401, address
        assert network.node("state")["state"] == "INFERENCE"
        for service in ("inference", "mlnode-308"):
            run("docker", "network", "disconnect", "plworld", network.container(service)["Id"])
    finally:
        run("docker", "network", "rm", "plworld")

    began = time.monotonic()
    run("docker", "stop", "-t", "45", network.container("mlnode-308")["Id"])
    took = time.monotonic() - began
    print(f"the node stops in {took:.1f} s")
    assert network.container("mlnode-308")["State"]["ExitCode"] == 0
    assert took < STOP_S
    network.swap()
    network.node("wait_health")
    network.node("start", "back")
    network.node("wait_nonces", "back", "50")
    assert network.node("stop", "back")["missing"] == 0
    assert network.container("api")["State"]["StartedAt"] == api_began
    assert contents(network.folder / "cache") == before


def test_a_gpu_host_without_the_network_node_takes_the_file_too(network: Network) -> None:
    Project(network.folder, "plalone", "docker-compose.mlnode.yml", SWAP)("config", "-q")


def test_no_process_compiles_a_module(node_image: str) -> None:
    """Nobody may write compiled modules there, so each process would compile them again."""
    script = (
        "import os, sys; import cli.main, cli.supervise.stack, api.app, workers.courier.main;"
        "print(*(path for one in list(sys.modules.values())"
        " if (path := getattr(one, '__cached__', None)) and not os.path.exists(path)))"
    )
    command = ["--rm", "--entrypoint", "python3", node_image, "-P", "-c", script]
    assert run("docker", "run", *command) == "\n"


VLLMS_IMAGE = """
FROM python:3.12-slim-bookworm
RUN cd $(python3 -c 'import site; print(site.getsitepackages()[0])') \\
    && mkdir vllm vllm-0.25.1.dist-info && touch vllm/__init__.py \\
    && printf 'Name: vllm\\nVersion: 0.25.1\\n' >vllm-0.25.1.dist-info/METADATA
WORKDIR /vllm-workspace
ENTRYPOINT ["vllm", "serve"]
"""


def test_the_image_for_gpus_on_a_stand_in_for_vllms_starts_and_waits(
    checkout: Path, tmp_path: Path
) -> None:
    tag = "proofline-stand-in"
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(VLLMS_IMAGE)
    run("docker", "build", "-q", "-t", f"vllm/vllm-openai:{tag}", str(tmp_path))
    image = build(checkout, "node", f"proofline-node:{tag}", VLLM_VERSION=tag)
    cache = tmp_path / "cache"
    cache.mkdir()
    run("chown", "1000:1000", str(cache))
    mounts = ["-v", "plstandin:/data", "-v", f"{cache}:/root/.cache"]
    run("docker", "run", "-d", "--name", "plstandin", *mounts, image)
    try:

        def health() -> str:
            return run("docker", "inspect", "-f", "{{.State.Health.Status}}", "plstandin").strip()

        wait_until(lambda: health() == "healthy", "a healthy node")
        script = "proofline status; stat -c %u /data/redis.conf"
        said = run("docker", "exec", "plstandin", "sh", "-c", script)
        assert "no model is deployed" in said
        assert said.endswith("\n1000\n"), said
        run("docker", "stop", "-t", "45", "plstandin")
        (document,) = json.loads(run("docker", "inspect", "plstandin"))
        assert document["State"]["ExitCode"] == 0
    finally:
        run("docker", "rm", "-f", "plstandin")
        run("docker", "volume", "rm", "-f", "plstandin")


@pytest.mark.parametrize(("owner", "is_root"), [(0, True), (10001, False)])
def test_the_node_is_the_owner_of_the_cache(
    node_image: str, tmp_path: Path, owner: int, is_root: bool
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    run("chown", str(owner), str(cache))
    mount = ["-v", f"{cache}:/root/.cache", "--entrypoint", "sh", node_image]
    script = "proofline key new a --role read-only && stat -c %u /data/keys.json /data/home"
    said = run("docker", "run", "--rm", *mount, "-c", script)
    assert said.split()[-2:] == [str(owner), str(owner)]


def test_a_code_change_is_a_small_layer(node_image: str) -> None:
    history = run(
        "docker", "history", "--no-trunc", "--format", "{{.Size}} {{.CreatedBy}}", node_image
    )
    ours = [line for line in history.splitlines() if "/wheels/*.whl" in line or "sbom.py" in line]
    sizes = [line.split()[0] for line in ours]
    units = {"kB": 1e3, "MB": 1e6}
    total = sum(float(size[:-2]) * units[size[-2:]] for size in sizes)
    print(f"layers of a code change: {', '.join(sizes)}")
    assert len(sizes) == 2
    assert total < 20e6
