"""Requests that come together begin in turns of their clients."""

import asyncio

import httpx
import pytest

from api.app import create_app


@pytest.mark.promise(
    "a client with thousands of simultaneous requests",
    "takes turns with other clients",
)
async def test_one_request_does_not_wait_behind_all_of_another_client() -> None:
    app, order = create_app(), list[str]()

    async def ask(address: str) -> None:
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/livez")).status_code == 200
        order.append(address)

    greedy = [asyncio.create_task(ask("192.0.2.1")) for _ in range(200)]
    await asyncio.gather(*greedy, ask("192.0.2.2"))
    assert len(order) == 201
    assert order.index("192.0.2.2") < 30
