"""Starting, switching, stopping and looking at rounds, for both families of paths."""

from typing import Any

from fastapi import HTTPException

from api.round_admission import admit_round
from api.round_bodies import ArtifactRoundBody, DistanceRoundBody
from api.services import Services
from poc_core.errors import RoundError
from poc_core.records import RoundConfig, RoundRecord, RoundState, WorkerRecord


def start(body: ArtifactRoundBody | DistanceRoundBody, services: Services, state: RoundState) -> list[WorkerRecord]:
    """Stores a round in `state`; the workers that are ready for it. HTTPException 409 while another generates."""
    config = admit_round(body, services.settings, services.workers)
    try:
        round_id = services.rounds.store(config, state)
    except RoundError as error:
        raise HTTPException(409, str(error)) from None
    ready = services.workers.ready(config.model)
    if state is RoundState.GENERATING:
        services.dispatcher.publish_steps([worker.id for worker in ready], round_id)
    return ready


def switch(services: Services, state: RoundState) -> None:
    """Sets the current round's state. HTTPException 400 when there is none that could."""
    current = services.rounds.current()
    if current is None:
        raise HTTPException(400, "No round was initialised; send POST /init first.")
    before = services.rounds.switch(current, state)
    if before is None or before is RoundState.STOPPED:
        raise HTTPException(400, "The round was stopped; send POST /init to begin another.")
    if state is RoundState.GENERATING:
        ids = [worker.id for worker in services.workers.ready(current.config.model)]
        services.dispatcher.publish_steps(ids, current.round_id)


def stop(services: Services) -> int:
    """Stops the current round and cancels all jobs; returns how many jobs."""
    current = services.rounds.current()
    if current is not None:
        services.rounds.switch(current, RoundState.STOPPED)
    return len(services.jobs.cancel_active())


def config_of(config: RoundConfig) -> dict[str, Any]:
    """The round's configuration in the words of the body that started it."""
    spec = config.spec
    common: dict[str, Any] = {
        "block_hash": spec.block_hash,
        "block_height": config.block_height,
        "public_key": spec.public_key,
        "node_id": config.node_id,
        "node_count": config.node_count,
        "batch_size": config.batch_size,
    }
    if config.r_target is not None:
        randomization = spec.options.get("randomization", "sign_flips")
        return common | {
            "model": config.model,
            "seq_len": spec.seq_len,
            "r_target": config.r_target,
            "fraud_threshold": config.fraud_threshold,
            "use_sign_flips": randomization == "sign_flips",
            "use_layer_hooks": randomization == "layer_hooks",
            "callback_url": config.url,
        }
    return common | {
        "group_id": config.group_id,
        "n_groups": config.n_groups,
        "params": {"model": config.model, "seq_len": spec.seq_len, "k_dim": spec.options.get("k_dim")},
        "poc_stronger_rng": spec.options.get("stronger_rng", False),
        "url": config.url,
    }


def distances_of(services: Services, record: RoundRecord) -> dict[str, Any]:
    """What /status says of a distance round beside the rest."""
    valid = services.rounds.valid(record.round_id)
    stats = stats_of(services, record)
    return {
        "valid_nonces": [nonce for nonce, _ in valid],
        "valid_distances": [dist for _, dist in valid],
        "total_checked": record.n_processed,
        "total_valid": record.n_valid,
        "elapsed_seconds": stats["elapsed_seconds"],
        "rate_per_second": stats["nonces_per_second_of_round"],
        "r_target": record.config.r_target,
    }


def stats_of(services: Services, record: RoundRecord) -> dict[str, Any]:
    """A round's numbers: per worker and in sum."""
    rates, outbox = services.rounds.rates(record), services.outbox.status(record.round_id)
    # A current rate is one of a round that runs; of one that is over, the last seconds say nothing.
    running = record.state is RoundState.GENERATING
    elapsed_s = services.rounds.elapsed_s(record)
    limit = services.settings.outbox_max_artifacts
    return {
        "total_processed": record.n_processed,
        "nonces_per_second": sum(rates.per_second.values()) if running else 0.0,
        "nonces_per_second_of_round": record.n_processed / elapsed_s if elapsed_s > 0 else 0.0,
        "elapsed_seconds": elapsed_s,
        "n_excluded": record.n_excluded,
        "excluded_nonces": services.rounds.excluded(record.round_id) if record.n_excluded else [],
        "workers": {
            worker: {
                "total_processed": total,
                "nonces_per_second": rates.per_second.get(worker, 0.0) if running else 0.0,
            }
            for worker, total in sorted(rates.totals.items())
        },
        "artifacts_delivered": outbox.delivered,
        "artifacts_waiting": outbox.waiting,
        "outbox": {
            "limit": limit,
            "full": outbox.waiting >= limit,
            "dropped": outbox.dropped,
            "failures": outbox.failures,
            "next_try_at": outbox.next_at if outbox.waiting else None,
            "last_error": outbox.last_error,
        },
        "error": record.error,
    }
