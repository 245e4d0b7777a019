"""Limits on requests that run the model, so that no request can occupy an engine alone: two tables,
PATHS (poc_core/serving/openai_paths.py) and FIELDS. The API and the workers refuse requests beyond
the limits.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from poc_core.records import ModelInfo
from poc_core.serving.openai_paths import PATHS

# Most commas of a body. The time for which parsing blocks the event loop depends on the number of
# items, not of bytes: 33 MB of text or of a picture take 3 ms, half a million items 50 ms, 33 MB of
# short items 260 ms and 550 MB of memory.
MAX_COMMAS = 500_000
# An engine computes max_num_seqs answers at the same time. One request may have 1 / 2 of them.
_PART_OF_ENGINE = 2
# Number of answers that one request may always have, even if the engine is small.
_ALWAYS = 16
# Up to this many answers, or prompts, of a request may each fill the model's context. More answers
# or prompts share the same number of tokens.
_WHOLE_CONTEXTS = 16
# Logprobs per token of such a request: one for the token, and five more, as the network requests.
_LOGPROBS = 6
# Texts that one request may embed, score or classify, and their total tokens: OpenAI's limits.
_INPUTS, _INPUT_TOKENS = 2048, 300_000
# Most characters of a text for each token of the context, and most characters of a text that vLLM
# truncates for the client. Tokens are shorter than this on average in every language. Four spaces
# count as one character.
TOKEN_CHARS, _TRUNCATED_CHARS = 8, 128 * 1024
# Most levels of nested lists and objects.
_DEEPEST = 64
# Tokens that vLLM computes for a completion without max_tokens.
_COMPLETION_TOKENS = 16

# Paths whose requests have a field for a salt of the prefix cache.
SALTED = {path for path, (kind, _) in PATHS.items() if kind in ("answers", "inputs")}

_TEXT, _OBJECT, _CHOICE = "a text", "an object", "a text or an object"
_LIST, _OBJECTS = "a list", "a list of objects"
_IS: dict[str, Any] = {_TEXT: str, _OBJECT: dict, _LIST: list, _OBJECTS: list, _CHOICE: str | dict}


@dataclass(frozen=True)
class Row:
    """The limits on the values of some request fields. `kind`: the required type; None if vLLM
    checks the type. `texts`: most characters of all texts of one value together; None means that
    the texts are part of the prompt, which may have 8 characters for each token of the model's
    context.
    """

    fields: str
    kind: str | None
    entries: int  # of each list or object
    values: int  # at all levels
    text: int  # characters of each text
    texts: int | None
    why: str  # the reason for the limits, quoted in errors
    paths: str = "/"  # beginnings of the paths to which the row applies
    messages: bool = False  # True if the values are messages, whose parts may be pictures or sounds


_ANY, _KB, _MB = 1 << 40, 1024, 1024 * 1024
# fields, type, entries, values, characters of a text, of all texts, reason
FIELDS = (
    Row("messages", _LIST, 4096, 65_536, _ANY, None, "a template renders each", messages=True),
    Row(
        "input inputs query queries documents items text_1 text_2 data_1 data_2",
        None, 4096, 65_536, _ANY, None, "the same, by other names", messages=True,
    ),
    Row(
        "prompt suffix tokens system instructions previous_input_messages texts instruction"
        " chat_template",
        None, 4096, 65_536, _ANY, None, "a part of the prompt; a token's id counts as 8",
    ),
    Row("tools", _OBJECTS, 10_000, 10_000, 128 * _KB, None, "rendered, and made a grammar"),
    Row("chat_template_kwargs", _OBJECT, 1000, 1000, _ANY, None, "a template sees all of them"),
    Row(
        "structured_outputs response_format",
        _OBJECT, 10_000, 10_000, 128 * _KB, _MB, "made a grammar before the answer begins",
        paths="/v1/chat /v1/completions /v1/responses /v1/messages /cohere",
    ),
    Row(
        "text output_config",
        _OBJECT, 10_000, 10_000, 128 * _KB, _MB, "the same, by other names",
        paths="/v1/responses /v1/messages",
    ),
    Row(
        "reasoning metadata thinking",
        _OBJECT, 1000, 1000, 128 * _KB, 128 * _KB, "vLLM reads its entries",
        paths="/v1/responses /v1/messages",
    ),
    Row(
        "stream_options logit_bias mm_processor_kwargs media_io_kwargs kv_transfer_params"
        " ec_transfer_params vllm_xargs repetition_detection",
        _OBJECT, 10_000, 10_000, 128 * _KB, 128 * _KB, "vLLM reads its entries",
    ),
    Row("tool_choice", _CHOICE, 1000, 1000, 128 * _KB, 128 * _KB, "vLLM reads its entries"),
    Row("cache_salt", _TEXT, 1, 1, _KB, _KB, "a name for a cache"),
    Row("stop stop_sequences bad_words", None, 1024, 1025, 16 * _KB, 16 * _KB, "sought or encoded"),
    Row("images data prompt_embeds", None, 4096, 65_536, _ANY, _ANY, "bytes, and no text"),
)  # fmt: skip
_OTHER = Row("", None, 10_000, 10_000, 128 * _KB, 128 * _KB, "no field needs more")
_ROWS = {name: row for row in FIELDS for name in row.fields.split()}
# Nested objects: vLLM reads their entries before it checks their type.
_WITHIN = {
    "messages": {"tool_calls": _OBJECTS},
    "tools": {"function": _OBJECT},
    "chat_template_kwargs": {"tools": _OBJECTS},
    "tool_choice": {"function": _OBJECT},
    "response_format": {"json_schema": _OBJECT},
}
# Fields of the network's validations with the known tokens of an answer, which the engine repeats;
# and the form of a token that is an id. Only the length of these fields is limited. The worker
# reports all other errors, because its error texts decide who is blamed for the tokens.
KNOWN_TOKENS = ("enforced_str", "enforced_tokens")
TOKEN_ID = re.compile(r"(?:token_id:)?(-?[0-9]+)")

# Fields of a message, or of a part, that hold further parts; fields of a part that hold bytes.
_PARTS = {"content", "output"}
_MEDIA = {
    "image_url", "audio_url", "video_url", "input_audio", "image_embeds", "audio_embeds", "image",
    "source", "file_data",
}  # fmt: skip

_UNFIT = "{} does not fit this node's context of {}."
_NUMBER = TypeAdapter(int)


@dataclass(frozen=True)
class Excess:
    """The reason for refusing a request: a sentence for the client, and the name of the field."""

    message: str
    field: str | None


@dataclass(frozen=True)
class _Size:
    text: int  # characters, counting each number as 8
    longest: int  # characters of the longest text
    too_much: str = ""


def known_excess(body: bytes, infos: Iterable[ModelInfo]) -> Excess | None:
    """Returns an error if the field `enforced_tokens` has more tokens than the largest context of
    the models `infos`. Counts tokens in the raw body, because parsing many objects takes long.
    """
    context = max((info.max_seq_len for info in infos), default=0)
    if context and b'"enforced_tokens"' in body and body.count(b'"token"') > context:
        return Excess(_UNFIT.format("enforced_tokens", context), None)
    return None


def unfit(name: str, said: Any, context: int) -> str | None:
    """Returns an error if the answer that a request prescribes, in a field of KNOWN_TOKENS, is
    longer than the context allows; else None. A token id counts as one token. Texts have a limit of
    characters, because tokenizing takes a second per megabyte.
    """
    tokens = said.get("tokens") if isinstance(said, dict) else said
    is_long = False
    if isinstance(tokens, str):
        is_long = _length(tokens) > TOKEN_CHARS * context
    elif isinstance(tokens, list):
        texts = (one.get("token") for one in tokens[:context] if isinstance(one, dict))
        words = (text for text in texts if isinstance(text, str) and not TOKEN_ID.fullmatch(text))
        is_long = len(tokens) >= context or sum(map(_length, words)) > TOKEN_CHARS * context
    return _UNFIT.format(name, context) if is_long else None


def excess(path: str, asked: Mapping[str, Any], infos: Iterable[ModelInfo]) -> Excess | int | None:
    """Checks a request's fields `asked` against the limits of the smallest engine in `infos`.

    Returns an Excess if a limit is exceeded or a field has the wrong type; vLLM itself refuses
    other wrong values. Returns an int if the request needs a max_tokens and has none: the value
    that the caller must set. Otherwise returns None. A `path` outside PATHS has a chat's limits.
    """
    kind, prompts = PATHS.get(path, PATHS["/v1/chat/completions"])
    engines = list(infos)
    context = min((info.max_seq_len for info in engines), default=0)
    sizes: dict[str, _Size] = {}
    for name, said in asked.items() if kind != "form" else ():
        if name in KNOWN_TOKENS:
            if context and (fault := unfit(name, said, context)):
                return Excess(fault, None)
            continue
        row = _row(name, path)
        if fault := _fault(name, said, row) if said is not None or (name,) == prompts else None:
            return Excess(f"{fault}.", name)
        size = _measure(said, row)
        if size.too_much:
            return Excess(f"{name} {size.too_much} ({row.why}).", name)
        if row.texts is None:
            sizes[name] = size
    if not engines:
        return None
    given = {name: _entries(name, asked[name]) for name in prompts if asked.get(name) is not None}
    if kind == "inputs":
        return _inputs(given, sizes, context)
    many = max(1, min(max(given.values(), default=1), _WHOLE_CONTEXTS))
    total, room = sum(size.text for size in sizes.values()), many * context
    # -1: as many tokens as the context has
    kept = _number(asked, "truncate_prompt_tokens") or -(asked.get("truncation") == "auto")
    if total > (max(room * TOKEN_CHARS, _TRUNCATED_CHARS) if kept else room * TOKEN_CHARS):
        return _long(sizes, total, room)
    if kind == "tokens":
        return None
    each = min(context, kept) if kept > 0 else context
    prompt_tokens = min(total, max(given.values(), default=1) * each)
    return _answers(path, asked, given, prompt_tokens, engines)


def _answers(
    path: str,
    asked: Mapping[str, Any],
    given: Mapping[str, int],
    prompt_tokens: int,
    engines: list[ModelInfo],
) -> Excess | int | None:
    """Checks how many answers, answer tokens and logprobs a request asks for. Returns the same as
    `excess`. `given`: prompts in each field. `prompt_tokens`: most tokens of all prompts.
    """
    context = min(info.max_seq_len for info in engines)
    n, best_of = _number(asked, "n"), _number(asked, "best_of")
    field, prompts = max(given.items(), key=lambda one: one[1], default=("messages", 1))
    answers = max(prompts, 1) * max(n, best_of, 1)
    most = max(_ALWAYS, min(info.max_sequences for info in engines) // _PART_OF_ENGINE)
    if answers > most:
        if prompts <= most:
            field = "best_of" if best_of > n else "n"
        return Excess(f"One request may have {most} answers, this asks for {answers}.", field)
    limits = [
        name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        if _number(asked, name) > 0
    ]  # fmt: skip
    is_short = path == "/v1/completions" and "max_tokens" not in asked
    named = max((_number(asked, name) for name in limits), default=_COMPLETION_TOKENS * is_short)
    room = _WHOLE_CONTEXTS * context
    of_answers, of_prompts = _widths(path, asked)
    of_prompts *= prompt_tokens * max(n, best_of, 1)
    if not named:
        left = max(0, room * _LOGPROBS - of_prompts)
        named = min(context, room // answers, max(1, left // (answers * of_answers)))
    tokens = answers * min(named, context)
    if tokens > room:
        return Excess(
            f"The {answers} answers of this request may have {room} tokens together,"
            f" {room // answers} each; this asks for {tokens}.",
            limits[-1] if limits else "max_tokens",
        )
    if (numbers := tokens * of_answers + of_prompts) > room * _LOGPROBS:
        if tokens * of_answers > of_prompts:
            field = "logprobs" if path == "/v1/completions" else "top_logprobs"
        else:
            field = "prompt_logprobs" if _number(asked, "prompt_logprobs") else "echo"
        return Excess(
            f"One request may have {room * _LOGPROBS} logprobs, of prompts and answers together;"
            f" this asks for {numbers}. Ask for fewer of each token, or for fewer tokens.",
            field,
        )
    return named if named < context and not (limits or is_short) else None


def _widths(path: str, asked: Mapping[str, Any]) -> tuple[int, int]:
    """Returns two numbers that a request asks for: logprobs for each token of the answer, and for
    each token of the prompt.
    """
    by_id = asked.get("logprob_token_ids")
    of_answers = max(_number(asked, "top_logprobs"), len(by_id) if isinstance(by_id, list) else 0)
    is_echo = False
    if path == "/v1/completions":
        of_answers = max(of_answers, _number(asked, "logprobs"))
        is_echo = bool(asked.get("echo")) and asked.get("logprobs") is not None
    elif path != "/v1/responses" and not asked.get("logprobs"):
        of_answers = 0
    of_prompts = 0
    if asked.get("prompt_logprobs") is not None or is_echo:
        of_prompts = 1 + max(_number(asked, "prompt_logprobs"), of_answers if is_echo else 0)
    return 1 + of_answers, of_prompts


def _inputs(given: Mapping[str, int], sizes: Mapping[str, _Size], context: int) -> Excess | None:
    """Checks the number and the lengths of texts to embed, score or classify. `given`: the number
    of texts in each field. If a field has a single text, such as a query, the text counts once for
    each document, because the engine computes them together.
    """
    n = max(given.values(), default=1)
    if n > _INPUTS:
        field = max(given, key=lambda name: given[name])
        return Excess(f"One request may have {_INPUTS} inputs, this has {n}.", field)
    each = max(context * TOKEN_CHARS, _TRUNCATED_CHARS)
    for name, size in sizes.items():
        if size.longest > each:
            return _long({name: size}, size.longest, each // TOKEN_CHARS)
    total = sum(size.text * (n if given.get(name) == 1 else 1) for name, size in sizes.items())
    room = max(_WHOLE_CONTEXTS * context, _INPUT_TOKENS)
    return _long(sizes, total, room) if total > room * TOKEN_CHARS else None


def _long(sizes: Mapping[str, _Size], total: int, tokens: int) -> Excess:
    field = max(sizes, key=lambda name: sizes[name].text)
    return Excess(
        f"This model's maximum context length allows {tokens} tokens here, at most"
        f" {tokens * TOKEN_CHARS} characters of text; this has {total}.",
        field,
    )


def _row(name: str, path: str) -> Row:
    row = _ROWS.get(name, _OTHER)
    return row if path.startswith(tuple(row.paths.split())) else _OTHER


def _fault(name: str, said: Any, row: Row) -> str | None:
    """Returns an error if a field's value, or an object in it, has the wrong type; else None."""
    if row.kind is not None and not _is_a(said, row.kind):
        return f"{name} must be {row.kind}"
    entries = said if isinstance(said, list) else [said]
    for within, kind in _WITHIN.get(name, {}).items() if row.kind is not None else ():
        for one in entries:
            found = one.get(within) if isinstance(one, dict) else None
            if found is not None and not _is_a(found, kind):
                return f"{within} in {name} must be {kind}"
    return None


