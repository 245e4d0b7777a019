"""Payloads for a round's receiver (protocol.md, section 6)."""

from typing import Any

from poc_core.records import RoundConfig
from poc_core.schemes import contract_of
from poc_core.schemes.contract import Pair


def callback_url(url: str | None, what: str) -> str:
    """Returns the url for "generated" or "validated" results; empty without a url."""
    return f"{url.rstrip('/')}/{what}" if url else ""


def payload_head(config: RoundConfig) -> dict[str, Any]:
    """Returns the fields that all payloads of a round share, and its scheme."""
    spec = config.spec
    shared = {
        "public_key": spec.public_key,
        "block_hash": spec.block_hash,
        "block_height": config.block_height,
        "node_id": config.node_id,
    }
    return {
        "scheme": spec.scheme,
        "shared": shared | contract_of(spec.scheme).about(spec, config.terms),
    }


def payload(head: dict[str, Any], pairs: list[Pair]) -> dict[str, Any]:
    """Returns the body of one callback with these (nonce, value) pairs."""
    shared: dict[str, Any] = head["shared"]
    return shared | contract_of(head["scheme"]).values(pairs)
