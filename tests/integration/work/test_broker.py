"""A node of two hosts that the network's client takes for its own: models come, change and go,
rounds and validations between them, whatever is restarted.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import redis

from tests.harness.chat_client import vllm_args
from tests.harness.marks import needs_vllm
from tests.harness.waiting import wait_until
from tests.integration.processes import descendants
from tests.peers.broker import CALLBACK_PATH, Broker, wait_state
from tests.peers.receiver import Receiver
from tests.stacks.local_compose import PROGRAMS, LocalCompose
from tests.stacks.round_client import FAST
from tests.stacks.up import Up, proofline
from workers.vllm.start.log_patterns import NOT_HERE

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("broker")]

HOSTS = ("host-a", "host-b")


class Node:
    """Redis, API, courier and two `proofline workers` that were told no model."""

    def __init__(self, compose: LocalCompose) -> None:
        self.compose = compose

    def start(self) -> None:
        for name in ("api", "courier"):
            self.compose.start(name)
        self.compose.wait_healthy("api")
        for host in HOSTS:
            self.start_host(host, "--synthetic-step-ms", "20")

    def start_host(self, host: str, *options: str) -> None:
        environment = self.compose.environment("worker") | {
            "PYTHONUNBUFFERED": "1",
            "POC_HOST_NAME": host,
        }
        command = [PROGRAMS["proofline"], "workers", "--engine", "synthetic", *options]
        self.compose.run(host, command, os.environ | environment)

    def mend(self) -> None:
        """Starts what a test that failed has ended and not started again."""
        running = [self.compose.processes.get(name) for name in ("redis", "api", "courier", *HOSTS)]
        if any(process is None or process.poll() is not None for process in running):
            self.restart()

    def restart(self) -> None:
        """Of everything, Redis too."""
        for name in reversed(list(self.compose.processes)):
            self.compose.stop(name)
        self.compose.processes.clear()
        self.start()

    def below(self, host: str) -> list[psutil.Process]:
        return descendants(self.compose.processes[host].pid)

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.compose.redis_url)

    def lasting_keys(self) -> set[bytes]:
        """Those without a TTL."""
        with self.redis() as client:
            return {key for key in client.scan_iter() if client.ttl(key) == -1}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with LocalCompose(tmp_path_factory.mktemp("broker"), settings=FAST) as compose:
        node = Node(compose)
        node.start()
        yield node


@pytest.fixture(
    params=[
        pytest.param("", id="without a version"),
        pytest.param("/v3.0.16", id="with one", marks=pytest.mark.slow),
    ]
)
def broker(node: Node, request: pytest.FixtureRequest) -> Iterator[Broker]:
    with httpx.Client(base_url=node.compose.api_url, timeout=300, trust_env=False) as http:
        broker = Broker(http, request.param)
        broker.wait_hosts("idle", "idle")
        yield broker
        node.mend()
        broker.stop()


@pytest.mark.promise(
    "a Redis user",
    "can run every command that its process needs",
)
def test_the_brokers_day(node: Node, broker: Broker) -> None:
    with Receiver() as receiver:
        url = receiver.url + CALLBACK_PATH
        assert broker.state() == ("STOPPED", "")
        broker.stop()
        broker.up(
            "tiny-llama", "--max-model-len", "512", "--tensor-parallel-size", "1", "--port", "5000"
        )
        assert broker.state() == ("INFERENCE", "tiny-llama")
        broker.wait_hosts("serving", "serving")
        assert broker.call("GET", "/health")
        assert (
            broker.call("GET", "/v1/models")["object"] == "list"
        )  # the synthetic engine serves no chat
        assert broker.call("GET", "/api/v1/versions")["poc_validation_inference"] is True

        assert broker.round_status() == "IDLE"
        broker.start_round("tiny-llama", url)
        assert broker.round_status() == "GENERATING"
        wait_until(lambda: receiver.taken(f"{CALLBACK_PATH}/generated"), "artifacts")
        state = broker.call("GET", "/api/v1/state")
        assert (state["state"], state["poc_status"], state["inference_healthy"]) == (
            "INFERENCE",
            "GENERATING",
            True,
        )
        broker.stop_round()
        payload = receiver.taken(f"{CALLBACK_PATH}/generated")[0]

        broker.validate("tiny-llama", url, payload.body["artifacts"][:20])
        wait_until(lambda: receiver.taken(f"{CALLBACK_PATH}/validated"), "the verdict")
        verdict = receiver.taken(f"{CALLBACK_PATH}/validated")[0].body
        assert (verdict["n_total"], verdict["n_mismatch"], verdict["fraud_detected"]) == (
            20,
            0,
            False,
        )

        assert "already" in broker.up("tiny-qwen3", expect=409)["detail"]
        assert broker.state() == ("INFERENCE", "tiny-llama")
        broker.stop()
        assert broker.state() == ("STOPPED", "")
        assert [node.below(host) for host in HOSTS] == [[], []]
        broker.up("tiny-qwen3", "--max-model-len", "512")
        assert broker.state() == ("INFERENCE", "tiny-qwen3")

        node.restart()
        wait_state(broker, "INFERENCE", "tiny-qwen3")
        broker.wait_hosts("serving", "serving")
        broker.stop()

        reason = broker.up("/no/such/model", expect=500)["detail"]
        assert "The model could not be started: There is no directory '/no/such/model'" in reason
        assert broker.state() == ("STOPPED", "")
        assert broker.up_status()["status"] == "failed"
        broker.up("tiny-qwen3")
        assert broker.state() == ("INFERENCE", "tiny-qwen3")


def test_a_change_of_model_during_a_round(broker: Broker) -> None:
    """What was computed arrives, whole; the new model's workers have the next round."""
    with Receiver() as receiver:
        broker.up("tiny-llama")
        broker.start_round("tiny-llama", receiver.url)
        wait_until(receiver.nonces, "artifacts")
        broker.stop()
        status = broker.call("GET", "/api/v1/pow/status")
        assert (status["state"], status["workers"]) == ("STOPPED", [])
        broker.up("tiny-qwen3")

        def delivered() -> bool:
            return bool(broker.call("GET", "/api/v1/pow/status")["stats"]["artifacts_waiting"] == 0)

        wait_until(delivered, "what the round had computed")
        assert (
            len(set(receiver.nonces()))
            == len(receiver.nonces())
            == status["stats"]["total_processed"]
        )
        broker.start_round("tiny-qwen3", receiver.url, "next")
        wait_until(
            lambda: any(p.body["block_hash"] == "next" for p in receiver.round_payloads()),
            "the next round's",
        )
        broker.call("POST", "/api/v1/inference/pow/init/generate", {"block_hash": "x"}, expect=422)


