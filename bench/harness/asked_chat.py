"""Chat that is asked all the while: how often it was answered, and how often refused."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Self

import httpx

# What a node with POC_CHAT_POLICY=exclusive says while a round runs.
REFUSED = "PoC generation is active"
PAUSE_S = 0.5
TIMEOUT_S = 120.0


class AskedChat:
    """Context manager: short answers, one after the other."""

    def __init__(self, base_url: str, model: str) -> None:
        self.counts: Counter[str] = Counter()
        self._base_url = base_url
        self._body = {"model": model, "prompt": "the sea", "max_tokens": 16, "ignore_eos": True}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._base_url, timeout=TIMEOUT_S, trust_env=False) as http:
            while not self._stop.wait(PAUSE_S):
                self.counts[self._outcome(http)] += 1

    def _outcome(self, http: httpx.Client) -> str:
        try:
            answer = http.post("/v1/completions", json=self._body)
        except httpx.HTTPError as error:
            return f"failed ({type(error).__name__})"
        if answer.status_code == 200:
            return "answered"
        if answer.status_code == 503 and REFUSED in answer.text:
            return "refused"
        return f"failed ({answer.status_code})"