def _is_a(said: Any, kind: str) -> bool:
    if not isinstance(said, _IS[kind]):
        return False
    return kind != _OBJECTS or all(isinstance(one, dict) for one in said)


def _entries(name: str, given: Any) -> int:
    """Counts the prompts in a field. A list of numbers, or of messages, is one prompt."""
    if not isinstance(given, list) or not given or isinstance(given[0], int | float):
        return 1
    is_conversation = name in ("messages", "input") and isinstance(given[0], dict)
    return 1 if is_conversation else len(given)


def _measure(said: Any, row: Row) -> _Size:
    """Measures the texts in a value. Stops at the first limit of `row` that the value exceeds."""
    n_values = text = longest = 0
    # with its place: a message, a part of a message, or neither
    level = [(said, "message" if row.messages else "")]
    for _ in range(_DEEPEST):
        n_values += len(level)
        if n_values > row.values:
            return _Size(text, longest, f"has more than {row.values} values")
        deeper: list[tuple[Any, str]] = []
        for one, place in level:
            size = 0
            if isinstance(one, str):
                size = _length(one)
            elif isinstance(one, list) and all(type(each) is int for each in one):
                size = TOKEN_CHARS * len(one)
            elif isinstance(one, list | dict) and len(one) > row.entries:
                return _Size(text, longest, f"has more than {row.entries} entries")
            elif isinstance(one, list):
                deeper += [(each, place) for each in one]
            elif isinstance(one, dict):
                text += sum(map(_length, one))
                deeper += [
                    (each, "part" if place and name in _PARTS else "")
                    for name, each in one.items()
                    if place != "part" or name not in _MEDIA
                ]
            text += size
            longest = max(longest, size)
        if longest > row.text:
            return _Size(text, longest, f"has a text of more than {row.text} characters")
        if row.texts is not None and text > row.texts:
            return _Size(text, longest, f"has more than {row.texts} characters of text")
        level = deeper
        if not level:
            return _Size(text, longest)
    return _Size(text, longest, f"lies more than {_DEEPEST} levels deep")


def _length(text: str) -> int:
    return len(text) - 3 * text.count("    ")


def _number(asked: Mapping[str, Any], name: str) -> int:
    """Returns the integer in a field; 0 if there is none. For logprobs, -1 (all) becomes 2**20."""
    try:
        number = _NUMBER.validate_python(asked.get(name))
    except ValidationError:
        return 0
    # Capped, because errors quote products of numbers, and Python prints at most 4300 digits.
    return 1 << 20 if number == -1 and name.endswith("logprobs") else min(number, 1 << 63)
