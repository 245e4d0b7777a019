"""Which models' caches can be isolated, and what a scratch cache does to the layers; on vLLM's
own cache kinds.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poc_core.errors import ProoflineError
from poc_core.records import ModelInfo
from tests.harness.marks import needs_vllm
from workers.engines.base import WholeBatchEngine
from workers.vllm.self_tests import check_isolation
from workers.vllm.start.log_patterns import CORRUPTS_CHAT, why_hopeless

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),  # whose process has loaded vLLM
    needs_vllm,
]

N_BLOCKS, BLOCK, HEADS, SIZE = 11, 16, 2, 32


def plain_spec() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32
    )


def group_of(spec: Any, *names: str) -> Any:
    """As vLLM's model runner keeps it, with a backend whose layers bind the block dimension
    first.
    """
    return SimpleNamespace(
        kv_cache_spec=spec,
        layer_names=list(names),
        backend=SimpleNamespace(__name__="FAKE"),
        get_metadata_builder=lambda _: SimpleNamespace(
            kv_cache_spec=SimpleNamespace(block_size=BLOCK)
        ),
    )


def layer_with(cache: Any, reads: str | None = None) -> Any:
    return SimpleNamespace(kv_cache=cache, kv_sharing_target_layer_name=reads)


def state_spec() -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=BLOCK, shapes=((4, 8), (2,)), dtypes=(torch.float32, torch.bfloat16)
    )


def states_of(n_blocks: int = N_BLOCKS) -> Any:
    return torch.full((n_blocks, 4, 8), 7.0), torch.full((n_blocks, 2), 7.0, dtype=torch.bfloat16)


def cache_of(n_blocks: int = N_BLOCKS) -> Any:
    return torch.full((n_blocks, 2, BLOCK, HEADS, SIZE), 7.0)


def scratch(layers: dict[str, Any], *groups: Any) -> Any:
    from workers.vllm.forward.kv_isolation import ScratchCaches

    return ScratchCaches(SimpleNamespace(attn_groups=[list(groups)]), layers)


class TestRefused:
    def refusal(self, layers: dict[str, Any], *groups: Any) -> str:
        from workers.vllm.forward.kv_isolation import NotIsolatableError

        with pytest.raises(NotIsolatableError) as refused:
            scratch(layers, *groups)
        assert why_hopeless(["loading", f"ProoflineError: {refused.value}"]) == CORRUPTS_CHAT
        return str(refused.value)

    @pytest.mark.parametrize(
        "kind", ["CrossAttentionSpec", "EncoderOnlyAttentionSpec", "SinkFullAttentionSpec"]
    )
    def test_attention_that_keeps_more_than_the_tokens_of_its_sequence(self, kind: str) -> None:
        spec: Any = object.__new__(type(kind, (type(plain_spec()),), {}))
        assert kind in self.refusal({"attn": layer_with(cache_of())}, group_of(spec, "attn"))

    def test_a_group_of_mixed_kinds_one_of_which_keeps_a_state(self) -> None:
        from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

        specs = {"a": plain_spec(), "b": state_spec()}
        mixed = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
        layers = {name: layer_with(cache_of()) for name in specs}
        assert "UniformTypeKVCacheSpecs" in self.refusal(layers, group_of(mixed, "a", "b"))

    def test_a_cache_that_is_no_single_tensor(self) -> None:
        for cache, said in (([cache_of(), cache_of()], "binds 2 tensors"), ({}, "binds a dict")):
            layers = {"attn": layer_with(cache)}
            assert said in self.refusal(layers, group_of(plain_spec(), "attn"))

    def test_a_layer_whose_cache_no_group_knows(self) -> None:
        for stray in (cache_of(), states_of()):
            layers = {"attn": layer_with(cache_of()), "stray": layer_with(stray)}
            assert "layer stray" in self.refusal(layers, group_of(plain_spec(), "attn"))


class TestBound:
    def test_layers_without_a_cache_do_not_matter(self) -> None:
        layers = {"attn": layer_with(cache_of()), "empty": layer_with(torch.tensor([]))}
        layers["moe"] = SimpleNamespace()
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

    def test_no_nan_of_another_batch_is_left_behind_the_end_of_a_sequence(self) -> None:
        """Attention multiplies masked positions by 0, and NaN stays NaN."""
        layers = {name: layer_with(cache_of()) for name in "01"}
        caches = scratch(layers, group_of(plain_spec(), "0", "1"))
        for n_sequences, seq_len in ((3, BLOCK), (3, BLOCK - 1), (2, 2 * BLOCK + 1)):
            with caches.bound(n_sequences, seq_len):
                used = layers["1"].kv_cache[: 1 + n_sequences * -(-seq_len // BLOCK)]
                assert not used.any()
                used.fill_(torch.nan)
            with caches.bound(n_sequences, seq_len):  # the next slice
                assert used.isnan().all()

    def test_memory_order_is_that_of_chats_cache(self) -> None:
        live = cache_of().permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
        layers = {"0": layer_with(live)}
        caches = scratch(layers, group_of(plain_spec(), "0"))
        with caches.bound(N_BLOCKS - 1, BLOCK):
            assert layers["0"].kv_cache.shape == live.shape
            assert layers["0"].kv_cache.stride() == live.stride()


class TestShared:
    """Which layers may have one scratch cache, and which must not."""

    @staticmethod
    def bound(layers: dict[str, Any], *groups: Any, private: bool = False) -> dict[str, Any]:
        caches = scratch(layers, *groups)
        caches.private = private
        with caches.bound(2, BLOCK):
            return {name: layer.kv_cache for name, layer in layers.items()}

    def test_two_kinds_of_caches_of_one_shape_do_not(self) -> None:
        """As DeepSeek-V4's sliding window and its compressed cache."""
        names = [f"{layer}.{kind}" for layer in "01" for kind in ("window", "compressed")]
        groups = [group_of(plain_spec(), *names[kind::2]) for kind in (0, 1)]
        found = self.bound({name: layer_with(cache_of()) for name in names}, *groups)
        assert found["0.window"] is found["1.window"]
        assert found["0.compressed"] is found["1.compressed"]
        assert found["0.window"].data_ptr() != found["0.compressed"].data_ptr()

    def test_two_caches_of_one_decoder_layer_do_not(self) -> None:
        names = [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("attn", "indexer")]
        found = self.bound(
            {name: layer_with(cache_of()) for name in names}, group_of(plain_spec(), *names)
        )
        assert found[names[0]] is found[names[2]]
        assert found[names[1]] is found[names[3]]
        assert found[names[0]] is not found[names[1]]

    @pytest.mark.parametrize("private", [False, True])
    def test_a_layer_that_reads_anothers_cache_finds_it_as_that_left_it(
        self, private: bool
    ) -> None:
        """As the upper layers of Gemma 3n."""
        layers = {name: layer_with(cache_of()) for name in "012"}
        layers |= {name: layer_with(layers["1"].kv_cache, reads="1") for name in "34"}
        found = self.bound(layers, group_of(plain_spec(), *layers), private=private)
        assert found["3"] is found["1"]
        assert found["4"] is found["1"]
        assert found["1"] is not found["0"]
        assert found["1"] is not found["2"]
        assert (found["0"] is found["2"]) is not private

    def test_in_private_none_do(self) -> None:
        layers = {str(layer): layer_with(cache_of()) for layer in range(4)}
        found = self.bound(layers, group_of(plain_spec(), *layers), private=True)
        assert len({cache.data_ptr() for cache in found.values()}) == 4


