"""Requests generated from vLLM's request models, to one engine in this process.

    .venv/bin/python -m bench.poison.campaign --cases 10000          # as `make fuzz` does
    .venv/bin/python -m bench.poison.campaign --minutes 3 --seed 7

Several requests are in progress at a time. After each request the engine must be alive. After every
hundred requests it must have no unfinished requests and answer a chat as before. A 5xx fails too.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel

from bench.poison.requests import Maker
from cli.machine import cpu_memory
from poc_core.chat_bounds import Excess, excess
from tests.integration.chat_checks.known import Server, chat, served, text_of
from tests.stacks.deployments import QWEN3
from workers.vllm.release import api_server
from workers.vllm.start import cpu_threads

# vLLM's statuses for features that this model or node does not have.
_NOT_HERE = (501, 503)
# vLLM closes a connection after a 500, maybe during the next request.
_HEADERS = {"Content-Type": "application/json", "Connection": "close"}
# Requests in progress at a time, and between two checks of the engine.
_AT_ONCE, _BETWEEN_LOOKS = 8, 100


@contextmanager
def noted_app(patch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yields a list to which vLLM's application is added when it is created."""
    made: list[Any] = []
    make = api_server.openai_app

    async def noted(llm: Any, args: Any) -> Any:
        made.append(await make(llm, args))
        return made[-1]

    with patch.context() as inner:
        inner.setattr(api_server, "openai_app", noted)
        yield made


def models_of(app: Any, paths: Sequence[str]) -> list[tuple[str, type[BaseModel]]]:
    """Returns (path, request model) for each path that the node passes on to vLLM."""
    found = []
    for route in app.routes:
        body = getattr(route, "body_field", None)
        if body is not None and f"POST {route.path}" in paths:
            annotation = body.field_info.annotation
            found += [(route.path, one) for one in get_args(annotation) or (annotation,)]
    return found


class Campaign:
    """Requests to one engine."""

    def __init__(self, server: Server, models: list[tuple[str, type[BaseModel]]]) -> None:
        self._server, self._models = server, models
        self._reference = chat(max_tokens=6, temperature=0)
        self._expected = text_of(server.ask(self._reference))
        self.seen: dict[str, Counter[int]] = {path: Counter() for path, _ in models}

    def run(self, n_cases: int, seed: int, until: float) -> int:
        """Sends requests and returns their number. AssertionError: an answer is wrong."""
        n, cases = 0, Maker(seed).requests(self._models)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            while n < n_cases and time.monotonic() < until:
                some = list(islice(cases, min(_BETWEEN_LOOKS, n_cases - n)))
                n += len(some)
                bad = list(filter(None, threads.map(self._why_wrong, some)))
                if unlike := self._unlike():
                    bad.append(f"{unlike} after {[f'{path} {shown(one)}' for path, one in some]}")
                if bad:
                    raise AssertionError("\n".join(bad))
        return n

    def _why_wrong(self, case: tuple[str, dict[str, Any]]) -> str:
        path, body = case
        said = f"{path} {shown(body)}"
        content = json.dumps({"model": self._server.model, **body}).encode()
        try:
            answer = self._server.http.post(path, content=content, headers=_HEADERS)
        except httpx.HTTPError as error:
            return f"{said}: {error!r}"
        self.seen[path][answer.status_code] += 1
        self._server.engine.check()
        is_wrong = answer.status_code >= 500 and answer.status_code not in _NOT_HERE
        # Requests that the API refuses never reach an engine, so vLLM may fail to parse them.
        if is_wrong and not isinstance(excess(path, body, [self._server.engine.info]), Excess):
            return f"{said}: {answer.status_code} {answer.text[:300]}"
        return ""

    def _unlike(self) -> str:
        """Returns how the idle engine differs from its first state; empty if it does not."""
        found = text_of(self._server.ask(self._reference))
        if found != self._expected:
            return f"{found!r} instead of {self._expected!r}"
        remembered = self._server.engine.unfinished_chat()
        return f"remembered: {remembered}" if remembered else ""


def shown(body: dict[str, Any]) -> str:
    text = json.dumps(body)
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    options = parser.parse_args()
    os.environ.setdefault(cpu_memory.VARIABLE, "1")
    os.environ.setdefault(cpu_threads.VARIABLE, "nobind")
    with (
        pytest.MonkeyPatch.context() as patch,
        noted_app(patch) as made,
        served(QWEN3, 256) as server,
    ):
        campaign = Campaign(server, models_of(made[0], server.engine.chat_paths))
        began = time.monotonic()
        try:
            n = campaign.run(options.cases, options.seed, began + 60 * options.minutes)
        finally:
            for path, statuses in campaign.seen.items():
                print(
                    f"{path:<35}", "  ".join(f"{one}: {n}" for one, n in sorted(statuses.items()))
                )
    print(f"seed {options.seed}: {n} requests in {time.monotonic() - began:.0f} s, one engine")


if __name__ == "__main__":
    main()
