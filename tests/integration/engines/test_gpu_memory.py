"""A GPU with less memory than a micro-batch wants: the budget is halved, and nothing else
changes.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.families import checks
from poc_core.records import ProofSpec
from tests.harness import golden
from tests.harness.marks import needs_vllm
from tests.stacks.deployments import Deployment
from workers.pipeline import compute_all
from workers.vllm.self_tests import check_memory

pytestmark = [pytest.mark.integration, pytest.mark.gpu, needs_vllm]

# Large, so that activations are what the memory is for: some 100 MB.
ASKED = 65_536
SPEC = ProofSpec(block_hash="block", public_key="key", seq_len=1024)
# Two micro-batches; four once the budget is halved.
NONCES = range(2 * ASKED // SPEC.seq_len)


class ShortOfMemory:
    """An engine whose device can be made to have less memory."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def taken(self, nonces: range) -> int:
        """Bytes that these take beside weights and chat's cache."""
        self._forget_scratch()
        self.engine._rpc("proof_memory_begin", (), 60)
        compute_all(self.engine, SPEC, nonces)
        return int(self.engine._rpc("proof_memory_taken", (), 60)[0])

    def limit(self, spare: int | None) -> None:
        """Leaves so many bytes beside weights and chat's cache; None: all that the device has."""
        self._forget_scratch()
        self.engine._rpc("proof_memory_limit", (spare,), 60)

    def ask(self, n_tokens: int) -> None:
        self.engine.info = dataclasses.replace(self.engine.info, max_batch_tokens=n_tokens)

    def _forget_scratch(self) -> None:
        self.engine.settle(private=self.engine.info.caches == "private", replicated=True)


@pytest.fixture(scope="module")
def short() -> Iterator[ShortOfMemory]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "workers.vllm.start.launch.EXTENSION", "tests.planted.memory.LimitedExtension"
        )
        engine = Deployment("tiny-qwen3", "bfloat16").start(max_batch_tokens=ASKED)
    yield ShortOfMemory(engine)
    engine.close()


@pytest.fixture
def half(short: ShortOfMemory) -> Iterator[int]:
    """Within: half a micro-batch fits and a whole one does not. How much that leaves, in bytes."""
    assert short.engine.info.max_batch_tokens == ASKED, (
        "the device itself has too little memory for this test"
    )
    n = ASKED // SPEC.seq_len
    spare = (short.taken(range(n)) + short.taken(range(n // 2))) // 2
    short.limit(spare)
    yield spare
    short.limit(None)
    short.ask(ASKED)


@pytest.mark.usefixtures("half")
def test_the_budget_is_halved_at_start_where_a_full_batch_does_not_fit(
    short: ShortOfMemory,
) -> None:
    check_memory(short.engine, whole=True)
    assert short.engine.info.max_batch_tokens == ASKED // 2


def test_memory_that_gets_short_later_halves_the_budget_and_runs_the_batch_again(
    short: ShortOfMemory, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    expected, answer = compute_all(short.engine, SPEC, NONCES), checks.greedy(short.engine)
    request.getfixturevalue("half")
    found = compute_all(short.engine, SPEC, NONCES)
    assert short.engine.info.max_batch_tokens == ASKED // 2
    assert f"too little memory for {ASKED} tokens at a time" in caplog.text
    errors = golden.l2(found, expected, 12)
    assert np.median(errors) <= 0.005, "as far as rounding in other batches goes"
    assert errors.max() <= 0.02
    assert compute_all(short.engine, SPEC, NONCES) == found, "it goes on, bit for bit"
    assert checks.greedy(short.engine) == answer
