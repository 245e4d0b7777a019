"""Request parameters, outputs and grammars of chat, adapted to each release of vLLM."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Self

import numpy as np
from vllm import exceptions
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from workers.vllm.release import extra_args

# Tokens of an answer that are converted to text at a time, blocking the event loop.
_PART = 256
# Exceptions that vLLM's grammar checks raise, including unexpected ones.
_WRONG = (
    getattr(exceptions, "VLLMClientError", ValueError),
    *(ValueError, TypeError, AttributeError, KeyError, RecursionError),
)
# Where releases define the row sizes of their second model runner; later entries win.
_SAMPLE = "vllm.v1.worker.gpu.sample"
_LIMITS = (
    ("allowed_token_ids", f"{_SAMPLE}.logit_bias", "MAX_NUM_ALLOWED_TOKEN_IDS"),
    ("logit_bias", f"{_SAMPLE}.logit_bias", "MAX_NUM_LOGIT_BIAS_TOKENS"),
    ("stop_token_ids", f"{_SAMPLE}.logit_bias", "MAX_NUM_STOP_TOKEN_IDS"),
    ("bad_words", f"{_SAMPLE}.bad_words", "MAX_NUM_BAD_WORDS"),
    ("bad_words", "vllm.envs", "VLLM_MAX_NUM_BAD_WORDS"),
    ("bad_words_tokens", f"{_SAMPLE}.bad_words", "MAX_BAD_WORDS_TOTAL_TOKENS"),
    ("bad_words_tokens", "vllm.envs", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"),
)


@dataclass(frozen=True)
class Rows:
    """The logprobs of consecutive tokens: one row per token."""

    ids: np.ndarray  # n x width: the token, then the best tokens
    logprobs: np.ndarray  # n x width
    ranks: np.ndarray  # n, ranks of the tokens

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.ids[part], self.logprobs[part], self.ranks[part])

    def __add__(self, more: Rows) -> Rows:
        parts = zip(self.parts(), more.parts(), strict=True)
        return Rows(*(np.concatenate(pair) for pair in parts))

    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.ids, self.logprobs, self.ranks

    @classmethod
    def of(cls, flat: Any) -> Self:
        """Creates Rows from vLLM's FlatLogprobs."""
        n = len(flat)
        ids, logprobs, ranks = (
            np.array(one).reshape(n, -1) if n else np.empty((0, 1))
            for one in (flat.token_ids, flat.logprobs, flat.ranks)
        )
        return cls._cast(ids, logprobs, ranks[:, 0])

    @classmethod
    def of_tensors(cls, tensors: Any) -> Self:
        """Creates Rows from vLLM's LogprobsTensors, which must be on the host."""
        return cls._cast(*(one.numpy() for one in tensors[:3]))

    @classmethod
    def _cast(cls, ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> Self:
        return cls(ids.astype(np.int64), logprobs.astype(np.float32), ranks.astype(np.int64))


# Applies top_k and top_p as vLLM's sampler does.
cut = apply_top_k_top_p
# Creates a model runner's result for a prompt, from ids, logprobs and ranks.
prompt_logprobs = LogprobsTensors


def _whole(**more: Any) -> Any:
    """Returns SamplingParams for one output without text, ended by max_tokens or the context."""
    return SamplingParams(
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **more,
    )


def pass_params(n_best: int, scoring: dict[str, Any], skip_cache: bool) -> Any:
    """Returns the parameters of a request that scores known tokens in one forward pass. `n_best`:
    number of best tokens to report. `skip_cache`: True also computes positions in the prefix cache.
    """
    return _whole(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=n_best,
        skip_reading_prefix_cache=skip_cache,
        extra_args={extra_args.PASS: scoring},
    )


def step_params(params: Any, tokens: list[int], mode: str) -> Any:
    """Returns the parameters of a request that scores known tokens by decode steps: the client's
    parameters, except those that end or format the answer. Masks end tokens before min_tokens.
    """
    kept = {**params.extra_args, extra_args.KNOWN_TOKENS: tokens, extra_args.LOGPROBS_MODE: mode}
    kept.pop(extra_args.TOKEN_IDS, None)
    params = copy.copy(params)
    params.extra_args = None  # avoids copying the list number by number
    params = copy.deepcopy(params)
    params.extra_args = kept
    params.n, params.seed = 1, None
    params.stop, params.stop_token_ids, params.ignore_eos = [], [], True
    params.max_tokens, params.min_tokens = len(tokens), min(params.min_tokens, len(tokens))
    params.detokenize, params.flat_logprobs = False, True
    if params.num_logprobs is None:
        params.logprobs = 0
    params.output_text_buffer_length = 0
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def trial_params(n_tokens: int, n_best: int, mode: str) -> Any:
    """Returns the parameters of an answer that the trial at start-up decodes and then scores."""
    extra = {extra_args.LOGPROBS_MODE: mode}
    return _whole(max_tokens=n_tokens, temperature=0.99, logprobs=n_best, extra_args=extra)


def core_output(request_id: str, tokens: list[int], rows: Rows) -> Any:
    """Creates the report with which vLLM's engine core delivers sampled tokens to the front end."""
    logprobs = LogprobsLists(rows.ids, rows.logprobs, rows.ranks)
    return EngineCoreOutput(request_id, tokens, new_logprobs=logprobs)


def shape_logprobs(processor: Any, request: Any) -> None:
    """Prepares the logprobs of an answer that vLLM has begun: names tokens by ids if requested, and
    stores a prompt's logprobs as Rows if the request scores known tokens in one pass.
    """
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    if not extra:
        return
    found = processor.request_states[request.request_id].logprobs_processor
    if extra.get(extra_args.TOKEN_IDS):
        found.tokenizer = _Ids()
    if extra_args.PASS in extra:
        found.prompt_logprobs = Rows.of(FlatLogprobs())
        found.update_from_output = partial(_keep_rows, found)


def _keep_rows(processor: Any, output: Any) -> None:
    """Stores a prompt's logprobs as arrays. vLLM's own method would loop over all numbers."""
    if output.new_prompt_logprobs_tensors is not None:
        processor.prompt_logprobs = Rows.of_tensors(output.new_prompt_logprobs_tensors)


def hands_over_each_step(state: Any) -> bool:
    """Returns True if vLLM's output processor delivers each step of this answer immediately."""
    return bool(state.output_kind == RequestOutputKind.DELTA and state.stream_interval == 1)


def limits() -> dict[str, int]:
    """Returns the limits of this release's V2 model runner, by their names in the class Limits."""
    said = {}
    for field, module, name in _LIMITS:
        with suppress(ImportError, AttributeError):
            said[field] = getattr(import_module(module), name)
    return said


def compiles_by_xgrammar(llm: Any) -> bool:
    """Returns True if vLLM compiles grammars with xgrammar, or tries xgrammar first."""
    config = llm.vllm_config.structured_outputs_config
    has_tokenizer = not llm.vllm_config.model_config.skip_tokenizer_init
    return has_tokenizer and config.backend in ("auto", "xgrammar")


def why_no_grammar(error: BaseException, kind: str, text: str) -> str | None:
    """Returns the text of vLLM's error for a client's grammar. Adds the unsupported parts of a JSON
    schema, or the compiler's error text. Returns None if the grammar has not caused the error.
    """
    if not isinstance(error, _WRONG):
        if not isinstance(error.__cause__, _WRONG):
            return None
        error = error.__cause__
    said = " ".join(str(error).split())
    if kind == "json" and "not supported" in said:
        with suppress(ValueError):
            said += f" {unsupported(json.loads(text))}"
    elif error.__cause__ is not None:
        said += " " + " ".join(str(error.__cause__).split())
    return said


def leave_schemas_to_trials() -> None:
    """Stops vLLM's server from converting schemas and other grammars, which would block its event
    loop for seconds. Another process compiles each grammar before the request.
    """
    from vllm.v1.structured_output import backend_xgrammar

    names = ("from_json_schema", "from_regex", "from_structural_tag")
    own = import_module("xgrammar")
    instead = _Instead(own.Grammar, dict.fromkeys(names, lambda *_, **__: None))
    backend_xgrammar.xgr = _Instead(own, {"Grammar": instead})


class _Instead:
    """A proxy for a module or class that replaces some of its attributes."""

    def __init__(self, own: Any, instead: dict[str, Any]) -> None:
        self._own = own
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


# Most keywords in a part of a schema that are tried one by one, which takes quadratic time.
_MOST_NAMED = 64


def unsupported(schema: Any) -> str:
    """Returns what xgrammar cannot enforce, such as "At #/properties/a: multipleOf.", or ""."""
    from vllm.v1.structured_output.backend_xgrammar import (
        has_xgrammar_unsupported_json_features as lacks,
    )

    if not lacks(schema):
        return ""
    path, names = _unsupported(schema, lacks)
    return f"At {path}: {', '.join(names)}."


def _unsupported(schema: Any, lacks: Callable[[Any], bool]) -> tuple[str, list[str]]:
    """Returns the path of a schema's innermost unsupported part, and which keywords cause that."""
    path, inner = "#", iter([("", schema)])
    while found := next(((at, one) for at, one in inner if lacks(one)), None):
        path, schema = path + found[0], found[1]
        inner = iter(
            (f"/{name}/{n}" if isinstance(value, list) else f"/{name}", one)
            for name, value in schema.items()
            for n, one in enumerate(value if isinstance(value, list) else [value])
            if isinstance(one, dict)
        )
    if len(schema) > _MOST_NAMED:
        return path, ["one of its keywords"]
    kind = {name: schema[name] for name in ("type",) if name in schema}
    names = [
        name
        for name in schema.keys() - kind.keys()
        if lacks(kind | {name: schema[name]})
        or not lacks({one: value for one, value in schema.items() if one != name})
    ]
    return path, sorted(names)


def vocabulary(llm: Any) -> str:
    """Returns the engine's tokenizer as JSON, for xgrammar in another process."""
    import xgrammar

    found: str = xgrammar.TokenizerInfo.from_huggingface(
        llm.output_processor.tokenizer, vocab_size=llm.model_config.get_vocab_size()
    ).serialize_json()
    return found


def _repeats(tokens: list[int], asked: Any) -> Any:
    """Returns for each number n whether the first n tokens end with a repetition that
    `repetition_detection` forbids: bool (len(tokens) + 1,). vLLM's check takes far longer.
    """
    ids, found = np.array(tokens), np.zeros(len(tokens) + 1, bool)
    least, most = (asked.min_pattern_size, asked.max_pattern_size) if asked else (0, 0)
    for size in range(max(1, least), most + 1):
        n_same = size * (asked.min_count - 1)  # tokens that equal the token `size` before
        if n_same + size > len(tokens):
            break
        same = ids[size:] == ids[:-size]
        places = np.arange(1, len(same) + 1)
        last_other = np.maximum.accumulate(np.where(same, 0, places))
        found[size + 1 :] |= places - last_other >= n_same
    return found


class _Ids:
    """A replacement for vLLM's tokenizer, whose `decode` returns a token's id as text."""

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])


