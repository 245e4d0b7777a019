"""What decode proofs keep from step to step: keys, values and states in memory of their own, on
vLLM's own cache kinds.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.decode.limits import ChainLimits
from tests.harness.marks import needs_vllm

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),  # whose process has loaded vLLM
    needs_vllm,
]

N_BLOCKS, BLOCK, HEADS, SIZE = 11, 16, 2, 32
# Bytes of a layer's keys and values of a token, and of a sequence's state.
TOKEN, STATE = 2 * HEADS * SIZE * 4, 4 * 8 * 4 + 2 * 2


class GDNAttentionMetadataBuilder(SimpleNamespace):
    """vLLM's, by name."""


def layers_and_groups(builder: type = GDNAttentionMetadataBuilder) -> tuple[dict[str, Any], Any]:
    """A layer of attention, and two whose states are carried on."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    tokens = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32
    )
    states = MambaSpec(
        block_size=BLOCK, shapes=((4, 8), (2,)), dtypes=(torch.float32, torch.bfloat16)
    )

    def group(spec: Any, kind: type, *names: str) -> Any:
        return SimpleNamespace(
            kv_cache_spec=spec,
            layer_names=list(names),
            backend=SimpleNamespace(__name__="FAKE"),
            get_metadata_builder=lambda _: kind(kv_cache_spec=spec),
        )

    def state() -> Any:
        return torch.full((N_BLOCKS, 4, 8), 7.0), torch.full((N_BLOCKS, 2), 7.0).bfloat16()

    attention = torch.full((N_BLOCKS, 2, BLOCK, HEADS, SIZE), 7.0)
    layers = {
        name: SimpleNamespace(kv_cache=cache, kv_sharing_target_layer_name=None)
        for name, cache in {"attn": attention, "a": state(), "b": state()}.items()
    }
    return layers, [group(tokens, SimpleNamespace, "attn"), group(states, builder, "a", "b")]


def kept_of(builder: type = GDNAttentionMetadataBuilder, on_gpu: bool = False) -> Any:
    """`on_gpu`: with memory that is reserved once, as there."""
    from workers.vllm.forward.kv_isolation import ScratchCaches
    from workers.vllm.forward.step_caches import StepCaches

    layers, groups = layers_and_groups(builder)
    scratch = ScratchCaches(SimpleNamespace(attn_groups=[groups]), layers)
    kept = StepCaches(scratch, torch.device("cpu"))
    kept.on_gpu = on_gpu
    return kept


def limits_of(kept: Any, n_tokens: int) -> ChainLimits:
    return ChainLimits(kept_tokens=n_tokens, kept_block=kept.block, kept_state=kept.state)


def spec_of(seq_len: int, max_tokens: int) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash="b",
        public_key="k",
        seq_len=seq_len,
        options={"max_tokens": max_tokens},
    )


class TestStates:
    def test_each_sequence_has_one_of_each_layer_beside_its_tokens(self) -> None:
        kept = kept_of()
        kept.reserve(1, 1024)
        place = kept.take(3, BLOCK + 1)
        assert place.shape == (3, 6 * BLOCK)
        assert place.caches["attn"][0].shape[0] == 1 + 6
        assert [cache.shape[0] for cache in place.caches["b"]] == [1 + 3, 1 + 3]
        assert place.caches["a"][0].data_ptr() != place.caches["b"][0].data_ptr()

    def test_they_take_memory_by_the_nonce_not_by_the_token(self) -> None:
        kept = kept_of()
        assert kept.state == -(-2 * STATE // TOKEN)
        limits = limits_of(kept, 10 * (2 * BLOCK + kept.state))
        info = ModelInfo("m", 256, 4, 1024, 8192, "float32")
        assert limits.max_batch(spec_of(BLOCK, 1), info) == 10
        assert limits.max_batch(spec_of(2 * BLOCK, 1), info) < 10

    @pytest.mark.parametrize("on_gpu", [False, True], ids=["grown", "reserved"])
    def test_new_sequences_begin_with_zeros_whatever_was_kept(self, on_gpu: bool) -> None:
        kept = kept_of(on_gpu=on_gpu)
        kept.reserve(1, kept.room(1, 1 << 20))
        for n in (3, 2, 5, 3):
            place = kept.take(n, BLOCK + 1)
            states = [cache for name in "ab" for cache in place.caches[name]]
            assert all(not state[: 1 + n].any() for state in states)
            # NaN at positions that are still to come would spoil the sums of attention.
            assert not place.caches["attn"][0][: 1 + 2 * n].any()
            for cache in (*states, *place.caches["attn"]):
                cache.fill_(torch.nan)
            kept.free(place)

    @pytest.mark.parametrize("kind", ["CircularBufferSpec", "KpoolTailSpec"])
    def test_rings_of_keys_that_are_not_yet_compressed_are_states(self, kind: str) -> None:
        """GLM-5.3-Flash's by the names of vLLM 0.32 and 0.30: one block a sequence, carried on."""
        from workers.vllm.release import kv_caches

        group = SimpleNamespace(kv_cache_spec=type(kind, (), {})())
        assert kv_caches.cache_kind(group) == "state"
        assert kv_caches.carries_state(group)

    def test_of_a_kind_that_this_node_does_not_know_are_refused(self) -> None:
        class Mamba2AttentionMetadataBuilder(SimpleNamespace):
            pass

        assert kept_of().why_not() is None
        refusal = kept_of(Mamba2AttentionMetadataBuilder).why_not()
        assert "Mamba2AttentionMetadataBuilder" in refusal
        assert refusal.endswith("is not known to this node.")


