"""The worker process: loads an engine, registers, and consumes its model's queue."""

import gc
import logging
import os
import secrets
import socket
import time
import uuid

from celery.platforms import EX_OK, signals
from celery.signals import worker_shutting_down
from celery.worker import state

from poc_core.open_files import raise_file_limit
from poc_core.periodic import Periodic
from poc_core.queues import model_queue, worker_queue
from poc_core.records import WorkerRecord
from poc_core.serving import places
from poc_core.serving.logs import log_to_stderr
from poc_core.settings import Settings, load_settings
from poc_core.state.client import connect, refuse_wrong
from poc_core.state.registry import CHAT_MEMORY_S, WorkerRegistry
from poc_core.state.work import WorkStore
from workers import tasks
from workers.chat_gate import ChatGate, Starvation
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.heartbeat import Heartbeat
from workers.housekeeping import Housekeeper
from workers.load import load_engine
from workers.proofs import Proofs
from workers.queue import broker
from workers.queue.app import create_app
from workers.queue.wake import Wake
from workers.work import Turns, Work

logger = logging.getLogger(__name__)

# Seconds after SIGTERM in which chat requests in progress may end; supervisors wait for 30.
CHAT_GRACE_S = 20.0
_CHAT_POLL_S = 0.1
# Seconds between two checks for validations, which run before other work.
_VALIDATIONS_LOOK_S = 0.5
# Python's defaults are 700, 10, 10. Objects of an answer are freed without a collection; during
# forty long streams each collection found nothing and delayed all answers by 0.04 to 0.2 s.
_GARBAGE_THRESHOLDS = (10_000, 10, 50)


def run_worker(
    options: EngineOptions, worker_id: str | None = None, redis_url: str | None = None
) -> None:
    """Runs a worker until SIGTERM or SIGINT, then finishes the batches in progress. ProoflineError
    if the engine cannot be loaded. `worker_id`: must be unique. `redis_url`: None means
    POC_REDIS_URL.
    """
    log_to_stderr()
    raise_file_limit()  # also for the engine's processes, which inherit the limit
    # Two lines for each batch would hide important lines.
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)
    settings = load_settings(redis_url=redis_url)
    refuse_wrong(settings)
    WorkerProcess(options, settings, worker_id, redis_url).run()


