"""The chains of an engine, compared with those of the oracle, which shares no code with it."""

import json
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue

from bench.families import oracle
from bench.families.make import FOR_TRANSFORMERS, is_quantized, kept, make, text_config
from bench.families.oracle import Chain, Wanted, chains
from poc_core.records import ProofSpec
from poc_core.schemes.decode.limits import why_no_chains
from workers.pipeline import compute_all

# Decode proofs read 256 dimensions of a state.
_WIDTH = 256
# Chains are shorter than the positions that real models' sparse attention uses without choosing.
_ALL_TAKEN = {"index_topk": 512}
# Longer than the families' windows and blocks.
_PLAN = Wanted("block", "key", seq_len=100, max_tokens=256, nonces=(0, 7, 100_001))
# Largest margins of right claims: of engines that round float32 differently, and of bfloat16 or 8
# bits.
_FLOAT32_MARGIN, _ROUNDED_MARGIN = 1e-3, 0.03
# If the oracle's best two scores are nearer than this, an engine may choose the second point.
_NEAR_TIE = 1e-4
# Least margin of chains of another model, state or token.
_WRONG = 0.1


class Opinions(NamedTuple):
    """The oracle's chains by nonce: free ones, along claims, and along free ones with other ids."""

    free: dict[int, Chain]
    claimed: dict[int, Chain]
    other_ids: dict[int, Chain]


def model(family: str, folder: Path) -> Path:
    """Makes the family's tiny model, as wide as chains need; returns its folder in `folder`."""
    config = text_config(family)
    changes = {"hidden_size": _WIDTH} if config["hidden_size"] < _WIDTH else {}
    return make(
        family, folder / "decode", **changes, **(_ALL_TAKEN if "index_topk" in config else {})
    )


def checked(engine: Any, family: str, folder: str) -> dict[str, Any]:
    """Returns the result of every comparison of an engine's chains, or the refusal."""
    if why_not := why_no_chains(engine.info):
        return {"right": "\n" not in why_not, "refused": why_not}
    exact = engine.info.dtype == "float32"
    return _compared(engine, opinions(family, folder), _claims(), exact)


def opinions(family: str, folder: str) -> Opinions:
    """Returns the oracle's chains of the model in a folder, stored there or computed now."""

    def ask() -> JsonValue:
        copy = os.path.join(folder, FOR_TRANSFORMERS) if is_quantized(family) else folder
        # In a process without vLLM, which registers its own configuration classes in transformers.
        with ProcessPoolExecutor(1, get_context("spawn")) as processes:
            asked = processes.submit(_asked, copy, _claims()).result()
        found: JsonValue = json.loads(json.dumps(asked))
        return found

    question = f"{_PLAN} {_claims()} {Path(oracle.__file__).read_text()}"
    answer: Any = kept(Path(folder, "oracle.json"), question, ask)
    return Opinions(*({int(n): Chain(*one) for n, one in part.items()} for part in answer))


def _claims() -> dict[int, list[int]]:
    """Returns random points by nonce."""
    chance = random.Random(0)
    return {
        nonce: [chance.randrange(16) for _ in range(_PLAN.max_tokens + 1)] for nonce in _PLAN.nonces
    }


def _asked(folder: str, claims: dict[int, list[int]]) -> Opinions:
    """Asks the oracle on the CPU, because GPUs may round float32 to TF32."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    free = chains(folder, _PLAN)
    own = {nonce: chain.points for nonce, chain in free.items()}
    return Opinions(
        free,
        chains(folder, _PLAN._replace(claims=claims)),
        chains(folder, _PLAN._replace(claims=own, other_ids=True)),
    )


def _compared(
    engine: Any, opinions: Opinions, claims: dict[int, list[int]], exact: bool
) -> dict[str, Any]:
    own = {nonce: opinions.free[nonce].points for nonce in _PLAN.nonces}
    most = _FLOAT32_MARGIN if exact else _ROUNDED_MARGIN
    free: list[Any] = compute_all(engine, _spec(), _PLAN.nonces)
    if None in free:
        return {"right": False, "chains": "not finite"}
    undecided = [_undecided(opinions.free[nonce]) for nonce in _PLAN.nonces]
    left = [_leaves(one, own[nonce]) for one, nonce in zip(free, _PLAN.nonces, strict=True)]
    seen: dict[str, Any] = {
        "dtype": engine.info.dtype,
        "steps alike": left,
        "undecided from": undecided,
    }
    right = not exact or all(one >= other for one, other in zip(left, undecided, strict=True))
    for words, options in (("one forward", {}), ("step by step", {"stepwise": True})):
        forced = _judged(engine, own, options)
        told = max(margin for _n, margin in forced)
        counts = [n for n, _margin in forced]
        ours, theirs = _judged(engine, claims, options), _oracles(opinions.claimed, claims)
        apart = max(abs(a[1] - b[1]) for a, b in zip(ours, theirs, strict=True))
        more = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
        seen[words] = f"{counts} disagree, margin {told:.5f}"
        seen[f"claims, {words}"] = f"margins within {apart:.5f}, {more} more or fewer disagree"
        right = right and told <= most and apart <= most
    others = [*_PLAN.nonces[1:], _PLAN.nonces[0]]
    mixed = {nonce: own[other] for nonce, other in zip(_PLAN.nonces, others, strict=True)}
    least = min(margin for _n, margin in _judged(engine, mixed, {}))
    seen["of other nonces"] = f"{least:.3f}"
    told = max(margin for _n, margin in _oracles(opinions.other_ids, own))
    seen["of other token ids"] = f"{told:.3f}"
    return {"right": right and least >= _WRONG, **seen}


def _spec(**options: Any) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash=_PLAN.block_hash,
        public_key=_PLAN.public_key,
        seq_len=_PLAN.seq_len,
        options={"max_tokens": _PLAN.max_tokens, **options},
    )


def _judged(
    engine: Any, claims: dict[int, list[int]], options: dict[str, Any]
) -> list[tuple[int, float]]:
    """Returns for each nonce the number of rejected claims, and the largest margin."""
    enforced = {str(nonce): points for nonce, points in claims.items()}
    found: list[Any] = compute_all(engine, _spec(enforced=enforced, **options), _PLAN.nonces)
    return [(1 << 30, float("inf")) if one is None else (one[0], one[1]) for one in found]


def _oracles(seen: dict[int, Chain], claims: dict[int, list[int]]) -> list[tuple[int, float]]:
    """Returns the same as `_judged` by the oracle's scores."""
    found = []
    for nonce in _PLAN.nonces:
        margins = [
            max(scores) - scores[claim]
            for scores, point, claim in zip(
                seen[nonce].scores, seen[nonce].points, claims[nonce], strict=True
            )
            if point != claim
        ]
        found.append((len(margins), max(margins, default=0.0)))
    return found


def _undecided(chain: Chain) -> int:
    """Returns the first step at which another engine may choose another point."""
    for step, scores in enumerate(chain.scores):
        best, next_best = sorted(scores)[:-3:-1]
        if best - next_best < _NEAR_TIE:
            return step
    return len(chain.points)


def _leaves(points: Sequence[int], expected: Sequence[int]) -> int:
    """Returns the number of equal steps before the first different step."""
    pairs = zip(points, expected, strict=True)
    return next((step for step, (a, b) in enumerate(pairs) if a != b), len(expected))
