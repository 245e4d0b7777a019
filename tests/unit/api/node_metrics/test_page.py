"""One page of metrics for all who ask at the same time."""

import asyncio
import re
from dataclasses import replace

import pytest
from redis.exceptions import ConnectionError

from api.node_metrics.page import Node, Page
from poc_core.records import WorkerRecord
from poc_core.serving.deployments import DeploymentStatus, HostReport, HostState
from poc_core.serving.places import WorkerPlace
from tests.harness.samples import worker_record
from tests.vllm_metrics import metrics_text

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


@pytest.mark.parametrize("follows", ["", "head:29500"])
async def test_no_engine_gets_the_number_of_one_that_is_started_again(follows: str) -> None:
    """A worker that has ended has no record until it is started again, after up to 30 s."""
    ids = [f"h/gpu{index}-00000{index}" for index in (0, 2)]
    workers = [replace(worker_record(name), port=1000) for name in ids]
    places = [WorkerPlace(name=f"h/gpu{i}", pid=None, is_ready=False, since=0) for i in range(3)]
    report = HostReport(
        id="h1", host="h", state=HostState.SERVING, generation=1, places=places, follows=follows
    )

    async def ask(worker: WorkerRecord) -> str:
        return metrics_text()

    page = Page(lambda: Node(workers, [], DeploymentStatus(None, [report])), ask)
    found = set(re.findall(r'running{.*replica="(\d+)"', (await page.text()).decode()))
    assert found == ({"0", "1"} if follows else {"0", "2"})  # a host that follows has no workers
