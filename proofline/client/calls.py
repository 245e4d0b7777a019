"""The calls of the API (protocol.md, section 5): each has a request and the type of its answer.

AsyncClient and Client send these calls. Use `Client.call` for a call that has no method of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from poc_core import answers
from proofline.client.bodies import Body, as_json, placed

NODE = "/api/v1"
PREFIX = f"{NODE}/pow"
TIMEOUT_S = 60.0  # a request of 100,000 nonces with artifacts takes seconds to check
READY_TIMEOUT_S = 5.0  # least timeout of `ready`, for a busy machine
STOP_TIMEOUT_S = 90.0  # timeout of `undeploy`, which waits up to a minute for engines to end

T = TypeVar("T")
Document = dict[str, Any]  # an answer's plain JSON


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request to the API, and the type of its answer.

    `answer`: a pydantic model, or Document for plain JSON. `is_repeatable`: True if the request can
    safely be sent again when it is unknown whether the API has received it.
    """

    method: str
    path: str
    answer: type[T]
    body: Body | None = None
    is_repeatable: bool = True
    timeout_s: float = TIMEOUT_S


STOP = Call("POST", f"{PREFIX}/stop", answers.Stopped)
STATE = Call("GET", f"{NODE}/state", answers.NodeState)
VERSIONS = Call("GET", f"{NODE}/versions", answers.Versions)
DEPLOYMENT = Call("GET", f"{NODE}/inference/up/status", answers.UpStatus)
UNDEPLOY = Call("POST", f"{NODE}/inference/down", answers.Done, timeout_s=STOP_TIMEOUT_S)


def ready(left_s: float) -> Call[answers.Ready]:
    """`left_s`: seconds for which the caller still waits."""
    timeout_s = min(TIMEOUT_S, max(READY_TIMEOUT_S, left_s))
    return Call("GET", "/readyz", answers.Ready, timeout_s=timeout_s)


def submit(body: Body) -> Call[answers.Queued]:
    whole = {**placed(body), "wait": False}
    return Call("POST", f"{PREFIX}/generate", answers.Queued, whole, is_repeatable=False)


def validation(
    body: Body, artifacts: Sequence[Mapping[str, Any]], stat_test: Body | None
) -> Document:
    """Returns the body of a job that validates `artifacts`.

    `body`: the body of a job that computes the artifacts. `stat_test`: criteria for fraud, or None.
    """
    validation = {"artifacts": list(map(dict, artifacts))}
    terms = {} if stat_test is None else {"stat_test": as_json(stat_test)}
    return {**as_json(body), "validation": validation, **terms}


def job_path(request_id: str) -> str:
    return f"{PREFIX}/generate/{quote(request_id, safe='', errors='replace')}"


def job(request_id: str) -> Call[Document]:
    return Call("GET", job_path(request_id), Document)


def cancel(request_id: str) -> Call[answers.Cancelled]:
    return Call("DELETE", job_path(request_id), answers.Cancelled)


def status(answer: type[T]) -> Call[T]:
    return Call("GET", f"{PREFIX}/status", answer)


def start_round(body: Body) -> Call[answers.RoundChanged]:
    path, whole = f"{PREFIX}/init/generate", placed(body)
    return Call("POST", path, answers.RoundChanged, whole, is_repeatable=False)


def deploy(model: str, dtype: str, additional_args: Sequence[str]) -> Call[answers.Done]:
    body = {"model": model, "dtype": dtype, "additional_args": list(additional_args)}
    return Call("POST", f"{NODE}/inference/up/async", answers.Done, body, is_repeatable=False)


def model_on_disk(hf_repo: str) -> Call[Document]:
    return Call("POST", f"{NODE}/models/status", Document, {"hf_repo": hf_repo})
