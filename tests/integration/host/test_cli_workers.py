"""`proofline workers` with engines that cannot start: it says why, once."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.marks import needs_vllm
from tests.harness.samples import MODEL
from tests.stacks.local_compose import PROGRAMS, LocalCompose

pytestmark = [
    pytest.mark.integration,
    needs_vllm,
]

READY_S = 240.0


@pytest.fixture(scope="module")
def redis_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCompose]:
    with LocalCompose(tmp_path_factory.mktemp("workers")) as compose:
        compose.start("redis")
        compose.wait_healthy("redis")
        compose.start("api")  # which loads the scripts that workers run
        yield compose


@pytest.mark.parametrize(
    ("more_environment", "options", "reason"),
    [
        pytest.param(
            {"VLLM_CPU_KVCACHE_SPACE": "100000"},
            [],
            "the model does not fit: use more --tensor-parallel .* a smaller"
            " VLLM_CPU_KVCACHE_SPACE",
            id="too little memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {},
            ["--", "--max-model-length", "512"],
            "its arguments are wrong",
            id="no argument of vLLM",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_another_start_would_not_mend_ends_at_once(
    redis_alone: LocalCompose,
    tmp_path: Path,
    more_environment: dict[str, str],
    options: list[str],
    reason: str,
) -> None:
    command = [PROGRAMS["proofline"], "workers", "--model", MODEL, *options]
    environment = redis_alone.environment("worker") | more_environment
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=READY_S
    )
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(rf"/cpu0 ended \(exit code \d\); not restarted: {reason}", said)
