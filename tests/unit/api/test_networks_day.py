"""A day of the network node with this one, by the requests that it sends, byte for byte.

tests/data/network/day.json has them: Go's client says no Content-Type but for chat. The host
follows what is deployed, by a fleet that loads for as long as a test wants; a worker of the test
computes; the courier is the node's own.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.app import create_app
from api.edge.keys import OF_NETWORK_NODE, KeyFile
from api.models import deployments
from api.models.cache import ModelCache
from api.models.downloads import Downloads
from api.routes.services import Services
from cli.supervise.fleet import Fleet
from cli.supervise.follower import Follower
from poc_core.schemes.artifact.encoding import encode_vectors
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.downloads import Download
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox, Receivers
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    Clock,
    complete_batch,
    complete_lease,
    known,
    lease_batch,
    lease_nonces,
    leased,
    worker_record,
)
from tests.peers.fake_fleet import FakeFleet
from workers.courier.courier import Courier
from workers.courier.poster import Poster
from workers.engines.options import EngineOptions

DAY = json.loads((Path(__file__).parents[2] / "data" / "network" / "day.json").read_text())
FIRST, OTHER = "MiniMaxAI/MiniMax-M2.7", "deepseek-ai/DeepSeek-V4-Flash-0731"
RECEIVED_AT = "/v3/poc/MiniMaxAI%252FMiniMax-M2.7"
WAITS_S = 0.3  # that `up` waits for a model here, in place of 15 minutes
ANSWER_S = 60.0  # for an answer, on a busy machine


class NetworkNode:
    """Sends the requests of the day as the network node does, and takes its callbacks."""

    def __init__(self, http: TestClient, version: str, key: str | None) -> None:
        self._http = http
        self._version = version
        self._headers = DAY["headers"] | ({"Authorization": f"Bearer {key}"} if key else {})
        self.received: list[tuple[bytes, dict[str, Any]]] = []  # path and body of each callback

    def send(self, name: str, sent: str | None = None) -> Any:
        method, path, recorded = DAY["requests"][name]
        body = recorded if sent is None else sent
        content = None if body is None else body.encode()
        path = self._version + path
        return self._http.request(method, path, content=content, headers=self._headers)

    def asks(self, name: str, sent: str | None = None) -> dict[str, Any]:
        """What it is answered. Any answer but 200 marks the node FAILED."""
        answer = self.send(name, sent)
        assert answer.status_code == 200, (name, answer.status_code, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    def take(self, request: httpx.Request) -> httpx.Response:
        self.received.append((request.url.raw_path, json.loads(request.content)))
        return httpx.Response(200)

    def of(self, kind: str) -> list[dict[str, Any]]:
        path = f"{RECEIVED_AT}/{kind}".encode()
        return [body for at, body in self.received if at == path]


class Here:
    """This node: the host's follower, a worker that computes, and the courier."""

    def __init__(self, redis: Redis, settings: Settings, clock: Clock, node: NetworkNode) -> None:
        self.jobs = JobStore(redis, settings, clock)
        self.rounds = RoundStore(redis, settings, clock)
        self.workers = WorkerRegistry(redis, settings, clock)
        self.outbox = Outbox(redis, settings, clock)
        self.clock = clock
        self.fleets: list[FakeFleet] = []
        self.store = store = DeploymentStore(redis, settings, clock)
        options = EngineOptions(model="")
        self.follower = Follower(store, self.workers, "h1", options, self._start, lambda _: None)
        posts = httpx.AsyncClient(transport=httpx.MockTransport(node.take))
        found = [(0, 0, 0, "", ("10.0.0.9", 9100))]
        poster = Poster(posts, settings.callbacks, lookup=lambda name, port: found)
        self.courier = Courier(self.outbox, Receivers(redis, clock), poster)

    def _start(self, options: EngineOptions, own: bool) -> Fleet:
        self.fleets.append(FakeFleet(options))
        return cast(Fleet, self.fleets[-1])

    def look(self) -> None:
        self.follower.look()
        ending = vars(self.follower)["_ending"]
        if ending is not None:
            ending.join()

    def beat(self) -> None:
        """The worker's heart; it is ready."""
        fleet = self.fleets[-1]
        record = worker_record("w1", str(fleet.options.name))
        self.workers.heartbeat(replace(record, host_id=self.follower.id, pid=fleet.pid or 0))

    def serve(self) -> None:
        self.fleets[-1].is_serving = True
        self.beat()
        self.look()

    def compute(self, n: int) -> None:
        """Nonces of the round."""
        record = known(self.rounds.current())
        lease = leased(lease_nonces(self.rounds, record, "w1", n))
        complete_lease(self.rounds, lease, "w1", [vector(nonce) for nonce in lease.nonces])

    def compute_job(self, job_id: str) -> None:
        record = known(self.jobs.read(job_id))
        for index in range(record.n_batches):
            batch = leased(lease_batch(self.jobs, job_id, index, "w1"))
            complete_batch(self.jobs, job_id, index, [vector(nonce) for nonce in batch.nonces])
        assert self.jobs.finish(job_id)

    def deliver(self) -> None:
        self.clock.now += 10
        for due in self.outbox.announce():
            asyncio.run(self.courier.deliver(due.outbox_id))


