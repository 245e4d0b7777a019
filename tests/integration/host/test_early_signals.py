"""A signal in the moment in which a worker serves and Celery has not begun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from poc_core.state import keys
from tests.stacks.own_redis import own_redis

pytestmark = pytest.mark.integration

WORKER = """
import os
from cli.main import app
from workers.engines.synthetic import SyntheticEngine
SyntheticEngine.begin_work = lambda _: os.kill(os.getpid(), {number})
app(["worker", "--model", "tiny-qwen3", "--engine", "synthetic"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_leaves_as_at_any_other_time(tmp_path: Path, number: signal.Signals) -> None:
    with own_redis(tmp_path) as own, redis.Redis.from_url(own.url) as client:
        worker = subprocess.run(
            [sys.executable, "-c", WORKER.format(number=int(number))],
            env={**os.environ, "POC_REDIS_URL": own.url},
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
        assert worker.returncode == 0, worker.stderr
        assert "serves tiny-qwen3" in worker.stderr
        assert not client.keys(f"{keys.WORKER_PREFIX}*")