def test_a_host_that_dies_and_one_that_comes_back(node: Node, broker: Broker) -> None:
    broker.up("tiny-llama")
    broker.wait_hosts("serving", "serving")
    node.compose.processes[HOSTS[1]].kill()
    broker.wait_hosts("serving")
    assert broker.state() == ("INFERENCE", "tiny-llama")
    node.compose.processes[HOSTS[1]].wait()
    node.start_host(HOSTS[1], "--model", "tiny-qwen3")
    broker.wait_hosts("serving", "serving")
    assert "workers: tiny-llama is deployed, and that counts more than --model" in node.compose.log(
        HOSTS[1]
    )


def test_the_same_by_hand(node: Node, broker: Broker) -> None:
    url = ("--url", node.compose.api_url + broker.version)
    done = proofline("deploy", *url, "tiny-llama", "--", "--max-model-len", "512")
    assert done.returncode == 0
    assert re.fullmatch(r"tiny-llama: running after \d+ s", done.stdout.splitlines()[0])
    assert broker.state() == ("INFERENCE", "tiny-llama")
    done = proofline("deploy", *url, "/no/such/model")  # ends the other first
    assert done.returncode == 1
    assert "error: /no/such/model cannot be served: There is no directory" in done.stderr
    done = proofline("deploy", *url, "--status")
    assert re.match(r"/no/such/model: failed after \d+ s: There is no directory", done.stdout)
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()[1:]] == list(HOSTS)
    done = proofline("undeploy", *url)
    assert (done.returncode, done.stderr) == (0, "Nothing is deployed.\n")
    assert broker.up_status()["status"] == "idle"


