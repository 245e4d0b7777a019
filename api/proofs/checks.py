"""Checks whether the node can compute a requested job or round."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from fastapi import HTTPException

from api.errors import unavailable
from poc_core.errors import BodyError, ForbiddenReceiverError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.contract import contract_of, contracts
from poc_core.settings import Settings
from poc_core.state.registry import WorkerRegistry


def check_receiver(url: str | None, settings: Settings, field: str = "url") -> None:
    """Raises BodyError if POC_CALLBACK_ALLOW forbids `url`. `field`: the name of its JSON field."""
    if url is None:
        return
    try:
        settings.callbacks.check_url(url, settings.node_ports)
    except ForbiddenReceiverError as error:
        raise BodyError(str(error), (field,), "url_not_allowed") from None


def deployed_limits(
    model: str,
    workers: WorkerRegistry,
    keeping: Collection[str] = (),
    for_round: bool = False,
) -> ModelInfo:
    """Returns the limits of a model's ready workers; the smallest if their limits differ.

    HTTPException 503 if the model has no ready worker now, or if no model is served yet; 409 if
    only other models are served. `keeping`: ids of hosts whose model was stopped; their workers do
    not count. `for_round`: 503 instead of 409 while no worker of any model is ready, because the
    network node concludes from 409 that the model's name is wrong.
    """
    infos = [
        worker.info
        for worker in workers.ready(model)
        if worker.info is not None and worker.host_id not in keeping
    ]
    if infos:
        # A batch may go to any of these workers, so the smallest one sets the limits.
        return replace(
            infos[0],
            max_seq_len=min(info.max_seq_len for info in infos),
            max_batch_tokens=min(info.max_batch_tokens for info in infos),
            max_sequences=min(info.max_sequences for info in infos),
            schemes={
                contract.name: own for contract in contracts() if (own := contract.common(infos))
            },
        )
    live, known = workers.live(), workers.known_models()
    if model in known or any(worker.model == model for worker in live):
        raise unavailable(
            f"No worker serves the model {model} right now; try again when one has started."
        )
    # Running models first: a client should ask for one of these.
    deployed = list(dict.fromkeys([*(worker.model for worker in live), *known]))
    if deployed and (not for_round or any(worker.is_ready for worker in live)):
        raise _mismatch(
            f"The model {model} is not deployed here; request {' or '.join(deployed)}.",
            {"model": (model, deployed[0] if len(deployed) == 1 else deployed)},
        )
    raise unavailable("No worker serves a model yet; try again when one has started.")


def check_limits(info: ModelInfo, spec: ProofSpec) -> None:
    """Raises HTTPException 409 if a proof spec exceeds a limit of the model."""
    asked = contract_of(spec.scheme).limits(spec, info)
    fields = {name: (wanted, most) for name, (wanted, most) in asked.items() if wanted > most}
    if fields:
        limits = " and ".join(f"{name} at most {most}" for name, (_, most) in fields.items())
        raise _mismatch(f"The model {info.name} takes {limits}.", fields)


def _mismatch(message: str, fields: Mapping[str, tuple[Any, Any]]) -> HTTPException:
    """Returns HTTPException 409. `fields`: (requested value, deployed value), by field name."""
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
