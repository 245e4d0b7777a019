"""`proofline chat-check`: validates an executor's chat answer as the network does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import httpx
import typer
from rich.table import Table

from cli import options
from cli.engine_options import takes_engine_options
from cli.terminal import EXIT_FRAUD, UsageError, note
from lab.judge import chat_distance
from lab.judge.chat_answer import (
    BEST,
    Answer,
    ExecutedChat,
    read_answer,
    read_file,
    validators_request,
)
from lab.judge.chat_distance import Rules, Verdict
from lab.local_engine import clean_stdout, local_engine
from lab.tables import result_console, result_table
from poc_core.errors import ProoflineError
from poc_core.settings import parse_chat_policy
from proofline.client import UrlError
from proofline.client.exchange import WITHOUT_PROXY, base_url, headers, no_answer
from workers.chat_gate import ChatGate
from workers.engines.options import EngineOptions

PATH = "/v1/chat/completions"
TIMEOUT_S = 600.0  # equal to the network's timeout
WORST = 10  # positions in the table

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Validate in this process with this model: a directory, a name on the Hugging "
        "Face hub, or a shipped model.",
    ),
]


class NoVerdictError(ProoflineError):
    """The validator gave no answer that can be compared with the executor's."""


class TokensRefusedError(ProoflineError):
    """The validator's model does not accept the executor's tokens."""


@dataclass(frozen=True)
class Checked:
    """The result of a check: the verdict, its explanation, and the positions of the validator's
    answer.
    """

    verdict: Verdict
    why: str
    validator: list[dict[str, Any]]


