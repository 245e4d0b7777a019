"""Computes the logprobs of known tokens from logits, as vLLM's sampler would report them."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from poc_core.arithmetic import fused
from workers.vllm.chat.scoring import PROCESSED, Scoring

logger = logging.getLogger(__name__)

# Positions whose logits, in the model's dtype, are computed at a time: with fewer, reading the
# model's last matrix takes longer than computing with it.
ROWS = 512
# Positions whose logits are converted to float32 at a time.
_FLOAT_ROWS = 128
# vLLM's limit: lower temperatures choose the best token, and do not divide the logits.
_GREEDY = 1e-5

# Logits (n x vocabulary), top_k and top_p (n, or None) -> logits with -inf for removed tokens.
Cut = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
# Hidden states (n x hidden size) -> logits (n x vocabulary); None on a rank that does not get them.
Logits = Callable[[torch.Tensor], torch.Tensor | None]
# Ids (n x width, the known token first), their logprobs, and the known tokens' ranks (n).
RowResults = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Collected:
    """The scores of one request's known tokens, one row per token, collected during its prefill."""

    def __init__(self, scoring: Scoring, device: torch.device) -> None:
        n, width = len(scoring.tokens), scoring.n_best + 1
        self.scoring = scoring
        self._tokens = _sent(scoring.tokens, device)
        self._seen = _occurrences(scoring, device) if scoring.penalizes else None
        self._ids = torch.zeros(n, width, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(n, width, device=device)
        self._ranks = torch.zeros(n, dtype=torch.int32, device=device)
        self._first = self._end = n  # rows between these are present

    def begin(self, hidden: torch.Tensor, start: int) -> tuple[int, torch.Tensor]:
        """Returns the index of the first known token that a chunk of the prefill scores, and the
        hidden states to score from. `start`: the chunk's position, earlier after a preemption.
        """
        shift = self.scoring.n_prompt - 1  # position of the first row
        begin = max(start - shift, 0)
        end = min(start + len(hidden) - shift, len(self._tokens))
        if begin >= end:
            return begin, hidden[:0]
        if not self._first <= begin <= self._end:
            self._first = begin
        self._end = end
        return begin, hidden[begin + shift - start : end + shift - start]

    @property
    def is_whole(self) -> bool:
        """Returns whether the row of the last known token was collected."""
        return self._first < self._end == len(self._tokens)

    def rows(self) -> RowResults:
        """Returns a row of ids, logprobs and rank for each token that the cache has not skipped."""
        return self._ids[self._first :], self._logprobs[self._first :], self._ranks[self._first :]

    def keep(self, first: int, logits: torch.Tensor, cut: Cut) -> None:
        """Stores the scores of the tokens from index `first` on. Modifies `logits`."""
        quick = self.scoring.only_scales and _is_fused(logits, self.scoring.n_best)
        size = len(logits) if quick else _FLOAT_ROWS
        for at, part in enumerate(logits.split(size)):
            self._keep(first + at * size, part, cut)

    def _keep(self, first: int, logits: torch.Tensor, cut: Cut) -> None:
        rows, scoring = slice(first, first + len(logits)), self.scoring
        temperature = 1.0
        if scoring.mode == PROCESSED and scoring.only_scales:
            # The order stays, so ranks and best tokens are computed in the model's dtype.
            _mask(logits, scoring, first)
            temperature = scoring.temperature if scoring.temperature >= _GREEDY else 1.0
        elif scoring.mode == PROCESSED:
            logits = processed(logits, scoring, self._seen, first, cut)
        told = scored(logits, self._tokens[rows], temperature, scoring.n_best)
        self._ids[rows], self._logprobs[rows], self._ranks[rows] = told


def take(chunks: Iterable[tuple[Collected, torch.Tensor, int]], logits: Logits, cut: Cut) -> None:
    """Scores the known tokens of one engine step. `chunks`: for each chunk of a request's prefill,
    the Collected that gets the scores, the hidden states, and the chunk's first position.
    """
    parts: list[tuple[Collected, int, torch.Tensor]] = []
    room = ROWS
    for collected, hidden, start in chunks:
        first, states = collected.begin(hidden, start)
        while len(states):
            parts.append((collected, first, states[:room]))
            n = len(parts[-1][2])
            first, states, room = first + n, states[n:], room - n
            if not room:
                _keep(parts, logits, cut)
                parts, room = [], ROWS
    if parts:
        _keep(parts, logits, cut)


def _keep(parts: list[tuple[Collected, int, torch.Tensor]], logits: Logits, cut: Cut) -> None:
    states = [states for _collected, _first, states in parts]
    found = logits(states[0] if len(states) == 1 else torch.cat(states))
    if found is None:
        return
    each = found.split([len(one) for one in states])
    for (collected, first, _states), own in zip(parts, each, strict=True):
        collected.keep(first, own, cut)


def scored(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, n_best: int
) -> RowResults:
    """Returns ids, logprobs and ranks for n tokens. `logits`: not yet divided by `temperature`."""
    if _is_fused(logits, n_best):
        # Imported here: only a CUDA build of torch includes Triton.
        from workers.vllm.chat import best

        return best.scored(logits, tokens, temperature, n_best)
    return _plainly_scored(logits, tokens, temperature, n_best)


def _plainly_scored(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, n_best: int
) -> RowResults:
    ids = tokens[:, None]
    ranks = (logits >= logits.gather(-1, ids)).sum(-1)
    if n_best:
        ids = torch.cat([ids, logits.topk(n_best, dim=-1).indices], -1)
    if temperature != 1:
        logits = logits / logits.new_full((1, 1), temperature, dtype=torch.float32)
    return ids, logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids), ranks


