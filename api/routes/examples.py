"""OpenAPI's examples of bodies and answers, and the errors of each route."""

from typing import Any

from pydantic import BaseModel

from poc_core import answers
from poc_core.schemes.contract import contracts
from poc_core.schemes.requests import REQUEST_ID_EXAMPLE

QUEUED_EXAMPLE = {
    "summary": "wait=false",
    "value": {"status": "queued", "request_id": REQUEST_ID_EXAMPLE, "queued_count": 3},
}
RUNNING_EXAMPLE = {
    "summary": "Not completed yet",
    "value": {
        "status": "running",
        "request_id": REQUEST_ID_EXAMPLE,
        "model": "tiny-qwen3",
        "n_total": 100000,
        "n_done": 4096,
        "created_at": 1764000000.5,
        "started_at": 1764000000.6,
    },
}
# Example results of completed jobs, for all schemes.
RESULTS = {
    name: example for contract in contracts() for name, example in contract.result_examples.items()
}
Errors = dict[int | str, dict[str, Any]]


def _error(
    description: str, detail: Any, model: type[BaseModel] = answers.Refused
) -> dict[str, Any]:
    return {
        "model": model,
        "description": description,
        "content": {"application/json": {"example": {"detail": detail}}},
    }


UNKNOWN_JOB: Errors = {
    404: _error(
        "The request_id is unknown or expired.",
        "No job has this request_id; results are kept for 300 s (POC_GENERATE_RESULT_TTL_SEC).",
    ),
}
REDIS_AWAY: Errors = {
    503: _error(
        "Redis is unavailable; see Retry-After.",
        "The node cannot reach its Redis; try again in 5 s.",
    ),
}
NOT_READY: Errors = {
    503: _error(
        "Redis is unavailable or no worker is ready; see Retry-After.",
        "No worker is ready: 0 of 1 workers ready for 41 s: host1/gpu0 loads its model.",
        answers.NotReady,
    ),
}
GENERATE_ERRORS: Errors = {
    400: _error(
        "The artifacts to validate do not match the nonces.",
        "validation.artifacts must hold exactly one artifact for each of nonces, and no others;"
        " they differ.",
    ),
    409: _error(
        "Another model is deployed, or cannot compute these params; or the job was cancelled"
        " (wait=true).",
        {
            "error": "params_mismatch",
            "message": "The model tiny-qwen3 takes seq_len at most 1024.",
            "fields": ["seq_len"],
            "requested": {"seq_len": 4096},
            "deployed": {"seq_len": 1024},
        },
        answers.Conflict,
    ),
    413: _error(
        "The body is too large.",
        "The body is larger than 33554432 bytes (POC_MAX_BODY_BYTES); split the request.",
    ),
    422: _error(
        "The body is invalid.",
        [
            {
                "loc": ["body", "nonces", 3],
                "msg": "Input should be greater than or equal to 0",
                "type": "greater_than_equal",
            }
        ],
        answers.Malformed,
    ),
    429: _error(
        "Too many nonces are queued; see Retry-After.",
        "99000 nonces wait already and 2000 more would exceed the 100000 that may"
        " (POC_MAX_QUEUED_NONCES); send at most 1000 now, or try again later.",
    ),
    500: _error(
        "With wait=true: the job failed.",
        {
            "error": "failed",
            "message": "Batch 3 was given up after ...",
            "request_id": REQUEST_ID_EXAMPLE,
        },
    ),
    503: _error(
        "No worker serves the model, no batch was done in time (wait=true), or Redis is"
        " unavailable; see Retry-After.",
        "No worker serves the model tiny-qwen3 right now; try again when one has started.",
    ),
}

ROUND_ERRORS: Errors = {
    409: _error(
        "A round generates already, or the workers cannot compute these params (see /generate).",
        "A round is generating already: end it with POST /api/v1/pow/stop, or ...",
    ),
    413: GENERATE_ERRORS[413],
    422: GENERATE_ERRORS[422],
    503: GENERATE_ERRORS[503],
}
PHASE_ERRORS: Errors = {
    400: _error("There is no round to switch.", "No round was initialised; send POST /init first."),
}
PROOF_BATCH_ERRORS: Errors = {
    400: _error(
        "No round validates.",
        "The round generates; send POST /phase/validate first.",
    ),
    **{code: GENERATE_ERRORS[code] for code in (409, 413, 422, 429, 500, 503)},
}

STOP_ERRORS: Errors = {
    500: _error(
        "Engines do not end within a minute.",
        "Engines still end on gpu-7 (stopping); look into the logs there.",
    ),
}
DEPLOY_ERRORS: Errors = {
    409: _error(
        "A model runs or starts already.",
        "A model is deployed already; send POST /api/v1/stop first.",
    ),
    422: _error(
        "The body is invalid, or an argument is not allowed in a deployment.",
        [
            {
                "loc": ["body", "additional_args"],
                "msg": (
                    "--middleware is not among the arguments that a deployment may bring here:"
                    " leave it out, or the operator of the hosts gives it to `proofline"
                    " workers` after --."
                ),
                "type": "deployment_arguments",
            }
        ],
        answers.Malformed,
    ),
    500: _error(
        "The model cannot be started. The node is STOPPED; the request can be repeated.",
        "The model could not be started: h1/cpu0: the model does not fit: use more"
        " --tensor-parallel.",
    ),
    503: _error(
        "There is no host, or Redis is unavailable; see Retry-After.",
        "No host is here to run a model: start `proofline up` or `proofline workers` on one.",
    ),
}

HOST_ERRORS: Errors = {
    401: _error(
        "No token has this id.",
        "The token is wrong: the node does not know it; its operator makes one with `proofline"
        " hosts invite`.",
    ),
    429: _error(
        "Too many tries from this address; see Retry-After.",
        "Too many tokens were tried from here; wait a little.",
    ),
}
JOIN_ERRORS: Errors = {
    403: _error(
        "The token was used, has expired or is revoked.",
        "The token of gpu2 has expired unused. The operator makes another: `proofline hosts revoke"
        " gpu2`, then `hosts invite`.",
    ),
    **HOST_ERRORS,
}

DOWNLOAD_ERRORS: Errors = {
    409: _error(
        "The model is already being downloaded, or HF_HUB_OFFLINE is set.",
        "Qwen/Qwen3-8B is already being downloaded; /api/v1/models/status shows the progress.",
    ),
    429: _error(
        "Three downloads are in progress; see Retry-After.",
        "3 models are being downloaded, the most allowed; try again later.",
    ),
}
CACHE_AWAY: Errors = {
    503: _error(
        "The models' folder cannot be read.",
        "The cache /models cannot be read: Permission denied; HF_HOME names another.",
    )
}
DELETE_ERRORS: Errors = {
    404: _error(
        "The model is not on disk.",
        "Qwen/Qwen3-8B is not in the cache /root/.cache/huggingface/hub.",
    ),
    409: _error(
        "Workers serve the model, or its files cannot be deleted.",
        "Workers serve Qwen/Qwen3-8B; deploy another model first.",
    ),
}
