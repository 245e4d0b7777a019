"""Reads the network's fields for validating chat: enforced_tokens, enforced_str, logprobs_mode."""

import asyncio
from dataclasses import dataclass
from typing import Any

from poc_core import chat_bounds
from workers.vllm.chat.errors import BadRequest, CannotForce, refuse_foreign
from workers.vllm.chat.fields import RequestOptions

PATHS = ("/v1/chat/completions", "/v1/completions")
_MODES = {
    "raw": "raw_logprobs",
    "raw_logprobs": "raw_logprobs",
    "processed": "processed_logprobs",
    "processed_logprobs": "processed_logprobs",
}
# More digits than any id has, but few enough for Python to parse.
_MOST_DIGITS = 20


@dataclass(frozen=True)
class NetworkFields:
    """A reader of the network's request fields for one engine."""

    n_ids: int  # size of the model's vocabulary
    context: int  # most tokens of a prompt and its answer
    tokenizer: Any  # None if the engine has none

    async def of(self, found: dict[str, Any]) -> RequestOptions | None:
        """Returns the options in a body's network fields, or None if the body has no such field.
        Raises BadRequest if a field is invalid, CannotForce if this engine cannot do what a field
        requests.
        """
        if not found.keys().isdisjoint(
            chat_bounds.KNOWN_TOKENS
        ):  # in a thread: tokenizing takes long
            return await asyncio.to_thread(self.read, found)
        return self.read(found) if "logprobs_mode" in found else None

    def read(self, found: dict[str, Any]) -> RequestOptions:
        known = self._known(found)
        mode = _mode(found.get("logprobs_mode"))
        if found.get("use_beam_search"):
            if known is not None:
                raise CannotForce("a beam search has no answer of its own to put them in")
            mode = None  # a beam search sets its own mode
        return RequestOptions(True, mode, known, known is not None and _lets_model_call(found))

    def _known(self, found: dict[str, Any]) -> list[int] | None:
        name = next(
            (name for name in chat_bounds.KNOWN_TOKENS if found.get(name) is not None), None
        )
        if name is None:
            return None
        if fault := chat_bounds.unfit(name, found[name], self.context):
            raise BadRequest(fault)
        ids = (self._of_text if name == "enforced_str" else self._of_tokens)(found[name])
        if len(ids) >= self.context:  # vLLM would blame max_tokens
            raise BadRequest(
                f"{len(ids)} known tokens do not fit this node's context of {self.context}."
            )
        return ids

    def _of_text(self, text: Any) -> list[int]:
        param = "enforced_str"
        ids = self._encode(text) if isinstance(text, str) else []
        if not ids:
            raise BadRequest("enforced_str must be a text of one token or more.", param)
        refuse_foreign(param, ids, self.n_ids)
        return ids

    def _of_tokens(self, enforced: Any) -> list[int]:
        tokens = enforced.get("tokens") if isinstance(enforced, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise BadRequest('enforced_tokens must be {"tokens": [...]} with one token or more.')
        for n, one in enumerate(tokens):
            if not isinstance(one, dict) or not isinstance(one.get("token"), str):
                raise BadRequest(
                    f'enforced_tokens.tokens[{n}] must be {{"token": "9707"}}: an id, as a string.'
                )
        ids = [self._id(one["token"]) for one in tokens]
        refuse_foreign("enforced_tokens", ids, self.n_ids)
        return ids

    def _id(self, token: str) -> int:
        if said := chat_bounds.TOKEN_ID.fullmatch(token):
            return int(said[1][:_MOST_DIGITS])
        ids = self._encode(token)
        if not ids:
            raise BadRequest(
                "enforced_tokens has a text that is no token of this model.", "enforced_tokens"
            )
        return ids[0]

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise CannotForce("this engine has no tokenizer, so only ids can be known tokens")
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except (TypeError, ValueError):  # half a surrogate pair
            return []


def _lets_model_call(body: dict[str, Any]) -> bool:
    """Returns True if the model may call tools freely, because no grammar is requested."""
    tools = body.get("tools")
    return (
        isinstance(tools, list)
        and body.get("tool_choice", "auto") in (None, "auto")
        and body.get("parallel_tool_calls", True) in (None, True)
        and body.get("structured_outputs") is None
        and (body.get("response_format") or {"type": "text"}) == {"type": "text"}
        and not any(isinstance(one, dict) and _is_strict(one) for one in tools)
    )


def _is_strict(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))


def _mode(said: Any) -> str | None:
    if said is None:
        return None
    if not isinstance(said, str) or said not in _MODES:
        raise BadRequest(
            "logprobs_mode must be raw_logprobs or processed_logprobs.", "logprobs_mode"
        )
    return _MODES[said]
