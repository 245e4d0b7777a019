"""What convicted honest nodes of the network's fleet, or ended them, held against our engine."""

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import pytest

from bench.families.checks import ask, greedy
from bench.families.make import make
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from tests.harness import golden
from tests.harness.chains import assert_chains, nonces_of, spec_of
from tests.harness.chains import golden as golden_chains
from tests.harness.chat_beside import answers_alone_and_beside
from tests.harness.marks import needs_vllm
from tests.stacks.deployments import CHAINS, DECODE_BFLOAT16, Deployment
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("engines"), needs_vllm]

ARTIFACTS = ProofSpec(block_hash="trap", public_key="key", seq_len=256)
STEPS = ARTIFACTS.model_copy(update={"scheme": "decode", "options": {"max_tokens": 256}})
SHORT = ARTIFACTS.model_copy(update={"scheme": "decode", "options": {"max_tokens": 128}})
# Of a mixture of experts in bfloat16: a router that is undecided chooses otherwise.
NEAR, MOST_OF_THEM, HONEST_MARGIN = 0.05, 0.75, 0.025
# Others may be on the GPU. vLLM ends where memory is given back while it measures its own: named,
# it is not measured.
_SHARED = ("--gpu-memory-utilization", "0.15", "--kv-cache-memory-bytes", "500000000")


def test_no_sequence_lies_in_vllms_null_block() -> None:
    """Block 0 of a paged cache, which its kernels may skip: a batch's first nonce was garbage."""
    from vllm.v1.core.block_pool import BlockPool

    from workers.vllm.forward.kv_isolation import FIRST_BLOCK

    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
    assert pool.null_block.block_id == FIRST_BLOCK - 1


@pytest.mark.parametrize("vllm_engine", [CHAINS], indirect=True, ids=str, scope="session")
def test_proofs_neither_enter_the_prefix_cache_nor_drive_chat_out_of_it(vllm_engine: Any) -> None:
    """Artifacts that were left in it broke the validation of chats that came after."""
    salt = uuid.uuid4().hex
    first, again = (ask(vllm_engine, salt=salt).result(300) for _ in range(2))
    assert first.cached == 0
    assert again.cached > 0
    steps = STEPS.model_copy(update={"options": {"max_tokens": 32}})
    proofs = [(ARTIFACTS, range(24)), (steps, range(2))]  # more tokens than chat's cache has
    values = [compute_all(vllm_engine, *proof) for proof in proofs]
    after, other = ask(vllm_engine, salt=salt).result(300), ask(vllm_engine).result(120)
    assert (after.tokens, after.cached) == (again.tokens, again.cached)
    assert (other.tokens, other.cached) == (first.tokens, 0)
    assert [compute_all(vllm_engine, *proof) for proof in proofs] == values


@pytest.mark.slow
def test_async_scheduling_under_tensor_parallel_changes_neither_chains_nor_answers() -> None:
    """The fleet's nodes turn it off on vLLM 0.25.1: proofs there are scheduled like chat."""
    engine = Deployment("tiny-qwen3-moe-256", "float32", 2).start("--async-scheduling")
    try:
        case = golden_chains(engine.info.name, "decode")[0]

        def prove() -> int:
            found = compute_all(engine, spec_of(case), nonces_of(case), SlicePlan(0.0, 1))
            assert_chains(found, case)
            return len(found)

        alone, beside, n_nonces = answers_alone_and_beside(engine, prove)
        assert n_nonces > 0
        assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]
        assert len(greedy(engine)) == 8
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next"])
def test_proofs_do_not_depend_on_which_model_runner_answers_chat(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On vLLM 0.30 the second runner gave 5 mismatches of 64, the first none. CPUs have one."""
    model = str(make(family, tmp_path, hidden_size=256))
    arguments = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", *_SHARED)
    options = EngineOptions(
        model=model, dtype="bfloat16", decode_memory_gb=0.1, vllm_args=arguments
    )
    chains: list[Any] = []
    found, margins = [], []
    for runner in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        try:
            engine: Any = load_engine(options, 120)
        except ProoflineError as error:
            pytest.skip(f"runner {runner} with {family}: {error}")
        try:
            assert engine.__dict__["_llm"].vllm_config.use_v2_model_runner == bool(int(runner))
            found.append(compute_all(engine, ARTIFACTS, range(16)))
            chains = chains or compute_all(engine, SHORT, range(16))
            enforced = {str(nonce): chain for nonce, chain in enumerate(chains)}
            claimed = SHORT.model_copy(
                update={"options": {"max_tokens": 128, "enforced": enforced}}
            )
            judged: list[Any] = compute_all(engine, claimed, range(16))
            margins.append(max(margin for _n, margin in judged))
        finally:
            engine.close()
    apart = golden.l2(found[0], found[1], 12)
    print(f"{family}: {apart.mean():.4f} mean, {apart.max():.4f}, margins {margins}")
    assert (apart <= NEAR).mean() >= MOST_OF_THEM
    assert max(margins) <= HONEST_MARGIN


@pytest.mark.gpu
@pytest.mark.parametrize("n_tokens", [16_384, 32_768])
def test_forwards_of_16384_tokens_and_more_give_what_small_ones_do(n_tokens: int) -> None:
    """On Hopper some releases' experts fail or differ beyond that (vllm-project/vllm#34249)."""
    engine = DECODE_BFLOAT16[1].start(max_batch_tokens=n_tokens)
    try:
        assert engine.info.max_batch_tokens == n_tokens
        nonces = range(n_tokens // ARTIFACTS.seq_len)
        large = compute_all(engine, ARTIFACTS, nonces)
        judged = range(n_tokens // (ARTIFACTS.seq_len + 256))
        chains: list[Any] = compute_all(engine, STEPS, judged)
        claims = {str(nonce): chain for nonce, chain in zip(judged, chains, strict=True)}
        claimed = STEPS.model_copy(update={"options": {"max_tokens": 256, "enforced": claims}})
        margins: list[Any] = [one[1] for one in compute_all(engine, claimed, judged)]
        engine.info = dataclasses.replace(engine.info, max_batch_tokens=4 * ARTIFACTS.seq_len)
        apart = golden.l2(large, compute_all(engine, ARTIFACTS, nonces), 12)
    finally:
        engine.close()
    print(f"{n_tokens} tokens: {apart.mean():.4f} mean, {apart.max():.4f}, margin {max(margins)}")
    assert (apart <= NEAR).mean() >= MOST_OF_THEM
    assert max(margins) <= HONEST_MARGIN
