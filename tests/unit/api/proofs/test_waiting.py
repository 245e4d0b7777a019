"""Requests that wait for a job have a limit; one whose client leaves is released."""

import json
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.edge.connections import Limits, limited
from api.routes.services import Services
from tests.harness.samples import body
from tests.harness.waiting import wait_until
from tests.stacks.served import port_of, served

GENERATE = "/api/v1/pow/generate"


@pytest.fixture
def services(client: TestClient, serve: Callable[..., Any]) -> Services:
    serve("w1")
    services: Services = client.app.state.services  # type: ignore[attr-defined]
    return services


@pytest.fixture
def port(client: TestClient, services: Services) -> Iterator[int]:
    """Of the API on a real server: an in-process one does not see clients leave."""
    services.inline._timeout_s = 60
    protocol = limited(Limits(100))
    with served(client.app, http=protocol, ws="none", lifespan="off") as server:
        yield port_of(server)


@pytest.mark.parametrize("padding", [0, 100_000])
def test_clients_that_leave_are_waited_for_no_longer(
    port: int, services: Services, padding: int
) -> None:
    sent = json.dumps(body(wait=True, padding="x" * padding)).encode()
    head = (
        f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length:"
        f" {len(sent)}\r\n\r\n"
    )
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    for client in clients:
        client.sendall(head.encode() + sent)
    wait_until(lambda: services.inline.n_waiting == 5)
    for client in clients:
        client.close()
    wait_until(lambda: services.inline.n_waiting == 0)
    assert services.jobs.queued_nonces() == 5 * 3  # the jobs go on


def test_looks_at_a_job_become_rarer(
    client: TestClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 20:
            services.jobs.cancel_all()

    services.inline._timeout_s = 60
    monkeypatch.setattr("api.proofs.waiting.anyio", SimpleNamespace(sleep=sleep))
    assert client.post(GENERATE, json=body(wait=True)).status_code == 409
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < 0.1 < pauses[-1] < 1


def test_beyond_the_limit_they_are_refused_and_nothing_is_queued(
    client: TestClient, services: Services
) -> None:
    services.inline.n_waiting = services.inline.limit
    answer = client.post(GENERATE, json=body(wait=True))
    assert answer.status_code == 429
    assert "POC_MAX_WAITING_REQUESTS" in answer.json()["detail"]
    assert services.jobs.queued_nonces() == 0
    assert client.post(GENERATE, json=body(wait=False)).status_code == 200
    assert services.inline.n_waiting == services.inline.limit
    services.inline.n_waiting = 0


def test_whoever_got_an_answer_has_left(client: TestClient, services: Services) -> None:
    # No batch was done in time.
    assert client.post(GENERATE, json=body(wait=True)).status_code == 503
    # Too many nonces.
    assert client.post(GENERATE, json=body(wait=True, nonces=list(range(2000)))).status_code == 429
    assert services.inline.n_waiting == 0