class TestMemory:
    def test_what_the_limits_admit_always_fits_where_it_is_reserved(self) -> None:
        """Of any shape: an assertion of the place's own tells what does not."""
        chance = random.Random(0)
        info = ModelInfo("m", 256, 4, 4096, 8192, "float32", max_sequences=4096)
        for _ in range(200):
            kept = kept_of(on_gpu=True)
            limit = chance.randrange(30_000, 3_000_000)
            n_tokens = kept.room(1, limit)
            kept.reserve(1, n_tokens)
            assert len(kept.places[0].memory) <= limit
            spec, limits = spec_of(chance.randrange(1, 200), 7), limits_of(kept, n_tokens)
            if limits.keeps(spec):
                n = limits.max_batch(spec, info)
                assert len(kept.take(n, spec.seq_len + 7).caches) == 3

    def test_a_shape_that_comes_again_lies_where_it_lay(self) -> None:
        """Which is where a recorded step of it reads and writes."""
        kept = kept_of(on_gpu=True)
        kept.reserve(1, kept.room(1, 1 << 20))
        places: dict[tuple[int, int], list[int]] = {}
        for n, positions in ((3, 20), (40, 33), (3, 200), (40, 33), (3, 20)):
            place = kept.take(n, positions)
            caches = [
                cache.data_ptr() for name in ("attn", "a", "b") for cache in place.caches[name]
            ]
            assert places.setdefault(place.shape, caches) == caches
            kept.free(place)
        assert len(places) >= 2

    def test_chats_memory_that_several_layers_lie_in_counts_once(self) -> None:
        from workers.vllm.forward.kv_isolation import ScratchCaches

        layers, groups = layers_and_groups()
        shared = torch.zeros(N_BLOCKS, 4, 8)
        for name in "ab":
            layers[name].kv_cache = (shared, shared.view(-1)[: 2 * N_BLOCKS].view(N_BLOCKS, 2))
        scratch = ScratchCaches(SimpleNamespace(attn_groups=[groups]), layers)
        assert scratch.chats_bytes() == N_BLOCKS * (BLOCK * TOKEN + 4 * 8 * 4)


