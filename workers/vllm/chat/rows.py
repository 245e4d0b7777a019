"""Logprobs of known tokens from the logits of their positions: what vLLM's sampler would have told
of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workers.vllm.chat.scoring import PROCESSED, Scoring

# Positions whose logits are there at a time: fewer than the sequences that vLLM keeps memory for.
ROWS = 128
# Of vLLM: temperatures below choose the best token, and divide nothing.
_GREEDY = 1e-5

# Logits (n x vocabulary), top_k and top_p (n, or None) -> logits with -inf outside.
Cut = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
# Hidden states (n x hidden size) -> logits (n x vocabulary); None on a rank that does not get them.
Logits = Callable[[torch.Tensor], torch.Tensor | None]


class Collected:
    """The rows of one request, as prefill goes on."""

    def __init__(self, scoring: Scoring, device: torch.device) -> None:
        n, width = len(scoring.tokens), scoring.n_best + 1
        self.scoring = scoring
        self._tokens = _sent(scoring.tokens, device)
        self._ids = torch.zeros(n, width, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(n, width, device=device)
        self._ranks = torch.zeros(n, dtype=torch.int32, device=device)
        self._first = self._end = n  # rows between them are there

    def take(self, hidden: torch.Tensor, start: int, logits: Logits, cut: Cut) -> bool:
        """The hidden states of one chunk, the positions from `start` on. True: it was the last one.

        A chunk may begin where an earlier one did: the request was preempted then, and begins anew.
        """
        shift = self.scoring.n_prompt - 1  # position of the first row
        begin = max(start - shift, 0)
        end = min(start + len(hidden) - shift, len(self._tokens))
        for first in range(begin, end, ROWS):
            last = min(first + ROWS, end)
            at = first + shift - start
            found = logits(hidden[at : at + last - first])
            if found is not None:
                self._keep(first, found, cut)
        if begin < end:
            if not self._first <= begin <= self._end:
                self._first = begin
            self._end = end
        return end == len(self._tokens)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids (n x width, the known one first), their logprobs, and the known ones' ranks (n). Rows
        are missing at the beginning where a prefix cache spared their positions."""
        return self._ids[self._first :], self._logprobs[self._first :], self._ranks[self._first :]

    def _keep(self, first: int, logits: torch.Tensor, cut: Cut) -> None:
        last, scoring = first + len(logits), self.scoring
        scaled = logits
        if scoring.mode == PROCESSED and not scoring.only_scales:
            logits = scaled = processed(logits, scoring, self._tokens, first, cut)
        elif scoring.mode == PROCESSED and scoring.temperature >= _GREEDY:
            # The order stays, so ranks and the best come of the model's own type: half the bytes.
            scaled = logits / logits.new_full((1, 1), scoring.temperature, dtype=torch.float32)
        ids = self._tokens[first:last, None]
        self._ranks[first:last] = (logits >= logits.gather(-1, ids)).sum(-1)
        if scoring.n_best:
            ids = torch.cat([ids, logits.topk(scoring.n_best, dim=-1).indices], -1)
        self._ids[first:last] = ids
        logprobs = scaled.log_softmax(-1, dtype=torch.float32)
        self._logprobs[first:last] = logprobs.gather(-1, ids)


def processed(
    logits: torch.Tensor, scoring: Scoring, tokens: torch.Tensor, first: int, cut: Cut
) -> torch.Tensor:
    """The logits (n x vocabulary) that tokens `first` to first + n - 1 would be sampled from,
    float32: in the order of vLLM's sampler."""
    logits = logits.to(torch.float32, copy=True)
    _mask(logits, scoring, first)
    if scoring.bias:
        ids, bias = zip(*scoring.bias, strict=True)
        logits[:, _sent(ids, logits.device)] += _sent(bias, logits.device)
    if scoring.penalizes:
        _penalize(logits, scoring, tokens, first)
    if scoring.temperature < _GREEDY:
        return logits
    logits /= scoring.temperature
    if scoring.min_p > 0:
        chances = logits.softmax(-1)
        logits[chances < scoring.min_p * chances.amax(-1, keepdim=True)] = -torch.inf
    n, vocabulary = logits.shape
    narrow = 0 < scoring.top_k < vocabulary
    top_k = (
        torch.full((n,), scoring.top_k, dtype=torch.int32, device=logits.device) if narrow else None
    )
    top_p = torch.full((n,), scoring.top_p, device=logits.device) if scoring.top_p < 1 else None
    return cut(logits, top_k, top_p)


def _sent(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """On the device, without a wait for what it has to do before: from pinned memory."""
    here = torch.tensor(values, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def _mask(logits: torch.Tensor, scoring: Scoring, first: int) -> None:
    """-inf for what may not be sampled."""
    if scoring.allowed is not None:
        strange = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        strange[_sent(scoring.allowed, logits.device)] = False
        logits.masked_fill_(strange, -torch.inf)
    for *before, word in scoring.bad_words:
        for row in range(len(logits)):
            at = first + row
            if at >= len(before) and scoring.tokens[at - len(before) : at] == before:
                logits[row, word] = -torch.inf
    if scoring.stop_ids and first < scoring.min_tokens:
        logits[: scoring.min_tokens - first, _sent(scoring.stop_ids, logits.device)] = -torch.inf


def _penalize(logits: torch.Tensor, scoring: Scoring, tokens: torch.Tensor, first: int) -> None:
    """Each row for the tokens before it: only the columns of tokens that occur."""
    rows = torch.arange(len(logits), device=logits.device)
    before = tokens[: first + len(logits) - 1]
    in_prompt = _sent(scoring.prompt_ids, logits.device).to(tokens.dtype)
    ids, places = torch.cat([in_prompt, before]).unique(return_inverse=True)
    if not len(ids):
        return
    # (row, id): how often before the row. Tokens before the first row count in all, the others from
    # their own on.
    counts = torch.zeros(len(logits), len(ids), dtype=torch.int32, device=logits.device)
    counts[0] = torch.bincount(places[len(in_prompt) :][:first], minlength=len(ids))
    counts[rows[1:], places[len(in_prompt) + first :]] = 1
    counts = counts.cumsum(0)
    prompt = torch.zeros(len(ids), dtype=torch.bool, device=logits.device)
    prompt[places[: len(in_prompt)]] = True
    said = counts > 0
    found = logits[:, ids]
    repeated = torch.where(found > 0, found / scoring.repetition, found * scoring.repetition)
    found = torch.where(said | prompt, repeated, found)
    logits[:, ids] = found - scoring.frequency * counts - scoring.presence * said