@pytest.mark.parametrize("changes", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_changes_of_model_leave_nothing(node: Node, changes: int) -> None:
    with httpx.Client(base_url=node.compose.api_url, timeout=300, trust_env=False) as http:
        broker = Broker(http)
        broker.wait_hosts("idle", "idle")
        lasting: set[bytes] = set()
        for number in range(changes):
            broker.up(("tiny-llama", "tiny-qwen3")[number % 2])
            broker.stop()
            if number == 1:  # both models have been served, and Celery knows their queues
                lasting = node.lasting_keys()
        assert [node.below(host) for host in HOSTS] == [[], []]
        supervisors = [psutil.Process(node.compose.processes[host].pid) for host in HOSTS]
        assert not any(
            c.status == psutil.CONN_LISTEN for one in supervisors for c in one.net_connections()
        )
        assert node.lasting_keys() == lasting
        assert {key for key in lasting if key.startswith(b"poc:")} == {b"poc:deployment"}


def test_redis_refused_the_services_nothing(node: Node) -> None:
    """After rounds, callbacks, validations, deployments and deaths: docker/users.acl has all
    that they need.
    """
    assert node.compose.refused_by_redis() == []


@pytest.mark.slow
@needs_vllm
def test_another_model_while_a_round_and_chat_run_on_real_engines() -> None:
    """The round ends and is delivered, chat under way comes to its end, the next model serves."""
    # In `up`, which was told no model: what it is told beside is for every model.
    arguments = ("--dtype", "float32", "--port", "0", "--", "--max-model-len", "1024", *vllm_args())
    env = {
        **FAST,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "POC_CHAT_POLICY": "share:0.3",
    }
    up = Up(*arguments, env=env)
    try:
        with (
            Receiver() as receiver,
            httpx.Client(base_url=up.base_url, timeout=180, trust_env=False) as http,
            ThreadPoolExecutor(9) as pool,
        ):
            broker = Broker(http, "/v3.0.16")
            assert broker.state() == ("STOPPED", "")
            broker.call("POST", "/api/v1/inference/up/async", {"model": "tiny-llama"})
            wait_until(lambda: _pids(broker), "a worker that loads")
            loading = _pids(broker)
            broker.stop()  # as the network node does after 15 minutes, and asks again
            broker.wait_hosts("keeping")
            broker.up("tiny-llama")
            assert _pids(broker) == loading
            assert [model["id"] for model in broker.call("GET", "/v1/models")["data"]] == [
                "tiny-llama"
            ]
            assert broker.call("GET", "/health")["status"] == "ok"
            broker.start_round("tiny-llama", receiver.url)
            wait_until(receiver.nonces, "artifacts")
            chat = {
                "model": "tiny-llama",
                "messages": [{"role": "user", "content": "Say"}],
                "ignore_eos": True,
            }
            chat |= {"max_tokens": 200, "temperature": 0}
            answers = [
                pool.submit(broker.call, "POST", "/v1/chat/completions", chat) for _ in range(8)
            ]
            wait_until(lambda: _chat_active(broker) == 8, "chat under way")
            broker.stop()
            assert [answer.result(300)["usage"]["completion_tokens"] for answer in answers] == [
                200
            ] * 8
            stats = broker.call("GET", "/api/v1/pow/status")["stats"]
            wait_until(
                lambda: len(receiver.nonces()) == stats["total_processed"], "all that was computed"
            )
            assert broker.call("GET", "/health", expect=503)

            reason = broker.up("tiny-qwen3", "--max-model-len", "9999999", expect=500)["detail"]
            assert "max_model_len" in reason
            assert broker.state() == ("STOPPED", "")
            before = restarts(up)
            reason = broker.up("acme/no-such-model", expect=500)["detail"]
            assert NOT_HERE in reason
            assert "There is no model 'acme/no-such-model' here" in reason
            assert broker.state() == ("STOPPED", "")
            assert restarts(up) == before  # another try would end the same
            broker.up("tiny-qwen3", "--served-model-name", "q")
            assert broker.state() == ("INFERENCE", "tiny-qwen3")
            assert (
                broker.call("POST", "/v1/chat/completions", chat | {"model": "q", "max_tokens": 4})[
                    "model"
                ]
                == "q"
            )
            assert broker.call("POST", "/v1/chat/completions", chat, expect=404)
    finally:
        up.end()


def restarts(up: Up) -> int:
    return sum("restarting it" in line for line in up.log)


def _pids(broker: Broker) -> list[int]:
    return [worker["pid"] for worker in broker.call("GET", "/api/v1/pow/status")["workers"]]


def _chat_active(broker: Broker) -> int:
    workers = broker.call("GET", "/api/v1/pow/status")["workers"]
    return sum(worker["stats"].get("chat_active", 0) for worker in workers)
