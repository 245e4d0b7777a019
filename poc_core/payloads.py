"""What a round's receiver is sent (protocol.md, section 6), by scheme."""

import json
from typing import Any

from poc_core.records import RoundConfig


def encoding(k_dim: int) -> dict[str, Any]:
    """How a vector_b64 is to be read."""
    return {"dtype": "f16", "k_dim": k_dim, "endian": "le"}


def callback_url(url: str | None, what: str) -> str:
    """Where "generated" or "validated" results of a request with this url go; empty without one."""
    return f"{url.rstrip('/')}/{what}" if url else ""


def payload_head(config: RoundConfig) -> dict[str, Any]:
    """The fields that all payloads of a round share; `scheme` tells `payload` what goes beside them."""
    head: dict[str, Any] = {
        "public_key": config.spec.public_key,
        "block_hash": config.spec.block_hash,
        "block_height": config.block_height,
        "node_id": config.node_id,
    }
    if config.spec.scheme == "distance":
        head["r_target"] = config.r_target
    else:
        head["encoding"] = encoding(int(str(config.spec.options["k_dim"])))
    return head


def payload(head: dict[str, Any], pairs: list[tuple[int, Any]]) -> dict[str, Any]:
    """The body of one callback with these (nonce, value) pairs."""
    if "r_target" in head:
        return head | {"nonces": [nonce for nonce, _ in pairs], "dist": [value for _, value in pairs]}
    return head | {"artifacts": [{"nonce": nonce, "vector_b64": value} for nonce, value in pairs]}


def parse_entries(entries: list[bytes]) -> list[tuple[int, Any]]:
    """The pairs of entries, each `[nonce,value],...`, joined and parsed in one go."""
    return [(nonce, value) for nonce, value in json.loads(b"[" + b",".join(entries) + b"]")]
