"""Whatever is killed in the middle of a job: every nonce arrives, once, and the node goes on by itself."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cli.supervise import processes as supervision
from tests.integration.node import PREFIX, Node, run_node, synthetic_artifacts
from tests.integration.processes import process_of, wait_until
from tests.samples import body

pytestmark = pytest.mark.integration

# 150 micro-batches of 50 ms, 4 s on two workers: each of two batches, as a worker fills it.
N_NONCES = 4800
JOB = {"nonces": range(N_NONCES), "batch_size": 16}
MIDDLE = 640
WITHIN_S = 60.0  # of the kill, as promised to operators


def kill(pid: int | None, number: int = signal.SIGKILL) -> float:
    """When, by time.monotonic()."""
    assert pid is not None
    os.kill(pid, number)
    return time.monotonic()


def assert_every_nonce_once(node: Node, request_id: str, timeout_s: float = 120) -> None:
    """The job completes with each nonce's own artifact, and none was counted twice."""
    result = node.result(request_id, timeout_s)
    assert result["artifacts"] == synthetic_artifacts(range(len(result["artifacts"])))
    wait_until(lambda: node.http.get(f"{PREFIX}/status").status_code == 200, "an API that answers")
    status = node.status()
    assert (status["stats"]["total_processed"], status["queued_nonces"]) == (len(result["artifacts"]), 0)


@pytest.fixture
def away_for_3_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor waits so long before it restarts what was killed."""
    monkeypatch.setattr(supervision, "FIRST_BACKOFF_S", 3.0)


@pytest.fixture
def for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor does not restart what was killed, as long as the test lasts."""
    monkeypatch.setattr(supervision, "FIRST_BACKOFF_S", 600.0)
    monkeypatch.setattr(supervision, "MAX_BACKOFF_S", 600.0)


class TestWorker:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_that_ends_leaves_its_batches_to_another(self, start_node, for_good, number):
        node = start_node(workers=2)
        request_id = node.submit(**JOB)
        node.wait_progress(request_id, MIDDLE)
        killed = kill(node.stack.worker_pids()[0], number)
        assert_every_nonce_once(node, request_id, WITHIN_S)
        print(f"completed {time.monotonic() - killed:.1f} s after the signal")

    def test_that_is_killed_alone_goes_on_when_it_is_restarted(self, start_node):
        node = start_node(workers=1, env={"POC_WORKER_TTL_S": "3", "POC_HEARTBEAT_S": "1"})
        request_id = node.submit(**JOB)
        node.wait_progress(request_id, MIDDLE)
        kill(node.stack.worker_pids()[0])
        assert_every_nonce_once(node, request_id)

    def test_that_is_killed_is_soon_not_offered_any_more(self, start_node, for_good):
        node = start_node(workers=1)
        kill(node.stack.worker_pids()[0])
        wait_until(lambda: node.http.get("/ready").status_code == 503, "503 after the last heartbeat's time", 30)
        assert node.generate([1]).status_code == 503


class TestApi:
    def test_that_is_killed_leaves_the_job_running_and_its_result_can_be_fetched_later(self, start_node):
        node = start_node(workers=2)
        request_id = node.submit(**JOB)
        node.wait_progress(request_id, MIDDLE)
        old = process_of(node.stack.api_pid)
        kill(node.stack.api_pid)
        wait_until(lambda: not old.is_running and node.job(request_id), "an API that is back")
        assert_every_nonce_once(node, request_id)

    def test_that_is_gone_does_not_stop_the_work(self, start_node, redis_of, for_good):
        node = start_node(workers=2)
        request_id = node.submit(**JOB)
        node.wait_progress(request_id, MIDDLE)
        kill(node.stack.api_pid)
        redis = redis_of(node)
        wait_until(lambda: redis.hget(f"poc:job:{request_id}", "status") == b"completed", "a completed job")

    def test_that_is_killed_while_it_publishes_a_large_job_loses_no_batch(self, start_node):
        node = start_node(workers=2, synthetic_step_ms=0)
        # More messages than are published before the answer; the others are the workers' to publish.
        request_id = node.submit(range(4500), batch_size=1)
        kill(node.stack.api_pid)
        assert_every_nonce_once(node, request_id)


