"""Hooks for known tokens and logprobs_mode in vLLM's V1 model runner, which runs on CPUs and
wherever the V2 runner cannot. Methods of one runner and of its sampler are replaced by methods that
call the originals. vLLM's code is not changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from workers.vllm.chat.rows import Collected, take
from workers.vllm.chat.scoring import PROCESSED, RAW, SamplerOptions, Scoring, sampler_options
from workers.vllm.release import answers


class V1Hooks:
    """Changes one V1 model runner of vLLM, so that it supports known tokens and logprobs_mode."""

    def __init__(self, runner: Any) -> None:
        """Raises AttributeError if the runner of this vLLM release lacks a method to replace."""
        sampler = runner.sampler
        self._runner, self._sampler = runner, sampler
        self._default: str = sampler.logprobs_mode
        self._passes: dict[str, Collected] = {}
        self._asked: dict[str, SamplerOptions] = {}
        # the rows of this step that report raw logprobs, and these logprobs
        self._raw: tuple[list[int], torch.Tensor] | None = None
        self._verifying = False  # whether the step contains drafts
        self._update_states = runner._update_states
        self._prompt_logprobs = runner._get_prompt_logprobs_dict
        self._apply_processors = sampler.apply_logits_processors
        self._sample = sampler.sample
        self._verify: Any = getattr(runner, "rejection_sampler", None)
        verify = self._verify
        if verify is not None:
            self._forward, self._gather = verify.forward, verify._get_logprobs_tensors

    def install(self) -> None:
        runner, sampler, verify = self._runner, self._sampler, self._verify
        if verify is not None:
            verify.forward, verify._get_logprobs_tensors = self.verify, self.gather
        runner._update_states = self.update_states
        runner._get_prompt_logprobs_dict = self.prompt_logprobs
        sampler.apply_logits_processors = self.apply_processors
        sampler.sample = self.sample

    def update_states(self, scheduled: Any) -> Any:
        if self._passes or self._asked:
            for gone in scheduled.finished_req_ids:
                self._passes.pop(gone, None)
                self._asked.pop(gone, None)
        answer = self._update_states(scheduled)
        for new in scheduled.scheduled_new_reqs:
            asked = sampler_options(new.sampling_params)
            if isinstance(asked, Scoring):
                self._runner.num_prompt_logprobs.pop(new.req_id, None)
                self._passes[new.req_id] = Collected(asked, self._runner.device)
            elif asked is not None:
                self._asked[new.req_id] = asked
        return answer

    def prompt_logprobs(self, hidden: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        answer: dict[str, Any] = self._prompt_logprobs(hidden, scheduled)
        if not self._passes:
            return answer
        runner, chunks = self._runner, []
        for request, collected in self._passes.items():
            if (n := scheduled.get(request)) is None:
                continue
            start = runner.requests[request].num_computed_tokens
            at = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]])
            chunks.append((collected, hidden[at : at + n], start))
        take(chunks, runner.model.compute_logits, answers.cut)
        for request in [name for name, one in self._passes.items() if one.is_whole]:
            rows = self._passes.pop(request).rows()
            answer[request] = answers.prompt_logprobs(*(one.cpu() for one in rows))
        return answer

    def apply_processors(self, logits: torch.Tensor, *told: Any, **named: Any) -> Any:
        """Processes logits like vLLM. Before that, stores raw logprobs of rows that report them."""
        rows = self._raw_rows() if self._asked and not self._verifying else []
        self._raw = (rows, logits[rows].log_softmax(-1, dtype=torch.float32)) if rows else None
        return self._apply_processors(logits, *told, **named)

    def sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        if not self._asked or self._verifying:
            return self._sample(logits, metadata)
        sampled, logprobs = self._sample_processed(logits, metadata)
        if self._raw is not None and logprobs is not None:
            rows, raw = self._raw
            logprobs[rows] = raw
        self._raw = None
        self._force(sampled)
        return sampled, logprobs

    def _sample_processed(self, logits: torch.Tensor, metadata: Any) -> Any:
        """Samples tokens. Reports processed logprobs if the step's requests use different modes."""
        if self._default == PROCESSED or not self._mixed():
            return self._sample(logits, metadata)
        with _processed_logprobs(self._sampler):
            return self._sample(logits, metadata)

    def _force(self, sampled: torch.Tensor) -> None:
        rows, tokens = [], []
        for row, request in enumerate(self._runner.input_batch.req_ids):
            asked = self._asked.get(request)
            if asked is not None and asked.known:
                at = len(self._runner.requests[request].output_token_ids)
                if at < len(asked.known):
                    rows.append(row)
                    tokens.append(asked.known[at])
        if rows:
            sampled[rows] = sampled.new_tensor(tokens)

    def _mixed(self) -> bool:
        """Returns whether a request in this step uses another logprobs mode than the deployment."""
        asked = (self._asked.get(request) for request in self._runner.input_batch.req_ids)
        return any(one is not None and one.mode not in (None, self._default) for one in asked)

    def _raw_rows(self) -> list[int]:
        """Returns the rows that report raw logprobs; [] if all use the deployment's mode."""
        if not self._mixed():
            return []
        modes = (
            (self._asked.get(request), row)
            for row, request in enumerate(self._runner.input_batch.req_ids)
        )
        return [row for asked, row in modes if ((asked and asked.mode) or self._default) == RAW]

    def verify(self, *told: Any, **named: Any) -> Any:
        """Runs a speculative step. If the requests' logprobs modes differ, vLLM reports processed
        logprobs, and `gather` restores raw logprobs for requests that want them.
        """
        if not self._asked:
            return self._forward(*told, **named)
        switch = self._default != PROCESSED and self._mixed()
        self._verifying = True
        self._verify.is_processed_logprobs_mode |= switch
        try:
            with _processed_logprobs(self._sampler) if switch else nullcontext():
                return self._forward(*told, **named)
        finally:
            self._verifying = False
            if switch:
                self._verify.is_processed_logprobs_mode = False

    def gather(
        self,
        n_best: int,
        drafts: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        bonus: torch.Tensor,
        *told: Any,
    ) -> Any:
        """Returns a speculative step's logprobs. `logits`: unprocessed logits of all positions.
        `target`, `bonus`: processed logits of drafts, and of the positions after the drafts.
        """
        rows = self._raw_rows() if self._asked else []
        if rows:
            ends = drafts.cu_num_draft_tokens.tolist()
            begins = [0, *ends[:-1]]
            of_drafts = [at for row in rows for at in range(begins[row], ends[row])]
            target, bonus = target.clone(), bonus.clone()
            target[of_drafts] = logits[drafts.target_logits_indices[of_drafts]].to(target.dtype)
            bonus[rows] = logits[drafts.bonus_logits_indices[rows]].to(bonus.dtype)
        return self._gather(n_best, drafts, logits, target, bonus, *told)


@contextmanager
def _processed_logprobs(sampler: Any) -> Iterator[None]:
    """Makes the sampler report processed logprobs while the context is open."""
    last = sampler.topk_topp_sampler
    before = sampler.logprobs_mode, last.logprobs_mode, last.forward
    sampler.logprobs_mode = last.logprobs_mode = PROCESSED
    # forward_cuda may use kernels that report no logprobs
    if last.forward == getattr(last, "forward_cuda", None):
        last.forward = last.forward_native
    try:
        yield
    finally:
        sampler.logprobs_mode, last.logprobs_mode, last.forward = before
