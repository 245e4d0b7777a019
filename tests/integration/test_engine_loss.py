"""A worker that dies above its real vLLM engine, without anybody to clean up after it."""

import os
import signal
import subprocess

import pytest

from cli.supervise.processes import command_of_proofline, environment_of_proofline
from tests.integration.processes import assert_all_gone, descendants, wait_until
from tests.marks import needs_vllm
from tests.samples import MODEL

pytestmark = [
    pytest.mark.integration,
    needs_vllm,
]

START_TIMEOUT_S = 200.0


def test_a_killed_worker_leaves_no_vllm_process_behind(start_node):
    node = start_node(workers=1)
    environment = environment_of_proofline({"POC_REDIS_URL": str(node.stack.redis_url)})
    worker = subprocess.Popen(command_of_proofline("worker", "--model", MODEL), env=environment)

    def is_ready() -> bool:
        assert worker.poll() is None, "the worker ended while it loaded its engine"
        return any(w["pid"] == worker.pid and w["state"] == "ready" for w in node.status()["workers"])

    below = []
    try:
        wait_until(is_ready, "a loaded engine", START_TIMEOUT_S, 0.2)
        below = descendants(worker.pid)
        assert any("EngineCore" in process.name for process in below), below
        worker.send_signal(signal.SIGKILL)
        worker.wait(10)
        assert_all_gone(below)
    finally:
        worker.kill()
        for process in below:
            if process.is_running:
                os.kill(process.pid, signal.SIGKILL)
