"""Honest and dishonest executors of one model, each judged as the network judges it: the table of
docs/chat.md.

    python -m bench.executors

Answers of 128 tokens, in processed logprobs; the validator is a vLLM engine in bfloat16 that asks
for one at a time.
"""

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cli.shipped import shipped_models
from lab.judge import chat_distance
from lab.judge.chat_distance import Rules, Verdict
from tests.integration.chat_checks.known import Server, content, known, served
from tests.stacks.deployments import Deployment

MODEL, OTHER_MODEL = "tiny-qwen3-256", "tiny-qwen3"
# By which their last norm is larger: at temperature 1 they are then as sure as trained models are,
# 0.5 nats on average. As shipped they know nothing, 5.4 nats.
_SURER = {MODEL: 7.5, OTHER_MODEL: 9.5}
TEMPERATURE, WRONG_TEMPERATURE = 0.6, 1.2
SWAPPED_EVERY = 20
_ANSWERS, _TOKENS, _BEST, _VOCABULARY = 8, 128, 5, 512
HONEST = ("one at a time", "eight at a time", "transformers")
DISHONEST = (
    "weights of 4 bits",
    f"temperature {WRONG_TEMPERATURE:g} in place of {TEMPERATURE:g}",
    f"another model ({OTHER_MODEL})",
    f"every {SWAPPED_EVERY}th token swapped",
)

Content = list[dict[str, Any]]


@dataclass
class Judged:
    """An executor's answers, compared with a validator's."""

    executor: str
    verdicts: list[Verdict]

    @property
    def distances(self) -> list[float]:
        """The mean of each answer."""
        return [float(np.mean(one.distances)) for one in self.verdicts]

    @property
    def similarities(self) -> list[float]:
        """By the mean alone, whatever else the verdict says."""
        return [one.legacy_similarity or 0.0 for one in self.verdicts]


def judge_all(folder: Path) -> Iterator[Judged]:
    """Every executor of HONEST, then of DISHONEST. `folder`: for the models' weights."""
    model = sure(MODEL, folder)
    asked = [request(n, TEMPERATURE) for n in range(_ANSWERS)]
    with engine(in_4_bits(model, folder)) as server:
        rounded = answers(server, asked, 8)
    with engine(sure(OTHER_MODEL, folder)) as server:
        other = answers(server, asked, 8)
    with engine(model) as server:
        alone, together = (answers(server, asked, n) for n in (1, 8))
        elsewhere = [by_transformers(model, one) for one in asked]
        hotter = answers(server, [request(n, WRONG_TEMPERATURE) for n in range(_ANSWERS)], 8)
        swapped = [with_swaps(one) for one in together]
        executed = (alone, together, elsewhere, rounded, hotter, other, swapped)
        for name, found in zip((*HONEST, *DISHONEST), executed, strict=True):
            yield Judged(name, [judge(server, *pair) for pair in zip(asked, found, strict=True)])


def judge(server: Server, asked: dict[str, Any], executed: Content) -> Verdict:
    """By the rules of the network's models with calibration."""
    ids = [int(one["token"]) for one in executed]
    validated = content(server.ask(known(asked, ids)))
    return chat_distance.compare(executed, validated, RULES)


RULES = Rules.of("DeepSeek-V4-Flash", {}, "processed_logprobs")


def request(n: int, temperature: float) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Tell me about {n} ships."}],
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": n,
        "logprobs": True,
        "top_logprobs": _BEST,
        "logprobs_mode": "processed_logprobs",
    }


def answers(server: Server, asked: list[dict[str, Any]], at_once: int) -> list[Content]:
    with ThreadPoolExecutor(at_once) as pool:
        return [content(one) for one in pool.map(server.ask, asked)]


@contextmanager
def engine(model: Path) -> Iterator[Server]:
    with served(Deployment(str(model), "bfloat16"), 256) as server:
        yield server


@lru_cache(1)
def _loaded(model: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    return AutoTokenizer.from_pretrained(model), loaded


def by_transformers(model: Path, asked: dict[str, Any], dtype: str = "bfloat16") -> Content:
    """An answer of transformers, sampled at the temperature."""
    tokenizer, loaded = _loaded(model, dtype)
    prompt = tokenizer.apply_chat_template(
        asked["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    dice = torch.Generator().manual_seed(asked["seed"])
    found: Content = []
    step, cache = prompt["input_ids"], None
    with torch.no_grad():
        for _ in range(asked["max_tokens"]):
            output = loaded(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[0, -1].float() / asked["temperature"], -1)
            step = torch.multinomial(logprobs.exp(), 1, generator=dice)[None]
            found.append(position(logprobs, int(step)))
    return found


def position(logprobs: Tensor, token: int) -> dict[str, Any]:
    """The token's, and of the best with it."""
    best = [token, *(one for one in logprobs.topk(_BEST).indices.tolist() if one != token)]
    top = [{"token": str(one), "logprob": float(logprobs[one])} for one in best[:_BEST]]
    return {**top[0], "top_logprobs": top}


def with_swaps(executed: Content) -> Content:
    """Every 20th token is another one, told with the logprobs of the one that was sampled."""
    swapped = deepcopy(executed)
    for one in swapped[SWAPPED_EVERY - 1 :: SWAPPED_EVERY]:
        taken = {entry["token"] for entry in one["top_logprobs"]}
        token = next(str(n) for n in range(3, _VOCABULARY) if str(n) not in taken)
        for entry in one["top_logprobs"]:
            entry["token"] = token if entry["token"] == one["token"] else entry["token"]
        one["token"] = token
    return swapped


def sure(name: str, folder: Path) -> Path:
    """The shipped model, as sure of its answers as a trained one."""
    factor = _SURER[name]

    def larger(name: str, weight: Tensor) -> Tensor:
        return weight * factor if name == "model.norm.weight" else weight

    return _copy(shipped_models()[name], folder / f"sure-{name}", larger)


def in_4_bits(model: Path, folder: Path) -> Path:
    """The model with the weights of its layers rounded to 16 values, a scale for each output."""

    def rounded(name: str, weight: Tensor) -> Tensor:
        if weight.ndim != 2 or "layers" not in name:
            return weight
        scale = weight.float().abs().amax(1, keepdim=True) / 7
        return ((weight.float() / scale).round() * scale).to(weight.dtype)

    return _copy(model, folder / f"{model.name}-4-bits", rounded)


def _copy(model: Path, to: Path, change: Any) -> Path:
    shutil.copytree(model, to)
    weights = load_file(model / "model.safetensors")
    changed = {name: change(name, weight) for name, weight in weights.items()}
    save_file(changed, to / "model.safetensors", {"format": "pt"})
    return to


def told(judged: Judged) -> str:
    """A row of the table."""
    far, near = judged.distances, judged.similarities
    valid = sum(one.is_valid for one in judged.verdicts)
    reasons = sorted({one.reason for one in judged.verdicts} - {chat_distance.PASS})
    return (
        f"| {judged.executor} | {np.mean(far):.4f} ({max(far):.4f}) |"
        f" {min(near):.3f} to {max(near):.3f} | {valid} of {len(far)} |"
        f" {', '.join(reasons) or '-'} |"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for judged in judge_all(Path(folder)):
            print(told(judged), flush=True)


if __name__ == "__main__":
    main()
