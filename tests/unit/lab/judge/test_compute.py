"""`compute` with a stand-in for the engine."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from poc_core.records import ModelInfo, ProofSpec
from tests.harness.commands import run_here
from workers.engines.base import EngineLostError, WholeBatchEngine
from workers.engines.options import EngineOptions

Capture = pytest.CaptureFixture[str]
PROOF = "--block-hash 0xabc --public-key node-1 --nonces 0-2"
COMMAND = ["compute", "--model", "tiny-qwen3", *PROOF.split()]


class NoisyEngine(WholeBatchEngine):
    """Writes to file descriptor 1 as vLLM and its child processes do."""

    def __init__(self) -> None:
        self.info = ModelInfo("tiny-qwen3", 256, 4, 512, max_batch_tokens=256, dtype="float32")
        self.options: EngineOptions | None = None
        self.calls: list[tuple[ProofSpec, list[int]]] = []
        self.closed = False
        self.excluded: set[int] = set()

    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[Any]:
        os.write(1, b"noise\n")
        print("more noise")
        self.calls.append((spec, list(nonces)))
        values = [f"v{nonce}" if spec.scheme == "artifact" else nonce / 2 for nonce in nonces]
        found = zip(nonces, values, strict=True)
        return [None if nonce in self.excluded else value for nonce, value in found]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(stand_in: Callable[[Any], None]) -> NoisyEngine:
    noisy = NoisyEngine()
    stand_in(noisy)
    return noisy


def run(*arguments: str) -> int:
    return run_here(*COMMAND, *arguments)


def test_with_json_stdout_holds_only_the_result(engine: NoisyEngine, capfd: Capture) -> None:
    assert run("--json") == 0
    stdout, stderr = capfd.readouterr()
    assert json.loads(stdout) == {
        "artifacts": [{"nonce": nonce, "vector_b64": f"v{nonce}"} for nonce in range(3)],
        "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
        "request": {
            "block_hash": "0xabc",
            "public_key": "node-1",
            "params": {"scheme": "artifact", "seq_len": 256, "k_dim": 12},
            "poc_stronger_rng": False,
        },
    }
    assert stdout.count("\n") == 1
    assert "noise\n" in stderr
    assert engine.closed


def test_stdout_is_back_afterwards(engine: NoisyEngine, capfd: Capture) -> None:
    run("--json")
    capfd.readouterr()
    os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\n"


def test_options_reach_the_engine(engine: NoisyEngine, capfd: Capture) -> None:
    options = "--engine vllm --dtype bfloat16 --tensor-parallel 2 --pipeline-parallel 3"
    proof = "--seq-len 16 --k-dim 4 --stronger-rng --max-batch-tokens 99"
    own = ("--enforce-eager", "--max-model-len", "64")
    assert run(*options.split(), *proof.split(), "--", *own) == 0
    chosen = engine.options
    assert chosen is not None
    assert chosen.engine == "vllm"
    assert (chosen.dtype, chosen.tensor_parallel, chosen.pipeline_parallel) == ("bfloat16", 2, 3)
    assert (chosen.max_batch_tokens, chosen.vllm_args) == (99, own)
    assert Path(chosen.model, "config.json").is_file()
    spec, _ = engine.calls[0]
    assert (spec.seq_len, spec.options) == (16, {"k_dim": 4, "stronger_rng": True})


def test_distances_are_printed_as_two_lists(engine: NoisyEngine, capfd: Capture) -> None:
    assert run("--scheme", "distance", "--randomization", "layer_hooks", "--json") == 0
    printed = json.loads(capfd.readouterr().out)
    params = {"scheme": "distance", "seq_len": 256, "randomization": "layer_hooks"}
    assert printed.pop("request")["params"] == params
    assert printed == {"nonces": [0, 1, 2], "dist": [0.0, 0.5, 1.0]}
    assert engine.calls[0][0].options == {"randomization": "layer_hooks"}


def test_chains_need_the_number_of_their_steps(engine: NoisyEngine, capfd: Capture) -> None:
    assert run("--scheme", "decode") == 2
    assert "needs --max-tokens" in capfd.readouterr().err
    assert run("--scheme", "decode", "--max-tokens", "8", "--json") == 0
    assert engine.calls[0][0].options == {"k_dim": 12, "max_tokens": 8}


def test_a_schemes_options_may_be_named(engine: NoisyEngine, capfd: Capture) -> None:
    named = "--option randomization=layer_hooks --option other=[1] --option text=a=b"
    assert run("--scheme", "distance", *named.split(), "--json") == 0
    options = {"randomization": "layer_hooks", "other": [1], "text": "a=b"}
    assert engine.calls[0][0].options == options


def test_excluded_nonces_are_left_out_and_counted(engine: NoisyEngine, capfd: Capture) -> None:
    engine.excluded = {1}
    assert run("--json") == 0
    stdout, stderr = capfd.readouterr()
    assert [item["nonce"] for item in json.loads(stdout)["artifacts"]] == [0, 2]
    assert "1 nonces gave no finite state and are left out." in stderr


def test_many_nonces_are_computed_in_steps_that_fill_the_engines_micro_batches(
    engine: NoisyEngine, capfd: Capture
) -> None:
    assert run("--seq-len", "16", "--nonces", "0-39", "--json") == 0
    assert [len(nonces) for _, nonces in engine.calls] == [16, 16, 8]
    assert len(json.loads(capfd.readouterr().out)["artifacts"]) == 40


def test_without_json_people_get_a_table(engine: NoisyEngine, capfd: Capture) -> None:
    assert run() == 0
    rows = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert rows == ["nonce vector_b64", "0 v0", "1 v1", "2 v2"]


def test_the_result_can_go_to_a_file(engine: NoisyEngine, capfd: Capture, tmp_path: Path) -> None:
    assert run("--output", str(tmp_path / "proof.json")) == 0
    assert capfd.readouterr().out == ""
    assert len(json.loads((tmp_path / "proof.json").read_text())["artifacts"]) == 3


def test_the_engine_is_closed_after_a_failure_too(
    engine: NoisyEngine, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> list[Any]:
        raise EngineLostError("The engine is gone; start again.")

    monkeypatch.setattr(engine, "compute_batch", broken)
    assert run("--json") == 1
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert "error: The engine is gone; start again." in stderr
    assert engine.closed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonces", "5-1"],
        ["--block-hash", ""],
        ["--k-dim", "0"],
        ["--engine", "synthetic"],
        ["--model", "./none"],
        ["--option", "n_steps"],
    ],
)
def test_wrong_options_are_usage_errors_before_anything_is_loaded(
    engine: NoisyEngine, arguments: Any
) -> None:
    assert CliRunner().invoke(app, [*COMMAND, *arguments]).exit_code == 2
    assert engine.options is None
