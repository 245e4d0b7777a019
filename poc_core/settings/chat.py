"""Settings of chat, and of its share of the engine."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from poc_core.settings.theme import Theme, parsed

# How known tokens of chats are scored; `auto`: as a trial at start-up decides.
Validation = Literal["auto", "pass", "steps"]
# The tokens in logprobs: decimal ids, for the network's validators, or text for other clients.
LogprobTokens = Literal["ids", "text"]


class ChatPolicy(NamedTuple):
    """How chat and proofs share the engine. `fraction`: the proofs' part of the time, if shared."""

    mode: Literal["yield", "share", "exclusive", "off"]
    fraction: float = 0.0


def parse_chat_policy(text: str) -> ChatPolicy:
    """Parses yield, exclusive, off or share:F with 0 < F < 1. Raises ValueError, which lists these
    forms, if the text has none of them.
    """
    match text:
        case "yield" | "exclusive" | "off":
            return ChatPolicy(text)
    mode, _, fraction = text.partition(":")
    try:
        if mode == "share" and 0 < float(fraction) < 1:
            return ChatPolicy("share", float(fraction))
    except ValueError:
        pass
    raise ValueError(
        "must be yield, exclusive, off, or share:F with F between 0 and 1, such as share:0.3"
    )


class ChatSettings(Theme):
    """Chat, and its share of the engine."""

    chat_policy: Annotated[str, parsed(parse_chat_policy)] = "yield"
    """How chat and proofs share the engine. yield: chat first. share:0.3: proofs use at least 30 %
    of the time. exclusive: chat gets 503 during a round. off: no chat."""
    max_step_ms: float = Field(50, ge=1)
    """Largest number of milliseconds that a chat request waits for proofs on the GPU."""
    logprob_tokens: LogprobTokens = "ids"
    """How chat's logprobs name tokens. ids: by decimal id, which the network's validators read.
    text: by the token's text, as in OpenAI's API, if the request has none of the network's
    fields."""
    validation: Validation = "auto"
    """How chat validations are computed. pass: in one forward pass. steps: token by token. auto: a
    test at each worker's start chooses (docs/chat.md)."""
    chat_host: str = "127.0.0.1"
    """Address on which a worker serves chat to the API. If the node has several hosts in a private
    network, use 0.0.0.0."""
    chat_advertise_host: str | None = None
    """Name by which the API reaches this worker's chat. Unset: the value of POC_CHAT_HOST, but the
    host's name instead of 0.0.0.0."""

    @property
    def chat(self) -> ChatPolicy:
        return parse_chat_policy(self.chat_policy)
