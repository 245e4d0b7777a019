"""Estimates which worker's prefix cache has the beginning of a chat request's prompt."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Any

from poc_core.records import WorkerRecord

# Characters of one block of a prompt (of a block of vLLM's prefix cache: about 64).
_BLOCK = 512
# Most hashed blocks: 128 thousand characters distinguish a conversation from all others.
_MAX_BLOCKS = 256
# Largest body whose prefix is read: hashing takes 5 ms a MiB.
MAX_BODY = 1 << 20
# Most blocks that PrefixMemory remembers; each takes about 100 bytes.
_MEMORY = 200_000
_DIGEST = 16  # bytes of a hash
# Largest ratio of a worker's requests to the mean: consistent hashing with bounded loads.
_MOST_OVER_MEAN = 1.25


@dataclass(frozen=True)
class Prefix:
    """A request's prompt as hashes, one for each block. A hash includes all earlier blocks."""

    blocks: tuple[bytes, ...] = ()  # hash of the prompt up to the end of each block
    shared: int = 0  # blocks before the first user's message: tools and system prompt
    # blocks up to the end of that message, at least one: equal in every later turn
    opening: int = 0


NO_PREFIX = Prefix()


def prefix_of(asked: Mapping[str, Any]) -> Prefix:
    """Hashes the prompt of a chat or completion request. NO_PREFIX if there is no prompt."""
    salt = json.dumps(asked.get("cache_salt"))  # vLLM shares no block between different salts
    match asked:
        case {"messages": [*messages]}:
            return _of_conversation(messages, salt + json.dumps(asked.get("tools")))
        case {"prompt": str() | list() as prompt}:
            return Prefix(tuple(_chain(_text(prompt), _hash(salt))), 0, 1)
    return NO_PREFIX


def _of_conversation(messages: Sequence[object], tools: str) -> Prefix:
    blocks: list[bytes] = []
    shared = opening = 0
    last = _hash(tools)
    for message in messages:
        if not opening:
            shared = len(blocks)
        blocks.extend(_chain(_text(message), last))
        last = blocks[-1]
        if not opening and isinstance(message, dict) and message.get("role") == "user":
            opening = len(blocks)
        if len(blocks) > _MAX_BLOCKS:
            break
    return Prefix(tuple(blocks[:_MAX_BLOCKS]), shared, min(opening or len(blocks), _MAX_BLOCKS))


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=_DIGEST).digest()


def _text(part: object) -> str:
    return part if isinstance(part, str) else json.dumps(part)


def _chain(text: str, last: bytes) -> list[bytes]:
    """Hashes the blocks of `text`. A hash includes the previous hash; the first includes `last`."""
    chain = []
    for start in range(0, min(max(len(text), 1), _BLOCK * _MAX_BLOCKS), _BLOCK):
        block = text[start : start + _BLOCK].encode("utf-8", "surrogatepass")
        last = blake2b(block, digest_size=_DIGEST, key=last).digest()
        chain.append(last)
    return chain


class PrefixMemory:
    """Remembers which worker last computed each block of prompts. Runs on the event loop only."""

    def __init__(self, size: int = _MEMORY) -> None:
        self._size = size
        self._workers: OrderedDict[bytes, str] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._workers)

    def remember(self, prefix: Prefix, worker_id: str) -> None:
        for block in prefix.blocks:
            self._workers[block] = worker_id
            self._workers.move_to_end(block)
        while len(self._workers) > self._size:
            self._workers.popitem(last=False)

    def order(
        self, prefix: Prefix, workers: Sequence[WorkerRecord], active: Callable[[str], int]
    ) -> list[WorkerRecord]:
        """Returns the workers in the order to try.

        The first is the worker that has computed the longest beginning of the prompt. If there is
        none, the first is chosen by a hash of the conversation's first messages. A worker with too
        many requests in progress (`share`) is not moved to the front. `workers`: sorted by load.
        `active`: returns the number of a worker's requests in progress, by worker id.
        """
        if not prefix.blocks:
            return list(workers)
        most = share(workers, active)
        by_id = {worker.id: worker for worker in workers}
        for worker_id in self._wanted(prefix, by_id):
            if active(worker_id) < most:
                first = by_id[worker_id]
                return [first, *(worker for worker in workers if worker is not first)]
        return list(workers)

    def _wanted(self, prefix: Prefix, by_id: dict[str, WorkerRecord]) -> Iterator[str]:
        least = max(prefix.shared + 1, min(prefix.opening, len(prefix.blocks) // 2))
        for matched in range(len(prefix.blocks), least - 1, -1):
            worker_id = self._workers.get(prefix.blocks[matched - 1])
            if worker_id in by_id:
                yield worker_id
                break
        opening = prefix.blocks[prefix.opening - 1]

        def weight(worker_id: str) -> bytes:
            return blake2b(worker_id.encode(), digest_size=8, key=opening).digest()

        # Rendezvous hashing: most conversations keep their worker when a worker joins or leaves.
        yield from sorted(by_id, key=weight)


def share(workers: Sequence[WorkerRecord], active: Callable[[str], int]) -> int:
    """Returns how many requests make a worker too busy to be preferred: 1.25 times the mean."""
    under_way = sum(active(worker.id) for worker in workers) + 1
    return ceil(_MOST_OVER_MEAN * under_way / len(workers))
