"""/api/v1/metrics of a real engine: that its vLLM tells all that the schema has, and that the
network's broker, which restarts a node by one of these figures, and our own watchdog see the
same."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import fakeredis
import httpx
import psutil
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.node_metrics.families import ENGINE
from api.node_metrics.fetch import fetch
from api.node_metrics.page import Node, Page
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import WorkerRecord
from poc_core.serving.deployments import DeploymentStatus
from poc_core.settings import Settings, parse_chat_policy
from tests.harness.chat_beside import serve_chat
from tests.harness.marks import needs_vllm
from tests.harness.samples import Clock, RecordingDispatcher, worker_record
from tests.harness.waiting import wait_until
from tests.stacks.deployments import QWEN3
from workers.chat_gate import ChatGate
from workers.engines.base import Engine
from workers.housekeeping import Watchdog

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("engines"), needs_vllm]
with_engine = pytest.mark.parametrize(
    "vllm_engine", [QWEN3], indirect=True, ids=str, scope="session"
)

SECRET = "of this test's gateway"
# What the network's broker allows the counter to stand still while requests run.
BROKER_S = 120.0
ANSWER_TOKENS = 500
ANSWER_S = 240.0  # which takes some; a machine with other work needs more
Scrape = Callable[[], dict[str, float]]


@pytest.fixture
def worker(vllm_engine: Engine) -> WorkerRecord:
    """The engine behind its own server, as a worker serves it."""
    gate = ChatGate(parse_chat_policy("yield"), vllm_engine.unfinished_chat)
    port = serve_chat(vllm_engine, gate, SECRET)
    record = worker_record("w1", vllm_engine.info.name)
    return replace(
        record,
        engine="vllm",
        port=port,
        chat_host="127.0.0.1",
        chat_secret=SECRET,
        info=vllm_engine.info,
    )


@pytest.fixture
def scrape(worker: WorkerRecord) -> Iterator[Scrape]:
    """The engine's figures of this moment, by name; of those with further labels one."""
    services = Services(Settings(), fakeredis.FakeRedis(), cast(Dispatcher, RecordingDispatcher()))
    services.node_metrics = Page(
        lambda: Node([worker], [], DeploymentStatus(None)), fetch, fresh_s=0
    )
    with TestClient(create_app(services=services)) as client:

        def scrape() -> dict[str, float]:
            text = client.get("/api/v1/metrics").text
            found = text_string_to_metric_families(text)
            return {sample.name: sample.value for family in found for sample in family.samples}

        yield scrape


@with_engine
def test_a_real_engine_tells_every_family_of_the_schema(
    worker: WorkerRecord, scrape: Scrape
) -> None:
    ask(worker, 5)
    wait_until(lambda: scrape().get("vllm:generation_tokens_total", 0) >= 5, "the answer's tokens")
    found = scrape()
    assert {name for family in ENGINE for name in family.sample_names} <= found.keys()
    assert not [name for name in found if name.endswith("_created")]
    assert found["vllm:iteration_tokens_total_count"] > 0


@with_engine
def test_the_brokers_counter_and_our_watchdog_agree_and_ours_is_first(
    vllm_engine: Engine,
    worker: WorkerRecord,
    scrape: Scrape,
    clock: Clock,
    own_cores: list[psutil.Process],
) -> None:
    settings = Settings()
    watchdog = Watchdog(settings.engine_hung_s, 2 * settings.heartbeat_s, clock)
    (core,) = own_cores

    def stops_under_way() -> bool:
        core.send_signal(signal.SIGSTOP)
        wait_until(lambda: stands_still(vllm_engine, scrape), "what was under way")
        if scrape()["vllm:num_requests_running"] == 1:
            return True
        core.send_signal(signal.SIGCONT)  # it was between two requests
        return False

    with asked_on_and_on(worker):
        steps = watched(vllm_engine, scrape)
        wait_until(lambda: changed(steps, watched(vllm_engine, scrape)), "both go on")
        try:
            wait_until(stops_under_way, "an engine that is stopped with a request under way")
            ours, brokers = seconds_until_said(watchdog, vllm_engine, scrape, clock)
        finally:
            core.send_signal(signal.SIGCONT)
        assert ours is not None
        assert settings.engine_hung_s <= ours < brokers == BROKER_S
        stood = watched(vllm_engine, scrape)
        wait_until(lambda: changed(stood, watched(vllm_engine, scrape)), "both go on again")
        assert not watchdog.is_hung(vllm_engine.pulse())


@contextmanager
def asked_on_and_on(worker: WorkerRecord) -> Iterator[None]:
    """One request after the other, so that none is over too soon; the last to its end."""
    is_over = threading.Event()

    def ask_on() -> None:
        while not is_over.is_set():
            ask(worker, ANSWER_TOKENS)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_on)
        try:
            yield
        finally:
            is_over.set()
        asking.result(ANSWER_S)


def watched(engine: Engine, scrape: Scrape) -> tuple[int, float]:
    """What our watchdog looks at, and the broker."""
    return engine.pulse().beats, scrape()["vllm:iteration_tokens_total_count"]


def changed(before: tuple[int, float], after: tuple[int, float]) -> bool:
    return all(one < other for one, other in zip(before, after, strict=True))


def stands_still(engine: Engine, scrape: Scrape) -> bool:
    return len({watched(engine, scrape) for _ in range(5)}) == 1


def seconds_until_said(
    watchdog: Watchdog, engine: Engine, scrape: Scrape, clock: Clock
) -> tuple[float | None, float]:
    """After how many seconds of looks at an engine that stands still ours says so, and the
    broker."""
    began, ours = clock.now, None
    _, still_at = watched(engine, scrape)
    while clock.now - began < BROKER_S:
        if watchdog.is_hung(engine.pulse()) and ours is None:
            ours = clock.now - began
        found = scrape()
        assert found["vllm:iteration_tokens_total_count"] == still_at
        assert found["vllm:num_requests_running"] == 1
        clock.now += Settings().heartbeat_s
    return ours, clock.now - began


def ask(worker: WorkerRecord, n_tokens: int) -> None:
    body = {
        "model": worker.model,
        "prompt": "a b c",
        "max_tokens": n_tokens,
        "ignore_eos": True,
    }
    answer = httpx.post(
        f"http://127.0.0.1:{worker.port}/v1/completions",
        json=body,
        headers={"x-proofline-gateway-secret": SECRET},
        timeout=ANSWER_S,
        trust_env=False,
    )
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == n_tokens


@pytest.fixture
def clock() -> Clock:
    return Clock()
