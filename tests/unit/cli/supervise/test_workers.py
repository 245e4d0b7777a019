"""What `proofline workers` refuses before it starts anything."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.machine import placement
from cli.main import app
from cli.supervise import workers
from cli.supervise.fleet import WorkersError
from poc_core.joining.tokens import Token
from workers.vllm.start.log_patterns import HOPELESS


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(placement, "vllm_runs_on_cpu", lambda: False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--gpus", "0,1,2,3"],
            "error: --gpus names '3' and there are 0, 1, 2; name GPUs that are there, or all.",
        ),
        (
            ["--tensor-parallel", "2"],
            (
                "error: 3 GPU(s) cannot be divided into groups of 2 (--tensor-parallel x"
                " --pipeline-parallel): use --gpus 0,1, or another parallelism."
            ),
        ),
        (
            ["--workers", "2"],
            (
                "error: --workers is for machines without a GPU; with GPUs, --gpus and the"
                " parallelism say how many."
            ),
        ),
        (
            ["--hosts", "2", "--tensor-parallel", "2"],
            "error: --hosts needs --head HOST:PORT: where the host with --rank 0 listens.",
        ),
        (
            ["--rank", "1"],
            "error: --rank and --head are for an engine over several hosts: say --hosts.",
        ),
        (
            ["--hosts", "2", "--rank", "2", "--head", "a:1", "--tensor-parallel", "2"],
            "error: The ranks of 2 hosts are 0 to 1, not 2.",
        ),
        (
            ["--hosts", "2", "--head", "a:1", "--tensor-parallel", "8"],
            (
                "error: This host has 3 GPU(s) and the model is to use 4 (--tensor-parallel-size x"
                " --pipeline-parallel-size): less parallelism, or a host with more."
            ),
        ),
        (
            ["--", "oops"],
            "error: 'oops' is not an option; vLLM's own arguments go to the end, after --.",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options: Any, said: str) -> None:
    done = CliRunner().invoke(app, ["workers", "--model", "tiny-qwen3", *options])
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [said]


def test_a_cuda_build_of_vllm_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(placement, "vllm_needs_cuda", lambda: True)
    for command in ("workers", "up"):
        done = CliRunner().invoke(app, [command, "--model", "tiny-qwen3"])
        assert done.exit_code == 2
        (said,) = done.stderr.splitlines()
        assert said.startswith(
            "error: The vLLM installed here needs a GPU and this machine shows none: look at"
            " nvidia-smi"
        )


def test_a_redis_url_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_REDIS_URL", "http://redis")
    done = CliRunner().invoke(app, ["workers", "--model", "tiny-qwen3"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: POC_REDIS_URL: must look like redis://")


def test_a_host_that_would_join_without_tls_is_refused(tmp_path: Path) -> None:
    options = ["--join", "http://10.0.0.1:8000", "--join-file", str(tmp_path / "joined.json")]
    token = Token.new().text
    done = CliRunner().invoke(app, ["workers", *options], env={"PROOFLINE_JOIN_TOKEN": token})
    assert done.exit_code == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: http://10.0.0.1 is not encrypted")
    assert token not in done.output


@pytest.mark.parametrize(
    ("parent", "why", "waits"),
    [
        (1, next(iter(HOPELESS.values())), [workers.HOPELESS_S]),
        (1, "it crashed", []),
        (4242, next(iter(HOPELESS.values())), []),
    ],
)
def test_a_container_whose_model_cannot_be_served_is_not_started_again_at_once(
    monkeypatch: pytest.MonkeyPatch, parent: int, why: str, waits: list[float]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(workers.time, "sleep", waited.append)
    monkeypatch.setattr(workers.os, "getppid", lambda: parent)
    follower: Any = SimpleNamespace(failure=lambda: f"No worker is left: {why}.")
    with pytest.raises(WorkersError, match="No worker is left"):
        workers.watch_workers(follower, None)
    assert waited == waits
