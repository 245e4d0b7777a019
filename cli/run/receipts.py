"""Records received callbacks, and finds repeated and missing payloads and nonces."""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

# Nonces that a printed list contains at most.
_SHOWN = 5


@dataclass
class Receipt:
    """What the receiver prints about a payload: a line for the log, and the payload's faults."""

    line: str
    faults: list[str] = field(default_factory=list)


@dataclass
class Sender:
    name: str
    digests: dict[str, bytes] = field(default_factory=dict)  # payload id -> digest of the contents
    nonces: set[int] = field(default_factory=set)
    repeated_payloads: int = 0  # repeated because an answer was late or lost
    gapless: bool = False  # True if every nonce of a sequence is expected

    def missing(self) -> tuple[int, list[int]]:
        """Returns how many nonces are missing between the lowest and highest, and the lowest
        missing nonces; (0, []) unless `gapless`.

        Each of N nodes computes every N-th nonce. Payloads do not contain N, so the greatest common
        divisor of the nonces' differences is used as N.
        """
        if not self.gapless or len(self.nonces) < 2:
            return 0, []
        first, last = min(self.nonces), max(self.nonces)
        step = math.gcd(*(nonce - first for nonce in self.nonces))
        gaps = (nonce for nonce in range(first, last + 1, step) if nonce not in self.nonces)
        n_missing = (last - first) // step + 1 - len(self.nonces)
        return n_missing, list(islice(gaps, min(n_missing, _SHOWN + 1)))

    def summary(self) -> str:
        n_missing, lowest = self.missing()
        text = f"{self.name}: {len(self.nonces):,} nonces in {len(self.digests):,} payloads"
        if self.repeated_payloads:
            text += f", of which {self.repeated_payloads:,} came again"
        if n_missing:
            return f"{text}; {n_missing:,} nonces MISSING: {_some(lowest)}"
        return f"{text}, none missing" if self.gapless else text


class Receipts:
    """All payloads that the receiver got. Not safe for several threads at the same time."""

    def __init__(self) -> None:
        self.senders: dict[str, Sender] = {}
        self.n_faults = 0

    def take(self, path: str, body: dict[str, Any]) -> Receipt:
        """Records the payload posted to `path`. ValueError if its id or nonces are malformed."""
        payload_id, nonces = body.get("payload_id"), _nonces_of(body)
        if not isinstance(payload_id, str | None):
            raise ValueError("its payload_id is no text")
        name, number = _origin(body, payload_id)
        sender = self.senders.setdefault(name, Sender(name))
        receipt = Receipt(f"{path} {payload_id or '(no payload_id)'} {_described(body, nonces)}")
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        before = sender.digests.get(payload_id) if payload_id else None
        if before is not None:
            sender.repeated_payloads += 1
            receipt.line += ", again"
            if before != digest:
                receipt.faults.append(f"{payload_id} came again with OTHER CONTENTS")
            return self._judged(receipt)
        twice = [nonce for nonce in nonces if nonce in sender.nonces]
        if twice:
            receipt.faults.append(f"{len(twice):,} nonces came TWICE: {_some(twice)}")
        if number is not None and number != len(sender.digests):
            receipt.faults.append(
                f"{payload_id} came OUT OF ORDER: number {len(sender.digests)} was to come"
            )
        sender.digests[payload_id or f"(number {len(sender.digests)})"] = digest
        sender.nonces.update(nonces)
        sender.gapless = "artifacts" in body and "request_id" not in body
        return self._judged(receipt)

    def summary(self) -> list[str]:
        return [sender.summary() for sender in self.senders.values()]

    def is_whole(self) -> bool:
        return not self.n_faults and not any(one.missing()[0] for one in self.senders.values())

    def _judged(self, receipt: Receipt) -> Receipt:
        self.n_faults += len(receipt.faults)
        return receipt


def _origin(body: dict[str, Any], payload_id: str | None) -> tuple[str, int | None]:
    """Returns (name of the payload's round or job, number of the payload in a round or None)."""
    if "request_id" in body:
        return f"job {body['request_id']}", None
    numbered = re.fullmatch(r"(.+)-(\d+)", payload_id or "")
    if numbered:
        return f"round {numbered[1]}", int(numbered[2])
    return f"block {body.get('block_hash')} of node {body.get('node_id')}", None


def _nonces_of(body: dict[str, Any]) -> list[int]:
    found = body.get("nonces", [])
    if "artifacts" in body:
        try:
            found = [artifact["nonce"] for artifact in body["artifacts"]]
        except (TypeError, KeyError):
            raise ValueError("its artifacts have no nonces") from None
    if not isinstance(found, list) or not all(isinstance(nonce, int) for nonce in found):
        raise ValueError("its nonces are no list of integers")
    return found


def _described(body: dict[str, Any], nonces: list[int]) -> str:
    if "fraud_detected" in body:
        wrong = body.get("n_mismatch", body.get("n_invalid"))
        return (
            f"{'FRAUD' if body['fraud_detected'] else 'no fraud'}, {wrong} of"
            f" {body.get('n_total', len(nonces))} wrong{_why(body)}"
        )
    return f"{len(nonces)} {'artifacts' if 'artifacts' in body else 'valid nonces'}"


def _why(body: dict[str, Any]) -> str:
    """Returns a verdict's distances, threshold and likely cause, if the payload has them."""
    said = ""
    try:
        low, median, high = (body["distances"][name] for name in ("min", "median", "max"))
        said = (
            f"; distances {low:.4f} to {high:.4f}, median {median:.4f}, threshold"
            f" {body['dist_threshold']:g}"
        )
    except (KeyError, TypeError, ValueError):
        pass  # another scheme, no readable vectors, or another node's fields
    return f"{said}; {cause}" if (cause := body.get("likely_cause")) else said


def _some(nonces: Iterable[int]) -> str:
    shown = sorted(nonces)
    return ", ".join(map(str, shown[:_SHOWN])) + (", ..." if len(shown) > _SHOWN else "")
