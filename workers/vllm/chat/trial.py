"""The trial at start-up: finds how this engine can score known tokens with its model and flags."""

import asyncio
import logging
from typing import Any

import numpy as np

from poc_core.serving.position_distance import NEVER, position_distance
from poc_core.settings.chat import Validation
from workers.engines.validations import Way
from workers.vllm.chat.known_tokens import KnownTokens
from workers.vllm.chat.scoring import PROCESSED, RAW
from workers.vllm.release import answers
from workers.vllm.release.answers import Rows

logger = logging.getLogger(__name__)

# Mean distance between one pass and decoding that counts as rounding: batches of another size give
# 0.003, honest nodes with other hardware 0.026 to 0.040.
_NEAR = 0.01
_TOKENS = 64
_ANSWERS = 4
_BEST = 5
# For prompts without a tokenizer.
_PROMPT_TOKENS = 24
_TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a fisherman who lived by the sea with his wife and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)


async def choose_way(known: KnownTokens, llm: Any, wanted: Validation) -> None:
    """Sets how known tokens are scored. For "auto", tries both methods with a few new answers."""
    name = llm.model_config.model
    failed: dict[Way, str] = {"pass": known.why_no_pass, "steps": known.why_no_steps}
    if wanted != "auto":
        lacks = failed[wanted]
        known.settle("none" if lacks else wanted)
        _say(known, name, f"POC_VALIDATION={wanted}{f', but {lacks}' if lacks else ''}")
        return
    far: dict[Way, float] = {}
    ways = [way for way, why in failed.items() if not why]
    try:
        n_answers = _ANSWERS if ways else 0
        answers = await asyncio.gather(*(_decoded(known, llm, n) for n in range(n_answers)))
    except Exception as error:  # the worker continues, and detects by itself if its engine died
        logger.exception("the trial's answers cannot be decoded")
        known.settle("none")
        _say(known, name, f"{type(error).__name__}: {error}")
        return
    for way in ways:
        try:
            far[way] = await _distance(known, way, answers)
        except Exception as error:  # any error of vLLM or of a hook: this way is not used
            logger.exception("known tokens cannot be scored by %s", way)
            failed[way] = f"{type(error).__name__}: {error}"
    near = far.get("pass", 1.0) <= _NEAR
    known.settle("pass" if near else "steps" if "steps" in far else "none", failed["steps"])
    told = [
        f"{way} {far[way]:.4f} from decoding" if way in far else f"no {way}: {why}"
        for way, why in failed.items()
    ]
    _say(known, name, "; ".join(told))


def _say(known: KnownTokens, name: str, why: str) -> None:
    way = known.validations.way
    if way == "none":
        logger.warning(
            "known tokens of chat cannot be scored with %s, validators get 503: %s", name, why
        )
    else:
        logger.info("known tokens of chat are scored by %s with %s (%s)", way, name, why)


class _Decoded:
    def __init__(self, prompt: Any, params: Any, output: Any) -> None:
        (choice,) = output.outputs
        self.prompt, self.params = prompt, params
        self.tokens = list(choice.token_ids)
        self.rows = Rows.of(choice.logprobs)


async def _decoded(known: KnownTokens, llm: Any, n: int) -> _Decoded:
    tokenizer, config = llm.output_processor.tokenizer, llm.model_config
    room = config.max_model_len - _TOKENS
    ids = [*range(_PROMPT_TOKENS * n + 1, _PROMPT_TOKENS * (n + 1) + 1)]
    if tokenizer is not None:
        ids = tokenizer.encode(_TEXTS[n])
    prompt = {"type": "token", "prompt_token_ids": ids[: max(1, room)]}
    most = config.max_logprobs
    n_best = _BEST if most == -1 else min(_BEST, most)
    params = answers.trial_params(min(_TOKENS, max(1, room)), n_best, PROCESSED if n % 2 else RAW)
    async for output in known.generate(prompt, params, f"validation-trial-{n}"):
        last = output
    return _Decoded(prompt, params, last)


async def _distance(known: KnownTokens, way: Way, answers: list[_Decoded]) -> float:
    """Scores the answers' tokens by `way`. Returns the mean distance between the resulting logprobs
    and the logprobs from decoding.
    """
    scored = await asyncio.gather(
        *(
            known.rows(way, one.prompt, one.params, one.tokens, f"validation-trial-{way}-{n}")
            for n, one in enumerate(answers)
        )
    )
    for one, rows in zip(answers, scored, strict=True):
        if len(rows) != len(one.tokens):
            raise RuntimeError(f"{len(rows)} of {len(one.tokens)} tokens were scored")
    pairs = zip(answers, scored, strict=True)
    return float(
        np.mean([distance for one, rows in pairs for distance in distances(one.rows, rows)])
    )


def distances(executor: Rows, validator: Rows) -> list[float]:
    """Returns the distance of two answers at each position (protocol.md, section 9.2)."""
    return [
        position_distance(*(_entries(rows, at) for rows in (executor, validator)))
        for at in range(len(executor))
    ]


def _entries(rows: Rows, at: int) -> dict[int, float]:
    pairs = zip(rows.ids[at].tolist(), rows.logprobs[at].tolist(), strict=True)
    best = {token: max(logprob, NEVER) for token, logprob in pairs}
    return dict(list(best.items())[:_BEST])
