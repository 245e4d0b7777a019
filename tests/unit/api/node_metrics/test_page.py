"""One page of metrics for all who ask at the same time."""

import asyncio

import pytest
from redis.exceptions import ConnectionError

from api.node_metrics.page import Node, Page
from poc_core.records import WorkerRecord
from poc_core.serving.deployments import DeploymentStatus

EMPTY = Node([], [], DeploymentStatus(None))


async def nobody(worker: WorkerRecord) -> str:
    raise AssertionError(worker)


async def test_those_who_ask_together_share_one_look() -> None:
    looks = []

    def look() -> Node:
        looks.append(1)
        return EMPTY

    page = Page(look, nobody)
    texts = await asyncio.gather(*(page.text() for _ in range(20)))
    assert (len(looks), len(set(texts))) == (1, 1)


async def test_who_asks_later_gets_another() -> None:
    looks = []

    def look() -> Node:
        looks.append(1)
        return EMPTY

    page = Page(look, nobody, fresh_s=0)
    for _ in range(3):
        await page.text()
    assert len(looks) == 3


async def test_an_error_is_told_and_forgotten() -> None:
    errors = [ConnectionError("away")]

    def look() -> Node:
        if errors:
            raise errors.pop()
        return EMPTY

    page = Page(look, nobody)
    with pytest.raises(ConnectionError):
        await page.text()
    assert b"gonka_metrics_schema_info" in await page.text()
