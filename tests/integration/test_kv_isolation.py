"""Which models' caches can be isolated, and what a scratch cache does to the layers; on vLLM's own cache kinds."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.marks import needs_vllm

pytestmark = [
    pytest.mark.integration,
    needs_vllm,
]

N_BLOCKS, BLOCK, HEADS, SIZE = 11, 16, 2, 32


def plain_spec() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)


def group_of(spec: Any, *names: str) -> Any:
    """As vLLM's model runner keeps it, with a backend whose layers bind the block dimension first."""
    return SimpleNamespace(
        kv_cache_spec=spec,
        layer_names=list(names),
        backend=SimpleNamespace(__name__="FAKE"),
        get_metadata_builder=lambda _: SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK)),
    )


def layer_with(cache: Any) -> Any:
    return SimpleNamespace(kv_cache=cache)


def cache_of(n_blocks: int = N_BLOCKS) -> Any:
    import torch

    return torch.full((n_blocks, 2, BLOCK, HEADS, SIZE), 7.0)


def scratch(layers: dict[str, Any], *groups: Any) -> Any:
    from workers.vllm.kv_isolation import ScratchCaches

    return ScratchCaches(SimpleNamespace(attn_groups=[list(groups)]), layers)


class TestRefused:
    def refusal(self, layers: dict[str, Any], *groups: Any) -> str:
        from workers.vllm.kv_isolation import NotIsolatableError

        with pytest.raises(NotIsolatableError) as refused:
            scratch(layers, *groups)
        return str(refused.value)

    def test_state_space_layers(self) -> None:
        import torch
        from vllm.v1.kv_cache_interface import MambaSpec

        mamba = MambaSpec(block_size=BLOCK, shapes=((4, 8),), dtypes=(torch.float32,))
        layers = {"attn": layer_with(cache_of()), "mamba": layer_with([torch.zeros(3), torch.zeros(3)])}
        message = self.refusal(layers, group_of(plain_spec(), "attn"), group_of(mamba, "mamba"))
        assert "layers mamba" in message
        assert "MambaSpec" in message
        assert "cannot be isolated from chat" in message

    @pytest.mark.parametrize("kind", ["CrossAttentionSpec", "CircularBufferSpec", "SinkFullAttentionSpec"])
    def test_attention_that_keeps_more_than_the_tokens_of_its_sequence(self, kind: str) -> None:
        spec: Any = object.__new__(type(kind, (type(plain_spec()),), {}))
        assert kind in self.refusal({"attn": layer_with(cache_of())}, group_of(spec, "attn"))

    def test_a_group_of_mixed_kinds_one_of_which_keeps_a_state(self) -> None:
        import torch
        from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

        mamba = MambaSpec(block_size=BLOCK, shapes=((4, 8),), dtypes=(torch.float32,))
        mixed = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": plain_spec(), "b": mamba})
        layers = {"a": layer_with(cache_of()), "b": layer_with(cache_of())}
        assert "UniformTypeKVCacheSpecs" in self.refusal(layers, group_of(mixed, "a", "b"))

    def test_a_cache_that_is_no_single_tensor(self) -> None:
        message = self.refusal({"attn": layer_with([cache_of()])}, group_of(plain_spec(), "attn"))
        assert "binds a list" in message

    def test_a_layer_whose_cache_no_group_knows(self) -> None:
        layers = {"attn": layer_with(cache_of()), "stray": layer_with(cache_of())}
        assert "layer stray" in self.refusal(layers, group_of(plain_spec(), "attn"))


class TestBound:
    def test_layers_without_a_cache_do_not_matter(self) -> None:
        import torch

        layers = {"attn": layer_with(cache_of()), "moe": SimpleNamespace(), "empty": layer_with(torch.tensor([]))}
        assert len(scratch(layers, group_of(plain_spec(), "attn")).groups) == 1

    def test_batches_write_into_the_scratch_cache_and_chat_finds_its_own_again(self) -> None:
        live = [cache_of(), cache_of()]
        layers = {"0": layer_with(live[0]), "1": layer_with(live[1])}
        caches = scratch(layers, group_of(plain_spec(), "0", "1"))
        with caches.bound(n_sequences=3, seq_len=BLOCK + 1):
            assert layers["0"].kv_cache is layers["1"].kv_cache  # one for all layers
            assert layers["0"].kv_cache.shape == (1 + 3 * 2, 2, BLOCK, HEADS, SIZE)
            layers["0"].kv_cache.fill_(-1)
        assert layers["0"].kv_cache is live[0]
        assert layers["1"].kv_cache is live[1]
        assert all(bool((cache == 7).all()) for cache in live)

    def test_chats_caches_are_back_after_a_batch_that_failed(self) -> None:
        live = cache_of()
        layers = {"0": layer_with(live)}
        caches = scratch(layers, group_of(plain_spec(), "0"))
        with pytest.raises(ZeroDivisionError), caches.bound(1, BLOCK):
            raise ZeroDivisionError
        assert layers["0"].kv_cache is live

    def test_the_scratch_cache_is_kept_and_only_grows(self) -> None:
        layers = {"0": layer_with(cache_of())}
        caches = scratch(layers, group_of(plain_spec(), "0"))
        sizes = []
        for n_sequences in (2, 1, 5, 3):
            with caches.bound(n_sequences, BLOCK):
                sizes.append(layers["0"].kv_cache.shape[0])
        assert sizes == [3, 3, 6, 6]

    def test_memory_order_is_that_of_chats_cache(self) -> None:
        live = cache_of().permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
        layers = {"0": layer_with(live)}
        caches = scratch(layers, group_of(plain_spec(), "0"))
        with caches.bound(N_BLOCKS - 1, BLOCK):
            assert layers["0"].kv_cache.shape == live.shape
            assert layers["0"].kv_cache.stride() == live.stride()