class TestState:
    def test_each_sequence_gets_one_block_of_zeros_whatever_ran_before(self) -> None:
        live = [states_of(), states_of()]
        layers = {"0": layer_with(live[0]), "1": layer_with(live[1])}
        caches = scratch(layers, group_of(state_spec(), *layers))
        for _ in range(2):
            with caches.bound(n_sequences=3, seq_len=10 * BLOCK):
                bound = layers["0"].kv_cache
                assert isinstance(bound, tuple)
                assert [tuple(state.shape) for state in bound] == [(4, 4, 8), (4, 2)]
                assert [state.dtype for state in bound] == [state.dtype for state in live[0]]
                assert all(bool((state == 0).all()) for state in bound)
                for state in bound:
                    state.fill_(-1)
        assert all(layer.kv_cache is own for layer, own in zip(layers.values(), live, strict=True))
        assert all(bool((state == 7).all()) for states in live for state in states)

    def test_its_sequences_have_a_block_each_and_its_tokens_no_slots(self) -> None:
        from workers.vllm.forward.layout import BlockTables, Layout

        layers = {"attn": layer_with(cache_of()), "state": layer_with(states_of())}
        caches = scratch(layers, group_of(plain_spec(), "attn"), group_of(state_spec(), "state"))
        tables = BlockTables(caches.groups, 3, BLOCK, 2 * BLOCK + 1, torch.device("cpu"))
        tokens, states = tables.tables
        assert tokens.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        assert states.tolist() == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]
        layout = Layout(tables, range(2 * BLOCK + 1))
        assert not layout.slot_mapping["state"].any()
        assert layout.slot_mapping["attn"][:2].tolist() == [BLOCK, BLOCK + 1]

    def test_a_step_has_the_slots_behind_what_came_before(self) -> None:
        """Of each of the sequences, also where only some of them are computed at a time."""
        from workers.vllm.forward.layout import BlockTables, Layout

        caches = scratch({"attn": layer_with(cache_of())}, group_of(plain_spec(), "attn"))
        tables = BlockTables(caches.groups, 3, 2, BLOCK + 2, torch.device("cpu"))
        step = Layout(tables, range(BLOCK, BLOCK + 1)).slot_mapping["attn"]
        assert step.tolist() == [2 * BLOCK, 4 * BLOCK, 6 * BLOCK]
        some = Layout(tables.part(range(1, 3)), range(2))
        slots = [3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 1]
        assert some.slot_mapping["attn"].tolist() == slots
        assert (some.n_tokens, some.positions.tolist()) == (4, [0, 1, 0, 1])


