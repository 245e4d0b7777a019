"""The interface of a scheme for code without torch: its requests, answers, payloads and verdicts.

The API, the stores, the courier, the synthetic engine and the commands call a scheme's contract
where schemes differ. They therefore contain no scheme's name.
"""

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, JsonValue

from poc_core import records
from poc_core.schemes import known_name, scheme_names
from poc_core.schemes.requests import BatchBody, Examples, JobBody, Options, RoundBody, Terms

if TYPE_CHECKING:
    import numpy as np

# A nonce and the value that the scheme computed for it.
Pair = tuple[int, Any]


@dataclass(frozen=True)
class Reported:
    """Nonces that a round has reported to its receiver, with values, in order of computation."""

    first: int  # index of the first of `pairs` among all reported nonces of the round
    pairs: Sequence[Pair]


class Contract(ABC):
    """A scheme's interface for all code except engines. Its `contract.py` defines `CONTRACT`."""

    name: ClassVar[str]  # the name of the scheme's folder
    options: ClassVar[type[Options]] = Options
    terms: ClassVar[type[Terms]] = Terms

    # Request bodies. None if the scheme lacks the endpoint.

    job_body: ClassVar[type[JobBody] | None] = None
    round_body: ClassVar[type[RoundBody] | None] = None
    batch_body: ClassVar[type[BatchBody] | None] = None  # if set, the scheme's rounds have phases
    # Identifying fields of the bodies; if empty, the scheme gets bodies that no scheme recognises.
    marks: ClassVar[tuple[str, ...]] = ()

    def recognises(self, marks: Mapping[str, Any]) -> bool:
        """Returns True if a body with these identifying fields (`marks`) belongs to this scheme."""
        return any(name in marks for name in self.marks)

    def limits(
        self, spec: records.ProofSpec, info: records.ModelInfo
    ) -> dict[str, tuple[int, int]]:
        """Returns the request fields that a model limits: name -> (requested value, limit)."""
        return {"seq_len": (spec.seq_len, min(info.max_seq_len, info.max_batch_tokens))}

    def why_not(self, spec: records.ProofSpec, info: records.ModelInfo) -> str:
        """Returns a sentence that says why this model cannot compute the spec; "" if it can."""
        return ""

    def common(self, infos: Sequence[records.ModelInfo]) -> dict[str, JsonValue]:
        """Returns the scheme-specific limits that hold for all the models `infos`."""
        return {}

    def max_batch(self, spec: records.ProofSpec, info: records.ModelInfo) -> int:
        """Returns the largest number of nonces that fit into one micro-batch; at least 1."""
        return info.max_batch(self.passes(spec).rows)

    def halved(
        self, spec: records.ProofSpec, n: int, part: int, info: records.ModelInfo
    ) -> records.ModelInfo:
        """Returns `info` with smaller limits, after a micro-batch of `n` nonces ran out of memory.
        These limits allow at most half of that micro-batch. `part`: the most nonces in one of its
        forward passes.
        """
        rows = self.passes(spec).rows
        tokens = max(rows, part * rows // 2)  # fewer would refuse even one nonce
        return replace(info, max_batch_tokens=min(info.max_batch_tokens, tokens))

    def passes(self, spec: records.ProofSpec) -> records.Passes:
        """Returns the forward passes that compute one nonce. SpecError if an option is invalid."""
        return records.Passes(spec.seq_len)

    # Rounds.

    # True if /status lists the reported nonces.
    lists_reported: ClassVar[bool] = False
    # The optional fields that /status has only for this scheme's rounds.
    status_fields: ClassVar[type[BaseModel] | None] = None

    # The values of these fields before the first round.
    status_without_round: ClassVar[Mapping[str, JsonValue]] = {}

    def is_reported(self, value: JsonValue, terms: Mapping[str, JsonValue]) -> bool:
        """Returns True if a round with the criteria `terms` sends this value to its receiver."""
        return True

    def status(
        self, record: records.RoundRecord, reported: Reported, elapsed_s: float, rate: float
    ) -> dict[str, Any]:
        """Returns the fields of /status that only this scheme has (`status_fields`). `reported`:
        the nonces to list. `elapsed_s`: the round's age. `rate`: nonces per second.
        """
        return {}

    # Answers and callbacks (protocol.md, sections 5 and 6).

    # The answers to jobs, for OpenAPI.
    result_models: ClassVar[tuple[type[BaseModel], ...]] = ()
    result_examples: ClassVar[Examples] = {}

    def about(self, spec: records.ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Returns fields of answers and callbacks that describe the values, such as encoding."""
        return {}

    @abstractmethod
    def bytes_per_artifact(self, spec: records.ProofSpec) -> int:
        """Returns the largest number of bytes that a nonce and its value take in a job's answer."""

    @abstractmethod
    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        """Returns a nonce and its value as a JSON object for clients."""

    def values(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Returns the fields of a callback that contain the nonces and their values."""
        return {"artifacts": [self.artifact(nonce, value) for nonce, value in pairs]}

    def artifacts_json(self, nonces: Sequence[bytes], values: Sequence[bytes]) -> bytes:
        """Builds the JSON list of a job's artifacts from the JSON texts of nonces and values."""
        loaded = load_all(values)
        artifacts = [
            self.artifact(int(nonce), value) for nonce, value in zip(nonces, loaded, strict=True)
        ]
        return json.dumps(artifacts, separators=(",", ":")).encode()

    @abstractmethod
    def verdict(
        self,
        spec: records.ProofSpec,
        request: records.JobRequest,
        nonces: Sequence[int],
        values: Sequence[JsonValue],
        claims: Sequence[JsonValue],
    ) -> dict[str, Any]:
        """Compares claimed values with this node's values. Returns the fields of the answer.

        `request`: contains the criteria. `values`: this node's value of each nonce; None if the
        nonce is excluded. `claims`: the claimed value of each nonce.
        """

    # For engines without a model, and for the display of values.

    @abstractmethod
    def synthetic_values(
        self, spec: records.ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        """Returns values that depend only on spec and nonces. May raise SpecError."""

    # The heading of the column of values in a table.
    column: ClassVar[str] = "value"

    def cell(self, value: Any) -> str:
        """Returns a value as text for a cell of a table."""
        return str(value)

    def described(self, body: Mapping[str, Any]) -> str:
        """Describes a round's options in a few words. `body`: the round's fields (RoundBody.of)."""
        return self.name

    def reported_of(self, status: Mapping[str, Any]) -> str:
        """Returns a phrase that says how many nonces of a round were reported, by which criterion;
        "" if the scheme reports all nonces. `status`: the answer of GET /status.
        """
        return ""


def load_all(texts: Sequence[bytes]) -> list[Any]:
    """Parses several JSON texts at once. Returns one value per text."""
    loaded: list[Any] = json.loads(b"[" + b",".join(texts) + b"]")
    return loaded


@cache
def contract_of(name: str) -> Contract:
    """Returns the contract of a scheme. SpecError if there is no scheme with that name."""
    contract: Contract = importlib.import_module(
        f"{__package__}.{known_name(name)}.contract"
    ).CONTRACT
    return contract


def contracts() -> list[Contract]:
    """Returns the contracts of all schemes, ordered by name."""
    return [contract_of(name) for name in scheme_names()]


def recognised(marks: Mapping[str, Any], candidates: Sequence[Contract]) -> Contract:
    """Returns the contract of the scheme to which a request body belongs. `marks`: the body's
    fields that identify a scheme (Contract.marks). If no candidate recognises them, returns the
    first candidate without identifying fields, or else the first candidate.
    """
    by_marks = (contract for contract in candidates if contract.recognises(marks))
    without = (contract for contract in candidates if not contract.marks)
    return next(by_marks, None) or next(without, candidates[0])


def noise(spec: str, nonce: int, size: int) -> "np.ndarray":
    """Returns `size` pseudorandom numbers in [-1, 1), from a hash, for synthetic values."""
    import numpy as np  # imported here: it takes 25 MB, which most API processes do not need

    digest = hashlib.shake_128(f"synthetic|{spec}|{nonce}".encode()).digest(2 * size)
    return np.frombuffer(digest, dtype="<i2") / 32768
