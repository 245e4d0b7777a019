"""Logprobs of known tokens from logits: chunk by chunk, whatever the chunks, as a sampler sees each
position."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from workers.vllm.chat import rows
from workers.vllm.chat.rows import ROWS, Collected, take
from workers.vllm.chat.scoring import PROCESSED, RAW, Scoring

CPU = torch.device("cpu")
VOCABULARY, HIDDEN = 50, 8
N_PROMPT = 5
TOKENS = [int(one) for one in np.random.default_rng(3).integers(0, VOCABULARY, 300)]
HEAD = torch.randn(HIDDEN, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
STATES = torch.randn(N_PROMPT + len(TOKENS) - 1, HIDDEN, generator=torch.Generator().manual_seed(2))

PLAIN = Scoring(
    n_prompt=N_PROMPT,
    tokens=TOKENS,
    mode=PROCESSED,
    n_best=5,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition=1.0,
    presence=0.0,
    frequency=0.0,
    prompt_ids=[],
    min_tokens=0,
    stop_ids=[],
    bias=[],
    allowed=None,
    bad_words=[],
)
SHAPED = dataclasses.replace(
    PLAIN,
    temperature=0.7,
    repetition=1.3,
    presence=0.4,
    frequency=0.2,
    prompt_ids=[1, 2, 3],
    min_tokens=150,
    stop_ids=[0, 9],
    bias=[(4, 2.0), (5, -3.0)],
    bad_words=[[7], [TOKENS[10], TOKENS[11]]],
    min_p=0.01,
)


def no_cut(logits: torch.Tensor, *_limits: Any) -> torch.Tensor:
    return logits


def collected(scoring: Scoring, chunks: Iterable[tuple[int, int]]) -> tuple[Any, ...]:
    found = Collected(Scoring.read(scoring.packed()), CPU)
    for start, end in chunks:
        take([(found, STATES[start:end], start)], by_head, no_cut)
    assert found.is_whole
    return found.rows()


def by_head(hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ HEAD


WHOLE = [(0, len(STATES))]


def as_sampled(scoring: Scoring, row: int) -> np.ndarray:
    """The logprobs of one position, by numpy, one rule after the other."""
    logits = (STATES[scoring.n_prompt - 1 + row] @ HEAD).double().numpy()
    before = scoring.tokens[:row]
    for *prefix, word in scoring.bad_words:
        if before[len(before) - len(prefix) :] == prefix:
            logits[word] = -np.inf
    if row < scoring.min_tokens:
        logits[scoring.stop_ids] = -np.inf
    for token, bias in scoring.bias:
        logits[token] += bias
    for token in range(VOCABULARY):
        count = before.count(token)
        if count or token in scoring.prompt_ids:
            logits[token] *= 1 / scoring.repetition if logits[token] > 0 else scoring.repetition
        logits[token] -= scoring.frequency * count + scoring.presence * (count > 0)
    logits /= scoring.temperature
    chances = np.exp(logits - logits.max())
    logits[chances < scoring.min_p] = -np.inf
    found: np.ndarray = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    return found


def test_each_position_is_as_a_sampler_would_have_it() -> None:
    ids, logprobs, ranks = collected(SHAPED, WHOLE)
    assert ids[:, 0].tolist() == TOKENS
    for row in range(len(TOKENS)):
        expected = as_sampled(SHAPED, row)
        best = np.sort(expected)[::-1][:5]
        assert logprobs[row, 1:].numpy() == pytest.approx(best, abs=1e-4)
        assert logprobs[row, 0].item() == pytest.approx(expected[TOKENS[row]], abs=1e-4)
        assert ranks[row] == (expected >= expected[TOKENS[row]]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_temperature_and_what_may_not_be_sampled_give_what_all_rules_give(
    dtype: torch.dtype, temperature: float
) -> None:
    def told(scoring: Scoring) -> tuple[Any, ...]:
        found = Collected(scoring, CPU)
        take([(found, STATES, 0)], lambda hidden: (hidden @ HEAD).to(dtype), no_cut)
        return found.rows()

    masked: dict[str, Any] = {
        "min_tokens": 150,
        "stop_ids": [0, 9],
        "bad_words": [[7]],
        "allowed": [*range(40)],
    }
    alone = dataclasses.replace(PLAIN, temperature=temperature, **masked)
    ruled = dataclasses.replace(alone, bias=[(0, 0.0)])
    assert alone.only_scales
    assert not ruled.only_scales
    (_ids, logprobs, ranks), (_others, expected, others) = told(alone), told(ruled)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert torch.equal(ranks, others)


def test_raw_ones_know_nothing_of_the_sampler() -> None:
    raw = dataclasses.replace(SHAPED, mode=RAW)
    plain = dataclasses.replace(PLAIN, mode=RAW)
    for one, other in zip(collected(raw, WHOLE), collected(plain, WHOLE), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 3), (3, 64), (64, 65), (65, len(STATES))],
        [(at, at + 1) for at in range(len(STATES))],
        [(0, 100), (0, 50), (50, len(STATES))],  # preempted, and begun anew
        [(0, 100), (80, len(STATES))],  # preempted, what was computed is in the cache
        [(4, len(STATES))],  # all of the prompt but its last position was there
    ],
    ids=["parts", "one by one", "anew", "resumed", "cached prompt"],
)
def test_chunks_change_nothing(chunks: list[tuple[int, int]]) -> None:
    for one, other in zip(collected(SHAPED, WHOLE), collected(SHAPED, chunks), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "chunks",
    [[(60, len(STATES))], [(0, 30), (60, len(STATES))]],
    ids=["from the start", "after a part"],
)
def test_rows_that_a_prefix_cache_spared_are_not_told(chunks: list[tuple[int, int]]) -> None:
    _ids, logprobs, _ranks = collected(SHAPED, WHOLE)
    ids, found, ranks = collected(SHAPED, chunks)
    missing = 60 - (N_PROMPT - 1)
    assert len(ids) == len(ranks) == len(TOKENS) - missing
    torch.testing.assert_close(found, logprobs[missing:], atol=1e-5, rtol=0)


def test_never_more_logits_than_a_few_rows_nor_fewer_than_are_there() -> None:
    sizes = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden @ HEAD

    plain, shaped, raw = (
        Collected(one, CPU) for one in (PLAIN, SHAPED, dataclasses.replace(SHAPED, mode=RAW))
    )
    early = Collected(PLAIN, CPU)  # whose rows do not come in this step
    take(
        [(plain, STATES, 0), (early, STATES[:3], 0), (shaped, STATES, 0), (raw, STATES, 0)],
        logits,
        no_cut,
    )
    assert sizes == [ROWS, 3 * len(TOKENS) - ROWS]
    assert not early.is_whole
    for found, scoring in ((plain, PLAIN), (shaped, SHAPED), (raw, raw.scoring)):
        for one, other in zip(found.rows(), collected(scoring, WHOLE), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_a_rank_without_logits_goes_the_same_way() -> None:
    calls: list[int] = []

    def silent(hidden: torch.Tensor) -> None:
        calls.append(len(hidden))

    found = Collected(PLAIN, CPU)
    take([(found, STATES, 0)], silent, no_cut)
    assert found.is_whole
    assert sum(calls) == len(TOKENS)


def test_top_k_and_top_p_are_left_to_vllm() -> None:
    given: list[Any] = []

    def cut(logits: torch.Tensor, *limits: Any) -> torch.Tensor:
        given.append([None if one is None else one.tolist() for one in limits])
        return logits

    for more in (
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_k": VOCABULARY},
        {"temperature": 0.0, "top_k": 3},
    ):
        scoring = dataclasses.replace(PLAIN, tokens=TOKENS[:2], **more)
        take([(Collected(scoring, CPU), STATES[:6], 0)], by_head, cut)
    assert given == [[[3, 3], None], [None, [0.5, 0.5]], [None, None]]


@pytest.mark.parametrize("broken", [True, False], ids=["no compiler", "wrong"])
def test_a_kernel_that_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: bool
) -> None:
    pytest.importorskip("triton")
    from workers.vllm.chat import best

    def scored(logits: torch.Tensor, tokens: torch.Tensor, *_told: Any) -> Any:
        if broken:
            raise RuntimeError("Failed to find C compiler")
        return tokens[:, None].repeat(1, 6), torch.zeros(len(tokens), 6), torch.ones(len(tokens))

    expected = collected(PLAIN, WHOLE)
    monkeypatch.setattr(best, "scored", scored)
    monkeypatch.setattr(rows.fused, "is_on", lambda _device: True)
    monkeypatch.setattr(rows, "fused_is_right", rows.fused_is_right.__wrapped__)
    for one, other in zip(collected(PLAIN, WHOLE), expected, strict=True):
        assert torch.equal(one, other)
    assert "the fused kernel of logprobs" in caplog.text
