"""Hooks for known tokens and logprobs_mode in vLLM's V2 model runner, which runs on GPUs. Methods
of one runner's objects are replaced by methods that call the originals. Only the device knows the
request of each row, so the requests' options are also on the device, by request slot.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from workers.vllm.chat.rows import Collected, take
from workers.vllm.chat.scoring import PROCESSED, RAW, SamplerOptions, Scoring, sampler_options
from workers.vllm.release import answers


class V2Hooks:
    """Hooks for known tokens and logprobs_mode in a V2 model runner on the last pipeline stage.
    Other stages have no sampler.
    """

    def __init__(self, runner: Any) -> None:
        """Raises AttributeError if the runner of this vLLM release lacks a method to replace."""
        sampler, worker = runner.sampler, runner.prompt_logprobs_worker
        self._runner, self._sampler, self._worker = runner, sampler, worker
        self._default: str = sampler.logprobs_mode
        self._passes: dict[str, Collected] = {}
        self._asked: dict[str, tuple[int, SamplerOptions]] = {}  # with the request's slot
        self._table = _Table(worker.max_num_reqs, runner.device)
        # While a step is verified: its rows' slots, their raw logits, and their processed logits.
        self._step: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._add_request, self._remove_request = worker.add_request, worker.remove_request
        self._prompt_logprobs = worker.compute_prompt_logprobs
        self._sample, self._slot_list = sampler.sample, _place(sampler.sample, "idx_mapping_np")
        self._verify: Any = getattr(runner, "rejection_sampler", None)
        if verify := self._verify:
            self._apply, self._gather = sampler.apply_sampling_params, verify._get_logprobs_tensors
            self._gathered = _place(verify._get_logprobs_tensors, "logits")

    def install(self) -> None:
        sampler, worker = self._sampler, self._worker
        if verify := self._verify:
            sampler.apply_sampling_params = self.apply
            verify._get_logprobs_tensors = self.gather
        worker.add_request, worker.remove_request = self.add_request, self.remove_request
        worker.compute_prompt_logprobs = self.prompt_logprobs
        sampler.sample = self.sample

    def add_request(self, request: str, slot: int, params: Any) -> None:
        self._add_request(request, slot, params)
        asked = sampler_options(params)
        if isinstance(asked, Scoring):
            self._worker.uses_prompt_logprobs[slot] = False
            self._passes[request] = Collected(asked, self._runner.device)
        elif asked is not None:
            self._asked[request] = slot, asked
            self._table.fill(self._asked.values(), self._default)

    def remove_request(self, request: str) -> None:
        self._remove_request(request)
        self._passes.pop(request, None)
        if self._asked.pop(request, None) is not None:
            self._table.fill(self._asked.values(), self._default)
            self._sampler.logprobs_mode = self._default

    def prompt_logprobs(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        batch: Any,
        *told: Any,
    ) -> dict[str, Any]:
        answer: dict[str, Any] = self._prompt_logprobs(logits, hidden, batch, *told)
        if not self._passes:
            return answer
        chunks = []
        for place, request in enumerate(batch.req_ids):
            if (collected := self._passes.get(request)) is None:
                continue
            start = int(batch.num_computed_prefill_tokens_np[place])
            at, n = int(batch.query_start_loc_np[place]), int(batch.num_scheduled_tokens[place])
            chunks.append((collected, hidden[at : at + n], start))
        take(chunks, logits, answers.cut)
        for request in [name for name, one in self._passes.items() if one.is_whole]:
            answer[request] = answers.prompt_logprobs(*self._passes.pop(request).rows())
        return answer

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, *told: Any, **named: Any) -> Any:
        if not self._asked:
            return self._sample(logits, slots, *told, **named)
        mixed = self._is_mixed(told[self._slot_list - 2])
        self._sampler.logprobs_mode = PROCESSED if mixed else self._default
        sampled, processed = self._sample(logits, slots, *told, **named)
        self._step = None
        if mixed:
            processed = self._table.with_raw(slots, logits, processed)
        return self._table.forced(slots, sampled, self._runner.req_states), processed

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, *told: Any, **named: Any
    ) -> torch.Tensor:
        """Processes logits like vLLM. Stores raw and processed logits until `gather` reads them."""
        processed: torch.Tensor = self._apply(logits, slots, *told, **named)
        if self._asked:
            self._step = slots, logits, processed
        return processed

    def gather(self, *told: Any, **named: Any) -> Any:
        step, self._step = self._step, None
        if not self._asked or step is None:
            return self._gather(*told, **named)
        at = self._gathered
        return self._gather(*told[:at], self._table.with_raw(*step), *told[at + 1 :], **named)

    def _is_mixed(self, slots: Any) -> bool:
        """Returns whether a request in this step uses another logprobs mode than the deployment."""
        others = {
            slot for slot, one in self._asked.values() if one.mode not in (None, self._default)
        }
        return bool(others) and not others.isdisjoint(slots.tolist())


class _Table:
    """A table on the device with the options of requests, by request slot."""

    def __init__(self, n_slots: int, device: torch.device) -> None:
        self._n, self._device = n_slots, device
        self.fill((), PROCESSED)

    def fill(self, asked: Any, default: str) -> None:
        begins, counts, tokens = [0] * self._n, [0] * self._n, [0]
        raw = [default == RAW] * self._n
        for slot, one in asked:
            begins[slot], counts[slot] = len(tokens), len(one.known)
            tokens += one.known
            raw[slot] = (one.mode or default) == RAW
        self._forces = len(tokens) > 1
        self._begins, self._counts, self._tokens = (
            torch.tensor(one, device=self._device) for one in (begins, counts, tokens)
        )
        self._raw = torch.tensor(raw, device=self._device)

    def with_raw(
        self, slots: torch.Tensor, model: torch.Tensor, processed: torch.Tensor
    ) -> torch.Tensor:
        """Returns raw or processed logits (float32) for each row, as its request's mode demands."""
        return torch.where(self._raw[slots.long(), None], model.float(), processed.float())

    def forced(self, slots: torch.Tensor, sampled: torch.Tensor, states: Any) -> torch.Tensor:
        """Returns a token per row: the known token, or the sampled token if no token is known."""
        if not self._forces:
            return sampled
        slots = slots.long()
        step = states.total_len.gpu[slots] - states.prompt_len.gpu[slots]
        known = (step >= 0) & (step < self._counts[slots])
        at = (self._begins[slots] + step).clamp(0, len(self._tokens) - 1)
        return torch.where(known, self._tokens[at].to(sampled.dtype), sampled)


def _place(method: Callable[..., Any], name: str) -> int:
    """Returns the index of a method's argument `name`, because releases of vLLM differ."""
    return list(inspect.signature(method).parameters).index(name)