def test_large_blocks_do_not_shrink_batches() -> None:
    """GLM's of 2,304 tokens: a sequence of 1,024 takes one, and 32 of them are still 32,768
    tokens.
    """
    from workers.vllm.forward.kv_isolation import ScratchGroup

    group = ScratchGroup(None, 2304, ("0",), 0, False)
    n = ModelInfo("glm", 4096, 45, 4096, 32_768, "bfloat16").max_batch(1024)
    assert (n, group.n_blocks(n, 1024)) == (32, 1 + 32)


class TestPages:
    """How far apart the blocks of a scratch cache lie."""

    @staticmethod
    def like(live: Any, page: int, blocks: int = 0) -> Any:
        from workers.vllm.forward.kv_isolation import zeros_like

        return zeros_like(live, blocks, 5, page)

    def test_padding_that_chats_blocks_have_stays(self) -> None:
        live = torch.zeros(N_BLOCKS, 1728, dtype=torch.uint8)[:, :1584].view(N_BLOCKS, 12, 132)
        found = self.like(live, page=1728)
        assert (found.shape, found.stride()) == ((5, 12, 132), (1728, 132, 1))
        assert bool((found == 0).all())

    def test_pages_of_other_layers_in_between_do_not(self) -> None:
        live = torch.zeros(N_BLOCKS, 20, 64)[:, 3]
        assert self.like(live, page=64).stride() == (64, 1)
        assert self.like(live, page=72).stride() == (72, 1)

    def test_chats_dense_blocks_stay_dense(self) -> None:
        assert self.like(torch.zeros(N_BLOCKS, 1, 64), page=72).stride(0) == 64

    def test_blocks_that_do_not_come_first_in_memory_keep_their_place(self) -> None:
        live = torch.zeros(2, N_BLOCKS, BLOCK)
        assert self.like(live, BLOCK, blocks=1).stride() == (5 * BLOCK, BLOCK, 1)

    def test_a_kernels_alignment_is_kept(self) -> None:
        from workers.vllm.release import kv_caches

        spec = SimpleNamespace(
            block_size=BLOCK, page_size_padded=1700, get_block_stride_alignment=lambda: 576
        )
        assert kv_caches.page_bytes(group_of(spec), "0", 1584) == 1728
        assert kv_caches.page_bytes(group_of(SimpleNamespace(block_size=BLOCK)), "0", 1584) == 1584


