"""Starts, switches, stops and describes rounds, for all routes about rounds."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

from api.bodies import config_of
from api.errors import unavailable
from api.proofs.checks import check_limits, check_receiver, deployed_limits
from api.proofs.dispatch import Dispatcher
from poc_core.errors import RoundError
from poc_core.records import RoundConfig, RoundRecord, RoundState, WorkerRecord
from poc_core.schemes.contract import Reported, contract_of, contracts
from poc_core.schemes.requests import RoundBody
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.overview import Overview, RoundRates
from poc_core.state.parsing import OutboxStatus
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore


@dataclass(frozen=True)
class RoundControl:
    _settings: Settings
    _workers: WorkerRegistry
    _rounds: RoundStore
    _jobs: JobStore
    _outbox: Outbox
    _dispatcher: Dispatcher
    _keeping: Callable[[], Collection[str]]  # ids of hosts whose model was stopped

    def start(self, body: RoundBody, state: RoundState) -> list[WorkerRecord]:
        """Checks and stores a round, and wakes workers if it generates. Returns the ready workers.

        HTTPException 409 if another round is generating; other errors as in `_admitted`.
        """
        config = _admitted(body, self._settings, self._workers, self._keeping())
        self._end_unserved(config.model)
        try:
            self._rounds.store(config, state)
        except RoundError as error:
            raise HTTPException(409, str(error)) from None
        ready = self._workers.ready(config.model)
        if state is RoundState.GENERATING:
            self._dispatcher.wake_each(config.model, [worker.id for worker in ready])
        return ready

    def _end_unserved(self, model: str) -> None:
        """Stops the generating round if it is of another model, which no worker serves or starts:
        the node was started with `model` during the round.
        """
        current = self._rounds.current()
        if current is None or current.state is not RoundState.GENERATING:
            return
        left = current.config.model
        if left != model and not self._workers.live(left):
            why = f"No worker serves {left} any more, and a round of {model} was requested."
            self._rounds.switch(current, RoundState.STOPPED, why)

    def switch(self, state: RoundState) -> None:
        """Sets the round's state; GENERATING wakes workers. Raises HTTPException 400 if there is no
        round, or the round was stopped.
        """
        current = self._rounds.current()
        if current is None:
            raise HTTPException(400, "No round was initialised; send POST /init first.")
        before = self._rounds.switch(current, state)
        if before is None or before is RoundState.STOPPED:
            raise HTTPException(400, "The round was stopped; send POST /init to begin another.")
        if state is RoundState.GENERATING:
            ids = [worker.id for worker in self._workers.ready(current.config.model)]
            self._dispatcher.wake_each(current.config.model, ids)

    def stop(self) -> int:
        """Stops the round and drops failing callbacks. Returns how many jobs it cancelled."""
        # First, because a worker that asks after the round's end starts a queued job.
        n_cancelled = self._jobs.cancel_queued()
        current = self._rounds.current()
        if current is not None:
            self._rounds.switch(current, RoundState.STOPPED)
        self._outbox.drop_failing()
        return n_cancelled

    def status_of(self, seen: Overview, first: int | None, most: int) -> dict[str, Any]:
        """Returns /status's fields about the round. `first`, `most`: as in RoundStore.reported."""
        record = seen.round.record if seen.round is not None else None
        state, stats = record.state if record is not None else RoundState.IDLE, self.stats_of(seen)
        return {
            "status": state.activity.value,
            "state": state.value,
            "config": config_of(record.config) if record is not None else None,
            "stats": stats,
            **self._scheme_status(record, stats, first, most),
        }

    def stats_of(self, seen: Overview) -> dict[str, Any]:
        """Returns counters and rates of the last round; if there was no round, of all jobs."""
        limit_bytes = self._settings.outbox_max_bytes
        n, rate, elapsed_s, excluded = seen.total_processed, seen.nonces_per_second, 0.0, []
        record, rates, outbox = None, RoundRates({}, {}), OutboxStatus.of({})
        if (current := seen.round) is not None:
            record, rates, outbox = current.record, current.rates, current.outbox
            # A round that no longer generates has no current rate.
            if record.state is not RoundState.GENERATING:
                rates = RoundRates(rates.totals, {})
            n, rate, excluded = (
                record.n_processed,
                sum(rates.per_second.values(), 0.0),
                [*current.excluded],
            )
            elapsed_s = self._rounds.elapsed_s(record)
        return {
            "total_processed": n,
            "nonces_per_second": rate,
            "nonces_per_second_of_round": n / elapsed_s if elapsed_s > 0 else 0.0,
            "elapsed_seconds": elapsed_s,
            "n_excluded": record.n_excluded if record is not None else 0,
            "excluded_nonces": excluded,
            "workers": {
                worker: {
                    "total_processed": total,
                    "nonces_per_second": rates.per_second.get(worker, 0.0),
                }
                for worker, total in sorted(rates.totals.items())
            },
            "artifacts_delivered": outbox.delivered,
            "artifacts_waiting": outbox.waiting,
            "outbox": {
                "bytes": outbox.waiting_bytes,
                "limit_bytes": limit_bytes,
                "full": outbox.waiting_bytes >= limit_bytes,
                "dropped": outbox.dropped,
                "failures": outbox.failures,
                "next_try_at": outbox.next_at if outbox.waiting else None,
                "last_error": outbox.last_error,
            },
            "exhausted": record is not None and record.is_exhausted,
            "error": record.error if record is not None else None,
        }

    def _scheme_status(
        self,
        record: RoundRecord | None,
        stats: dict[str, Any],
        first: int | None,
        most: int,
    ) -> dict[str, Any]:
        """Returns /status's scheme-specific fields: of the round's scheme, else of all schemes."""
        if record is None:
            return {k: v for one in contracts() for k, v in one.status_without_round.items()}
        contract = contract_of(record.config.spec.scheme)
        reported = Reported(0, [])
        if contract.lists_reported:
            reported = self._rounds.reported(record.round_id, first, most)
        return contract.status(
            record, reported, stats["elapsed_seconds"], stats["nonces_per_second_of_round"]
        )


def _admitted(
    body: RoundBody, settings: Settings, workers: WorkerRegistry, keeping: Collection[str]
) -> RoundConfig:
    """Returns the configuration of a requested round. Raises BodyError or HTTPException if the node
    refuses the round.
    """
    spec = body.spec()
    model = body.served_model or _only_model(workers)
    info = deployed_limits(model, workers, keeping, for_round=True)
    check_limits(info, spec)
    config = body.config(info.name, body.requested_batch_size or settings.batch_size_default)
    check_receiver(
        config.url, settings, "callback_url" if "callback_url" in type(body).model_fields else "url"
    )
    return config


def _only_model(workers: WorkerRegistry) -> str:
    """Returns the only served model, for clients that name none. If no worker is alive, returns the
    only known model. Raises HTTPException 409 if several models are served, and 503 if none is
    served and not exactly one is known.
    """
    live = sorted({worker.model for worker in workers.live()})
    models = live or sorted(workers.known_models())
    if not models or (len(models) > 1 and not live):
        raise unavailable("No worker serves a model yet; try again when one has started.")
    if len(models) > 1:
        raise HTTPException(
            409, f"Several models are served here; name one of {', '.join(models)} as `model`."
        )
    return models[0]
