"""Whatever is killed in the middle of a job: every nonce arrives, once, and the node goes on by
itself.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from redis import Redis

from cli.supervise import processes as supervision
from poc_core.settings import load_settings
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import body
from tests.harness.waiting import wait_until
from tests.integration.node import PREFIX, Node, synthetic_artifacts
from tests.integration.processes import frozen, is_running
from tests.stacks.own_redis import write_before_answers
from tests.stacks.round_client import another_worker

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("node")]

# 150 micro-batches of 50 ms, 4 s on two workers: each of two batches, as a worker fills it.
N_NONCES = 4800
BATCH = 16
MIDDLE = 640


class Job:
    """A job of which each nonce is to be counted once."""

    def __init__(self, node: Node, n_nonces: int = N_NONCES, batch_size: int = BATCH) -> None:
        self._node = node
        self._n = n_nonces
        self._before = self._processed()
        self.id = node.submit(range(n_nonces), batch_size=batch_size)

    def wait_middle(self) -> None:
        self._node.wait_progress(self.id, MIDDLE)

    def assert_every_nonce_once(self) -> None:
        """It completes with each nonce's own artifact, and none was counted twice."""
        result = self._node.result(self.id)
        assert result["artifacts"] == synthetic_artifacts(range(self._n))
        wait_until(
            lambda: self._node.http.get(f"{PREFIX}/status").status_code == 200,
            "an API that answers",
        )
        assert (self._processed() - self._before, self._node.status()["queued_nonces"]) == (
            self._n,
            0,
        )

    def _processed(self) -> int:
        return int(self._node.status()["stats"]["total_processed"])


def append_only_file(node: Node) -> Path:
    """The one that the node's Redis writes to."""
    (path,) = {
        file.path
        for file in psutil.Process(node.stack.redis_pid).open_files()
        if file.path.endswith(".aof")
    }
    return Path(path)


def kill(pid: int | None, number: int = signal.SIGKILL) -> float:
    """When, by time.monotonic()."""
    assert pid is not None
    os.kill(pid, number)
    return time.monotonic()


