"""Passes the tensor-parallel ranks instructions to score known tokens, as data in `extra_args`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from workers.vllm.release import extra_args

RAW = "raw_logprobs"
PROCESSED = "processed_logprobs"


@dataclass(frozen=True)
class Scoring:
    """Known tokens to score, with their sampling parameters. The prefill has the prompt and all
    tokens except the last: the position before a token scores the token.
    """

    n_prompt: int
    tokens: list[int]
    mode: str  # RAW or PROCESSED; the fields below affect only PROCESSED
    n_best: int  # best tokens reported in addition to each known one
    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    repetition: float
    presence: float
    frequency: float
    prompt_ids: list[int]  # the prompt's ids, each once; empty if no penalty needs them
    min_tokens: int
    stop_ids: list[int]  # masked before min_tokens
    bias: list[tuple[int, float]]
    allowed: list[int] | None
    bad_words: list[list[int]]

    @classmethod
    def of(cls, params: Any, prompt: Sequence[int], tokens: list[int], mode: str) -> Self:
        """Creates an instance from completed SamplingParams and the prompt's token ids."""
        return cls(
            n_prompt=len(prompt),
            tokens=tokens,
            mode=mode,
            n_best=params.logprobs or 0,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            prompt_ids=sorted({*prompt}) if params.repetition_penalty != 1 else [],
            min_tokens=params.min_tokens,
            stop_ids=sorted(params.all_stop_token_ids),
            bias=sorted((params.logit_bias or {}).items()),
            allowed=params.allowed_token_ids,
            bad_words=params.bad_words_token_ids or [],
        )

    @classmethod
    def read(cls, told: dict[str, Any]) -> Self:
        """Restores an instance from the result of `packed`, in another process."""
        return cls(**told | {"tokens": np.frombuffer(told["tokens"], np.int64).tolist()})

    def packed(self) -> dict[str, Any]:
        """Returns plain data for `read`. Ids are bytes, because vLLM checks each item of a list."""
        return {**vars(self), "tokens": np.array(self.tokens, np.int64).tobytes()}

    @property
    def penalizes(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def only_scales(self) -> bool:
        """Returns True if only the temperature and masked tokens change the logits."""
        cut = self.top_p < 1 or self.top_k or self.min_p > 0
        return self.mode == RAW or not (cut or self.penalizes or self.bias)


@dataclass(frozen=True)
class SamplerOptions:
    """Options for the sampler that Proofline adds to a request."""

    known: list[int]  # replace the sampled tokens one by one
    mode: str | None  # RAW or PROCESSED, of its logprobs; None for the deployment's mode


def sampler_options(params: Any) -> Scoring | SamplerOptions | None:
    """Returns Proofline's options in vLLM's SamplingParams; None if there are none."""
    extra = getattr(params, "extra_args", None)
    if not extra:
        return None
    if isinstance(told := extra.get(extra_args.PASS), dict):  # clients cannot send this type
        return Scoring.read(told)
    known, mode = extra.get(extra_args.KNOWN_TOKENS) or [], extra.get(extra_args.LOGPROBS_MODE)
    return SamplerOptions(known, mode) if known or mode else None