def vector(nonce: int) -> str:
    """An artifact's, of length 1."""
    values = np.random.default_rng(nonce).normal(size=(1, 12))
    return encode_vectors(values / np.linalg.norm(values))[0]


def validation(n: int, n_wrong: int = 0) -> str:
    """As its client writes it: the fields in the order of its struct, without spaces."""
    right = [{"nonce": nonce, "vector_b64": vector(nonce)} for nonce in range(n)]
    wrong = [{"nonce": nonce, "vector_b64": vector(nonce + n)} for nonce in range(n_wrong)]
    sent = json.loads(DAY["requests"]["round"][2])
    del sent["poc_stronger_rng"]
    url = sent.pop("url")
    sent |= {"nonces": list(range(n)), "url": url}
    sent["validation"] = {"artifacts": [*wrong, *right[n_wrong:]]}
    sent["stat_test"] = {"dist_threshold": 0.75, "p_mismatch": 0.1, "p_value_threshold": 0.05}
    sent["poc_stronger_rng"] = True
    return json.dumps(sent, separators=(",", ":"))


@pytest.fixture(autouse=True)
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Download]:
    """Downloads whose processes would have been started, into an empty cache."""
    begun: list[Download] = []
    monkeypatch.setattr(Downloads, "begin", lambda _, download: begun.append(download))
    monkeypatch.setattr(ModelCache, "path", tmp_path / "hub")
    return begun


@pytest.fixture(
    params=[("", False), ("/v3.0.8", False), ("", True)],
    ids=["by host and port", "with a version", "by base_url and auth_token"],
)
def node(
    request: pytest.FixtureRequest, client: TestClient, tmp_path: Path
) -> Iterator[NetworkNode]:
    version, has_key = request.param
    file = KeyFile(tmp_path / "keys.json")
    settings = Settings(api_keys_file=file.path, require_keys="always" if has_key else "never")
    services: Services = client.app.state.services  # type: ignore[attr-defined]
    key = file.add("network-node", OF_NETWORK_NODE) if has_key else None
    with TestClient(create_app(settings, services)) as http:
        yield NetworkNode(http, version, key)


@pytest.fixture
def here(redis: Redis, settings: Settings, clock: Clock, node: NetworkNode) -> Here:
    here = Here(redis, settings, clock, node)
    here.look()
    return here


Answered = Callable[..., Any]


@pytest.fixture
def looking(node: NetworkNode, here: Here) -> Iterator[Answered]:
    """Sends a request that takes long; the host goes on looking, and `then` is called meanwhile."""
    with ThreadPoolExecutor(1) as pool:

        def send(name: str, then: Callable[[], None] = lambda: None) -> Any:
            answer = pool.submit(node.send, name)
            while not answer.done():
                here.look()
                then()
            return answer.result(ANSWER_S)

        yield send


