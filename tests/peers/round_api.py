"""A stand-in for the API's routes of rounds."""

import json
from typing import Any

import httpx
from rich.console import Console

from tests.harness.samples import round_body, status_answer

URL = "http://127.0.0.1:9100"


def status_of(state: str = "GENERATING", **changes: Any) -> dict[str, Any]:
    """The API's status of a round on two workers, one of which is gone; changes are merged into
    its stats.
    """
    outbox: dict[str, Any] = {
        "bytes": 9_680,
        "limit_bytes": 5_000_000,
        "full": False,
        "dropped": 0,
        "failures": 0,
    }
    outbox |= {"next_try_at": None, "last_error": None}
    stats = {
        "total_processed": 4321,
        "nonces_per_second": 103.44,
        "nonces_per_second_of_round": 98.76,
        "elapsed_seconds": 3725.9,
        "n_excluded": 0,
        "excluded_nonces": [],
        "workers": {
            "w1": {"total_processed": 4000, "nonces_per_second": 103.44},
            "w2": {"total_processed": 321, "nonces_per_second": 0.0},
        },
        "artifacts_delivered": 4200,
        "artifacts_waiting": 121,
        "outbox": outbox | changes.pop("outbox", {}),
        "error": None,
    }
    config = round_body(
        block_hash="0xabc", public_key="node-1", node_id=1, node_count=3, batch_size=32, url=URL
    ) | {"group_id": 0, "n_groups": 1, "poc_stronger_rng": False}
    running = {"status": state, "state": state, "config": config, "stats": stats | changes}
    return status_answer(["tiny-qwen3"]) | running | {"queued_nonces": 55}


def without_a_round() -> dict[str, Any]:
    return status_answer([])


class FakeApi:
    """Answers /status with the next of `looks`, the last one again and again; remembers what is
    posted.
    """

    def __init__(self) -> None:
        self.looks: list[dict[str, Any] | int | Exception] = [status_of()]
        self.refusal: tuple[int, Any] | None = None
        self.busy = 0  # how often a POST is asked to come again
        self.posted: list[tuple[str, Any]] = []
        self.asked: list[str] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1/pow")
        self.asked.append(str(request.url))
        if request.method == "POST":
            self.posted.append((path, json.loads(request.content) if request.content else None))
            if self.busy:
                self.busy -= 1
                return httpx.Response(
                    503, json={"detail": "No worker is ready"}, headers={"Retry-After": "0"}
                )
            if self.refusal:
                return httpx.Response(self.refusal[0], json={"detail": self.refusal[1]})
            return httpx.Response(
                200, json={"status": "OK", "pow_status": {"status": "STOPPED"}, "cancelled_jobs": 2}
            )
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        if isinstance(look, int):
            return httpx.Response(look, json={"detail": "away"})
        return httpx.Response(200, json=look)


def drawn(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text
