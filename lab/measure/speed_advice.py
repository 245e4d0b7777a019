"""Recommends settings to operators, based on measured speeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.measure.speed import SeqLenSpeeds, Speed, Speeds
from lab.measure.time_parts import COMMUNICATION

# Loss up to which a smaller micro-batch counts as equally fast: it leaves more memory for chat.
_NEARLY = 0.01
# Share of the rate that slices may cost.
_CHEAP = 0.02


@dataclass(frozen=True)
class Division:
    """How a model is divided over devices (tensor and pipeline parallelism), and the speed measured
    with that.
    """

    tensor_parallel: int
    pipeline_parallel: int
    nonces_per_s: dict[int, float]  # by seq_len

    @property
    def n_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def __str__(self) -> str:
        return f"tensor parallel {self.tensor_parallel}, pipeline parallel {self.pipeline_parallel}"


@dataclass(frozen=True)
class Advice:
    tensor_parallel: int
    pipeline_parallel: int
    max_batch_tokens: int
    max_step_ms: float
    reasons: Sequence[str]  # one or two sentences each: parallelism, tokens, milliseconds

    def settings(self) -> list[str]:
        return [
            (
                f"--tensor-parallel {self.tensor_parallel} --pipeline-parallel"
                f" {self.pipeline_parallel}"
            ),
            f"--max-batch-tokens {self.max_batch_tokens}",
            f"POC_MAX_STEP_MS={self.max_step_ms:g}",
        ]


def division_of(speeds: Speeds) -> Division:
    best = {one.seq_len: one.best for one in speeds.seq_lens}
    return Division(speeds.tensor_parallel, speeds.pipeline_parallel, best)


def division_from(document: dict[str, Any]) -> Division:
    """Reads the parallelism and the speeds from an earlier result of `bench --json`.

    Raises KeyError, TypeError, ValueError or OverflowError if the document is no such result.
    """
    best = {
        int(one["seq_len"]): max(float(size["whole"]["nonces_per_s"]) for size in one["sizes"])
        for one in document["seq_lens"]
    }
    found = Division(int(document["tensor_parallel"]), int(document["pipeline_parallel"]), best)
    if min(found.tensor_parallel, found.pipeline_parallel) < 1:
        raise ValueError
    if not all(math.isfinite(rate) for rate in best.values()):
        raise ValueError
    return found


def advise(speeds: Speeds, others: Sequence[Division] = ()) -> Advice:
    """Returns the recommended settings with reasons. `others`: earlier measurements of the same
    model with other parallelism.
    """
    best, division_reason = best_division(speeds, others)
    tokens, tokens_reason = batch_tokens(speeds)
    limit_ms, limit_reason = step_ms(speeds.seq_lens)
    return Advice(
        best.tensor_parallel,
        best.pipeline_parallel,
        tokens,
        limit_ms,
        [division_reason, tokens_reason, limit_reason],
    )


def best_division(speeds: Speeds, others: Sequence[Division]) -> tuple[Division, str]:
    """Returns the best parallelism, and the reason.

    The best has the most nonces/s per device, compared at the longest seq_len at which all were
    measured. Without other measurements it is the present one.
    """
    this = division_of(speeds)
    common = set(this.nonces_per_s).intersection(*(other.nonces_per_s for other in others))
    if others and common:
        seq_len = max(common)
        rated = sorted((this, *others), key=lambda one: -one.nonces_per_s[seq_len] / one.n_devices)
        rates = "; ".join(
            f"{one}: {one.nonces_per_s[seq_len] / one.n_devices:,.1f}" for one in rated
        )
        return rated[0], f"Nonces/s of each device at seq_len {seq_len}: {rates}."
    if this.n_devices == 1:
        return (
            this,
            "The model fits on one device: a worker on each device loses nothing to communication.",
        )
    compared = "measure the other division too, and give this result's JSON to it with --compare"
    if this.tensor_parallel == 1:
        return this, f"No other division was compared: {compared}."
    parts = speeds.seq_lens[-1].parts
    spent = (
        f"Communication takes {100 * parts.share(COMMUNICATION):.1f} % of the time"
        if parts
        else "One division"
    )
    return this, f"{spent}; pipeline parallel communicates less: {compared}."


def batch_tokens(speeds: Speeds) -> tuple[int, str]:
    """Returns the recommended --max-batch-tokens, and the reason. At every seq_len it allows a
    micro-batch that is nearly as fast as the fastest.
    """
    tokens, grows = 0, False
    for one in speeds.seq_lens:
        enough = max(
            fewest([whole for whole, _ in one.sizes]), fewest([sliced for _, sliced in one.sizes])
        )
        tokens = max(tokens, enough * one.seq_len)
        grows |= len(one.sizes) > 1 and enough == max(whole.n for whole, _ in one.sizes)
    if grows:
        why = (
            f"The largest micro-batch measured gains more than {100 * _NEARLY:.0f} %: more may gain"
            " more."
        )
    elif all(len(one.sizes) == 1 for one in speeds.seq_lens):
        why = "No other was measured."
    else:
        why = f"More tokens gain less than {100 * _NEARLY:.0f} %."
    return tokens, why


def fewest(measured: Sequence[Speed]) -> int:
    """Returns the smallest micro-batch size, in nonces, that is nearly as fast as the
    fastest one.
    """
    best = max(one.nonces_per_s for one in measured)
    return min(one.n for one in measured if one.nonces_per_s >= (1 - _NEARLY) * best)


def step_ms(seq_lens: Sequence[SeqLenSpeeds]) -> tuple[float, str]:
    """Returns the recommended POC_MAX_STEP_MS, and the reason: the shortest limit that costs little
    speed at every seq_len.

    If every limit costs more, returns the one that costs least.
    """
    lost: dict[float, float] = {}
    waits: dict[float, float] = {}
    for one in seq_lens:
        for trade in one.trades:
            limit_ms = trade.max_step_ms
            lost[limit_ms] = max(trade.lost, lost.get(limit_ms, -1.0))
            waits[limit_ms] = max(trade.sliced.chat_waits_ms, waits.get(limit_ms, 0.0))
    cheap = [limit_ms for limit_ms in lost if lost[limit_ms] <= _CHEAP]
    chosen = min(cheap) if cheap else min(lost, key=lambda limit_ms: lost[limit_ms])
    each = "; ".join(
        f"{limit_ms:g} ms: {100 * lost[limit_ms]:.1f} % of the rate, chat waits"
        f" {waits[limit_ms]:.0f} ms"
        for limit_ms in sorted(lost)
    )
    return chosen, f"What slices cost, at most: {each}."
