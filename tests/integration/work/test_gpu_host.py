"""`proofline workers` on a GPU host: the whole stack, artifacts against the reference's from an
H200 (run by hand).
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from cli.machine.gpus import visible_gpus
from tests.harness import golden
from tests.harness.chat_client import CHAT, request
from tests.harness.marks import needs_vllm
from tests.harness.samples import body
from tests.harness.waiting import wait_until
from tests.integration.processes import descendants
from tests.stacks.local_compose import PROGRAMS, LocalCompose

pytestmark = [
    pytest.mark.integration,
    pytest.mark.gpu,
    needs_vllm,
]

READY_S = 300.0
SHARED = ("--", "--gpu-memory-utilization=0.15")  # others may be on the GPU
QUICK = (*SHARED, "--enforce-eager")  # to start; compiling takes most of a minute


class Layout(NamedTuple):
    """How many GPUs there are and what `proofline workers` is to make of them."""

    name: str
    model: str
    options: tuple[str, ...]
    groups: list[
        list[int]
    ]  # each worker's GPUs; counted from the last, so that the default would be wrong
    mean: float  # of the L2 distances from the reference's artifacts, at most
    largest: float

    def __str__(self) -> str:
        return f"{self.name}, {self.model}"


LAYOUTS = [
    Layout("one GPU, compiled", "tiny-qwen3", SHARED, [[-1]], 0.005, 0.02),
    Layout("one GPU", "tiny-llama", QUICK, [[-1]], 0.005, 0.02),
    Layout("two workers", "tiny-qwen3", QUICK, [[-1], [-2]], 0.005, 0.02),
    Layout(
        "tensor parallel", "tiny-qwen3", ("--tensor-parallel=2", *QUICK), [[-2, -1]], 0.02, 0.05
    ),
    Layout(
        "pipeline parallel", "tiny-qwen3", ("--pipeline-parallel=2", *QUICK), [[-2, -1]], 0.02, 0.05
    ),
]


class Host:
    """This machine with its GPUs, an API, and `proofline workers`."""

    def __init__(self, compose: LocalCompose, layout: Layout) -> None:
        gpus = visible_gpus()
        self.layout = layout
        self.groups = [[gpus[index] for index in group] for group in layout.groups]
        self.http = httpx.Client(base_url=compose.api_url, timeout=300, trust_env=False)
        ids = ",".join(gpu for group in self.groups for gpu in group)
        command = [
            PROGRAMS["proofline"],
            "workers",
            "--model",
            layout.model,
            "--gpus",
            ids,
            *layout.options,
        ]
        # This machine's own environment too: where its CUDA is and what its NCCL must not do.
        environment = compose.environment("worker") | os.environ | {"PYTHONUNBUFFERED": "1"}
        compose.run("workers", command, environment)
        try:
            wait_until(
                lambda: len(self.workers()) == len(self.groups), "ready workers", READY_S, 0.2
            )
        except AssertionError:
            raise AssertionError(compose.log("workers")[-8000:]) from None

    def workers(self) -> list[dict[str, Any]]:
        workers = self.http.get("/api/v1/pow/status").json()["workers"]
        return [worker for worker in workers if worker["state"] == "ready"]

    def generate(self, case: dict[str, Any], batch_size: int) -> list[dict[str, Any]]:
        """Artifacts of a golden case's nonces."""
        job = body(
            block_hash=case["block_hash"],
            public_key=case["public_key"],
            nonces=[artifact["nonce"] for artifact in case["artifacts"]],
            batch_size=batch_size,
            poc_stronger_rng=case["poc_stronger_rng"],
            wait=True,
            params={"model": self.layout.model, "seq_len": case["seq_len"], "k_dim": case["k_dim"]},
        )
        answer = self.http.post("/api/v1/pow/generate", json=job)
        assert answer.status_code == 200, answer.text
        artifacts: list[dict[str, Any]] = answer.json()["artifacts"]
        assert [artifact["nonce"] for artifact in artifacts] == job["nonces"]
        return artifacts


def gpus_by_process() -> dict[int, set[str]]:
    """The GPUs that each process computes on, as the driver tells."""
    import pynvml

    found: dict[int, set[str]] = {}
    pynvml.nvmlInit()
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByIndex(index)
            ):
                found.setdefault(process.pid, set()).add(str(index))
    finally:
        pynvml.nvmlShutdown()
    return found


@pytest.fixture(scope="module")
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    layout: Layout = request.param
    needed = sum(map(len, layout.groups))
    if len(visible_gpus()) < needed:
        pytest.skip(f"needs {needed} GPUs")
    with LocalCompose(tmp_path_factory.mktemp("gpu-host")) as compose:
        compose.start("api")
        compose.wait_healthy("api")
        running = Host(compose, layout)
        yield running
        running.http.close()


@pytest.mark.parametrize("host", LAYOUTS, indirect=True, ids=str, scope="module")
class TestWorkers:
    def test_each_sees_just_its_gpus(self, host: Host) -> None:
        on_gpu = gpus_by_process()
        found = []
        for worker in host.workers():
            pids = [worker["pid"], *(process.pid for process in descendants(worker["pid"]))]
            found.append(sorted({gpu for pid in pids for gpu in on_gpu.get(pid, ())}))
            assert f"gpu{'-'.join(found[-1])}-" in worker["id"]
        assert sorted(found) == sorted(sorted(group) for group in host.groups)

    def test_artifacts_are_the_references(self, host: Host) -> None:
        errors = []
        for case in golden.cases(host.layout.model, "artifact", "h200", "bfloat16"):
            for batch_size in (len(case["artifacts"]), 2):
                found = [artifact["vector_b64"] for artifact in host.generate(case, batch_size)]
                expected = [artifact["vector_b64"] for artifact in case["artifacts"]]
                errors.append(golden.l2(found, expected, case["k_dim"]))
        of_all = np.concatenate(errors)
        print(f"{host.layout}: mean {of_all.mean():.5f}, largest {of_all.max():.5f}")
        assert of_all.mean() <= host.layout.mean, [case.mean() for case in errors]
        assert of_all.max() <= host.layout.largest, [case.max() for case in errors]

    def test_all_of_them_work(self, host: Host) -> None:
        job = body(
            nonces=list(range(2000)), batch_size=8, wait=True, params={"model": host.layout.model}
        )
        answer = host.http.post("/api/v1/pow/generate", json=job)
        assert len(answer.json()["artifacts"]) == 2000
        # Heartbeats tell it.
        wait_until(
            lambda: all(worker["stats"]["proof_busy_s"] > 0.1 for worker in host.workers()),
            "work of all",
            30,
        )

    def test_they_serve_chat(self, host: Host) -> None:
        answer = host.http.post(CHAT, json=request("Hello", 16) | {"model": host.layout.model})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 16
