"""What a worker's log tells: that it is ready, or that starting another is pointless."""

import pytest

from workers.vllm.start.log_patterns import (
    DOES_NOT_FIT,
    LEAVES_OUT,
    LEFT_OUT,
    NEEDS_TRUST,
    NOT_HERE,
    NOT_ON_HUB,
    READY,
    TELLING,
    why_hopeless,
)


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        (
            'RuntimeError: torch_call_dispatcher( "aten::new_empty", "", stack.data(), ( ((0ULL +'
            " 2) << 56))) API call failed at torch/csrc/stable/ops.h, line 939"
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing"
            " `gpu_memory_utilization`."
        ),
        (
            "ValueError: To serve at least one request (4.00 GiB KV cache is needed), which is"
            " larger than the available KV cache memory (1.00 GiB)."
        ),
        (
            "ValueError: Free memory on device (3/80 GiB) is less than desired GPU memory"
            " utilization (0.9)."
        ),
        (
            "ValueError: Available memory on node 0 (21/23 GiB) on startup is less than desired CPU"
            " memory"
        ),
        (
            "ValueError: Available memory on node 0 (21/23 GiB) on allocation is less than"
            " requested memory for kv"
        ),
    ],
)
def test_a_worker_that_never_had_enough_memory(line: str) -> None:
    assert why_hopeless(["loading", line, "Engine core initialization failed"]) == DOES_NOT_FIT


def test_what_only_points_at_a_cause_tells_nothing() -> None:
    cause = "(EngineCore pid=9) ERROR [core.py:1510] ValueError: VLLM_PORT 'tcp://x' is a URI"
    found = TELLING.search(cause)
    assert found is not None
    assert cause[found.start() :] == "ValueError: VLLM_PORT 'tcp://x' is a URI"
    pointer = "error: vLLM cannot start: Engine core initialization failed. See root cause above."
    assert TELLING.search(pointer) is None


def test_the_line_that_ends_a_start() -> None:
    assert READY.search("[2026-11-20 16:35:53,031: INFO/MainProcess] gpu0-640d77@vm ready.")
    assert not READY.search(
        "[2026-11-20 16:35:53,031: INFO/MainProcess] Connected to redis://:**@host:6379/0"
    )


@pytest.mark.parametrize(
    "line",
    [
        (
            "Repository Not Found for url:"
            " https://huggingface.co/api/models/acme/none/tree/main?recursive=true."
        ),
        (
            "Error retrieving file list: Client error '401 Unauthorized' for url"
            " 'https://hub/api/models/acme/none/tree/main'"
        ),
        (
            "OSError: acme/none is not a local folder and is not a valid model identifier listed on"
            " the hub"
        ),
    ],
)
def test_a_name_that_the_hub_does_not_know(line: str) -> None:
    last = (
        "error: vLLM cannot start with the model acme/none: Invalid repository ID or local"
        " directory specified"
    )
    assert why_hopeless(["loading", line, last]) == NOT_ON_HUB


def test_a_model_that_is_not_here_and_may_not_be_fetched() -> None:
    line = (
        "error: vLLM cannot start with the model acme/none: Cannot find an appropriate cached"
        " snapshot folder for the specified revision on the local disk and outgoing traffic has"
        " been disabled."
    )
    assert why_hopeless(["loading", line]) == NOT_HERE


@pytest.mark.parametrize(
    "line",
    [
        "ConnectionError: Redis is away",
        (
            "'[Errno 111] Connection refused' thrown while requesting GET"
            " https://huggingface.co/api/models/a/b/tree/main"
        ),
        (
            "error: vLLM cannot start with the model a/b: Invalid repository ID or local directory"
            " specified: 'a/b'."
        ),
    ],
)
def test_another_cause_may_pass(line: str) -> None:
    assert why_hopeless([line]) is None


@pytest.mark.parametrize(
    "line",
    [
        (
            "RuntimeError: Failed to load the model config. If the model is a custom model not yet"
            " available in the HuggingFace transformers library, consider setting"
            " `trust_remote_code=True` in LLM or using the `--trust-remote-code` flag in the CLI."
        ),
        (
            "ValueError: The repository acme/model contains custom code which must be executed to"
            " correctly load the model. Please pass the argument `trust_remote_code=True` to allow"
            " custom code to be run."
        ),
    ],
)
def test_a_model_that_needs_code_of_its_repository(line: str) -> None:
    assert why_hopeless(["loading", line]) == NEEDS_TRUST


def test_an_argument_that_an_engine_goes_without() -> None:
    line = LEAVES_OUT % ("kda-prefill-backend", "0.25.1")
    found = LEFT_OUT.search(f"[2026-11-20 16:35:53,031: WARNING/MainProcess] {line}")
    assert found is not None
    assert found[1] == "--kda-prefill-backend: vLLM 0.25.1 does not know it"
