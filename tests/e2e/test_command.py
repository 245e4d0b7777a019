"""The command as a user runs it: `up` with a real vLLM engine, `generate` and `validate`
against it, and `compute`.
"""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.harness import golden
from tests.harness.chat_client import CHAT, request
from tests.harness.marks import needs_vllm
from tests.harness.samples import body
from tests.harness.waiting import wait_until
from tests.integration.node import PREFIX, synthetic_artifacts, tampered
from tests.integration.processes import assert_all_gone, command_of, engine_cores, frozen
from tests.stacks.round_client import RoundClient
from tests.stacks.up import Up, proofline
from workers.proofs import ENGINE_LOST_STATUS

pytestmark = [
    pytest.mark.integration,
    needs_vllm,
]

MODEL = "tiny-qwen3"
EXIT_FRAUD = 3
STAGES = ("Redis", "API", "importing vLLM", "loading the model", "self-test", "chat server")
MOST_LINES = 25


@pytest.fixture(scope="module")
def golden_case() -> dict[str, Any]:
    return golden.cases(MODEL, "artifact")[0]


@pytest.fixture(scope="module")
def proof(up: Up, golden_case: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that `proofline generate` wrote for the golden case."""
    path = tmp_path_factory.mktemp("proof") / "proof.json"
    done = proofline("generate", *case_options(golden_case), "--url", up.base_url, "--output", path)
    assert done.returncode == 0
    return path


def nonces_of(case: dict[str, Any]) -> list[int]:
    return (
        [artifact["nonce"] for artifact in case["artifacts"]]
        if "artifacts" in case
        else case["nonces"]
    )


def case_options(case: dict[str, Any]) -> list[object]:
    nonces = ",".join(map(str, nonces_of(case)))
    options: list[object] = ["--block-hash", case["block_hash"], "--public-key", case["public_key"]]
    options += ["--nonces", nonces, "--seq-len", case["seq_len"]]
    return options + (["--k-dim", case["k_dim"]] if "k_dim" in case else [])


def assert_golden(document: dict[str, Any], case: dict[str, Any]) -> None:
    assert [artifact["nonce"] for artifact in document["artifacts"]] == nonces_of(case)
    ours, theirs = (
        [artifact["vector_b64"] for artifact in found["artifacts"]] for found in (document, case)
    )
    errors = golden.l2(ours, theirs, case["k_dim"])
    assert errors.max() <= 0.003, errors


@pytest.mark.xdist_group("up")
class TestUp:
    def test_says_what_its_start_is_at_and_last_that_it_is_ready(self, up: Up) -> None:
        stages = [line.removeprefix("up: ").partition(":")[0] for line in up.start]
        assert [name for name in STAGES if name not in stages] == []
        assert re.match(rf"up: ready at {up.base_url} .* nonces/s of ", up.start[-1])
        assert len(up.start) <= MOST_LINES

    def test_computes_the_references_artifacts(
        self, proof: Path, golden_case: dict[str, Any]
    ) -> None:
        assert_golden(json.loads(proof.read_text()), golden_case)

    def test_prints_only_json_to_stdout(self, up: Up, golden_case: dict[str, Any]) -> None:
        done = proofline("generate", *case_options(golden_case), "--url", up.base_url)
        assert_golden(json.loads(done.stdout), golden_case)

    def test_finds_no_fraud_in_its_own_artifacts(self, up: Up, proof: Path) -> None:
        done = proofline("validate", "--artifacts", proof, "--url", up.base_url)
        assert (done.returncode, json.loads(done.stdout)["fraud_detected"]) == (0, False)

    def test_finds_fraud_in_tampered_artifacts(self, up: Up, proof: Path, tmp_path: Path) -> None:
        document = json.loads(proof.read_text())
        document["artifacts"], changed = tampered(document["artifacts"], every=3)
        forged = tmp_path / "forged.json"
        forged.write_text(json.dumps(document))
        done = proofline("validate", "--artifacts", forged, "--url", up.base_url)
        assert (done.returncode, json.loads(done.stdout)["mismatch_nonces"]) == (
            EXIT_FRAUD,
            changed,
        )

    # Another worker is a minute of CPU time. In `make test`: test_vllm_engine.py kills a real core,
    # test_housekeeping.py ends the worker, test_cli_processes.py starts another.
    @pytest.mark.slow
    @pytest.mark.ends_its_stack
    def test_restarts_a_worker_whose_engine_died_while_it_had_nothing_to_do(self, up: Up) -> None:
        def cores() -> list[psutil.Process]:
            return [process for process in up.below if "EngineCore" in command_of(process)]

        wait_until(cores, "an engine", 200)  # also where this is tried once more
        cores()[0].kill()
        up.wait_line(rf"up: \S+/cpu0 ended \(exit code {ENGINE_LOST_STATUS}\); restarting it", 300)

    @pytest.mark.ends_its_stack
    def test_a_worker_that_is_to_end_lets_chat_come_to_its_end(
        self, up: Up, yielding: RoundClient
    ) -> None:
        def worker() -> dict[str, Any]:
            """The one with an engine: another, whose engine died, is listed for a while."""
            found = yielding.status()["workers"]
            return next((one for one in found if engine_cores(one["pid"])), {})

        yielding.wait(lambda: worker().get("state") == "ready", 300, "a worker")
        pid = worker()["pid"]
        (core,) = engine_cores(pid)
        body = request("Hello", n_tokens := 200)  # takes longer than the API remembers a worker
        with ThreadPoolExecutor(1) as pool, frozen(core.pid):
            answer = pool.submit(yielding.http.post, CHAT, json=body, timeout=300)
            yielding.wait(lambda: worker()["stats"]["chat_active"], 300, "chat under way")
            os.kill(pid, signal.SIGTERM)
            yielding.wait(lambda: worker().get("state") == "draining", 300, "it says so")
            assert not answer.done()
        assert answer.result().json()["usage"]["completion_tokens"] == n_tokens
        assert not [line for line in up.log if "cut off" in line]
        up.wait_line(r"up: \S+/cpu0 ended \(exit code 0\)", 300)

    @pytest.mark.ends_its_stack
    def test_ends_at_ctrl_c_and_leaves_nothing_running(self, up: Up) -> None:
        below = up.below
        assert any("redis-server" in command_of(process) for process in below)
        assert up.ctrl_c() == 0
        assert_all_gone(below)


# In `make test`, test_new_scheme.py runs the command with transformers, unit/lab/judge's
# test_compute.py holds its options and its JSON, and each engine's tests its golden values.
@pytest.mark.slow
class TestCompute:
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param(
                ["--engine", "vllm", "--tensor-parallel", "2"], id="vllm, tensor parallel 2"
            ),
            pytest.param(["--engine", "transformers"], id="transformers"),
        ],
    )
    def test_prints_the_references_artifacts_as_json_and_nothing_else(
        self, golden_case: dict[str, Any], options: Any
    ) -> None:
        done = proofline(
            "compute",
            "--model",
            MODEL,
            "--dtype",
            "float32",
            "--json",
            *options,
            *case_options(golden_case),
        )
        assert done.returncode == 0
        document = json.loads(done.stdout)
        assert document["encoding"] == {
            "dtype": "f16",
            "k_dim": golden_case["k_dim"],
            "endian": "le",
        }
        assert_golden(document, golden_case)

    def test_prints_the_references_distances(self) -> None:
        case = golden.cases(MODEL, "distance")[0]
        done = proofline(
            "compute",
            "--model",
            MODEL,
            "--dtype",
            "float32",
            "--json",
            "--engine",
            "transformers",
            "--scheme",
            "distance",
            "--randomization",
            case["randomization"],
            *case_options(case),
        )
        document = json.loads(done.stdout)
        assert document["nonces"] == case["nonces"]
        assert document["dist"] == pytest.approx(case["dist"], abs=0.0003)


def test_a_job_that_sigterm_interrupts_completes_after_the_next_start(tmp_path: Path) -> None:
    options = (
        "--model",
        MODEL,
        "--engine",
        "synthetic",
        "--port",
        "0",
        "--data-dir",
        str(tmp_path),
    )
    up = Up(*options, "--synthetic-step-ms", "100")
    try:
        below = up.below
        with httpx.Client(base_url=up.base_url, timeout=300, trust_env=False) as http:
            job = http.post(
                f"{PREFIX}/generate", json=body(nonces=list(range(1000)), batch_size=10)
            ).json()
            path = f"{PREFIX}/generate/{job['request_id']}"
            wait_until(lambda: http.get(path).json()["n_done"] >= 50, "the job's middle")
        assert up.terminate() == 0
        assert_all_gone(below)
    finally:
        up.end()
    up = Up(*options, "--synthetic-step-ms", "1")
    try:
        with httpx.Client(base_url=up.base_url, timeout=300, trust_env=False) as http:
            wait_until(lambda: http.get(path).json()["status"] == "completed", "the job's end")
            assert http.get(path).json()["artifacts"] == synthetic_artifacts(range(1000))
    finally:
        up.end()
