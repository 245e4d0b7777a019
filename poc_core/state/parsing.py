"""Parses records in Redis. Unreadable records are skipped, and each of them is logged once."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, TypeVar

from pydantic import TypeAdapter

from poc_core import records
from poc_core.serving import deployments
from poc_core.state import keys

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_REASON_CHARS = 300  # most characters of the reason why a record is unreadable
_WORKER = TypeAdapter(records.WorkerRecord)

# Unanswered tries in a row after which only one job payload at a time is sent, as a probe.
BREAKS_AT = 5
# The problem that a courier reports with its sign of life if certificates are unusable.
BAD_CERTIFICATES = "certificates"
# Most receivers that a status lists, and most receivers that are examined for this list.
_MOST_LISTED = 20
MOST_LOOKED_AT = 100
# The fields of a round's hash for a RoundRecord, without the counts by worker.
_MADE = ("round_id", "is_exhausted")
RECORD_FIELDS = [
    "exhausted",
    *(one.name for one in fields(records.RoundRecord) if one.name not in _MADE),
]
_ROUND = TypeAdapter(records.RoundRecord)
_DEPLOYMENT = TypeAdapter(deployments.DeploymentRecord)


def readable(name: str, parse: Callable[[], T]) -> T | None:
    """Returns the result of `parse`; None if `parse` fails. Logs a failure once per `name`."""
    try:
        return parse()
    except MemoryError:
        raise  # no fault of the record
    except Exception as error:
        _say_once(name, type(error).__name__)
        return None


def answers(pipe: Any) -> list[Any]:
    """Executes a pipeline and returns the results. For a key of the wrong type the result is an
    exception; other errors are raised.
    """
    found: list[Any] = pipe.execute(raise_on_error=False)
    for one in found:
        if isinstance(one, Exception) and "WRONGTYPE" not in str(one):
            raise one
    return found


@lru_cache(maxsize=1000)
def _say_once(name: str, trouble: str) -> None:
    # The error's text is left out: pydantic's quotes the record, which may hold a secret.
    logger.error(
        "%s in Redis cannot be read (%s) and is skipped: correct or delete it", name, trouble
    )


@dataclass(frozen=True)
class OutboxStatus:
    """The progress of one outbox: what waits, what was delivered or dropped, and failed tries."""

    waiting: int = 0  # artifacts; 1 for a job's answer
    waiting_bytes: int = 0
    delivered: int = 0
    dropped: int = 0  # given up after POC_CALLBACK_MAX_RETRIES
    failures: int = 0  # failed tries in a row
    next_at: float | None = None  # when the next try is due, seconds since the epoch
    last_error: str | None = None
    failing_since: float | None = None  # time of the first failed try in a row

    @classmethod
    def of(cls, found: Mapping[bytes, bytes]) -> "OutboxStatus":
        """Parses an outbox's hash. The hash is empty after everything was delivered."""
        raw = {name.decode(): value for name, value in found.items()}
        return _OUTBOX.validate_python(raw | {"waiting_bytes": raw.get("bytes", 0)})


_OUTBOX = TypeAdapter(OutboxStatus)


@dataclass(frozen=True)
class SilentReceiver:
    receiver: str  # host:port
    failures: int  # tries in a row without an answer
    next_try_at: float  # seconds since the epoch


def spared(found: Iterable[Sequence[bytes | None]]) -> list[SilentReceiver]:
    """Returns at most 20 receivers that failed at least BREAKS_AT tries. `found`: name, failures
    and next_at of each receiver.
    """
    silent = [
        SilentReceiver(name.decode(), int(n), float(at))
        for name, n, at in found
        if name and n and at and int(n) >= BREAKS_AT
    ]
    return silent[:_MOST_LISTED]


def round_record(round_id: str, values: Sequence[bytes | None]) -> records.RoundRecord | None:
    """Builds a round's record from the values of RECORD_FIELDS. Returns None if it has expired or
    cannot be read.
    """
    return readable(f"round {round_id}", partial(_round, round_id, values))


def _round(round_id: str, values: Sequence[bytes | None]) -> records.RoundRecord | None:
    found = zip(RECORD_FIELDS, values, strict=True)
    raw = {name: value.decode() for name, value in found if value is not None}
    if "state" not in raw:
        return None
    made = {"round_id": round_id, "is_exhausted": "exhausted" in raw}
    config = records.RoundConfig.model_validate_json(raw["config"])
    return _ROUND.validate_python(raw | made | {"config": config})


def worker_records(found: Iterable[tuple[bytes, bytes]]) -> list[records.WorkerRecord]:
    """Parses pairs of a worker's id and JSON record. Returns the live workers, sorted by id. A dead
    worker's record is empty.
    """
    alive = (
        readable(f"worker {name.decode(errors='replace')!r}", partial(_WORKER.validate_json, raw))
        for name, raw in found
        if raw
    )
    return sorted((worker for worker in alive if worker is not None), key=lambda worker: worker.id)


def deployment_record(found: Mapping[bytes, bytes]) -> deployments.DeploymentRecord | None:
    """Parses a deployment's hash. Returns None if nothing was ever deployed. An unreadable hash
    becomes a failed deployment, whose error says what the operator must do.
    """
    if not found:
        return None
    texts = [part.decode(errors="replace") for item in found.items() for part in item]
    raw = dict(zip(texts[::2], texts[1::2], strict=True))
    try:
        return _record(raw)
    except (AttributeError, KeyError, RecursionError, ValueError) as error:
        return _unreadable(raw.get("generation", ""), error)


def _record(raw: Mapping[str, str]) -> deployments.DeploymentRecord:
    wanted = json.loads(raw["wanted"]) if raw["wanted"] else None
    if wanted is not None:  # earlier versions wrote unset options as null
        options = {name: value for name, value in wanted.items() if value is not None}
        wanted = deployments.Deployment.model_validate(options)
    made = {"wanted": wanted, "cancelled": "loading" in raw}
    return _DEPLOYMENT.validate_python({"engines": raw["generation"]} | dict(raw) | made)


def _unreadable(generation: str, error: Exception) -> deployments.DeploymentRecord:
    why = " ".join(str(error).split())[:MOST_REASON_CHARS]
    return deployments.DeploymentRecord(
        generation=int(generation) if re.fullmatch("[0-9]{1,12}", generation) else 0,
        wanted=None,
        by="request",
        asked_at=0.0,
        settled_at=0.0,
        error=f"The record {keys.DEPLOYMENT} cannot be read ({why}); send POST /api/v1/stop, then"
        " deploy a model again.",
    )
