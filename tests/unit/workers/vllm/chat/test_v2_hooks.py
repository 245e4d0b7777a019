"""The second model runner's hooks, as far as a CPU can show them: on objects with the methods of
two releases."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.marks import needs_vllm
from workers.vllm.chat.scoring import PROCESSED, RAW
from workers.vllm.release.extra_args import KNOWN_TOKENS, LOGPROBS_MODE, PASS

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

N_SLOTS = 8


class Sampler:
    """Of 0.32: the logits, then the slots of the rows, on the device and as an array."""

    def __init__(self, mode: str) -> None:
        self.logprobs_mode = mode
        self.modes: list[str] = []

    def sample(
        self,
        logits: Any,
        expanded_idx_mapping: Any,
        idx_mapping: Any,
        idx_mapping_np: Any,
        pos: Any,
    ) -> Any:
        self.modes.append(self.logprobs_mode)
        return logits.argmax(-1), logits.float() / 2

    def apply_sampling_params(self, logits: Any, expanded_idx_mapping: Any) -> Any:
        return logits.float() / 2


class OlderSampler(Sampler):
    """Of 0.25.1."""

    def sample(  # type: ignore[override]
        self, logits: Any, expanded_idx_mapping: Any, idx_mapping_np: Any, pos: Any
    ) -> Any:
        return super().sample(logits, expanded_idx_mapping, None, idx_mapping_np, pos)


class PromptLogprobs:
    max_num_reqs = N_SLOTS

    def __init__(self) -> None:
        self.uses_prompt_logprobs = np.zeros(N_SLOTS, dtype=bool)

    def add_request(self, request: str, slot: int, params: Any) -> None:
        self.uses_prompt_logprobs[slot] = params.prompt_logprobs is not None

    def remove_request(self, request: str) -> None:
        pass

    def compute_prompt_logprobs(self, logits: Any, hidden: Any, batch: Any, *told: Any) -> Any:
        return {}


def runner_of(sampler: Sampler) -> Any:
    lengths = {"total_len": [0, 7, 0, 9, 0, 5, 0, 0], "prompt_len": [0, 6, 0, 9, 0, 1, 0, 0]}
    return SimpleNamespace(
        sampler=sampler,
        prompt_logprobs_worker=PromptLogprobs(),
        rejection_sampler=None,
        device=torch.device("cpu"),
        req_states=SimpleNamespace(
            **{name: SimpleNamespace(gpu=torch.tensor(one)) for name, one in lengths.items()}
        ),
    )


def params(**extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra or None, prompt_logprobs=None)


@pytest.mark.parametrize("older", [True, False], ids=["0.25.1", "0.32"])
@pytest.mark.parametrize("default", [RAW, PROCESSED])
def test_each_row_has_its_token_and_its_mode(older: bool, default: str) -> None:
    from workers.vllm.chat.v2_hooks import V2Hooks

    sampler = (OlderSampler if older else Sampler)(default)
    runner = runner_of(sampler)
    V2Hooks(runner).install()
    worker = runner.prompt_logprobs_worker
    other = PROCESSED if default == RAW else RAW
    worker.add_request("forced", 1, params(**{KNOWN_TOKENS: [4, 2], LOGPROBS_MODE: other}))
    worker.add_request("first", 3, params(**{KNOWN_TOKENS: [3], LOGPROBS_MODE: default}))
    worker.add_request("done", 5, params(**{KNOWN_TOKENS: [3]}))
    slots = torch.tensor([1, 3, 5, 6], dtype=torch.int32)
    logits = torch.eye(6)[:4] * 8
    told = (slots.numpy(), None) if older else (slots, slots.numpy(), None)
    sampled, found = sampler.sample(logits, slots, *told)
    assert sampled.tolist() == [2, 3, 2, 3]  # the second known token; the first; sampled ones
    whose = [other, default, default, default]
    assert found.tolist() == [
        (row if mode == RAW else row / 2).tolist() for row, mode in zip(logits, whose, strict=True)
    ]
    assert sampler.modes == [PROCESSED]  # of both, so that the rows can be told apart

    for request in ("forced", "first", "done"):
        worker.remove_request(request)
    sampled, found = sampler.sample(logits, slots, *told)
    assert sampled.tolist() == [0, 1, 2, 3]
    assert sampler.modes[-1] == default


def test_the_rows_of_one_pass_are_its_own() -> None:
    from tests.unit.workers.vllm.chat.test_rows import HEAD, N_PROMPT, PLAIN, STATES
    from workers.vllm.chat.v2_hooks import V2Hooks

    runner = runner_of(Sampler(PROCESSED))
    V2Hooks(runner).install()
    worker = runner.prompt_logprobs_worker
    asked = SimpleNamespace(extra_args={PASS: PLAIN.packed()}, prompt_logprobs=5)
    worker.add_request("a", 1, params())
    worker.add_request("b", 2, asked)
    assert not worker.uses_prompt_logprobs[2]  # vLLM would score the whole prompt
    beside = torch.zeros(3, STATES.shape[1])
    found: dict[str, Any] = {}
    for start, end in ((0, 100), (100, len(STATES))):
        batch = SimpleNamespace(
            req_ids=["a", "b"],
            num_computed_prefill_tokens_np=np.array([50, start]),
            query_start_loc_np=np.array([0, 3, 3 + end - start]),
            num_scheduled_tokens=np.array([3, end - start]),
        )
        hidden = torch.cat([beside, STATES[start:end]])
        found |= worker.compute_prompt_logprobs(
            lambda one: one @ HEAD, hidden, batch, None, None, None
        )
    expected = (STATES[N_PROMPT - 1 :] @ HEAD).log_softmax(-1)
    ids, logprobs, _ranks, *_ = found["b"]
    assert ids[:, 0].tolist() == PLAIN.tokens
    torch.testing.assert_close(logprobs[:, :1], expected.gather(-1, ids[:, :1].long()))
