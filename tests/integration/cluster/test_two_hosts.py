"""One engine over two hosts, each a network namespace: golden data, and a host that is killed."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from cli.supervise.redis_server import free_port
from tests.harness import golden
from tests.harness.chat_client import CHAT, request, vllm_args
from tests.harness.marks import needs_vllm
from tests.stacks.round_client import FAST, RoundClient, round_body
from tests.stacks.two_hosts import PROOFLINE, Network, can_make_hosts
from workers.vllm.start.cpu_threads import VARIABLE
from workers.vllm.start.host_link import HOST_LOST_STATUS, SILENT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    needs_vllm,
    pytest.mark.skipif(sys.platform != "linux" or not can_make_hosts(), reason="needs root"),
]

MODEL = "tiny-qwen3"
ENGINE = ("--model", MODEL, "--dtype", "float32")
READY_S = 400.0  # two engines' starts, one behind the other, on a machine with other work
# Of each rank, as threads that wait for each other take others' cores.
ONE_CORE = {VARIABLE: "0", "OMP_NUM_THREADS": "1"}
LOST_S = 130.0  # in which a lost host is to be noticed


class Node(RoundClient):
    """A node whose engine is one over the hosts a and b."""

    def __init__(self, net: Network, http: httpx.Client) -> None:
        super().__init__(http, model=MODEL)
        self._net = net
        self.head = f"{net.address_of('a')}:{free_port()}"

    def start_part(self, rank: int) -> None:
        span = ("--hosts", "2", "--rank", str(rank), "--head", self.head)
        self._net.workers(
            "ab"[rank],
            *ENGINE,
            "--tensor-parallel",
            "2",
            *span,
            "--",
            *vllm_args(),
            **FAST,
            **ONE_CORE | {VARIABLE: str(rank % (os.cpu_count() or 1))},
        )

    def lines(self) -> list[str]:
        return [
            f"{name} | {line}"
            for name, program in self._net.programs.items()
            for line in program.log.splitlines()[-30:]
        ]

    def workers(self) -> dict[str, str]:
        """The state of each worker by its host."""
        return {one["host"]: one["state"] for one in self.status()["workers"]}

    def hosts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/api/v1/inference/up/status").json()["hosts"]
        return sorted(found, key=lambda host: host["host"])

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/readyz").json()["health"]
        return found

    def n_done(self, job: str) -> int:
        return int(self.http.get(f"/api/v1/pow/generate/{job}").json()["n_done"])

    def wait_ready(self, host: str = "a") -> None:
        self.wait(lambda: self.workers().get(host) == "ready", READY_S, f"the engine of {host}")

    def compute(self, **body: Any) -> str:
        """The id of a job."""
        answer = self.http.post("/api/v1/pow/generate", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    def result(self, job: str, timeout_s: float = READY_S) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def is_done() -> bool:
            nonlocal found
            found = self.http.get(f"/api/v1/pow/generate/{job}").json()
            return found["status"] not in ("queued", "running")

        self.wait(is_done, timeout_s, "the job's end")
        assert found["status"] == "completed", found
        return found


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("two-hosts")) as net:
        for host in "abc":
            net.add_host(host)
        net.start_redis()
        yield net


@pytest.fixture(scope="module")
def node(net: Network) -> Iterator[Node]:
    port = str(free_port())
    net.here("api", [PROOFLINE, "api", "--port", port], **FAST)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as http:
        node = Node(net, http)
        node.wait(lambda: http.get("/livez").status_code == 200, 300, "the API")
        for rank in (0, 1):
            node.start_part(rank)
        yield node


def test_artifacts_are_the_references(node: Node) -> None:
    node.wait_ready()
    assert list(node.workers()) == ["a"]
    assert_golden(node)


def test_chat_is_answered_over_both_hosts(node: Node) -> None:
    node.wait_ready()
    answer = node.http.post(CHAT, json=request("the sea over"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_both_hosts_are_seen_and_are_one_worker(net: Network, node: Node) -> None:
    node.wait_ready()
    node.wait(lambda: [host["state"] for host in node.hosts()] == ["serving"] * 2, 300, "both")
    assert [(host["host"], host["follows"]) for host in node.hosts()] == [
        ("a", ""),
        ("b", node.head),
    ]
    node.wait(lambda: node.health()["level"] == "ok", 300, "health")
    assert (node.health()["workers"], node.health()["workers_ready"]) == (1, 1)


def test_a_host_that_is_killed_is_missed_and_another_worker_goes_on(
    net: Network, node: Node
) -> None:
    node.wait_ready()
    net.workers("c", *ENGINE, "--", *vllm_args(), **FAST, **ONE_CORE)
    node.wait_ready("c")
    job = node.compute(**round_body(None, nonces=list(range(2000)), batch_size=8))
    node.wait(lambda: node.n_done(job) > 100, READY_S, "the job's middle")
    net.programs["b"].kill()
    lost_s = node.wait(lambda: node.workers().get("a") != "ready", LOST_S, "a loss")
    print(f"a host that is killed is missed after {lost_s:.1f} s")
    artifacts = node.result(job)["artifacts"]
    assert [artifact["nonce"] for artifact in artifacts] == list(range(2000))
    assert f"exits with status {HOST_LOST_STATUS}" in net.programs["a"].log
    node.start_part(1)
    node.wait_ready()


def test_a_follower_waits_for_a_head_that_is_killed(net: Network, node: Node) -> None:
    node.wait_ready()
    net.programs["a"].kill()
    node.wait(lambda: "host waits for it again" in net.programs["b"].log, LOST_S, "a lost head")
    node.wait(lambda: "a" not in node.workers(), LOST_S, "the end of its record")
    node.start_part(0)
    node.wait_ready()


def test_a_cable_that_is_pulled_is_noticed_at_both_ends(net: Network, node: Node) -> None:
    node.wait_ready()
    silent = f"no sign of life for {SILENT_S:g} s"
    net.unplug("b")
    try:
        logs = [net.programs[host] for host in "ab"]
        node.wait(lambda: all(silent in one.log for one in logs), LOST_S, "a loss at both ends")
        node.wait(lambda: node.workers().get("a") != "ready", LOST_S, "the end of its record")
    finally:
        net.plug("b")
    node.wait_ready()


def test_artifacts_are_the_references_after_all_that(net: Network, node: Node) -> None:
    node.wait_ready()
    net.programs["c"].stop()
    node.wait(lambda: list(node.workers()) == ["a"], 300, "one worker")
    assert_golden(node)


def test_a_host_that_is_stopped_lets_the_engine_finish(net: Network, node: Node) -> None:
    node.wait_ready()
    before = net.programs["a"].log.count(f"exits with status {HOST_LOST_STATUS}")
    job = node.compute(**round_body(None, nonces=list(range(5000)), batch_size=8))
    node.wait(lambda: node.n_done(job) > 0, READY_S, "the job's begin")
    net.programs["b"].stop()
    assert "this worker finishes its batches" in net.programs["a"].log
    assert net.programs["a"].log.count(f"exits with status {HOST_LOST_STATUS}") == before


def assert_golden(node: Node) -> None:
    for case in golden.cases(MODEL, "artifact"):
        params = {"seq_len": case["seq_len"], "k_dim": case["k_dim"]}
        theirs = [artifact["vector_b64"] for artifact in case["artifacts"]]
        body = round_body(
            None,
            nonces=[artifact["nonce"] for artifact in case["artifacts"]],
            block_hash=case["block_hash"],
            public_key=case["public_key"],
            poc_stronger_rng=case["poc_stronger_rng"],
            params=params,
        )
        ours = [one["vector_b64"] for one in node.result(node.compute(**body))["artifacts"]]
        errors = golden.l2(ours, theirs, case["k_dim"])
        print(f"two hosts against the reference: at most {np.max(errors):.6f}")
        assert np.all(errors <= 0.003), errors
