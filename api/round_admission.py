"""Decides whether a round can run here, and turns its body into what is stored."""

from fastapi import HTTPException

from api.admission import check_limits, deployed_limits
from api.errors import unavailable
from api.round_bodies import ArtifactRoundBody, DistanceRoundBody
from poc_core.records import ProofSpec, RoundConfig
from poc_core.settings import Settings
from poc_core.state import WorkerRegistry


def admit_round(
    body: ArtifactRoundBody | DistanceRoundBody, settings: Settings, workers: WorkerRegistry
) -> RoundConfig:
    """The configuration of a round. HTTPException 409, 422 or 503 says why there can be none."""
    if isinstance(body, DistanceRoundBody):
        return _distance_round(body, settings, workers)
    info = deployed_limits(body.params.model, workers)
    check_limits(info, body.params.seq_len, body.params.k_dim)
    return RoundConfig(
        model=info.name,
        spec=ProofSpec(
            block_hash=body.block_hash,
            public_key=body.public_key,
            seq_len=body.params.seq_len,
            options={"k_dim": body.params.k_dim, "stronger_rng": body.poc_stronger_rng},
        ),
        block_height=body.block_height,
        node_id=body.node_id,
        node_count=body.node_count,
        group_id=body.group_id,
        n_groups=body.n_groups,
        batch_size=body.batch_size or settings.batch_size_default,
        url=body.url,
    )


def _distance_round(body: DistanceRoundBody, settings: Settings, workers: WorkerRegistry) -> RoundConfig:
    info = deployed_limits(body.model or _only_model(workers), workers)
    check_limits(info, body.seq_len)
    return RoundConfig(
        model=info.name,
        spec=ProofSpec(
            scheme="distance",
            block_hash=body.block_hash,
            public_key=body.public_key,
            seq_len=body.seq_len,
            options={"randomization": body.randomization},
        ),
        block_height=body.block_height,
        node_id=body.node_id,
        node_count=body.node_count,
        batch_size=body.batch_size or settings.batch_size_default,
        url=body.callback_url,
        r_target=body.r_target,
        fraud_threshold=body.fraud_threshold,
    )


def _only_model(workers: WorkerRegistry) -> str:
    """The model that clients of the earlier generation mean, who name none."""
    models = sorted({worker.model for worker in workers.live()}) or sorted(workers.known_models())
    if not models:
        raise unavailable("No worker serves a model yet; try again when one has started.")
    if len(models) > 1:
        raise HTTPException(409, f"Several models are served here; name one of {', '.join(models)} as `model`.")
    return models[0]
