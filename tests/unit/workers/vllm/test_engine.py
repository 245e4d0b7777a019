"""What vLLM is started with and what its ranks tell, as far as it can be seen without it."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from workers.engines.options import EngineOptions
from workers.engines.ticks import EngineLostError, EngineMemoryError, MicroBatch, Slice, Tick
from workers.vllm import engine
from workers.vllm.start import lifeline


def test_vllms_paths_for_developers_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run any method of the workers for whoever asks."""
    seen: list[str | None] = []

    async def start(*_args: object) -> None:
        seen.append(os.environ.get("VLLM_SERVER_DEV_MODE"))
        raise ProoflineError("This is enough.")

    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", lifeline.VARIABLE):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # to be as it was after the test
    with pytest.raises(ProoflineError, match="This is enough"):
        engine.VllmEngine(EngineOptions(model="m"))
    assert seen == [None]


# Slices with seconds, or an error of memory.
Told = Sequence[tuple[Slice, float]] | str


class Ranks(engine.VllmEngine):
    """An engine of which only the answers of its ranks are there."""

    def __init__(self, n_stages: int, *answers: Sequence[Told]) -> None:
        """`answers`: of each call, what each rank tells."""
        self.stages = [range(stage, stage + 1) for stage in range(n_stages)]
        self._heard = {}
        self._stepping = set()
        self._waiting = iter(answers)

    def _ask(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[dict[str, Any]]:
        assert (method, args[0]) == ("proof_run", "tick")
        return [
            {"error": ran, "kind": "memory"}
            if isinstance(ran, str)
            else {"value": {"refused": {}, "ran": ran, "values": {}}}
            for ran in next(self._waiting)
        ]


def test_a_slice_is_told_with_the_time_of_its_slowest_rank_once_that_has_told_it() -> None:
    first, second = Slice(7, 0, 1), Slice(8, 0, 1)
    ranks = Ranks(
        1, [[(first, 1.0)], []], [[(second, 2.0)], [(first, 3.0)]], [[], [(second, 1.0)]], [[], []]
    )
    assert [ranks.tick(Tick()).ran for _ in range(4)] == [[], [(first, 3.0)], [(second, 2.0)], []]


def test_a_slice_of_a_stage_is_told_without_the_other_stages_ranks() -> None:
    first, second = Slice(7, 0, 1), Slice(7, 1, 2)
    ranks = Ranks(2, [[(first, 1.0)], []], [[], [(second, 2.0)]])
    assert [ranks.tick(Tick()).ran for _ in range(2)] == [[(first, 1.0)], [(second, 2.0)]]


def test_memory_that_is_short_on_all_ranks_of_a_stage_loses_no_engine() -> None:
    short = "out of memory"
    cases: list[tuple[int, list[Told]]] = [(1, [short, short]), (2, [short, short, [], []])]
    for n_stages, answers in cases:
        with pytest.raises(EngineMemoryError, match=short):
            Ranks(n_stages, answers).tick(Tick())


def test_ranks_of_which_one_failed_are_lost() -> None:
    """The others wait for its sums, and would take them from whatever it computes next."""
    short = "out of memory"
    cases: list[tuple[int, list[Told]]] = [
        (1, [[], short]),
        (2, [short, [], [], []]),
        (2, [[], [], [], short]),
    ]
    for n_stages, answers in cases:
        with pytest.raises(EngineLostError, match=r"others wait: out of memory\. If it was short"):
            Ranks(n_stages, answers).tick(Tick())


@pytest.mark.parametrize("scheme", ["decode", "artifact"])
def test_an_engine_lost_under_decode_proofs_says_what_to_try(scheme: str) -> None:
    class Lost(Ranks):
        on_gpu = True

        def _ask(self, *_args: Any) -> Any:
            raise EngineLostError("No answer.")

    options: dict[str, JsonValue] = {"max_tokens": 4} if scheme == "decode" else {}
    spec = ProofSpec(scheme=scheme, block_hash="b", public_key="k", seq_len=4, options=options)
    with pytest.raises(EngineLostError) as lost:
        Lost(1).tick(Tick([MicroBatch(spec, range(1), id=0)]))
    assert str(lost.value).startswith("No answer.")
    assert ("PROOFLINE_GRAPHS=off" in str(lost.value)) == (scheme == "decode")
