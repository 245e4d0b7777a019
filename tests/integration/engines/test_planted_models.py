"""What a real engine's tests at start-up find in models that no CPU runs: their peculiarities
are planted.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.families import checks
from bench.families.make import make
from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes.decode.limits import ChainLimits
from tests.harness.marks import needs_vllm
from tests.stacks.deployments import QWEN3, Deployment
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.usefixtures("forked_engines"),
    pytest.mark.xdist_group("engines"),
    needs_vllm,
]

Plant = Callable[[str], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Has the engines of this test run a class of tests.planted.models in vLLM's workers."""
    return lambda name: monkeypatch.setattr(
        "workers.vllm.start.launch.EXTENSION", f"tests.planted.models.{name}"
    )


@pytest.fixture
def started() -> Iterator[list[Engine]]:
    """Engines that are to be closed."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


def distances(randomization: str) -> ProofSpec:
    return checks.SPEC.model_copy(
        update={"scheme": "distance", "options": {"randomization": randomization}}
    )


def test_layers_that_share_what_they_may_not_get_their_own(
    plant: Plant, started: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    plant("ReadingExtension")
    engine: Any = QWEN3.start()
    started.append(engine)
    assert engine.info.caches == "private"
    assert "layers of tiny-qwen3 cannot share a cache for proofs: each gets its own" in caplog.text
    values = compute_all(engine, checks.SPEC, checks.NONCES)
    engine.settle(private=False, replicated=True)
    shared = compute_all(engine, checks.SPEC, checks.NONCES)
    engine.settle(private=True, replicated=True)
    assert values == compute_all(engine, checks.SPEC, checks.NONCES)
    assert values != shared  # the fault is there


def test_parts_of_sums_on_tensor_parallel_ranks_are_not_divided_by_their_norms(
    plant: Plant, started: list[Engine]
) -> None:
    plant("PartialSumsExtension")
    engine = Deployment("tiny-qwen3", "float32", tensor_parallel=2).start()
    started.append(engine)
    with pytest.raises(
        SpecError, match=r"leave parts of a sum on each tensor-parallel rank.*use sign_flips"
    ):
        compute_all(engine, distances("layer_hooks"), checks.NONCES)
    assert len(compute_all(engine, distances("sign_flips"), checks.NONCES)) == len(checks.NONCES)
    assert len(compute_all(engine, checks.SPEC, checks.NONCES)) == len(checks.NONCES)


def test_steps_that_go_on_from_another_sequences_state_are_refused(
    plant: Plant, started: list[Engine], tmp_path: Path
) -> None:
    plant("ForgettingExtension")
    options = EngineOptions(
        model=str(make("qwen3-next", tmp_path, hidden_size=256)),
        served_model_name="qwen3-next",
        dtype="bfloat16",
        vllm_args=("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"),
    )
    engine = load_engine(options, 120)
    started.append(engine)
    assert "one forward does not follow the steps" in ChainLimits.of(engine.info).no_chains
    assert len(compute_all(engine, checks.SPEC, checks.NONCES)) == len(checks.NONCES)
