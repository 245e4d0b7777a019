"""The workers that live, by their heartbeats, and the models that are or were served."""

import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from redis import Redis

from poc_core.queues import bindings, worker_queue
from poc_core.records import ModelInfo, WorkerRecord
from poc_core.settings import Settings
from poc_core.state import keys

_WORKER = TypeAdapter(WorkerRecord)
_INFO = TypeAdapter(ModelInfo)


class WorkerRegistry:
    """A worker is alive while its key exists; the key expires worker_ttl_s after the last
    heartbeat.
    """

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._settings = settings
        self._clock = clock

    def heartbeat(self, worker: WorkerRecord, in_hand: str | None = None) -> None:
        """Says that the worker lives, what it serves and which leases it has in hand
        (Hand.told; None: all that Redis knows of). Comes before its first lease: the dead hold
        no lease.
        """
        fields = asdict(worker)
        info = fields["info"]
        mapping = {name: json.dumps(value) for name, value in fields.items()}
        if in_hand is not None:
            mapping["in_hand"] = json.dumps(in_hand)
        now = self._clock()
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.worker(worker.id))
            pipe.hset(keys.worker(worker.id), mapping=mapping)
            pipe.expire(keys.worker(worker.id), self._settings.worker_ttl_s)
            pipe.zadd(keys.WORKERS, {worker.id: now})
            pipe.expire(keys.WORKERS, self._settings.job_ttl_sec)
            if info is not None:
                pipe.hset(keys.MODELS, worker.model, json.dumps({"info": info, "seen_at": now}))
                pipe.expire(keys.MODELS, self._settings.job_ttl_sec)
            pipe.execute()

    def remove(self, worker_id: str) -> None:
        """The worker leaves; its leases are free at once, and Celery forgets its own queue."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.worker(worker_id), bindings(worker_queue(worker_id)))
            pipe.zrem(keys.WORKERS, worker_id)
            pipe.execute()

    def last_beats(self) -> dict[str, float]:
        """When each worker's heart beat last, in seconds since the epoch; also of some that are
        dead.
        """
        beats = self._redis.zrange(keys.WORKERS, 0, -1, withscores=True)
        return {worker_id.decode(): at for worker_id, at in beats}

    def is_alive(self, worker_id: str) -> bool:
        return bool(self._redis.exists(keys.worker(worker_id)))

    def live(self, model: str | None = None) -> list[WorkerRecord]:
        """The workers alive (of `model`), starting or ready, by id."""
        ids = [worker_id.decode() for worker_id in self._redis.zrange(keys.WORKERS, 0, -1)]
        with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in ids:
                pipe.hgetall(keys.worker(worker_id))
            hashes = pipe.execute()
        dead = [worker_id for worker_id, found in zip(ids, hashes, strict=True) if not found]
        if dead:
            # Only those silent for long: one that beats at this very moment must not be dropped.
            silent_since = self._clock() - 10 * self._settings.worker_ttl_s
            for worker_id in self._redis.zrangebyscore(keys.WORKERS, "-inf", silent_since):
                self.remove(worker_id.decode())
        workers = [worker_record(found) for found in hashes if found]
        return sorted(
            (w for w in workers if model is None or w.model == model), key=lambda worker: worker.id
        )

    def ready(self, model: str | None = None) -> list[WorkerRecord]:
        """Those of `live` that take new work."""
        return [worker for worker in self.live(model) if worker.is_ready]

    def ports(self) -> set[int]:
        """Those on which the workers alive serve chat. Reads nothing else, and cleans nothing
        up.
        """
        with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in self._redis.zrange(keys.WORKERS, 0, -1):
                pipe.hget(keys.worker(worker_id.decode()), "port")
            found = (json.loads(port) for port in pipe.execute() if port is not None)
        return {int(port) for port in found if port}

    def here(self) -> list[WorkerRecord]:
        """Those alive that run on this machine, or in this container."""
        machine = socket.gethostname()
        return [worker for worker in self.live() if worker.machine == machine]

    def known_models(self) -> dict[str, ModelInfo]:
        """The models that a worker served within the last job_ttl_sec, also when none does now."""
        oldest = self._clock() - self._settings.job_ttl_sec
        known = {
            name.decode(): json.loads(raw) for name, raw in self._redis.hgetall(keys.MODELS).items()
        }
        return {
            name: _INFO.validate_python(entry["info"])
            for name, entry in known.items()
            if entry["seen_at"] >= oldest
        }


def worker_record(found: Mapping[bytes, bytes]) -> WorkerRecord:
    """The worker of a hash that a heartbeat wrote."""
    return _WORKER.validate_python(
        {name.decode(): json.loads(value) for name, value in found.items()}
    )
