"""Every service of compose.yaml as a process of this machine, on real vLLM: a job, Flower,
health, an orderly end.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from cli.main import app
from tests.harness import golden
from tests.harness.marks import needs_vllm
from tests.harness.samples import body
from tests.harness.waiting import wait_until
from tests.integration.processes import assert_all_gone, command_of, descendants
from tests.integration.strangers import doors_of, knock_at
from tests.stacks.local_compose import LocalCompose

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    needs_vllm,
]

# The worker for GPUs takes a model of its own, so that each worker is seen to work; without a GPU
# it runs on the CPU.
VARIABLES = {
    "PROOFLINE_MODEL": "tiny-llama",
    "PROOFLINE_DTYPE": "float32",
    "PROOFLINE_ENGINE_ARGS": "--max-model-len 512",
    "POC_REQUIRE_KEYS": "always",
}
# Of the environment; beside those that `proofline key` makes.
KEY = "a key of these tests, long enough"
BEARER = {"Authorization": f"Bearer {KEY}"}
MODELS = {"worker": "tiny-qwen3", "worker-gpu": "tiny-llama"}
# The references' artifacts, in the number format of each worker, and how far its own may lie from
# them (L2).
GOLDEN = {
    "worker": golden.cases("tiny-qwen3", "artifact", "h200", "bfloat16"),
    "worker-gpu": golden.cases("tiny-llama", "artifact"),
}
MEAN = {"worker": 0.02, "worker-gpu": 0.003}
LARGEST = {"worker": 0.05, "worker-gpu": 0.003}
TEST_S = 300.0


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCompose]:
    with LocalCompose(
        tmp_path_factory.mktemp("compose"), VARIABLES, {"POC_API_KEY": KEY}
    ) as running:
        for name in running.services:
            running.start(name)
        for name in running.services.keys() - {"secrets"}:
            running.wait_healthy(name)
        # A container's check knows the workers of that container; here both have one machine.
        ready = f"{running.api_url}/ready"
        models = list(MODELS.values())
        wait_until(
            lambda: httpx.get(ready, headers=BEARER).json().get("models") == sorted(models),
            "both models",
            TEST_S,
            0.5,
        )
        yield running


@pytest.fixture(scope="module")
def api(compose: LocalCompose) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=compose.api_url, headers=BEARER, timeout=300, trust_env=False
    ) as client:
        yield client


@pytest.fixture(scope="module")
def flower(compose: LocalCompose) -> Iterator[httpx.Client]:
    auth = ("proofline", compose.secret("flower_password"))
    with httpx.Client(
        base_url=compose.flower_url, auth=auth, timeout=300, trust_env=False
    ) as client:
        yield client


def run_job(api: httpx.Client, model: str, case: dict[str, Any]) -> dict[str, Any]:
    """A finished job of `model`, about a golden case."""
    job = body(
        block_hash=case["block_hash"],
        public_key=case["public_key"],
        nonces=[artifact["nonce"] for artifact in case["artifacts"]],
        batch_size=8,
        poc_stronger_rng=case["poc_stronger_rng"],
        params={"model": model, "seq_len": case["seq_len"], "k_dim": case["k_dim"]},
    )
    request_id = api.post("/api/v1/pow/generate", json=job).json()["request_id"]
    path = f"/api/v1/pow/generate/{request_id}"
    wait_until(
        lambda: api.get(path).json()["status"] not in ("queued", "running"), "the job's end", TEST_S
    )
    found: dict[str, Any] = api.get(path).json()
    return found | {"request_id": request_id}


def soon(look: Callable[[], Any], what: str) -> Any:
    """What `look` sees once it sees something."""
    seen: list[Any] = [None]

    def sees() -> bool:
        seen[0] = look()
        return bool(seen[0])

    wait_until(sees, what, TEST_S, 0.5)
    return seen[0]


@pytest.mark.parametrize("service", list(MODELS))
def test_each_worker_serves_jobs_and_chat(
    compose: LocalCompose, api: httpx.Client, service: str
) -> None:
    errors = []
    for case in GOLDEN[service]:
        job = run_job(api, MODELS[service], case)
        assert job["status"] == "completed", job
        assert [artifact["nonce"] for artifact in job["artifacts"]] == [
            a["nonce"] for a in case["artifacts"]
        ]
        ours, theirs = (
            [artifact["vector_b64"] for artifact in one["artifacts"]] for one in (job, case)
        )
        errors.append(golden.l2(ours, theirs, case["k_dim"]))
    assert np.concatenate(errors).mean() <= MEAN[service], [case.mean() for case in errors]
    assert np.concatenate(errors).max() <= LARGEST[service], [case.max() for case in errors]
    chat = {
        "model": MODELS[service],
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
    }
    answer = api.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


class TestFlower:
    def test_wants_its_password(self, flower: httpx.Client) -> None:
        for path in ("/", "/api/workers", "/api/tasks", "/metrics"):
            assert httpx.get(f"{flower.base_url}{path}", trust_env=False).status_code == 401
            assert (
                httpx.get(
                    f"{flower.base_url}{path}", auth=("proofline", "x"), trust_env=False
                ).status_code
                == 401
            )

    def test_sees_workers_and_their_queues(self, flower: httpx.Client) -> None:
        def queues() -> dict[str, set[str]] | None:
            found = flower.get("/api/workers", params={"refresh": "1"}).json()
            read = {
                name: {queue["name"] for queue in said.get("active_queues", [])}
                for name, said in found.items()
            }
            return read if len(read) == 2 and all(read.values()) else None

        found = soon(queues, "two workers in Flower")
        assert all(re.match(r"cpu0-\w+@", name) for name in found), found
        assert set.union(*found.values()) >= {
            "poc.model.tiny-qwen3",
            "poc.model.tiny-llama",
        }

    def test_sees_what_each_turn_computed(self, api: httpx.Client, flower: httpx.Client) -> None:
        ids: list[str] = []

        def tasks() -> list[dict[str, Any]]:
            # until Flower has switched events on
            ids.append(run_job(api, "tiny-qwen3", GOLDEN["worker"][0])["request_id"])
            found = flower.get("/api/tasks", params={"limit": 1000}).json().values()
            return [
                task
                for task in found
                if any(job_id in (task["result"] or "") for job_id in ids)
                and task["state"] == "SUCCESS"
            ]

        (task, *_) = soon(tasks, "tasks in Flower")
        assert task["name"] == "proofline.work"
        assert "tiny-qwen3" in task["args"]
        assert re.search(r"tiny-qwen3: \d+ nonces of job [0-9a-f]{32}", task["result"])

    def test_sees_how_many_messages_wait(self, flower: httpx.Client) -> None:
        lengths = flower.get("/api/queues/length").json()["active_queues"]
        assert {"name": "poc.model.tiny-qwen3", "messages": 0} in lengths

    def test_may_only_look(self, flower: httpx.Client) -> None:
        (name, *_) = flower.get("/api/workers").json()
        assert flower.post(f"/api/worker/shutdown/{name}").status_code in (403, 405)


def test_redis_takes_no_one_without_the_password(compose: LocalCompose) -> None:
    import redis

    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(f"redis://127.0.0.1:{compose.redis_port}/0").ping()
    with redis.Redis.from_url(compose.redis_url) as client:
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


@pytest.mark.promise("a client without a key", "gets 401 for every path except the public ones")
def test_a_stranger_gets_nothing_from_any_port(compose: LocalCompose) -> None:
    running = [
        psutil.Process(process.pid)
        for process in compose.processes.values()
        if process.poll() is None
    ]
    doors = doors_of(
        [*running, *(below for process in running for below in descendants(process.pid))]
    )
    heard = knock_at(doors)
    assert [one for one in heard if not one.is_refusal] == []
    # Two workers' chat, the API and Flower speak HTTP; Redis, and what vLLM has for itself, do not.
    http = {one.door.port for one in heard if one.is_http}
    assert len(http) == 4
    assert {int(url.rpartition(":")[2]) for url in (compose.api_url, compose.flower_url)} < http
    own_redis = [one.answer for one in heard if one.door.port == compose.redis_port]
    assert own_redis
    assert any(answer.startswith(b"-NOAUTH") for answer in own_redis)


@pytest.mark.promise(
    "a Redis user",
    "can run every command that its process needs",
)
def test_redis_refused_the_services_nothing(compose: LocalCompose) -> None:
    """After all that the tests above had them do."""
    assert compose.refused_by_redis() == []


def test_a_key_made_beside_a_running_api_opens_it(
    compose: LocalCompose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POC_API_KEYS_FILE", compose.environment("api")["POC_API_KEYS_FILE"])
    made = CliRunner().invoke(app, ["key", "new", "looker", "--role", "read-only"])
    bearer = {"Authorization": f"Bearer {made.stdout.strip()}"}
    with httpx.Client(base_url=compose.api_url, headers=bearer, trust_env=False) as client:
        assert client.get("/api/v1/pow/status").status_code == 200
        assert client.post("/api/v1/pow/stop").status_code == 403
        assert CliRunner().invoke(app, ["key", "revoke", "looker"]).exit_code == 0
        assert client.get("/api/v1/pow/status").status_code == 401


@pytest.mark.ends_its_stack
def test_stopping_leaves_nothing_running(compose: LocalCompose) -> None:
    below = [
        process
        for name in compose.processes
        for process in descendants(compose.processes[name].pid)
    ]
    assert any("EngineCore" in command_of(process) for process in below)
    for name in reversed(compose.services):
        compose.stop(name)
    assert_all_gone(below)
    assert compose.processes["worker"].returncode == 0