class Planted(WholeBatchEngine):
    """An engine of two layers, each of which writes what it is given and what it finds into its own
    cache.

    `reads`: the second one reads the first one's cache too, and says so to nobody; `leaks`: it
    writes into chat's.
    """

    def __init__(self, reads: bool = False, leaks: bool = False, replicated: bool = True) -> None:
        self.info = ModelInfo("planted", HEADS, 2, 64, 256, "float32")
        self.layers = {"0": layer_with(cache_of(40)), "1": layer_with(cache_of(40))}
        self.caches = scratch(self.layers, group_of(plain_spec(), "0", "1"))
        self.settled: list[tuple[bool, bool]] = []
        self.reads, self.leaks, self.replicated = reads, leaks, replicated

    def compute_batch(self, spec: Any, nonces: Any) -> list[Any]:
        chats = self.layers["0"].kv_cache
        with self.caches.bound(len(nonces), spec.seq_len):
            first, second = (layer.kv_cache for layer in self.layers.values())
            first[1:].fill_(3.0)
            second[1:].fill_(5.0)
            if self.leaks:
                chats[2].fill_(0.0)
            return [float(second[1].sum() + (first[1].sum() if self.reads else 0)) for _ in nonces]

    def watch(self, n_sequences: int, seq_len: int) -> None:
        from workers.vllm.forward.watch import Watch

        self.watching = Watch(self.caches, n_sequences, seq_len)

    def unwatch(self) -> list[dict[str, Any]]:
        return [{"touched": self.watching.touched(), "replicated": self.replicated}]

    def settle(self, private: bool, replicated: bool) -> None:
        self.caches.private = private
        self.caches.forget()
        self.settled.append((private, replicated))

    def close(self) -> None: ...


class TestSelfTest:
    def test_a_model_whose_layers_may_share_goes_on_sharing(self) -> None:
        engine: Any = Planted()
        check_isolation(engine)
        assert engine.settled[-1] == (False, True)
        assert engine.info.caches == "shared"

    def test_a_planted_fault_of_sharing_ends_it(self, caplog: pytest.LogCaptureFixture) -> None:
        engine: Any = Planted(reads=True)
        check_isolation(engine)
        assert engine.settled[-1] == (True, True)
        assert engine.info.caches == "private"
        assert "each gets its own" in caplog.text

    def test_a_model_that_writes_into_chats_cache_is_refused_by_layer(self) -> None:
        engine: Any = Planted(leaks=True)
        why = "Proofs of planted write into chat's cache of layer 0"
        with pytest.raises(ProoflineError, match=why):
            check_isolation(engine)

    def test_sums_that_are_spread_over_ranks_are_remembered(self) -> None:
        engine: Any = Planted(replicated=False)
        check_isolation(engine)
        assert engine.settled[-1] == (False, False)

    def test_what_a_model_cannot_compute_is_one_sentence(self) -> None:
        engine: Any = Planted()

        def fail(*_: Any) -> list[Any]:
            raise ProoflineError("it wants token ids.")

        vars(engine)["compute_batch"] = fail
        why = r"^Proofs cannot be computed with planted: it wants token ids\.$"
        with pytest.raises(ProoflineError, match=why):
            check_isolation(engine)
