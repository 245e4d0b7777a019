"""Decides whether a well-formed request can be computed here, and turns it into a job."""

from dataclasses import replace
from typing import Any

from fastapi import HTTPException

from api.bodies import GenerateBody
from api.errors import malformed, unavailable
from poc_core.encoding import decode_vector
from poc_core.errors import VectorError
from poc_core.records import JobRequest, ModelInfo, NewJob, ProofSpec, StatTest
from poc_core.settings import Settings
from poc_core.state import Outbox, WorkerRegistry


def admit(body: GenerateBody, settings: Settings, workers: WorkerRegistry, outbox: Outbox) -> NewJob:
    """The job of a request. HTTPException 400, 409, 422, 429 or 503 says why there can be none."""
    if body.url is not None and outbox.n_jobs() >= settings.outbox_max_jobs:
        raise unavailable(
            f"The callbacks of {settings.outbox_max_jobs} jobs wait for their receivers already (POC_OUTBOX_MAX_JOBS); "
            "try again later, or leave out the url and poll.",
            429,
        )
    claimed = _claimed(body)
    limits = deployed_limits(body.params.model, workers)
    check_limits(limits, body.params.seq_len, body.params.k_dim)
    batch_size = body.batch_size or settings.batch_size_default
    return NewJob(
        model=body.params.model,
        spec=ProofSpec(
            block_hash=body.block_hash,
            public_key=body.public_key,
            seq_len=body.params.seq_len,
            options={"k_dim": body.params.k_dim, "stronger_rng": body.poc_stronger_rng},
        ),
        request=JobRequest(
            block_height=body.block_height,
            node_id=body.node_id,
            node_count=body.node_count,
            url=body.url,
            stat_test=body.stat_test or StatTest(),
        ),
        nonces=body.nonces,
        batch_size=min(batch_size, limits.max_batch(body.params.seq_len)),
        claimed=claimed,
    )


def _claimed(body: GenerateBody) -> dict[int, str] | None:
    """nonce -> vector_b64 of a validation, every vector found decodable."""
    if body.validation is None:
        return None
    artifacts = body.validation.artifacts
    claimed = {artifact["nonce"]: artifact["vector_b64"] for artifact in artifacts}
    if len(artifacts) != len(body.nonces) or claimed.keys() != set(body.nonces):
        raise HTTPException(
            400, "validation.artifacts must hold exactly one artifact for each of nonces, and no others; they differ."
        )
    for index, artifact in enumerate(artifacts):
        try:
            decode_vector(artifact["vector_b64"], body.params.k_dim)
        except VectorError as error:
            loc = ("body", "validation", "artifacts", index, "vector_b64")
            raise malformed([{"loc": loc, "msg": str(error), "type": "vector_b64"}]) from None
    return claimed


def deployed_limits(model: str, workers: WorkerRegistry) -> ModelInfo:
    """What every worker of the model can do. 409: other models are served here; 503: no worker serves it."""
    infos = [worker.info for worker in workers.ready(model) if worker.info is not None]
    if infos:
        # A batch may go to any of them, so the smallest one sets the limits.
        return replace(
            infos[0],
            max_seq_len=min(info.max_seq_len for info in infos),
            max_batch_tokens=min(info.max_batch_tokens for info in infos),
            max_sequences=min(info.max_sequences for info in infos),
        )
    live, known = workers.live(), workers.known_models()
    if model in known or any(worker.model == model for worker in live):
        raise unavailable(f"No worker serves the model {model} right now; try again when one has started.")
    # Those that are alive come first: one of them is what the client should ask for.
    deployed = list(dict.fromkeys([*(worker.model for worker in live), *known]))
    if deployed:
        raise _mismatch(
            f"The model {model} is not deployed here; ask for {' or '.join(deployed)}.",
            {"model": (model, deployed[0] if len(deployed) == 1 else deployed)},
        )
    raise unavailable("No worker serves a model yet; try again when one has started.")


def check_limits(info: ModelInfo, seq_len: int, k_dim: int = 1) -> None:
    """HTTPException 409 when the model cannot do that."""
    max_seq_len = min(info.max_seq_len, info.max_batch_tokens)
    fields: dict[str, tuple[Any, Any]] = {}
    if seq_len > max_seq_len:
        fields["seq_len"] = (seq_len, max_seq_len)
    if k_dim > info.hidden_size:
        fields["k_dim"] = (k_dim, info.hidden_size)
    if fields:
        limits = " and ".join(f"{name} at most {most}" for name, (_, most) in fields.items())
        raise _mismatch(f"The model {info.name} takes {limits}.", fields)


def _mismatch(message: str, fields: dict[str, tuple[Any, Any]]) -> HTTPException:
    """409; fields: name -> (requested, deployed)."""
    return HTTPException(
        409,
        {
            "error": "params_mismatch",
            "message": message,
            "fields": list(fields),
            "requested": {name: requested for name, (requested, _) in fields.items()},
            "deployed": {name: deployed for name, (_, deployed) in fields.items()},
        },
    )
