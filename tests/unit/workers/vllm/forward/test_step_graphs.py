"""A recorded step reads what a later one is given, from tensors that stay where they are."""

from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core.records import ProofSpec
from poc_core.schemes.base import Batch, load_scheme
from tests.harness.marks import needs_vllm

# In whose process vLLM is loaded.
pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]

HIDDEN, SEQ_LEN, STEPS, N, VOCAB = 256, 5, 4, 3, 512
CPU = torch.device("cpu")


class Forward:
    """Keeps the tensors that it was given while it was recorded: a graph asks for no others."""

    given: dict[str, Tensor]

    def run(self, *args: Any, **_others: Any) -> Tensor:
        self.given = next(arg for arg in args if isinstance(arg, dict) and "inputs_embeds" in arg)
        return torch.zeros(N, HIDDEN)


class Graph:
    """Replays by copying the token ids that the recorded work was given."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def record(self, work: Any) -> Any:
        output = work()
        ids = self.forward.given["input_ids"]
        return lambda: output.copy_(ids[:, None].expand_as(output))

    def renewed(self, kept: Any, new: Any) -> Any:
        return kept


def begun(n: int = N, seq_len: int = SEQ_LEN, n_steps: int = STEPS) -> Batch:
    options: Any = {"max_tokens": n_steps}
    spec = ProofSpec(
        scheme="decode", block_hash="b", public_key="k", seq_len=seq_len, options=options
    )
    loaded = load_scheme(spec, hidden_size=HIDDEN, n_layers=1, device=CPU, dtype=torch.float32)
    batch = loaded.begin(range(n))
    batch.take(0, torch.randn(n, seq_len, HIDDEN, generator=torch.Generator().manual_seed(0)))
    return batch


def test_a_replayed_step_has_the_token_ids_of_its_own_points() -> None:
    from workers.vllm.forward.layout import BlockTables
    from workers.vllm.forward.step_graphs import Part, RecordedStep  # here: it imports vLLM

    batch = begun()
    forward: Any = Forward()
    tables = BlockTables([], N, SEQ_LEN, SEQ_LEN + STEPS, CPU)
    recorded = RecordedStep(batch, tables, Part(range(1), 1, range(0), VOCAB), Graph(forward))
    seen = []
    for step in range(1, 1 + STEPS):
        expected = batch.token_ids(step, VOCAB)
        recorded.fill(batch, step)
        if step == 1:
            recorded.record(forward, nullcontext)
        assert recorded.replayed()[:, 0].tolist() == expected.tolist()
        seen.append(tuple(expected.tolist()))
        batch.take(step, torch.randn(N, 1, HIDDEN, generator=torch.Generator().manual_seed(step)))
    assert len(set(seen)) == STEPS
    assert forward.given["input_ids"].dtype == torch.int32


def test_a_model_that_wants_no_token_ids_is_given_none() -> None:
    from workers.vllm.forward.layout import BlockTables
    from workers.vllm.forward.step_graphs import Part, RecordedStep

    batch = begun()
    forward: Any = Forward()
    recorded = RecordedStep(
        batch,
        BlockTables([], N, SEQ_LEN, SEQ_LEN + STEPS, CPU),
        Part(range(1), 1, range(0), None),
        Graph(forward),
    )
    recorded.fill(batch, 1)
    with pytest.raises(KeyError):
        recorded.record(forward, nullcontext)
    assert set(forward.given) == {"inputs_embeds"}


def test_a_stage_in_the_middle_takes_and_gives_activations() -> None:
    from vllm.sequence import IntermediateTensors

    from workers.vllm.forward.layout import BlockTables
    from workers.vllm.forward.recording import RunAgain
    from workers.vllm.forward.step_graphs import Part, RecordedStep

    class Stage:
        def __init__(self) -> None:
            self.out = {"hidden_states": torch.empty(N, HIDDEN)}

        def run(self, *args: Any, **_others: Any) -> Any:
            given = next(one for one in args if isinstance(one, dict) and "input_ids" in one)
            assert given["input_ids"].tolist() == [0] * N, "this stage knows no points"
            state = given["intermediate_tensors"].tensors["hidden_states"]
            self.out["hidden_states"].copy_(2 * state)
            state.fill_(-1)  # as layers do to what they are given
            return IntermediateTensors(self.out)

    batch, stage = begun(), Stage()
    tables = BlockTables([], N, SEQ_LEN, SEQ_LEN + STEPS, CPU)
    part = Part(range(1, 2), 3, range(0), VOCAB)
    recorded = RecordedStep(batch, tables, part, RunAgain())
    given = [torch.full((N, HIDDEN), float(step)) for step in (1, 2)]
    recorded.fill(batch, 1, {"hidden_states": given[0]})
    recorded.record(stage, nullcontext)  # type: ignore[arg-type]
    first = recorded.replayed().tensors["hidden_states"]
    recorded.fill(batch, 2, {"hidden_states": given[1]})
    second = recorded.replayed().tensors["hidden_states"]
    assert (first == 2).all(), "it may still be being sent when the next step is replayed"
    assert (second == 4).all()
    assert [float(x[0, 0]) for x in given] == [1, 2]


def test_a_step_that_ends_no_block_of_positions_is_replayed_at_one_that_does() -> None:
    """DeepSeek-V4 since vLLM 0.28: the compressor of 128 positions runs where its metadata does not
    say that a step ends none, which a recorded step would keep to."""
    from vllm.models.deepseek_v4.compressor import CompressorMetadata

    from workers.vllm.forward.recording import refill
    from workers.vllm.release import kv_caches

    if "c128_boundary" not in {field.name for field in fields(CompressorMetadata)}:
        pytest.skip("this release's compressor runs at every step")
    slots = torch.arange(2)

    def told(ends_one: bool) -> dict[str, Any]:
        metadata = CompressorMetadata(slots, slots, 8, c128_boundary=ends_one)
        return kv_caches.of_any_step({"state": metadata, "attention": object()})

    kept, new = told(False)["state"], told(True)["state"]
    assert kept.c128_boundary is None
    refill(kept, new)


class TestWhatSeveralRanksRecord:
    """They agree on each part of it: a rank that went on alone would wait for ever."""

    @pytest.fixture
    def said(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        """What this rank says of itself. Another one fails at its second part."""
        from workers.vllm.release import parallel

        told: list[bool] = []

        def do_all(say_so: bool) -> bool:
            told.append(say_so)
            return say_so and len(told) != 2

        monkeypatch.setattr(parallel, "do_all_tensor_ranks", do_all)
        return told

    def test_it_is_an_error_here_where_another_rank_failed(self, said: list[bool]) -> None:
        from workers.vllm.forward.recording import NotReplayableError
        from workers.vllm.forward.step_graphs import _on_all_ranks

        assert _on_all_ranks(lambda: 7) == 7
        with pytest.raises(NotReplayableError, match="another rank"):
            _on_all_ranks(lambda: 7)
        assert said == [True, True]

    def test_a_rank_that_fails_tells_the_others(self, said: list[bool]) -> None:
        from workers.vllm.forward.step_graphs import _on_all_ranks

        def fails() -> None:
            raise MemoryError("no memory")

        with pytest.raises(MemoryError):
            _on_all_ranks(fails)
        assert said == [False]


def graphs_of(n_ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of an engine of which nothing else is there; switched on."""
    from workers.vllm.forward import step_graphs
    from workers.vllm.forward.recording import RunAgain
    from workers.vllm.release import kv_caches, parallel

    monkeypatch.setattr(parallel, "tensor_ranks", lambda: (0, n_ranks))
    monkeypatch.setattr(parallel, "n_stages", lambda: 1)
    monkeypatch.setattr(parallel, "do_all_tensor_ranks", lambda say_so: say_so)
    monkeypatch.setattr(kv_caches, "workspaces", lambda **_alike: ())
    nothing: Any = SimpleNamespace(forget_unfinished=lambda: None, numbers=range(0))
    graphs = step_graphs.StepGraphs(nothing, nothing, range(1), 1, nothing, None, RunAgain())
    graphs.on = True
    return graphs