class WorkerProcess:
    """A worker: its registration, its engine and Celery. One per process, because Celery's signal
    handlers and the engine are global.
    """

    def __init__(
        self,
        options: EngineOptions,
        settings: Settings,
        worker_id: str | None,
        redis_url: str | None,
    ) -> None:
        self._options = options
        self._settings = settings
        self._name, worker_id = _names(worker_id, settings.host)
        self._record = _record(options, settings, worker_id)
        redis = connect(settings)
        self._store = WorkStore(redis, settings, worker_id)
        self._app = create_app(redis_url, "worker")
        self._wake = Wake(self._app, redis, options.name, worker_id)
        registry = WorkerRegistry(redis, settings)
        self._heartbeat = Heartbeat(self._record, registry, self._store.hand, settings.heartbeat_s)
        self._began_to_leave: float | None = None

    def run(self) -> None:
        """Loads the engine and computes until a signal ends it. ProoflineError if loading fails."""
        self._heartbeat.start()
        try:
            engine = load_engine(self._options, self._settings.rpc_timeout_ms / 1000)
            try:
                self._work(engine)
            finally:
                engine.close()
        finally:
            self._heartbeat.stop()

    def _work(self, engine: Engine) -> None:
        gate, chat_port = _serve_chat(engine, self._settings, self._record.chat_secret)
        proofs = Proofs(engine, gate, self._settings.max_step_ms)
        urgent = Work(proofs, self._store, urgent=True)
        work = Work(proofs, self._store, pass_on=self._wake.another)
        turns = Turns(self._record.model, work, urgent, self._wake)
        tasks.install(turns)

        def leave(**_: object) -> None:
            # Otherwise SIGTERM waits for a round's task or for chat, too long for some supervisors.
            turns.leave()
            self._heartbeat.drain()
            self._began_to_leave = time.monotonic()

        def leave_soon(*_: object) -> None:
            leave()
            state.should_stop = EX_OK  # read when Celery starts

        worker_shutting_down.connect(leave, weak=False)
        # Until Celery installs its own handlers, a signal would end this process at once.
        signals.update(SIGTERM=leave_soon, SIGINT=leave_soon)
        housekeeper = Housekeeper(
            self._heartbeat, self._store, proofs, turns, self._settings, chat_port
        )
        self._heartbeat.ready(proofs, chat_port)
        housekeeper.start()
        validations = Periodic("validations", _VALIDATIONS_LOOK_S, urgent.run)
        validations.start()
        try:
            engine.begin_work()
            # Existing objects are never collected again, and new objects more rarely.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GARBAGE_THRESHOLDS)
            logger.info("worker %s serves %s: %s", self._record.id, self._record.model, engine.info)
            self._take_messages()
            validations.stop()
            turns.end()
            proofs.stop()
            if gate is not None and self._began_to_leave is not None:
                self._heartbeat.beat()
                # Waits until no API process lists this worker as available for chat.
                time.sleep(CHAT_MEMORY_S)
                _let_chat_end(gate, self._began_to_leave + CHAT_GRACE_S)
        finally:
            housekeeper.stop()

    def _take_messages(self) -> None:
        queues = [model_queue(self._record.model), worker_queue(self._record.id)]
        self._app.conf.task_queues = [broker.queue(queues[0]), broker.queue_of_one(queues[1])]
        # Threads: prefork's daemonic children are not allowed to start processes, which vLLM does.
        self._app.Worker(
            pool="threads",
            concurrency=1,
            hostname=f"{self._name}@{self._settings.host}",
            queues=queues,
            loglevel="INFO",
            without_gossip=True,
            without_mingle=True,
        ).start()


def _record(options: EngineOptions, settings: Settings, worker_id: str) -> WorkerRecord:
    return WorkerRecord(
        id=worker_id,
        model=options.name,
        engine=options.engine,
        host=settings.host,
        machine=socket.gethostname(),
        host_id=os.environ.get(places.HOST_ID_VARIABLE, ""),
        pid=os.getpid(),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        state="starting",
        started_at=time.time(),
        chat_host=settings.chat_advertise_host
        or (socket.gethostname() if settings.chat_host == "0.0.0.0" else settings.chat_host),
        chat_secret=secrets.token_urlsafe(32),
    )


def _let_chat_end(gate: ChatGate, deadline: float) -> None:
    while (active := gate.stats().chat_active) and time.monotonic() < deadline:
        time.sleep(_CHAT_POLL_S)
    if active:
        logger.warning(
            "%d chat requests are cut off: they took longer than %g s", active, CHAT_GRACE_S
        )


def _names(given: str | None, host: str) -> tuple[str, str]:
    """Returns the worker's Celery name and its id. Without `given`, generates both from the GPUs
    (or the supervisor's slot, or the pid) and a random part.
    """
    if given:
        return given, given
    otherwise = os.environ.get(places.SLOT_VARIABLE) or f"pid{os.getpid()}"
    slot = places.slot_of(os.environ.get("CUDA_VISIBLE_DEVICES", ""), otherwise)
    start = f"{slot}-{uuid.uuid4().hex[:6]}"
    return start, f"{host}/{start}"


def _serve_chat(
    engine: Engine, settings: Settings, secret: str | None
) -> tuple[ChatGate | None, int | None]:
    """Starts the chat server. Returns its chat gate and port, or (None, None) without chat."""
    if settings.chat.mode == "off":
        return None, None
    # Half, so that a client with wait=true gets its first batch before its limit ends.
    starvation = Starvation(settings.generate_chunk_timeout_sec / 2)
    gate = ChatGate(settings.chat, engine.unfinished_chat, starvation)
    port = engine.serve_chat(gate, settings.chat_host, secret)
    return (None, None) if port is None else (gate, port)