def _is_fused(logits: torch.Tensor, n_best: int) -> bool:
    if not fused.is_on(logits.device) or logits.stride(1) != 1:
        return False
    from workers.vllm.chat import best

    return n_best <= best.MOST_BEST <= logits.shape[1] and fused_is_right(logits.device)


@functools.cache
def fused_is_right(device: torch.device) -> bool:
    """Returns True if the fused kernel runs on the device and gives the torch code's results."""
    from workers.vllm.chat import best

    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randn(2, 20_000, generator=generator, device=device)
    tokens = torch.tensor([3, 19_999], device=device)
    try:
        for dtype in (torch.bfloat16, torch.float32):
            told = (logits.to(dtype), tokens, 0.7, best.MOST_BEST)
            ids, found, ranks = best.scored(*told)
            others, expected, counts = _plainly_scored(*told)
            same = torch.equal(ids[:, 0], others[:, 0]) and torch.equal(ranks, counts)
            if not same or not torch.allclose(found, expected, atol=1e-4, rtol=0):
                logger.warning("the fused kernel of logprobs is wrong on %s: not used", device)
                return False
    except Exception as error:  # any error of a compiler or driver
        logger.warning("the fused kernel of logprobs cannot be used on %s: %s", device, error)
        return False
    return True


# The ids that penalties can concern, and for each prompt and known token its index in these ids.
Occurrences = tuple[torch.Tensor, torch.Tensor]


def processed(
    logits: torch.Tensor, scoring: Scoring, seen: Occurrences | None, first: int, cut: Cut
) -> torch.Tensor:
    """Returns the logits (n x vocabulary, float32) from which vLLM's sampler would sample tokens
    `first` to `first` + n - 1. `seen`: the ids that penalties concern. Never waits for the device.
    """
    logits = logits.to(torch.float32, copy=True)
    _mask(logits, scoring, first)
    if scoring.bias:
        ids, bias = zip(*scoring.bias, strict=True)
        logits[:, _sent(ids, logits.device)] += _sent(bias, logits.device)
    if seen is not None:
        _penalize(logits, scoring, seen, first)
    if scoring.temperature < _GREEDY:
        return logits
    logits /= scoring.temperature
    if scoring.min_p > 0:
        chances = logits.softmax(-1)
        least = scoring.min_p * chances.amax(-1, keepdim=True)
        logits.masked_fill_(chances < least, -torch.inf)
    n, vocabulary = logits.shape
    narrow = 0 < scoring.top_k < vocabulary
    top_k = (
        torch.full((n,), scoring.top_k, dtype=torch.int32, device=logits.device) if narrow else None
    )
    top_p = torch.full((n,), scoring.top_p, device=logits.device) if scoring.top_p < 1 else None
    return cut(logits, top_k, top_p)


def _sent(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Copies values to the device through pinned memory. Does not wait for the device's work."""
    here = torch.tensor(values, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def _mask(logits: torch.Tensor, scoring: Scoring, first: int) -> None:
    """Sets logits to -inf for tokens that must not be sampled."""
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


def _occurrences(scoring: Scoring, device: torch.device) -> Occurrences:
    ids, places = np.unique([*scoring.prompt_ids, *scoring.tokens], return_inverse=True)
    return _sent(ids.tolist(), device), _sent(places.tolist(), device)


def _penalize(logits: torch.Tensor, scoring: Scoring, seen: Occurrences, first: int) -> None:
    """Applies the penalties to the logits of tokens that occur before each row's position."""
    ids, places = seen
    in_prompt, said = places.split([len(scoring.prompt_ids), len(scoring.tokens)])
    rows = torch.arange(len(logits), device=logits.device)
    # (row, id): how often the id occurs before the row. Tokens before the first row count in all
    # rows, and the token of each row in the rows after it.
    counts = torch.zeros(len(logits), len(ids), dtype=torch.int32, device=logits.device)
    counts[0].index_add_(0, said[:first], torch.ones_like(said[:first], dtype=torch.int32))
    counts[rows[1:], said[first : first + len(logits) - 1]] = 1
    counts = counts.cumsum(0, dtype=torch.int32)
    prompt = torch.zeros(len(ids), dtype=torch.bool, device=logits.device)
    prompt[in_prompt] = True
    was_said = counts > 0
    found = logits[:, ids]
    repeated = torch.where(found > 0, found / scoring.repetition, found * scoring.repetition)
    found = torch.where(was_said | prompt, repeated, found)
    logits[:, ids] = found - scoring.frequency * counts - scoring.presence * was_said
