"""Starts, computes and reads a round over HTTP."""

from typing import Any

from fastapi.testclient import TestClient

from poc_core.records import RoundRecord
from poc_core.state.rounds import RoundStore
from tests.harness.samples import complete_lease, known, lease_nonces, leased, round_body

POW = "/api/v1/pow"
START = f"{POW}/init/generate"
URL = "http://receiver:9000/poc"


def current(rounds: RoundStore) -> RoundRecord:
    return known(rounds.current())


def start(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any] | None = None
) -> RoundRecord:
    answer = client.post(START, json=sent or round_body())
    assert answer.status_code == 200, answer.text
    return current(rounds)


def compute(
    rounds: RoundStore, places: int = 4, worker: str = "w1", values: list[Any] | None = None
) -> None:
    lease = leased(lease_nonces(rounds, current(rounds), worker, places))
    complete_lease(rounds, lease, worker, values or ["A" * 32] * places)


def status(client: TestClient) -> dict[str, Any]:
    answer = client.get(f"{POW}/status")
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded
