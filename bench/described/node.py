"""The API with a Redis in this process, in all situations that a request may meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fakeredis

from api.app import create_app
from api.edge.keys import KeyFile, Role
from api.models.cache import ModelCache
from api.models.downloads import Downloads
from api.proofs.admission import admit
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import Lease, NewJob, RoundState
from poc_core.schemes.artifact.requests import GenerateBody
from poc_core.serving.deployments import Deployment, HostReport, HostState
from poc_core.settings import Settings
from poc_core.state.downloads import Download, DownloadStore
from poc_core.state.jobs import JobStore
from tests.harness.samples import (
    DISTANCE_SPEC,
    MODEL,
    RecordingDispatcher,
    body,
    complete_batch,
    complete_lease,
    lease_batch,
    lease_nonces,
    round_config,
    worker_record,
)

REPO = "acme/small"
VECTOR = "A" * 32  # of twelve zeros
# Values that a node which serves MODEL accepts together in a request.
KNOWN: dict[str, Any] = {
    "model": MODEL,
    "seq_len": 64,
    "k_dim": 12,
    "batch_size": 8,
    "node_id": 0,
    "node_count": 1,
    "hf_repo": REPO,
    "dtype": "auto",
    "additional_args": [],
    "request_id": "0" * 32,
}
# Nothing listens there.
_NOWHERE = 9
_WAITS_FOR_HOSTS = {"POST /api/v1/stop", "POST /api/v1/inference/down", "POST /api/v1/inference/up"}


class _NoDownloads(Downloads):
    """Downloads that never proceed."""

    def begin(self, download: Download) -> None:
        """Does not download."""


class Node:
    """A Target without workers: a request that waits for a job soon gets an answer without it."""

    def __init__(self, folder: Path) -> None:
        """`folder`: an empty folder for models and keys."""
        settings = Settings(
            generate_chunk_timeout_sec=0.02,
            worker_ttl_s=86_400,
            max_queued_nonces=1_000,
            api_keys_file=folder / "keys",
        )
        self._server = fakeredis.FakeServer()
        redis = fakeredis.FakeRedis(server=self._server)
        self._redis: Any = redis
        self._folder = folder
        self._services = self._services_for(settings)
        self._open = create_app(settings, self._services)
        strict = settings.model_copy(
            update={"require_keys": "always", "api_key": None, "max_body_bytes": 150}
        )
        self._strict = create_app(strict, self._services)
        looks = KeyFile(strict.api_keys_file).add("looks", [Role.READ])
        does = KeyFile(strict.api_keys_file).add("does", list(Role))
        self._keys = {"no key": "", "a key that may only look": looks, "small bodies": does}
        # The app and the headers of the next request.
        self._asked = self._open
        self._headers: dict[str, str] = {}
        self.document: dict[str, Any] = self._open.openapi()
        self._enter: dict[str, Callable[[], Mapping[str, Any]]] = {
            "no worker": self._without_worker,
            "idle": dict,
            "Redis is away": self._without_redis,
            "all places are taken": self._full,
            "a job": self._job,
            "a result": self._result,
            "a verdict": self._verdict,
            "a round generates": self._generating,
            "a distance round generates": lambda: self._distance(RoundState.GENERATING),
            "a distance round waits": lambda: self._distance(RoundState.IDLE),
            "a distance round validates": lambda: self._distance(RoundState.VALIDATING),
            "a round has ended": self._ended,
            "a host starts a model": self._starting,
            "a model is downloaded": self._downloading,
            **dict.fromkeys(self._keys, dict),
        }
        self.situations = list(self._enter)

    def enter(self, situation: str, operation: str) -> Mapping[str, Any]:
        services = self._services
        if situation == "a host starts a model" and operation in _WAITS_FOR_HOSTS:
            situation = "idle"  # a start never ends here
        self._server.connected = True
        self._redis.flushall()
        self._open.state.services = self._strict.state.services = services
        worker = replace(worker_record(max_seq_len=256), port=_NOWHERE, chat_host="127.0.0.1")
        services.workers.heartbeat(worker)
        self._asked, self._headers = self._open, {}
        if situation in self._keys:
            self._asked, key = self._strict, self._keys[situation]
            self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        return {**KNOWN, "url": None, "callback_url": None, **self._enter[situation]()}

    def send(self, case: Any) -> Any:
        return case.call(app=self._asked, base_url="http://testserver", headers=self._headers)

    def share(self, operation: str) -> float:
        return 1.0

    # Situations.

    def _without_worker(self) -> dict[str, Any]:
        self._redis.flushall()
        return {}

    def _without_redis(self) -> dict[str, Any]:
        self._server.connected = False
        return {}

    def _full(self) -> dict[str, Any]:
        settings = self._services.settings.model_copy(update={"max_queued_nonces": 5})
        jobs = JobStore(self._redis, settings)
        self._without_waiting(settings)
        for n in range(3):
            self._download(f"acme/{n}")
        return {"request_id": jobs.create(self._new_job())}

    def _job(self) -> dict[str, Any]:
        return {"request_id": self._services.jobs.create(self._new_job())}

    def _result(self) -> dict[str, Any]:
        return {"request_id": self._computed(self._new_job())}

    def _verdict(self) -> dict[str, Any]:
        claimed = [{"nonce": nonce, "vector_b64": VECTOR} for nonce in range(3)]
        return {"request_id": self._computed(self._new_job(validation={"artifacts": claimed}))}

    def _generating(self) -> dict[str, Any]:
        self._without_waiting()  # otherwise a request would wait for the end of the round
        rounds = self._services.rounds
        round_id = rounds.store(round_config(), RoundState.GENERATING)
        record = rounds.read(round_id)
        assert record is not None
        lease = lease_nonces(rounds, record, "w1", 4)
        assert isinstance(lease, Lease)
        complete_lease(rounds, lease, "w1", [VECTOR, None, VECTOR, VECTOR])
        return {}

    def _distance(self, state: RoundState) -> dict[str, Any]:
        if state is RoundState.GENERATING:
            self._without_waiting()
        terms = {"r_target": 1.4, "fraud_threshold": 0.01}
        self._services.rounds.store(round_config(spec=DISTANCE_SPEC, terms=terms), state)
        return {}

    def _ended(self) -> dict[str, Any]:
        self._generating()
        current = self._services.rounds.current()
        assert current is not None
        self._services.rounds.switch(current, RoundState.STOPPED, "it could not go on")
        return {}

    def _starting(self) -> dict[str, Any]:
        deployments = self._services.deployments
        deployments.report(HostReport(id="h1", host="h1", state=HostState.IDLE, generation=0))
        generation = deployments.deploy(Deployment(model="acme/other"))
        starting = HostReport(id="h1", host="h1", state=HostState.STARTING, generation=generation)
        deployments.report(starting)
        return {}

    def _downloading(self) -> dict[str, Any]:
        self._download(REPO)
        return {"hf_commit": None}

    def _download(self, repo: str) -> None:
        downloads = self._services.downloads
        downloads.store.start(repo, None, downloads.machine)

    def _services_for(self, settings: Settings) -> Services:
        made = Services(settings, self._redis, cast(Dispatcher, RecordingDispatcher()))
        made.downloads = _NoDownloads(DownloadStore(self._redis), settings)
        made.model_cache = ModelCache(self._folder / "hub")
        return made

    def _without_waiting(self, settings: Settings | None = None) -> None:
        services = self._services_for(settings or self._services.settings)
        services.inline.limit = 0
        self._open.state.services = services

    def _new_job(self, **changes: Any) -> NewJob:
        asked = GenerateBody.model_validate(body(**changes))
        return admit(asked, self._services.settings, self._services.workers, ())

    def _computed(self, job: NewJob) -> str:
        jobs = self._services.jobs
        job_id = jobs.create(job)
        lease = lease_batch(jobs, job_id, 0, "w1")
        assert isinstance(lease, Lease)
        complete_batch(jobs, job_id, 0, [VECTOR for _ in lease.nonces])
        jobs.finish(job_id)
        return job_id
