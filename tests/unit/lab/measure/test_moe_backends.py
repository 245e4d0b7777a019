"""`bench --try-moe-backend` with engines whose times and artifacts are those of BACKENDS."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from lab.measure.artifact_distance import Distance, distance
from lab.measure.moe_backends import BATCH, NONCES, cause
from lab.measure.speed import spec_of
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.encoding import decode_vector, encode_vectors
from tests.harness.commands import run_here
from tests.harness.samples import Clock
from workers.engines.options import EngineOptions
from workers.engines.synthetic import SyntheticEngine

Capture = pytest.CaptureFixture[str]
QUICK = ("--seconds", "0", "--seq-len", "64", "--batch-size", "32", "--max-step-ms", "30")
MODEL = ("--model", "tiny-qwen3-moe")
# How far a batch smaller than BATCH moves an artifact of every backend.
BY_SIZE = 0.02


@dataclass(frozen=True)
class Backend:
    step_ms: float = 1.0
    moves: float = 0.01  # its artifacts, from the default's
    refusal: str = ""  # it does not start


BACKENDS = {
    "": Backend(step_ms=30.0, moves=0.0),
    "near": Backend(),
    "nearer": Backend(step_ms=8.0, moves=0.0),
    "far": Backend(moves=0.05),
    "slow": Backend(step_ms=100.0),
    "absent": Backend(
        refusal=(
            "vLLM cannot start: See root cause above.\n  (EngineCore pid=1) ValueError: no kernel"
            " of [/this] kind.\n  RuntimeError: See root cause above.\n  All of it: engine.log"
        )
    ),
}


class MovedEngine(SyntheticEngine):
    running = 0
    clock = Clock()

    def __init__(self, options: EngineOptions) -> None:
        name = options.vllm_args[-1].partition("--moe-backend=")[2] if options.vllm_args else ""
        self.backend = BACKENDS[name]
        if self.backend.refusal:
            raise ProoflineError(self.backend.refusal)
        assert MovedEngine.running == 0  # two would share a GPU's memory
        MovedEngine.running += 1
        super().__init__(
            EngineOptions(model=options.model, engine="synthetic", synthetic_step_ms=0)
        )

    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        self.clock.now += self.backend.step_ms / 1000
        values = super().compute_batch(spec, nonces)
        vectors = np.array([decode_vector(str(value), 12) for value in values])
        vectors[:, 0] += self.backend.moves + (BY_SIZE if len(nonces) < BATCH else 0.0)
        return [*encode_vectors(vectors)]

    def close(self) -> None:
        MovedEngine.running -= 1


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.local_engine.load_engine", MovedEngine)
    monkeypatch.setattr(MovedEngine, "running", 0)
    clock = SimpleNamespace(perf_counter=MovedEngine.clock)
    monkeypatch.setattr("lab.measure.speed.time", clock)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def trying(*backends: str) -> list[str]:
    return [word for name in backends for word in ("--try-moe-backend", name)]


def result(capfd: Capture, *arguments: str) -> dict[str, Any]:
    assert run_here("bench", *QUICK, *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)["moe_backends"]
    return found


def why_not(found: dict[str, Any]) -> dict[str, str]:
    return {one["backend"]: one["why_not"] for one in found["tried"]}


def test_a_faster_backend_within_the_distance_of_batch_sizes_is_proposed(capfd: Capture) -> None:
    found = result(capfd, *MODEL, *trying("near"))
    assert found["proposal"] == "--moe-backend=near"
    assert why_not(found) == {"near": ""}
    assert (found["seq_len"], found["nonces"]) == (64, NONCES)
    assert (found["default"]["batch"], found["default"]["small_batch"]) == (32, 8)
    assert found["default"]["distance"]["mean"] == pytest.approx(BY_SIZE, rel=0.1)
    assert found["tried"][0]["distance"]["mean"] == pytest.approx(0.01, rel=0.1)
    assert found["tried"][0]["nonces_per_s"] > found["default"]["nonces_per_s"]


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("far", "its artifacts lie further from the default's"),
        ("slow", "it is not clearly faster"),
    ],
)
def test_one_that_is_further_away_or_no_faster_is_refused(
    capfd: Capture, backend: str, why: str
) -> None:
    found = result(capfd, *MODEL, *trying(backend))
    assert found["proposal"] is None
    assert why in why_not(found)[backend]


def test_of_several_good_backends_the_fastest_is_proposed(capfd: Capture) -> None:
    found = result(capfd, *MODEL, *trying("nearer", "near", "far"))
    assert found["proposal"] == "--moe-backend=near"
    assert why_not(found)["nearer"] == "near is faster."


def test_a_backend_that_does_not_start_has_one_line_and_the_others_go_on(capfd: Capture) -> None:
    assert run_here("bench", *QUICK, *MODEL, *trying("absent", "near")) == 0
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert (
        "absent is not proposed: it cannot be used here: ValueError: no kernel of [/this] kind."
        in lines
    )
    assert "absent - - - -" in lines
    assert lines[-1].startswith("near is faster, ")
    assert lines[-1].endswith("Add after --: --moe-backend=near")
    assert next(line for line in lines if line.startswith("default, batches of 8 from those of 32"))


def test_of_dummy_weights_no_backend_is_proposed(capfd: Capture) -> None:
    found = result(capfd, "--dimensions", "qwen3-30b-a3b", *trying("near", "slow"))
    assert found["proposal"] is None
    assert "made-up ones are not your model's" in why_not(found)["near"]
    assert "it is not clearly faster" in why_not(found)["slow"]
    assert found["tried"][0]["distance"]["mean"] == pytest.approx(0.01, rel=0.1)


def test_without_the_option_no_other_engine_starts(capfd: Capture) -> None:
    assert result(capfd, *MODEL) is None


def test_engines_without_backends_are_refused_before_anything_is_loaded(capfd: Capture) -> None:
    assert run_here("bench", *MODEL, "--engine", "transformers", *trying("near")) == 2
    assert "--try-moe-backend needs --engine vllm" in capfd.readouterr().err


def test_a_nonce_that_only_one_side_could_compute_is_as_far_away_as_can_be() -> None:
    one, other = encode_vectors(np.eye(2, 12))
    spec = spec_of(64)
    assert distance(spec, [one, None, None], [one, None, other]) == Distance(2 / 3, 2.0)
    assert distance(spec, [one], [other]).largest == pytest.approx(2**0.5)


def test_an_error_without_a_log_is_its_own_cause() -> None:
    assert cause(ProoflineError("vLLM is not installed.")) == "vLLM is not installed."