def test_a_day(
    node: NetworkNode,
    here: Here,
    looking: Answered,
    begun: list[Download],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A node without a model.
    assert node.asks("state")["state"] == "STOPPED"
    assert node.asks("gpus")["count"] == 0
    assert node.send("encrypted identity").status_code == 503  # as MLNode without encryption
    assert node.asks("driver").keys() == {"driver_version", "cuda_driver_version", "nvml_version"}
    assert "gonka_metrics_schema_info" in node.send("metrics").text
    assert node.send("clock").status_code == 204

    # Its model comes onto the disk.
    assert node.asks("on disk")["status"] == "NOT_FOUND"
    assert node.send("download").status_code == 202
    assert node.asks("on disk")["status"] == "DOWNLOADING"
    assert (begun[0].hf_repo, begun[0].hf_commit) == (FIRST, revision("download"))

    # It loads for 20 minutes, of which `up` waits 15.
    with monkeypatch.context() as patched:
        patched.setattr(deployments, "SERVE_S", WAITS_S)
        assert looking("up").status_code == 500
    clock.now += 900
    assert looking("stop").status_code == 200
    assert node.asks("state")["state"] == "STOPPED"
    assert node.send("round").status_code == 503
    loading = here.fleets[0]
    clock.now += 5

    def serves_soon() -> None:
        if here.store.status().wanted is not None:
            clock.now += 300
            here.serve()

    assert looking("up", serves_soon).json() == {"status": "OK"}
    assert here.fleets == [loading]
    assert loading.n_stops == 0
    state = node.asks("state")
    assert (state["state"], state["loaded_model"], state["poc_status"]) == (
        "INFERENCE",
        FIRST,
        "IDLE",
    )
    assert state["inference_healthy"]
    assert state["poc_validation_inference"]
    assert not state["version"].startswith("3.")
    assert node.send("up").status_code == 409

    # A round, in which the only worker is lost for a while.
    assert node.asks("round status")["status"] == "IDLE"
    assert node.asks("round")["status"] == "OK"
    assert node.asks("state")["poc_status"] == "GENERATING"
    here.compute(8)
    here.deliver()
    loading.pid, loading.is_serving, loading.since = None, False, clock.now
    for probe in ("health", "readyz"):
        here.look()
        assert node.asks(probe)
    assert node.asks("round status")["status"] == "GENERATING"
    loading.pid = 8
    here.serve()
    here.compute(8)
    assert node.asks("round stop")["status"] == "OK"
    here.deliver()
    assert node.asks("round status")["status"] == "IDLE"
    assert node.asks("state")["poc_status"] == "IDLE"
    nonces = [one["nonce"] for body in node.of("generated") for one in body["artifacts"]]
    assert nonces == list(range(16))

    # Validations of 200 nonces, and of the 50 of a tail that somebody has made up.
    for n, n_wrong in ((200, 0), (50, 50)):
        here.beat()
        here.compute_job(node.asks("validate", validation(n, n_wrong))["request_id"])
        here.deliver()
        verdict = node.of("validated")[-1]
        assert (verdict["n_total"], verdict["n_mismatch"]) == (n, n_wrong)
        assert verdict["fraud_detected"] is (n_wrong > 0)

    # Another model.
    def ends() -> None:
        if loading.n_stops:
            here.workers.remove("w1")

    assert looking("stop", ends).status_code == 200
    assert node.asks("state")["state"] == "STOPPED"
    assert [node.send(probe).status_code for probe in ("health", "readyz")] == [503, 503]
    assert node.asks("round status")["status"] == "NO_BACKENDS"
    assert looking("other up", serves_soon).status_code == 200
    assert (node.asks("state")["loaded_model"], len(here.fleets)) == (OTHER, 2)


def revision(name: str) -> str:
    found: str = json.loads(DAY["requests"][name][2])["hf_commit"]
    return found