class TestTables:
    def test_a_checkpoint_of_the_prefill_is_not_left_in_its_state(self) -> None:
        from workers.vllm.forward.layout import BlockTables
        from workers.vllm.release import kv_caches

        kept = kept_of()
        groups = kept.groups
        state = groups[1].group
        state.kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_prefill_checkpoint_blocks=1)
        assert [kv_caches.checkpoints(state, n) for n in (1, 16, 17, 33)] == [0, 0, 1, 2]
        tables = BlockTables(groups, 2, BLOCK + 1, 3 * BLOCK, torch.device("cpu")).tables
        assert tables[1].tolist() == [[0, 1, 1], [0, 2, 2]]

    def test_where_vllm_looks_for_a_state_there_is_one(self) -> None:
        """In the column of the last position, and in those behind it that speculation takes."""
        from workers.vllm.release import kv_caches

        for speculative in (0, 2):
            spec = SimpleNamespace(block_size=BLOCK, num_speculative_blocks=speculative)
            group = SimpleNamespace(kv_cache_spec=spec)
            for length in (1, BLOCK, BLOCK + 1, 5 * BLOCK):
                width = kv_caches.state_table_width(group, length)
                assert (length - 1) // BLOCK + speculative < width

    def test_a_builder_that_was_told_chats_states_takes_the_proofs(self) -> None:
        from workers.vllm.release import kv_caches

        class Told(SimpleNamespace):
            def build(self, _prefix: int, common: Any) -> Any:
                return self.mamba_aligned_state_indices[: common.num_reqs].tolist()

        builder = Told(
            mamba_aligned_state_indices="chat's", kv_cache_spec=SimpleNamespace(block_size=BLOCK)
        )
        group = SimpleNamespace(get_metadata_builder=lambda _: builder)
        fields = metadata_fields(3)
        assert kv_caches.build_attention_metadata(group, **fields) == [[1], [2], [3]]
        assert builder.mamba_aligned_state_indices == "chat's"

    def test_a_ring_that_a_part_of_the_prefill_left_is_where_steps_look_for_it(self) -> None:
        """GLM-5.3-Flash's, of prompts whose last keys are not yet compressed."""
        from workers.vllm.forward.layout import BlockTables, Layout

        indexer = pytest.importorskip("vllm.v1.attention.backends.mla.indexer")
        slots_of = getattr(indexer, "compute_kpool_tail_slot_mapping", None)
        if slots_of is None:
            pytest.skip("this release has no such ring")
        ring, length, n = 4, 10, 3  # two keys are left over
        tables = BlockTables(kept_of().groups, n, length, 2 * length, torch.device("cpu"))

        def slots(part: BlockTables, positions: range) -> Any:
            fields: dict[str, Any] = Layout(part, positions)._fields
            found = slots_of(
                torch.zeros(fields["num_actual_tokens"], dtype=torch.int64),
                part.tables[1],
                fields["query_start_loc"],
                fields["positions"],
                fields["num_actual_tokens"],
                fields["num_reqs"],
                ring,
            )
            return found.view(part.n, len(positions)).tolist()

        parts = (range(2), range(2, n))
        left = [row for part in parts for row in slots(tables.part(part), range(length))]
        assert len({slot for row in left for slot in row[-ring:]}) == n * ring
        assert min(slot for row in left for slot in row) >= ring, "vLLM's null block"
        for position in range(length, length + ring):
            step = slots(tables, range(position, position + 1))
            expected = [[row[0] // ring * ring + position % ring] for row in left]
            assert step == expected

    def test_a_builder_that_makes_large_blocks_of_small_ones_gets_the_small_ones(self) -> None:
        """vLLM 0.30's for GLM-5.3-Flash's indexer: its cache has larger blocks than its table."""
        from workers.vllm.release import kv_caches

        class Merging(SimpleNamespace):
            def build(self, _prefix: int, common: Any) -> Any:
                factor = self.kv_cache_spec.block_size // self.kernel_block_size
                return (common.block_table_tensor[:, ::factor] // factor).tolist()

        spec = SimpleNamespace(block_size=4 * BLOCK)
        builder = Merging(kernel_block_size=BLOCK, kv_cache_spec=spec)
        group = SimpleNamespace(get_metadata_builder=lambda _: builder)
        fields = metadata_fields(3)
        fields["block_table_tensor"] = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
        found = kv_caches.build_attention_metadata(group, **fields)
        assert found == fields["block_table_tensor"].tolist()


def metadata_fields(n: int) -> dict[str, Any]:
    """Of a step of `n` sequences, each with a block of its own."""
    from workers.vllm.forward.layout import BlockTables, Layout

    kept = kept_of()
    tables = BlockTables(kept.groups, n, BLOCK, 2 * BLOCK, torch.device("cpu"))
    layout = Layout(tables, range(BLOCK, BLOCK + 1))
    return {
        **layout._fields,
        "block_table_tensor": tables.tables[1],
        "slot_mapping": torch.zeros(n, dtype=torch.int64),
    }
