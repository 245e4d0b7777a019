"""What OpenAPI shows beside the models of bodies and answers: examples of both, and the errors of each route."""

from typing import Any

from pydantic import BaseModel

from api.answers import Conflict, Malformed, Refused

_REQUEST_ID = "0f2b6c1d9e4a4f0d8a7c5b3e1f2d4c6a"
_VECTOR = "kLLvNnktsS7BJk80ODL5KZezZDPHsTC1"

GENERATE_BODIES: dict[str, dict[str, Any]] = {
    "generate": {
        "summary": "Compute artifacts",
        "value": {
            "block_hash": "block-1",
            "block_height": 1,
            "public_key": "key-1",
            "node_id": 0,
            "node_count": 1,
            "nonces": [0, 1, 2],
            "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
            "wait": True,
        },
    },
    "validate": {
        "summary": "Validate somebody's artifacts",
        "value": {
            "block_hash": "block-1",
            "block_height": 1,
            "public_key": "key-1",
            "node_id": 0,
            "node_count": 1,
            "nonces": [0],
            "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
            "validation": {"artifacts": [{"nonce": 0, "vector_b64": _VECTOR}]},
            "stat_test": {"dist_threshold": 0.02, "p_mismatch": 0.001, "fraud_threshold": 0.01},
            "wait": False,
        },
    },
}

QUEUED_EXAMPLE = {
    "summary": "wait=false",
    "value": {"status": "queued", "request_id": _REQUEST_ID, "queued_count": 3},
}
RUNNING_EXAMPLE = {
    "summary": "Not completed yet",
    "value": {
        "status": "running",
        "request_id": _REQUEST_ID,
        "model": "tiny-qwen3",
        "n_total": 100000,
        "n_done": 4096,
        "created_at": 1764000000.5,
        "started_at": 1764000000.6,
    },
}
RESULT_EXAMPLES: dict[str, dict[str, Any]] = {
    "artifacts": {
        "summary": "Completed",
        "value": {
            "status": "completed",
            "request_id": _REQUEST_ID,
            "artifacts": [{"nonce": 0, "vector_b64": _VECTOR}],
            "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
        },
    },
    "validation": {
        "summary": "Completed, with validation",
        "value": {
            "status": "completed",
            "request_id": _REQUEST_ID,
            "n_total": 400,
            "n_mismatch": 20,
            "mismatch_nonces": list(range(20)),
            "p_value": 1.9e-27,
            "fraud_detected": True,
            "n_excluded": 0,
        },
    },
}


def _error(model: type[BaseModel], description: str, detail: Any) -> dict[str, Any]:
    return {
        "model": model,
        "description": description,
        "content": {"application/json": {"example": {"detail": detail}}},
    }


REDIS_AWAY: dict[int | str, dict[str, Any]] = {
    503: _error(Refused, "Redis is away; see Retry-After.", "The node cannot reach its Redis; try again in 5 s."),
}
UNKNOWN_JOB: dict[int | str, dict[str, Any]] = {
    404: _error(
        Refused,
        "Unknown or expired.",
        "No job has this request_id; results are kept for 300 s (POC_GENERATE_RESULT_TTL_SEC).",
    ),
}
GENERATE_ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error(
        Refused,
        "The artifacts to validate are not those of the nonces.",
        "validation.artifacts must hold exactly one artifact for each of nonces, and no others; they differ.",
    ),
    409: _error(
        Conflict,
        "Another model is deployed, or it cannot do what params ask for; or a job waited for was cancelled.",
        {
            "error": "params_mismatch",
            "message": "The model tiny-qwen3 takes seq_len at most 1024.",
            "fields": ["seq_len"],
            "requested": {"seq_len": 4096},
            "deployed": {"seq_len": 1024},
        },
    ),
    413: _error(
        Refused,
        "The body is over the limit.",
        "The body is larger than 33554432 bytes (POC_MAX_BODY_BYTES); split the request.",
    ),
    422: _error(
        Malformed,
        "The body is not as described.",
        [
            {
                "loc": ["body", "nonces", 3],
                "msg": "Input should be greater than or equal to 0",
                "type": "greater_than_equal",
            }
        ],
    ),
    429: _error(
        Refused,
        "Too many nonces wait; see Retry-After.",
        "99000 nonces wait already and 2000 more would exceed the 100000 that may (POC_MAX_QUEUED_NONCES); "
        "send at most 1000 now, or try again later.",
    ),
    500: _error(
        Refused,
        "With wait=true: the job failed.",
        {"error": "failed", "message": "Batch 3 was given up after ...", "request_id": _REQUEST_ID},
    ),
    503: _error(
        Refused,
        "No worker serves the model, no batch was done in time (wait=true), or Redis is away; see Retry-After.",
        "No worker serves the model tiny-qwen3 right now; try again when one has started.",
    ),
}

_ARTIFACT_ROUND = {
    "summary": "Artifacts",
    "value": {
        "block_hash": "block-1",
        "block_height": 1,
        "public_key": "key-1",
        "node_id": 0,
        "node_count": 1,
        "batch_size": 32,
        "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
        "url": "http://127.0.0.1:9100",
    },
}
DISTANCE_ROUND_BODIES: dict[str, dict[str, Any]] = {
    "distances": {
        "summary": "Distances",
        "value": {
            "block_hash": "block-1",
            "block_height": 1,
            "public_key": "key-1",
            "r_target": 1.405,
            "node_id": 0,
            "node_count": 1,
            "batch_size": 32,
            "seq_len": 256,
            "callback_url": "http://127.0.0.1:9100",
        },
    },
}
ROUND_BODIES: dict[str, dict[str, Any]] = {"artifacts": _ARTIFACT_ROUND, **DISTANCE_ROUND_BODIES}
ROUND_ERRORS: dict[int | str, dict[str, Any]] = {
    409: _error(
        Refused,
        "A round generates already, or the workers cannot do what is asked for (see /generate).",
        "A round is generating already; send /stop first, or wait for its end.",
    ),
    413: GENERATE_ERRORS[413],
    422: GENERATE_ERRORS[422],
    503: GENERATE_ERRORS[503],
}
PHASE_ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error(Refused, "There is no round to switch.", "No round was initialised; send POST /init first."),
    **REDIS_AWAY,
}
PROOF_BATCH_BODIES: dict[str, dict[str, Any]] = {
    "batch": {
        "summary": "Two pairs",
        "value": {
            "public_key": "key-1",
            "block_hash": "block-1",
            "block_height": 1,
            "nonces": [3, 17],
            "dist": [1.4012, 1.3987],
            "node_id": 0,
        },
    },
}
PROOF_BATCH_ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error(
        Refused,
        "No round validates.",
        "The round generates; send POST /phase/validate first.",
    ),
    **{code: GENERATE_ERRORS[code] for code in (409, 413, 422, 429, 500, 503)},
}