@pytest.fixture(autouse=True)
def back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a test has killed it before."""
    monkeypatch.setattr(supervision, "MAX_BACKOFF_S", 1.0)


@pytest.fixture(autouse=True)
def whole(node: Node) -> Iterator[None]:
    """The node again as it was found."""
    yield
    node.wait_whole()


class TestWorker:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_that_ends_leaves_its_batches_to_others(self, node: Node, number: Any) -> None:
        with another_worker(node.stack) as worker:
            node.wait_whole(more=1)
            job = Job(node)
            job.wait_middle()
            killed = kill(worker.pid, number)
            job.assert_every_nonce_once()
            print(f"completed {time.monotonic() - killed:.1f} s after the signal")

    def test_that_was_the_last_is_soon_not_offered_any_more_and_its_job_goes_on_with_the_next(
        self, node: Node, redis_of: Callable[[Node], Redis], back: Callable[[], None]
    ) -> None:
        job = Job(node)
        job.wait_middle()
        for pid in node.stack.worker_pids():
            kill(pid)
        wait_until(
            lambda: node.http.get("/ready").status_code == 503,
            "503 after the last heartbeat's time",
        )
        # Health hears of a silence, what takes requests of the records' end: in any order.
        workers = WorkerRegistry(redis_of(node), load_settings())
        wait_until(lambda: workers.ready() == [], "the last record's end")
        assert node.generate([1]).status_code == 503
        back()
        job.assert_every_nonce_once()


class TestApi:
    def test_that_is_killed_leaves_the_job_running_and_its_result_can_be_fetched_later(
        self, node: Node, redis_of: Callable[[Node], Redis], back: Callable[[], None]
    ) -> None:
        job = Job(node)
        job.wait_middle()
        old = psutil.Process(node.stack.api_pid)
        kill(node.stack.api_pid)
        redis = redis_of(node)
        wait_until(
            lambda: redis.hget(f"poc:job:{job.id}", "status") == b"completed",
            "a completed job",
            120,
        )
        assert not is_running(old)
        with pytest.raises(httpx.TransportError):  # the work went on without it
            node.get(job.id)
        back()
        wait_until(lambda: node.job(job.id), "an API that is back")
        job.assert_every_nonce_once()

    def test_that_is_killed_while_it_publishes_a_large_job_loses_no_batch(self, node: Node) -> None:
        # More messages than are published before the answer; the others are the workers' to
        # publish.
        job = Job(node, 4500, batch_size=1)
        kill(node.stack.api_pid)
        job.assert_every_nonce_once()


class TestRedis:
    def test_that_is_killed_costs_no_nonce(self, node: Node) -> None:
        write_before_answers(str(node.stack.redis_url))
        job = Job(node)
        job.wait_middle()
        killed = kill(node.stack.redis_pid)
        job.assert_every_nonce_once()
        print(f"completed {time.monotonic() - killed:.1f} s after the kill")

    def test_that_is_killed_again_and_again_costs_no_nonce(self, node: Node) -> None:
        job = Job(node, 2 * N_NONCES)
        for _ in range(3):
            write_before_answers(str(node.stack.redis_url))
            job.wait_middle()
            kill(node.stack.redis_pid)
            wait_until(lambda: node.job(job.id), "a Redis that is back")
        job.assert_every_nonce_once()

    def test_that_forgets_what_it_has_answered_costs_no_nonce(self, node: Node) -> None:
        """As one that is killed while its disk is slow: workers hold batches again that they
        were done with.
        """
        write_before_answers(str(node.stack.redis_url))
        job = Job(node)
        job.wait_middle()
        written = append_only_file(node)
        size = written.stat().st_size
        # So much later whatever was in hand is completed, and its workers do not yet pass for dead.
        node.wait_progress(job.id, MIDDLE + 20 * BATCH)
        with frozen(node.stack.redis_pid):
            os.truncate(written, size)
            killed = kill(node.stack.redis_pid)
        job.assert_every_nonce_once()
        print(f"completed {time.monotonic() - killed:.1f} s after the kill")

    def test_that_drops_all_connections_costs_no_nonce(
        self, node: Node, redis_of: Callable[[Node], Redis]
    ) -> None:
        job = Job(node)
        for _ in range(3):
            job.wait_middle()
            redis_of(node).client_kill_filter(_type="normal", skipme=True)
        job.assert_every_nonce_once()

    def test_that_hangs_for_a_while_costs_no_nonce(self, node: Node) -> None:
        job = Job(node)
        job.wait_middle()
        with frozen(node.stack.redis_pid):
            time.sleep(8)  # past the timeouts and all tries of one command
        job.assert_every_nonce_once()

    def test_that_is_away_is_a_503_with_retry_after_until_the_same_api_and_workers_find_it_again(
        self, node: Node, back: Callable[[], None]
    ) -> None:
        api, workers = node.stack.api_pid, node.stack.worker_pids()
        kill(node.stack.redis_pid)
        for method, path in (
            ("POST", f"{PREFIX}/generate"),
            ("GET", f"{PREFIX}/generate/{'0' * 32}"),
            ("GET", f"{PREFIX}/status"),
            ("POST", f"{PREFIX}/stop"),
            ("GET", "/ready"),
            ("GET", "/health"),
        ):
            content = body() if method == "POST" and path.endswith("generate") else None
            answer = node.http.request(method, path, json=content)
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True), (
                f"{path}: {answer.text}"
            )
        assert node.http.get("/livez").status_code == 200
        back()
        wait_until(lambda: node.http.get("/ready").status_code == 200, "readiness")
        answer = node.generate(range(100), wait=True, batch_size=5)
        assert answer.status_code == 200, answer.text
        assert (node.stack.api_pid, node.stack.worker_pids()) == (api, workers)
