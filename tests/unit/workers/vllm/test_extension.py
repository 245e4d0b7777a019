"""What the calls of vLLM's workers answer where something goes wrong: they never raise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workers.vllm.extension import ProofExtension

Tick = Callable[..., dict[str, Any]]


def answer(tick: Tick) -> dict[str, Any]:
    """Of a worker whose proof runner does this."""
    extension = ProofExtension()
    vars(extension)["_proof_runner_instance"] = type("Runner", (), {"tick": staticmethod(tick)})
    return extension.proof_run("tick", [], [], [], False, None)


def fails(error: Exception) -> Tick:
    def tick(*_: object) -> dict[str, Any]:
        raise error

    return tick


def test_a_value() -> None:
    assert answer(lambda *_: {"ran": []}) == {"value": {"ran": []}}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried 3 GiB.\nOf 139 GiB ..."),
            "CUDA out of memory. Tried 3 GiB.",
        ),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
            "DefaultCPUAllocator: not enough memory",
        ),
        (
            RuntimeError(
                'torch_call_dispatcher( "aten::new_empty", "", stack.data(), ( ((0ULL + 2) << 56)'
                " API call failed at /opt/venv/torch/csrc/stable/ops.h, line 939"
            ),
            'torch_call_dispatcher( "aten::new_empty"',
        ),
        (MemoryError("no more"), "no more"),
        (MemoryError(), "MemoryError"),
    ],
    ids=["GPU", "CPU", "stable interface", "numpy", "Python"],
)
def test_memory_that_is_short_is_told_apart(error: Exception, said: str) -> None:
    found = answer(fails(error))
    assert found["kind"] == "memory"
    assert found["error"].startswith(said)
    assert "\n" not in found["error"]


def test_other_errors_say_what_they_are(caplog: pytest.LogCaptureFixture) -> None:
    for words in ("bad shape", 'torch_call_dispatcher( "aten::sum", "") API call failed'):
        assert answer(fails(RuntimeError(words))) == {
            "error": f"RuntimeError: {words}",
            "kind": "failed",
        }
    assert answer(fails(KeyError("layer"))) == {"error": "KeyError: 'layer'", "kind": "failed"}
    assert caplog.messages == ["a proof call failed"] * 3


def test_one_without_words_says_where() -> None:
    class Silent(RuntimeError):
        pass

    def asserts(*_: object) -> dict[str, Any]:
        assert len([]) == 1
        return {}

    found = answer(fails(Silent()))
    assert found["kind"] == "failed"
    assert found["error"].startswith("Silent: raise error (")
    assert "AssertionError: " in answer(asserts)["error"]