class TestRedis:
    def test_that_is_killed_costs_no_nonce(self, start_node):
        node = start_node(workers=2)
        request_id = node.submit(**JOB)
        node.wait_progress(request_id, MIDDLE)
        killed = kill(node.stack.redis_pid)
        assert_every_nonce_once(node, request_id, WITHIN_S)
        print(f"completed {time.monotonic() - killed:.1f} s after the kill")

    def test_that_is_killed_again_and_again_costs_no_nonce(self, start_node):
        node = start_node(workers=2)
        request_id = node.submit(**JOB)
        for _ in range(3):
            node.wait_progress(request_id, MIDDLE)
            kill(node.stack.redis_pid)
            wait_until(lambda: node.job(request_id), "a Redis that is back")
        assert_every_nonce_once(node, request_id)

    def test_that_drops_all_connections_costs_no_nonce(self, start_node, redis_of):
        node = start_node(workers=2)
        request_id = node.submit(**JOB)
        for _ in range(3):
            node.wait_progress(request_id, MIDDLE)
            redis_of(node).client_kill_filter(_type="normal", skipme=True)
        assert_every_nonce_once(node, request_id)

    def test_that_hangs_for_a_while_costs_no_nonce(self, start_node):
        node = start_node(workers=2, env={"POC_REDIS_TIMEOUT_S": "1"})
        request_id = node.submit(**JOB)
        node.wait_progress(request_id, MIDDLE)
        kill(node.stack.redis_pid, signal.SIGSTOP)
        time.sleep(8)  # past the timeouts and all tries of one command
        kill(node.stack.redis_pid, signal.SIGCONT)
        assert_every_nonce_once(node, request_id)

    def test_that_was_away_while_nothing_ran_finds_workers_that_take_new_jobs(self, start_node, away_for_3_s):
        node = start_node(workers=2)
        kill(node.stack.redis_pid)
        wait_until(lambda: node.http.get("/ready").status_code == 503, "Redis's absence", 10)
        wait_until(lambda: node.http.get("/ready").status_code == 200, "readiness")
        answer = node.generate(range(100), wait=True, batch_size=5)
        assert answer.status_code == 200, answer.text

    def test_that_was_away_is_found_again_by_the_same_api(self, start_node, away_for_3_s):
        node = start_node()
        api = node.stack.api_pid
        kill(node.stack.redis_pid)
        wait_until(lambda: node.http.get(f"{PREFIX}/status").status_code == 503, "Redis's absence", 10)
        wait_until(lambda: node.http.get(f"{PREFIX}/status").status_code == 200, "200 again")
        assert node.stack.api_pid == api


@pytest.fixture(scope="module")
def node_without_redis() -> Iterator[Node]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as exits:
        patch.setattr(supervision, "FIRST_BACKOFF_S", 600.0)
        patch.setattr(supervision, "MAX_BACKOFF_S", 600.0)
        node = run_node(exits)
        kill(node.stack.redis_pid)
        yield node


class TestRedisAway:
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", f"{PREFIX}/generate"),
            ("GET", f"{PREFIX}/generate/{'0' * 32}"),
            ("GET", f"{PREFIX}/status"),
            ("POST", f"{PREFIX}/stop"),
            ("GET", "/ready"),
        ],
    )
    def test_is_a_503_with_retry_after(self, node_without_redis, method, path):
        content = body() if method == "POST" and path.endswith("generate") else None
        answer = node_without_redis.http.request(method, path, json=content)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True), answer.text

    def test_does_not_make_the_api_unhealthy(self, node_without_redis):
        assert node_without_redis.http.get("/health").status_code == 200
