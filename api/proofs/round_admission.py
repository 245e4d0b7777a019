"""Decides whether a round can run here, and turns its body into what is stored."""

from fastapi import HTTPException

from api.errors import unavailable
from api.proofs.admission import check_limits, check_receiver, deployed_limits
from poc_core.records import RoundConfig
from poc_core.schemes.requests import RoundBody
from poc_core.settings import Settings
from poc_core.state import WorkerRegistry


def admit_round(body: RoundBody, settings: Settings, workers: WorkerRegistry) -> RoundConfig:
    """The configuration of a round. HTTPException 409, 422 or 503, BodyError: why not."""
    spec = body.spec()
    info = deployed_limits(body.served_model or _only_model(workers), workers)
    check_limits(info, spec)
    config = body.config(info.name, body.asked_batch_size or settings.batch_size_default)
    check_receiver(
        config.url, settings, "callback_url" if "callback_url" in type(body).model_fields else "url"
    )
    return config


def _only_model(workers: WorkerRegistry) -> str:
    """The only model served, meant by clients that name none (those of the earlier generation)."""
    models = sorted({worker.model for worker in workers.live()}) or sorted(workers.known_models())
    if not models:
        raise unavailable("No worker serves a model yet; try again when one has started.")
    if len(models) > 1:
        raise HTTPException(
            409, f"Several models are served here; name one of {', '.join(models)} as `model`."
        )
    return models[0]