@takes_engine_options(for_proofs=True, needs_model=False, model=Model)
def chat_check(
    executor_answer: Annotated[
        Path,
        typer.Argument(
            help='JSON file {"request": {...}, "answer": {...}}: the body of a chat request, and '
            "the answer or the list of the stream's chunks; - for stdin."
        ),
    ],
    engine_options: EngineOptions,
    against: Annotated[
        str | None,
        typer.Option(
            help=f"The node that validates. Default: PROOFLINE_URL, or {options.DEFAULT_URL}."
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="A similarity above this value is valid. Default: the network's threshold for "
            "the model's name.",
        ),
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    """Validate an executor's chat answer as the network does, and print the verdict's reason.

    The executor's tokens are sent to a validator: a node, or an engine in this process. The
    validator computes the tokens' log probabilities (logprobs), which are compared with the
    executor's. Prints the verdict, the similarity, and the positions where the logprobs differ
    most.

    **Exit code:** 0 valid, 3 invalid, 1 no verdict, 2 wrong options or no such file.

    **Example:** proofline chat-check answer.json --against http://other-node:8000
    """
    if against is not None and engine_options.model:
        raise UsageError("Give --against, the node that validates, or --model; not both.")
    chat = read_file(executor_answer)
    served = str(chat.request.get("model") or engine_options.name)
    rules = Rules.of(served, chat.request, chat.mode, threshold)
    with clean_stdout(verbose or not engine_options.model) as stdout:
        checked = check(chat, rules, engine_options, against)
        show(chat, checked, rules, stdout)
    if not checked.verdict.is_valid:
        raise typer.Exit(EXIT_FRAUD)


def check(
    chat: ExecutedChat, rules: Rules, engine_options: EngineOptions, against: str | None
) -> Checked:
    """Has a validator compute logprobs for the executor's tokens, and compares them with the
    executor's logprobs by the network's rules.

    Raises NoVerdictError if the validator gives no usable answer.
    """
    asked = chat.request.get("top_logprobs")
    n_best = asked if isinstance(asked, int) and asked else BEST
    if fault := chat_distance.malformed(chat.answer.positions, n_best):
        why = (
            "Tokens must be ids in decimal, such as 9707, each among the entries of its place; a"
            " node answers so with POC_LOGPROB_TOKENS=ids to top_logprobs: 5."
        )
        return Checked(invalid(fault), why, [])
    try:
        with validator(engine_options, against) as (url, name):
            answer = ask(url, name, chat)
    except TokensRefusedError as refusal:
        return Checked(invalid(chat_distance.REFUSED), f"The validator answered: {refusal}", [])
    verdict = judge(chat, answer, rules)
    told = (explanation(chat, answer, verdict), truncation(chat, answer))
    return Checked(verdict, "\n".join(filter(None, told)), answer.positions)


def invalid(reason: str) -> Verdict:
    """Returns the verdict "invalid" for an answer whose logprobs were not compared."""
    return Verdict([], None, None, reason)


@contextmanager
def validator(
    engine_options: EngineOptions, against: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yields the url of the validator, and the model's name there.

    With --model the validator is an engine in this process. Otherwise it is a node, and the name is
    None, because the node knows the model by the name in the request.
    """
    if not engine_options.model:
        try:
            yield base_url(against), None
        except UrlError as error:
            raise UsageError(f"--against: {error}") from error
        return

    note(f"Starting an engine with {engine_options.name}.")
    with local_engine(engine_options) as engine:
        gate = ChatGate(parse_chat_policy("yield"), engine.unfinished_chat)
        port = engine.serve_chat(gate, "127.0.0.1")
        if port is None:
            raise UsageError(f"--engine {engine_options.engine} has no chat; leave it out.")
        yield f"http://127.0.0.1:{port}", engine.info.name


def ask(url: str, model: str | None, chat: ExecutedChat) -> Answer:
    """Requests the validator's answer. `model`: the model's name on an engine in this process; None
    for a node.

    Raises TokensRefusedError if the validator refuses the executor's tokens, and NoVerdictError if
    it gives no answer with logprobs.
    """
    body = validators_request(chat) | ({"model": model} if model else {})
    note(f"Having {url} validate {len(chat.answer.content)} tokens.")
    try:
        with httpx.Client(timeout=TIMEOUT_S, mounts=WITHOUT_PROXY) as client:
            answer = client.post(url + PATH, json=body, headers=headers(None))
    except httpx.HTTPError as error:
        raise no_answer(url, error) from error
    document = _json(answer)
    if answer.status_code == 200:
        try:
            return read_answer(document)
        except ValueError as error:
            raise NoVerdictError(f"{url} answers no chat with logprobs: {error}.") from error
    told = document.get("error") if isinstance(document, Mapping) else None
    said = told if isinstance(told, Mapping) else {}
    message = str(said.get("message") or answer.text[:500])
    if answer.status_code == 400 and said.get("param") == "enforced_tokens":
        raise TokensRefusedError(message)
    passes = answer.status_code in (400, 422)
    raise NoVerdictError(
        f"No verdict: {url} answers HTTP {answer.status_code}: {message}"
        + (" (The network lets an executor pass unseen then.)" if passes else "")
    )


def _json(answer: Any) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def judge(chat: ExecutedChat, answer: Answer, rules: Rules) -> Verdict:
    """Returns the network's verdict on an executor's answer, given the validator's `answer`.

    Raises NoVerdictError if the validator's tokens are not token ids.
    """
    if not chat_distance.has_ids(answer.positions):
        raise NoVerdictError(
            "No verdict: the validator returns texts instead of token ids, so it does not take part"
            " in the network's chat. Ask a node of the network, or give --model."
        )
    if chat_distance.claims_too_much(chat.answer.usage.model_dump(), answer.usage.model_dump()):
        return invalid(chat_distance.CLAIMED_TOKENS)
    return chat_distance.compare(chat.answer.positions, answer.positions, rules)


def show(chat: ExecutedChat, checked: Checked, rules: Rules, stdout: IO[str]) -> None:
    verdict = checked.verdict
    similarity, today = (
        "none" if one is None else f"{one:.6f}"
        for one in (verdict.similarity, verdict.legacy_similarity)
    )
    stdout.write(
        f"{'VALID' if verdict.is_valid else 'INVALID'}: {verdict.reason}.\n{checked.why}\n"
        f"Similarity {similarity}, which must be above {rules.threshold:g}; by the rule of today"
        f" {today}. Logprobs: {chat.mode}.\n"
    )
    if verdict.distances:
        result_console(stdout).print(worst_positions(chat, checked))
    stdout.flush()


def worst_positions(chat: ExecutedChat, checked: Checked) -> Table:
    distances = checked.verdict.distances
    table = result_table(
        f"The worst of {len(distances)} positions",
        "position",
        "distance",
        "executor",
        "validator",
        "executor's best",
        "validator's best",
    )
    pairs = list(zip(chat.answer.positions, checked.validator, strict=False))
    for at in sorted(range(len(pairs)), key=lambda at: -distances[at])[:WORST]:
        one, other = pairs[at]
        told = (spelt(entry) for entry in (one, other, best(one), best(other)))
        table.add_row(str(at), f"{distances[at]:.4f}", *told)
    return table


def explanation(chat: ExecutedChat, answer: Answer, verdict: Verdict) -> str:
    """Explains in a sentence why the verdict is what it is. `answer`: the validator's."""
    n = len(chat.answer.content)
    match verdict.reason:
        case chat_distance.DIFFERENT_LENGTH:
            return (
                f"The validator ends after {len(answer.content)} of {n} tokens, by the request's"
                " stop rules or its context."
            )
        case chat_distance.DIFFERENT_TOKENS:
            pairs = zip(chat.answer.content, answer.content, strict=False)
            at = next(at for at, (one, other) in enumerate(pairs) if one.token != other.token)
            return f"The first token that differs is at position {at}."
        case chat_distance.CLAIMED_TOKENS:
            return f"The executor claims {_usage(chat.answer)}, the validator {_usage(answer)}."
    mean = sum(verdict.distances) / n
    return (
        f"Mean distance {mean:.4f}, largest {max(verdict.distances):.4f}; honest nodes of other"
        " hardware lie 0.026 to 0.040 apart on average."
    )


def truncation(chat: ExecutedChat, answer: Answer) -> str:
    """Returns a warning if the executor seems to have cut off its answer; "" otherwise. `answer`:
    the validator's.
    """
    one, n = chat.answer, len(chat.answer.content)
    asked = chat.request.get("max_completion_tokens") or chat.request.get("max_tokens") or 0
    if one.usage.completion_tokens > n:
        why = f"it claims {one.usage.completion_tokens} tokens and has logprobs of {n}"
    elif one.finish_reason == "stop" and answer.finish_reason == "length":
        why = f"it says that a stop ended it, and none does after its {n} tokens"
    elif one.finish_reason == "length" and n < asked:
        why = f"it says that it ran out of tokens after {n} of {asked}, if its context is longer"
    else:
        return ""
    return (
        f"The answer looks truncated: {why}. The network's comparison of logprobs passes the"
        " beginning of an honest answer."
    )


def _usage(answer: Answer) -> str:
    return f"{answer.usage.prompt_tokens} and {answer.usage.completion_tokens} tokens"


def best(position: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = max(position["top_logprobs"], key=lambda one: one["logprob"])
    return found


def spelt(entry: Mapping[str, Any]) -> str:
    return f"{entry['token']}: {entry['logprob']:.4f}"
