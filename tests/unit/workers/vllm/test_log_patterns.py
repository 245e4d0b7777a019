"""What a worker's log tells: that it is ready, or that starting another is pointless."""

import pytest

from workers.vllm.log_patterns import CORRUPTS_CHAT, DOES_NOT_FIT, READY, why_hopeless


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        "ValueError: To serve at least one request (4.00 GiB KV cache is needed), which is larger than the "
        "available KV cache memory (1.00 GiB).",
        "ValueError: Free memory on device (3/80 GiB) is less than desired GPU memory utilization (0.9).",
        "ValueError: Available memory on node 0 (21/23 GiB) on startup is less than desired CPU memory",
        "ValueError: Available memory on node 0 (21/23 GiB) on allocation is less than requested memory for kv",
    ],
)
def test_a_worker_that_never_had_enough_memory(line: str) -> None:
    assert why_hopeless(["loading", line, "Engine core initialization failed"]) == DOES_NOT_FIT


def test_the_line_that_ends_a_start() -> None:
    assert READY.search("[2026-11-20 16:35:53,031: INFO/MainProcess] gpu0-640d77@vm ready.")
    assert not READY.search("[2026-11-20 16:35:53,031: INFO/MainProcess] Connected to redis://:**@host:6379/0")


def test_a_model_whose_state_proofs_would_overwrite() -> None:
    line = "ProoflineError: layers model.layers.0 .. keep a MambaSpec state, which cannot be isolated from chat; ..."
    assert why_hopeless(["loading", line]) == CORRUPTS_CHAT


def test_another_cause_may_pass() -> None:
    assert why_hopeless(["ConnectionError: Redis is away"]) is None
