"""compose.yaml as a clone has it: up to a job, chat, a round; what dies comes back; down and up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificate
from tests.docker.conftest import MARKS, Project, run, wait_until

pytestmark = MARKS
SERVICES = ("redis", "api", "courier", "flower", "worker")
JOB = {
    "block_hash": "TEST_BLOCK",
    "block_height": 1,
    "public_key": "node1",
    "node_id": 0,
    "node_count": 1,
    "nonces": [1, 2, 999],
    "wait": True,
    "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
}
CHAT = {"model": "tiny-qwen3", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
# In a container: a request, and its status and body as JSON.
ASK = """
import base64, json, ssl, sys, urllib.error, urllib.request
method, url, body, password = json.loads(sys.argv[1])
request = urllib.request.Request(url, json.dumps(body).encode() if body else None, method=method)
request.add_header("Content-Type", "application/json")
if password:
    request.add_header("Authorization", "Basic " + base64.b64encode(password.encode()).decode())
try:
    answer = urllib.request.urlopen(request, timeout=300)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, answer.read().decode()]))
"""


FILES = [
    ["compose.yaml"],
    ["compose.yaml", "compose.hosts.yaml"],
    ["compose.yaml", "compose.tls.yaml"],
    ["compose.yaml", "compose.hosts.yaml", "compose.tls.yaml"],
    ["compose.workers.yaml"],
]
OF_FILES = {
    "PRIVATE_ADDRESS": "127.0.0.1",
    "REDIS_ADDRESS": "10.0.0.1",
    "PROOFLINE_MODEL": "tiny-qwen3",
    "PROOFLINE_TLS": "./tls",
}


class Node(Project):
    def ask(self, method: str, url: str, body: Any = None, password: str = "") -> tuple[int, str]:
        asked = json.dumps([method, url, body, password])
        status, text = json.loads(self.exec("courier", "python", "-c", ASK, asked))
        return status, text

    def api(self, method: str, path: str, body: Any = None) -> Any:
        status, text = self.ask(method, f"http://api:8000{path}", body)
        assert status == 200, f"{method} {path}: {status} {text[:500]}"
        return json.loads(text)

    def wait_ready(self) -> None:
        def ready() -> bool:
            try:
                return self.ask("GET", "http://api:8000/readyz")[0] == 200
            except AssertionError:  # a container that starts
                return False

        wait_until(ready, "a ready node", 600)

    def crash(self, service: str) -> None:
        """Its process dies; as Docker does not restart what `docker kill` ended, we do."""
        run("docker", "kill", "-s", "KILL", self.container(service)["Id"])
        run("docker", "start", self.container(service)["Id"])


@pytest.fixture(scope="module")
def node(compose_images: Path) -> Iterator[Node]:
    ports = {"PROOFLINE_API_PORT": "18100", "PROOFLINE_FLOWER_PORT": "15555"}
    # Of every process, by env_file: a loaded machine takes longer than 300 s for `down` and `up`.
    (compose_images / ".env").write_text("POC_GENERATE_RESULT_TTL_SEC=3600\n")
    project = Node(compose_images, "plnode", **ports, PROOFLINE_TLS="./tls")
    project("up", "-d", "--no-build")
    project.wait_ready()
    yield project
    project.end()


@pytest.mark.parametrize("files", FILES, ids=" ".join)
def test_compose_takes_the_files_together(checkout: Path, files: list[str]) -> None:
    project = Project(checkout, "plfiles", *files, **OF_FILES)
    project("--profile", "*", "config", "-q")


def test_a_job_a_chat_flower_and_the_console(node: Node) -> None:
    assert node.api("POST", "/api/v1/pow/generate", JOB)["status"] == "completed"
    assert node.api("POST", "/v1/chat/completions", CHAT)["usage"]["completion_tokens"] == 8
    for path in ("/console", "/docs", "/metrics", "/api/v1/metrics"):
        assert node.ask("GET", f"http://api:8000{path}")[0] == 200, path
    password = node.exec("flower", "cat", "/run/proofline/flower_password")
    assert node.ask("GET", "http://flower:5555/")[0] == 401
    assert node.ask("GET", "http://flower:5555/", password=f"proofline:{password}")[0] == 200


def test_all_services_get_healthy_and_start_without_errors(node: Node) -> None:
    for service in SERVICES:
        wait_until(lambda service=service: node.is_healthy(service), service)  # type: ignore[misc]
    for service in ("courier", "flower"):
        log = node("logs", service)
        assert "scripts" not in log, log[-2000:]
        assert "ERROR" not in log, log[-2000:]


def test_containers_have_few_rights_and_nobody_elses_secrets(node: Node) -> None:
    passwords = [
        node.exec("redis", "cat", "/run/proofline/redis_password"),
        node.exec("flower", "cat", "/run/proofline/flower_password"),
    ]
    for service in ("secrets", *SERVICES):
        told = json.dumps(node.container(service))
        assert not any(password in told for password in passwords), service
    check = "test $(id -u) = 10001 && ! touch /x 2>/dev/null && ls /run/proofline"
    for service in ("api", "courier", "flower", "worker"):
        assert "redis_password" in node.exec(service, "sh", "-c", check), service
    assert node("port", "api", "8000").startswith("127.0.0.1:")


def test_models_that_the_api_downloads_are_the_workers(node: Node) -> None:
    assert node.api("GET", "/api/v1/models/space")["cache_path"].startswith("/cache/huggingface")
    node.exec("api", "sh", "-c", "mkdir -p $HF_HOME/hub && touch $HF_HOME/hub/seen")
    node.exec("worker", "sh", "-c", "test -f $HF_HOME/hub/seen && rm $HF_HOME/hub/seen")


def test_doctor_says_where_to_look_for_workers(node: Node) -> None:
    for service in ("api", "courier"):
        assert "exec worker proofline doctor" in node.exec(service, "proofline", "doctor")


def test_a_round_survives_the_death_of_each_service(node: Node) -> None:
    receiver = [
        "--name",
        "plreceiver",
        "--network",
        "plnode_outside",
        "--network-alias",
        "receiver",
    ]
    command = ["proofline-api", "receive", "--host", "0.0.0.0", "--port", "9100"]
    run("docker", "run", "-d", "--init", *receiver, *command)
    try:
        said = ["--block-hash", "TEST_BLOCK", "--public-key", "node1", "--seq-len", "256"]
        started = ["round", "start", *said, "--callback-url", "http://receiver:9100"]
        node.exec("api", "proofline", *started)
        for service in SERVICES:
            node.crash(service)
        node.wait_ready()
        seen = node.api("GET", "/api/v1/pow/status")["stats"]["total_processed"]

        def more() -> bool:
            now: int = node.api("GET", "/api/v1/pow/status")["stats"]["total_processed"]
            return bool(now > seen)

        wait_until(more, "nonces after the last death")
        node.exec("api", "proofline", "round", "stop")

        def delivered() -> bool:
            return bool(node.api("GET", "/api/v1/pow/status")["callbacks_waiting"] == 0)

        wait_until(delivered, "all callbacks")
        run("docker", "stop", "plreceiver")
        log = run("sh", "-c", "docker logs plreceiver 2>&1")
        (line,) = [line for line in log.splitlines() if "receive: round" in line][-1:]
        print(line)
        assert "none missing" in line
        (document,) = json.loads(run("docker", "inspect", "plreceiver"))
        assert document["State"]["ExitCode"] == 0
    finally:
        run("docker", "rm", "-f", "plreceiver")


def test_down_and_up_keep_jobs(node: Node) -> None:
    answer = node.api("POST", "/api/v1/pow/generate", {**JOB, "wait": False})
    path = f"/api/v1/pow/generate/{answer['request_id']}"
    wait_until(lambda: node.api("GET", path)["status"] == "completed", "the job")
    artifacts = node.api("GET", path)
    node("down")
    node("up", "-d", "--no-build")
    node.wait_ready()
    assert node.api("GET", path) == artifacts
    health = node.api("GET", "/api/v1/pow/status")["health"]
    assert "has not reported" not in json.dumps(health)


def test_the_proxy_finds_an_api_that_has_another_address(node: Node) -> None:
    folder = node.folder / "tls"
    folder.mkdir(mode=0o755)
    for name in ("server", "client", "courier"):
        certificate, key = make_certificate(folder, name)
        certificate.rename(folder / f"{name}.crt")
        key.rename(folder / f"{name}.key")
        (folder / f"{name}.key").chmod(0o644)
    files = ["compose.yaml", "compose.override.yaml", "compose.tls.yaml"]
    with_tls = Node(
        node.folder, "plnode", *files, PROOFLINE_TLS="./tls", PROOFLINE_API_PORT="18100"
    )
    with_tls("up", "-d", "--no-build", "--no-deps", "tls")
    look = (
        "import ssl, sys, urllib.request; c = ssl._create_unverified_context();"
        "c.load_cert_chain('/run/tls/client.crt', '/run/tls/client.key');"
        "print(urllib.request.urlopen('https://tls:8443/api/v1/state', context=c).status)"
    )
    through = ["run", "--rm", "--network", "plnode_outside", "-v", f"{folder}:/run/tls:ro"]

    def works() -> bool:
        try:
            return (
                run("docker", *through, "python:3.12-slim-bookworm", "python", "-c", look)
                == "200\n"
            )
        except AssertionError:
            return False

    def address() -> str:
        found: str = node.container("api")["NetworkSettings"]["Networks"]["plnode_outside"][
            "IPAddress"
        ]
        return found

    wait_until(works, "an answer through the proxy", 60)
    before = address()
    node("stop", "api")
    taken = ["docker", "run", "-d", "--rm", "--network", "plnode_outside", "--entrypoint", "sleep"]
    other = run(*taken, "proofline-api", "600").strip()  # gets the first address that is free
    node("start", "api")
    node.wait_ready()
    assert address() != before
    wait_until(works, "an answer at the new address", 60)
    run("docker", "rm", "-f", other)
    with_tls("rm", "-s", "-f", "tls")