class Answer:
    """The answer that vLLM would have given if it had sampled the known tokens (another node's
    answer). vLLM's own code decides where the answer ends, and formats the outputs.
    """

    def __init__(self, llm: Any, request: Any, text: str | None, tokens: list[int]) -> None:
        """`request`: vLLM's EngineCoreRequest. `text`: the prompt. `tokens`: known tokens."""
        self._llm, self._request, self._text = llm, request, text
        self._ends = Request.from_engine_core_request(request, None)
        self.tokens = self._cut(tokens)

    def _cut(self, tokens: list[int]) -> list[int]:
        """Returns the tokens up to the first that ends the answer. No token ends the answer before
        min_tokens, although releases after 0.28 also stop at tokens that they would have masked.
        """
        params, ends = self._request.sampling_params, self._ends
        limit = self._llm.model_config.max_model_len
        room = min(ends.max_tokens, limit - ends.num_tokens)
        stops = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
        repeats = _repeats(tokens, getattr(params, "repetition_detection", None))
        at = 0
        for n, token in enumerate(tokens, 1):
            # vLLM's check is slow, so it is called only if it may end the answer.
            if n >= params.min_tokens and (n >= room or token in stops or repeats[n]):
                ends.append_output_token_ids(tokens[at:n])
                at = n
                if check_stop(ends, limit):
                    return tokens[:n]
        ends.append_output_token_ids(tokens[at:])
        return tokens

    def outputs(self, rows: Rows) -> Iterator[list[Any]]:
        """Yields lists of vLLM's RequestOutputs, one list for each part of the tokens. For a
        stream, each token is a part.
        """
        processor = OutputProcessor(self._llm.output_processor.tokenizer, log_stats=False)
        requests = self._children(processor)
        params = self._request.sampling_params
        whole = params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop
        size, n = _PART if whole else 1, len(self.tokens)
        told = rows if params.num_logprobs is not None else None
        for part in (slice(at, min(at + size, n)) for at in range(0, n, size)):
            new = None if told is None else self._logprobs_for_vllm(processor, requests, told[part])
            cores = [self._output(request, part, new) for request in requests]
            yield processor.process_outputs(cores).request_outputs
            if not processor.request_states:  # a stop string ended the answer
                return

    def _logprobs_for_vllm(self, processor: Any, requests: list[str], rows: Rows) -> Any:
        """Returns logprobs for vLLM to format. If the request wants token ids in place of texts,
        adds the logprobs to vLLM's state itself and returns None.
        """
        if not (self._request.sampling_params.extra_args or {}).get(extra_args.TOKEN_IDS):
            return LogprobsLists(rows.ids, rows.logprobs, rows.ranks)
        n, width = rows.ids.shape
        ids = rows.ids.ravel().tolist()
        ranks = np.tile(np.arange(width), (n, 1))
        ranks[:, 0] = rows.ranks
        for request in requests:
            found = processor.request_states[request].logprobs_processor
            flat = found.logprobs
            ends = range(len(flat.token_ids), len(flat.token_ids) + n * width + 1, width)
            flat.start_indices += ends[:-1]
            flat.end_indices += ends[1:]
            flat.token_ids += ids
            flat.logprobs += rows.logprobs.ravel().tolist()
            flat.ranks += ranks.ravel().tolist()
            flat.decoded_tokens += map(str, ids)
            found.cumulative_logprob += float(rows.logprobs[:, 0].sum())
        return None

    def _children(self, processor: Any) -> list[str]:
        """Registers a vLLM request for each of the answer's n choices. Returns the request ids."""
        request, n = self._request, self._request.sampling_params.n
        parent = ParentRequest(request) if n > 1 else None
        ids = []
        for index in range(n):
            child = request
            if parent is not None:
                child = copy.copy(request)
                child.request_id, child.sampling_params = parent.get_child_info(index)
            processor.add_request(child, self._text, parent, index)
            shape_logprobs(processor, child)
            found = processor.request_states[child.request_id].logprobs_processor
            if found.logprobs is not None:
                # FlatLogprobs has few objects; with dicts, garbage collection took most time.
                found.logprobs = FlatLogprobs()
            ids.append(child.request_id)
        return ids

    def _output(self, request_id: str, part: slice, logprobs: Any) -> Any:
        last = part.stop == len(self.tokens)
        reason = self._ends.get_finished_reason()
        if reason is None:  # the tokens ran out
            reason = FinishReason.LENGTH
        return EngineCoreOutput(
            request_id=request_id,
            new_token_ids=self.tokens[part],
            new_logprobs=logprobs,
            finish_reason=reason if last else None,
            stop_reason=self._ends.stop_reason if last else None,
        )
