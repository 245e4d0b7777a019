"""Models and caches that are refused because no test of values would find what is wrong."""

from typing import Any

import pytest
import torch

from tests.harness.marks import needs_vllm

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),  # whose process has loaded vLLM
    needs_vllm,
]


def why_not(model: Any, cache_dtype: str = "auto") -> str | None:
    from workers.vllm.release import kv_caches

    return kv_caches.why_not_provable(model, cache_dtype)


@pytest.mark.parametrize("cache_dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_caches_with_scales_elsewhere_are_refused(cache_dtype: str) -> None:
    assert (
        why_not(torch.nn.Module(), cache_dtype)
        == f"--kv-cache-dtype {cache_dtype} keeps its scales in the first cache that it sees,"
        " which cannot be isolated from chat; use auto or fp8"
    )


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_others_are_not(cache_dtype: str) -> None:
    assert why_not(torch.nn.Module(), cache_dtype) is None


def test_a_wrapper_that_hands_on_chats_last_embeddings_is_refused() -> None:
    wrapper = torch.nn.Module()
    wrapper.register_module("inner", torch.nn.Module())
    wrapper.get_submodule("inner").per_layer_embeddings = torch.zeros(3)
    assert "data of chat's last tokens" in str(why_not(wrapper))
    wrapper.get_submodule("inner").per_layer_embeddings = None  # type: ignore[assignment]
    assert why_not(wrapper) is None