def held_of(n: int) -> Any:
    place = SimpleNamespace(shape=(N, 9))
    return SimpleNamespace(batch=begun(n), place=place, tables=object(), state=None)


@pytest.mark.parametrize(
    ("recorded", "n_micro_batches", "tries"), [(10_000, 2, False), (64, 1, False), (64, 2, True)]
)
def test_the_memory_that_ranks_sums_keep_of_each_graph_is_not_used_up(
    recorded: int, n_micro_batches: int, tries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once half of them are recorded, a shape gets one when a second micro-batch has it."""
    graphs, held = graphs_of(2, monkeypatch), held_of(N)
    graphs.recorded = recorded
    for _ in range(n_micro_batches):
        for step in (1, 2):  # a shape is recorded when it is seen again
            assert graphs.output(held, range(1), step) is None
    assert bool(graphs.why_not) == tries, "these tables cannot be recorded"


def test_sizes_that_have_no_memory_for_a_graph_leave_smaller_ones_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workers.vllm.forward import step_graphs

    tried, held = [], {n: held_of(n) for n in (2, 3, 4)}

    def recorded_step(batch: Batch, *_others: Any) -> Any:
        tried.append(len(batch.nonces))
        if len(batch.nonces) > 2:
            raise torch.OutOfMemoryError("no memory")
        return SimpleNamespace(
            fill=lambda *_: None, record=lambda *_: None, replayed=lambda: "replayed"
        )

    monkeypatch.setattr(step_graphs, "RecordedStep", recorded_step)
    graphs = graphs_of(1, monkeypatch)

    def outputs(n: int) -> list[Any]:
        # Held beyond this call: a shape's key names its place.
        return [graphs.output(held[n], range(1), step) for step in (1, 2, 3)]

    assert outputs(2) == [None, "replayed", "replayed"]
    assert outputs(4) == [None, None, None]
    assert outputs(3) == [None, None, None]
    assert outputs(2) == ["replayed"] * 3
    assert tried == [2, 4, 3]
    assert graphs.why_not == ""


def test_chains_of_equal_length_with_other_prefills_share_no_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Block tables have no state in columns of the prefill's checkpoints (GLM-5.3-Flash)."""
    from workers.vllm.forward import step_graphs
    from workers.vllm.forward.kv_isolation import ScratchGroup
    from workers.vllm.forward.layout import BlockTables

    def recorded_step(_batch: Batch, tables: Any, *_others: Any) -> Any:
        return SimpleNamespace(
            fill=lambda *_: None, record=lambda *_: None, replayed=lambda: tables.tables[0].tolist()
        )

    monkeypatch.setattr(step_graphs, "RecordedStep", recorded_step)
    graphs, place = graphs_of(1, monkeypatch), SimpleNamespace(shape=(1, 9))
    spec = SimpleNamespace(block_size=2, num_prefill_checkpoint_blocks=1)
    groups = [ScratchGroup(SimpleNamespace(kv_cache_spec=spec), 1, ("kda",), 0, True)]
    seen = []
    for rows in (5, 3):
        tables = BlockTables(groups, 1, rows, 9, CPU)
        batch = begun(1, rows, 9 - rows)
        held: Any = SimpleNamespace(batch=batch, place=place, tables=tables, state=None)
        seen.append([graphs.output(held, range(1), step) for step in (1, 2)])
    assert seen == [[None, [[0, 0, 1, 1, 1]]], [None, [[0, 1, 1, 1, 1]]]]


def test_an_operator_can_switch_recording_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm.forward.recording import RunAgain
    from workers.vllm.forward.step_graphs import StepGraphs
    from workers.vllm.release import parallel

    monkeypatch.setattr(parallel, "tensor_ranks", lambda: (0, 1))
    monkeypatch.setattr(parallel, "n_stages", lambda: 1)
    nothing: Any = None
    for value, said in (("off", "PROOFLINE_GRAPHS=off"), ("on", "")):
        monkeypatch.setenv("PROOFLINE_GRAPHS", value)
        graphs = StepGraphs(nothing, nothing, range(1), 1, nothing, None, RunAgain())
        assert graphs.why_not == said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", "expandable"),
        ("VLLM_USE_NCCL_SYMM_MEM", "1", "chat's graphs alone"),
    ],
)
def test_ranks_record_no_sums_in_memory_that_no_graph_of_ours_can_have(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm.forward.recording import why_off

    monkeypatch.setenv(name, value)
    assert said in why_off(shares_sums=True)
    assert why_off(shares_sums=False) == ""
