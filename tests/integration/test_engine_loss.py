"""A real vLLM engine that dies under its worker, and a worker that dies above its engine."""

import importlib.util
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from cli.processes import command_of_proofline, environment_of_proofline
from tests.integration.node import Node
from tests.integration.processes import Process, assert_all_gone, descendants, wait_until
from tests.samples import MODEL
from workers.host import ENGINE_LOST_STATUS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

START_TIMEOUT_S = 200.0


class HandStartedWorker:
    """`proofline worker` with vLLM as an operator runs it by hand: nobody restarts it or cleans up after it."""

    def __init__(self, node: Node) -> None:
        env = {"POC_REDIS_URL": str(node.stack.redis_url)}
        self._process = subprocess.Popen(
            command_of_proofline("worker", "--model", MODEL, "--dtype", "float32"), env=environment_of_proofline(env)
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, node: Node) -> None:
        def is_ready() -> bool:
            assert self._process.poll() is None, "the worker ended while it loaded its engine"
            return any(w["pid"] == self.pid and w["state"] == "ready" for w in node.status()["workers"])

        wait_until(is_ready, "a loaded engine", START_TIMEOUT_S, 0.2)

    def wait_exit(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def end(self) -> None:
        for process in [*descendants(self.pid)]:
            os.kill(process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


def engine_core(worker: HandStartedWorker) -> Process:
    return next(process for process in descendants(worker.pid) if "EngineCore" in process.name)


@pytest.fixture
def start_worker() -> Iterator[Callable[[Node], HandStartedWorker]]:
    with ExitStack() as exits:

        def start(node: Node) -> HandStartedWorker:
            worker = HandStartedWorker(node)
            exits.callback(worker.end)
            worker.wait_ready(node)
            return worker

        yield start


def test_a_worker_that_loses_its_engine_exits_and_its_batches_run_elsewhere(start_node, start_worker):
    # The other worker is slow, so that most batches go to vLLM and none is left for long when it dies.
    node = start_node(workers=1, synthetic_step_ms=300)
    worker = start_worker(node)
    nonces = range(800)
    request_id = node.submit(nonces, batch_size=8, params={"seq_len": 512})
    node.wait_progress(request_id, 80)
    os.kill(engine_core(worker).pid, signal.SIGKILL)
    assert worker.wait_exit(60) == ENGINE_LOST_STATUS
    assert [artifact["nonce"] for artifact in node.result(request_id)["artifacts"]] == list(nonces)


def test_a_killed_worker_leaves_no_vllm_process_behind(start_node, start_worker):
    node = start_node(workers=1)
    worker = start_worker(node)
    below = descendants(worker.pid)
    assert any("EngineCore" in process.name for process in below), below
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait_exit(10)
    assert_all_gone(below)
