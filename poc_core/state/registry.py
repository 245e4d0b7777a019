"""The live workers, known by their heartbeats, and the models that are or were served."""

import ipaddress
import itertools
import json
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from typing import Any

import psutil
from pydantic import TypeAdapter
from redis import Redis

from poc_core import callbacks, queues, records
from poc_core.serving.places import name_of
from poc_core.settings import Settings, parse_ports
from poc_core.state import keys, scripts
from poc_core.state.client import Store, server_clock
from poc_core.state.events import Events
from poc_core.state.parsing import readable, worker_records

# Seconds for which the API caches the list of workers that serve chat; short compared to the time
# between heartbeats. A worker that stops waits for the same time.
CHAT_MEMORY_S = 0.25
# Seconds for which a chat request is refused after two engines died with it.
DEADLY_S = 600
_LOOK_S = 0.1  # between two checks for new heartbeats
# Seconds to connect to a worker, and until a removed worker gets no more chat requests.
CHAT_CONNECT_S = 5.0
CHAT_SENT_S = CHAT_MEMORY_S + CHAT_CONNECT_S + 0.25

_INFO = TypeAdapter(records.ModelInfo)


class WorkerRegistry(Store):
    """The store of the workers. A worker's record expires worker_ttl_s after its last heartbeat."""

    _read = scripts.of_store("read_workers")

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock`: returns seconds since the epoch; None means the clock of Redis' machine."""
        super().__init__(redis, settings, clock or server_clock(redis))

    def heartbeat(self, worker: records.WorkerRecord, in_hand: str | None = None) -> None:
        """Stores the worker's record and its leases. Must precede the first lease, because Redis
        frees leases of unknown workers. `in_hand`: see HeldLeases.summary; None to keep all leases.
        """
        fields = asdict(worker)
        info = fields["info"]
        # One JSON text: some forty fields per worker would slow reading a large fleet.
        mapping = {"record": json.dumps(fields)}
        if in_hand is not None:
            mapping["in_hand"] = json.dumps(in_hand)
        now = self._clock()
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.worker(worker.id))
            pipe.hset(keys.worker(worker.id), mapping=mapping)
            pipe.expire(keys.worker(worker.id), self._settings.worker_ttl_s)
            pipe.zadd(keys.WORKERS, {worker.id: now})
            pipe.expire(keys.WORKERS, self._settings.job_ttl_sec)
            if worker.port:
                pipe.zadd(keys.CHAT_PORTS, {str(worker.port): now})
                pipe.zremrangebyscore(keys.CHAT_PORTS, "-inf", now - self._known_s)
                pipe.zremrangebyscore(keys.CHAT_PORTS, now + self._known_s, "+inf")
                pipe.expire(keys.CHAT_PORTS, self._settings.job_ttl_sec)
            if info is not None and worker.is_ready:
                pipe.hset(keys.MODELS, worker.model, json.dumps({"info": info, "seen_at": now}))
                pipe.expire(keys.MODELS, self._settings.job_ttl_sec)
            pipe.execute()

    def pulse(self, worker_id: str) -> bool:
        """Extends the TTL of a worker's record. Returns False if the record is missing."""
        ttl_ms = self._settings.worker_ttl_s * 1000
        return bool(self._redis.pexpire(keys.worker(worker_id), ttl_ms))

    def drop_silent(self, wait_s: float) -> int:
        """Removes all workers that send no heartbeat for the next `wait_s` seconds. Returns their
        number. Ignores stored times, because a revoked host may have written any records.
        """
        prefix, now = keys.WORKER_PREFIX.encode(), self._clock()
        silent = {name.removeprefix(prefix) for name in self._redis.scan_iter(prefix + b"*")}
        if listed := self._redis.zrange(keys.WORKERS, 0, -1):
            self._redis.zadd(keys.WORKERS, dict.fromkeys(listed, now), xx=True)
        silent, until = silent.union(listed), time.monotonic() + wait_s
        while silent and time.monotonic() < until:
            time.sleep(_LOOK_S)
            found = self._redis.zrange(keys.WORKERS, 0, -1, withscores=True)
            silent -= {name for name, beat_at in found if beat_at != now}
        for worker_id in silent:
            self._redis.zrem(keys.WORKERS, worker_id)
        return sum(self._redis.delete(prefix + worker_id) for worker_id in silent)

    def remove_ended(self, host_id: str, pids: Collection[int]) -> None:
        """Removes the workers of the supervisor `host_id` whose processes `pids` have ended."""
        for worker in self.live():
            if worker.host_id == host_id and worker.pid in pids:
                self.remove(worker.id)

    def remove(self, worker_id: str) -> None:
        """Removes a worker and its Celery queue. Other workers may lease its work at once."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.worker(worker_id), *_queue_keys(worker_id))
            pipe.zrem(keys.WORKERS, worker_id)
            pipe.execute()

    def died_with(self, worker_id: str, request: str, what: str) -> int:
        """Stores that a worker's engine died during a chat request. Returns the number of such
        workers. From two workers on, the request is refused for DEADLY_S seconds. `request`: the
        request's fingerprint. `what`: the request's description for an event.
        """
        now = self._clock()
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(keys.deaths(request), worker_id)
            pipe.expire(keys.deaths(request), DEADLY_S)
            pipe.scard(keys.deaths(request))
            n = int(pipe.execute()[-1])
        if n > 1 and self._redis.zadd(keys.DEADLY, {request: now + DEADLY_S}):
            self._redis.expire(keys.DEADLY, DEADLY_S)
            self._redis.incr(keys.DEADLY_TOTAL)
            self._redis.expire(keys.DEADLY_TOTAL, self._settings.job_ttl_sec)
            text = f"{what} was in the engines of {n} workers when they died, the last"
            text += f" {name_of(worker_id)}: it is refused for {DEADLY_S // 60} minutes."
            Events(self._redis, self._clock).note("refused", text, name_of(worker_id))
        return n

    def outlived(self, request: str) -> None:
        """Forgets the engines that died during a request, because an engine has answered it."""
        self._redis.delete(keys.deaths(request))

    def deadly(self) -> frozenset[str]:
        """Returns the fingerprints of chat requests that are refused because engines died."""
        found = self._redis.zrangebyscore(keys.DEADLY, self._clock(), "+inf")
        return frozenset(one.decode() for one in found)

    def n_deadly(self) -> int:
        """Returns how many different chat requests have been refused because engines died."""
        return int(self._redis.get(keys.DEADLY_TOTAL) or 0)

    def is_alive(self, worker_id: str) -> bool:
        return bool(self._redis.exists(keys.worker(worker_id)))

    def live(self, model: str | None = None) -> list[records.WorkerRecord]:
        """Returns the live workers in any state, sorted by id. `model`: None means all models."""
        raw: Any = self._read([keys.WORKERS], [self._settings.worker_ttl_s * 1000])
        found = dict(zip(raw[::2], raw[1::2], strict=True))
        if not all(found.values()):
            now, known_s = self._clock(), self._known_s
            for name, beat_at in self._redis.zrange(keys.WORKERS, 0, -1, withscores=True):
                # Only workers silent for long: a worker sending a heartbeat right now must stay.
                if found.get(name) == b"" and abs(now - beat_at) > known_s:
                    # Without `remove`: this user may lack access to the expired record.
                    self._redis.delete(*_queue_keys(name.decode(errors="replace")))
                    self._redis.zrem(keys.WORKERS, name)
        alive = worker_records(found.items())
        return [worker for worker in alive if model is None or worker.model == model]

    def count(self) -> int:
        """Returns the number of workers that live or died recently; at least 1."""
        return max(1, int(self._redis.zcard(keys.WORKERS)))

    def ready(self, model: str | None = None) -> list[records.WorkerRecord]:
        """Returns the live workers that take new work. `model`: None means all models."""
        return [worker for worker in self.live(model) if worker.is_ready]

    def store_api_addresses(self) -> None:
        """Stores the addresses and ports of the API on this machine, which `ports` returns."""
        now, ports = self._clock(), parse_ports(self._settings.api_port)
        found = [one.address for of_one in psutil.net_if_addrs().values() for one in of_one]
        addresses = {
            str(address)
            for address in map(callbacks.literal_address, found)
            if address and not address.is_loopback and not address.is_link_local
        }
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(keys.API_ADDRESSES, "-inf", now - self._known_s)
            for address, port in itertools.product(addresses, ports):
                pipe.zadd(keys.API_ADDRESSES, {f"{address} {port}": now})
            pipe.expire(keys.API_ADDRESSES, self._settings.job_ttl_sec)
            pipe.execute()

    def ports(self) -> set[int | tuple[callbacks.Address, int]]:
        """Returns the ports of workers' chat servers, and the addresses and ports of APIs. Includes
        servers that stopped recently. Leaves out workers' addresses, because a host could report
        the address of a receiver as its own.
        """
        now, known_s = self._clock(), self._known_s
        found = [
            raw
            for key in (keys.CHAT_PORTS, keys.API_ADDRESSES)
            for raw in self._redis.zrangebyscore(key, now - known_s, now + known_s)
        ]
        ports = (readable(f"port {raw!r}", partial(_port, raw)) for raw in found)
        return {port for port in ports if port}

    @property
    def _known_s(self) -> float:
        """The seconds for which the registry remembers a worker or API after its last heartbeat."""
        return 10 * self._settings.worker_ttl_s

    def here(self) -> list[records.WorkerRecord]:
        """Returns the live workers of this machine or container."""
        machine = socket.gethostname()
        return [worker for worker in self.live() if worker.machine == machine]

    def known_models(self) -> dict[str, records.ModelInfo]:
        """Returns the models, by name, that a worker served within the last job_ttl_sec seconds."""
        oldest = self._clock() - self._settings.job_ttl_sec
        known = {}
        for name, raw in self._redis.hgetall(keys.MODELS).items():
            entry = readable(f"model {name.decode()!r}", partial(_model, raw))
            if entry is not None and entry[1] >= oldest:
                known[name.decode()] = entry[0]
        return known


def _queue_keys(worker_id: str) -> tuple[str, str]:
    """Returns the keys of a worker's Celery queue, which have no TTL."""
    queue = queues.worker_queue(worker_id)
    return queues.bindings(queue), queues.messages(queue)


def _port(raw: bytes) -> int | tuple[callbacks.Address, int]:
    address, _, port = raw.decode().rpartition(" ")
    return (ipaddress.ip_address(address), int(port)) if address else int(port)


def _model(raw: bytes) -> tuple[records.ModelInfo, float]:
    entry = json.loads(raw)
    return _INFO.validate_python(entry["info"]), float(entry["seen_at"])
