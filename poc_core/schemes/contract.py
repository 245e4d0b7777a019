"""The half of a scheme that needs no torch: its requests, answers, payloads and verdicts.

The API, the stores, the courier, the synthetic engine and the commands call a scheme's contract
where schemes differ, so none of them contains a scheme's name.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from poc_core.errors import SpecError
from poc_core.records import JobRequest, ModelInfo, Passes, ProofSpec, RoundRecord
from poc_core.schemes.requests import BatchBody, Examples, JobBody, RoundBody

# A nonce and its value, as returned by the scheme.
Pair = tuple[int, Any]


@dataclass(frozen=True)
class Reported:
    """Some of the nonces that a round has reported, in the order of their computation."""

    first: int  # index of the first of `pairs` among all reported nonces of the round
    pairs: Sequence[Pair]


class Options(BaseModel):
    """The inputs of a scheme besides hash, key and seq_len: the typed form of ProofSpec.options.

    A field's description of its valid values is quoted in errors, and may contain {hidden_size}.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def of(cls, spec: ProofSpec) -> Self:
        """Returns the options of a spec that has been checked before."""
        return cls.model_validate(spec.options)

    @classmethod
    def checked(cls, spec: ProofSpec, hidden_size: int) -> Self:
        """Returns the options. SpecError for unknown options, and values that are invalid for a
        model of this hidden size.
        """
        try:
            return cls.model_validate(spec.options, context={"hidden_size": hidden_size})
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
        unknown = sorted(
            str(problem["loc"][0]) for problem in problems if problem["type"] == "extra_forbidden"
        )
        if unknown:
            known = ", ".join(sorted(cls.model_fields))
            raise SpecError(
                f"The {spec.scheme} scheme has no option {', '.join(unknown)}; it knows {known}."
            )
        name = str(problems[0]["loc"][0])
        wanted = (cls.model_fields[name].description or "different").format(hidden_size=hidden_size)
        raise SpecError(f"{name} must be {wanted}, not {repr(problems[0]['input'])[:80]}.")


class Terms(BaseModel):
    """The criteria for verdicts and reports: the typed form of the `terms` of a job or round.

    Unlike Options, terms do not change the values.
    """

    model_config = ConfigDict(frozen=True)


class Contract(ABC):
    """A scheme as all code except engines uses it. A scheme's `contract.py` has its `CONTRACT`."""

    name: ClassVar[str]  # the name of the scheme's folder
    options: ClassVar[type[Options]] = Options
    terms: ClassVar[type[Terms]] = Terms

    # Request bodies. None if the scheme lacks the endpoint.

    job_body: ClassVar[type[JobBody] | None] = None
    round_body: ClassVar[type[RoundBody] | None] = None
    batch_body: ClassVar[type[BatchBody] | None] = None  # if set, the scheme's rounds have phases
    # Fields that identify this scheme's bodies. Empty: bodies that no other scheme recognises.
    marks: ClassVar[tuple[str, ...]] = ()

    def recognises(self, marks: Mapping[str, Any]) -> bool:
        """Returns True if a body belongs to this scheme.

        `marks`: those fields of the unchecked body that are marks of any scheme.
        """
        return any(name in marks for name in self.marks)

    def limits(self, spec: ProofSpec, info: ModelInfo) -> dict[str, tuple[int, int]]:
        """Returns the requested value and the model's limit, by name of the request's field."""
        return {"seq_len": (spec.seq_len, min(info.max_seq_len, info.max_batch_tokens))}

    def why_not(self, spec: ProofSpec, info: ModelInfo) -> str:
        """Returns why this model cannot compute the spec, apart from `limits`; empty if it can."""
        return ""

    def common(self, infos: Sequence[ModelInfo]) -> dict[str, JsonValue]:
        """Returns the scheme's own limits that hold for all these models (ModelInfo.schemes)."""
        return {}

    def max_batch(self, spec: ProofSpec, info: ModelInfo) -> int:
        """Returns the number of nonces that fit into one micro-batch; at least 1."""
        return info.max_batch(self.passes(spec).rows)

    def halved(self, spec: ProofSpec, n: int, part: int, info: ModelInfo) -> ModelInfo:
        """Returns `info` with limits of at most half of a micro-batch that ran out of memory.

        `n`: the number of nonces of the micro-batch. `part`: those of one forward.
        """
        tokens = max(1, part * self.passes(spec).rows // 2)
        return replace(info, max_batch_tokens=min(info.max_batch_tokens, tokens))

    def passes(self, spec: ProofSpec) -> Passes:
        """Returns the forward passes of each nonce. SpecError if the options are invalid."""
        return Passes(spec.seq_len)

    # Rounds.

    # True if /status lists the reported nonces.
    lists_reported: ClassVar[bool] = False
    # The optional fields that /status has only for this scheme's rounds.
    status_fields: ClassVar[type[BaseModel] | None] = None

    # The values of these fields before the first round.
    status_without_round: ClassVar[Mapping[str, JsonValue]] = {}

    def is_reported(self, value: JsonValue, terms: Mapping[str, JsonValue]) -> bool:
        """Returns True if a round sends a nonce with this value to its receiver."""
        return True

    def status(
        self, record: RoundRecord, reported: Reported, elapsed_s: float, rate: float
    ) -> dict[str, Any]:
        """Returns the `status_fields` of a round. `rate`: nonces per second."""
        return {}

    # Answers and callbacks (protocol.md, sections 5 and 6).

    # The answers to jobs, for OpenAPI.
    result_models: ClassVar[tuple[type[BaseModel], ...]] = ()
    result_examples: ClassVar[Examples] = {}

    def about(self, spec: ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Returns the fields of answers and callbacks that describe the values."""
        return {}

    @abstractmethod
    def bytes_per_artifact(self, spec: ProofSpec) -> int:
        """Returns the largest number of bytes that a nonce takes in a job's answer."""

    @abstractmethod
    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        """Returns a nonce and its value as a JSON object for clients."""

    def values(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Returns the fields of a callback that contain the values."""
        return {"artifacts": [self.artifact(nonce, value) for nonce, value in pairs]}

    def artifacts_json(self, nonces: Sequence[bytes], values: Sequence[bytes]) -> bytes:
        """Returns the JSON list of an answer's artifacts. `nonces`, `values`: as JSON."""
        loaded = load_all(values)
        artifacts = [
            self.artifact(int(nonce), value) for nonce, value in zip(nonces, loaded, strict=True)
        ]
        return json.dumps(artifacts, separators=(",", ":")).encode()

    @abstractmethod
    def verdict(
        self,
        spec: ProofSpec,
        request: JobRequest,
        nonces: Sequence[int],
        values: Sequence[JsonValue],
        claims: Sequence[JsonValue],
    ) -> dict[str, Any]:
        """Returns the fields of a validation's answer.

        `values`: this node's, None for excluded nonces. `claims`: the claimed values.
        """

    # For engines without a model, and for the display of values.

    @abstractmethod
    def synthetic_values(
        self, spec: ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        """Returns values for load tests, which are derived only from spec and nonces.

        SpecError if the options are invalid.
        """

    # The heading of values in a table.
    column: ClassVar[str] = "value"

    def cell(self, value: Any) -> str:
        """Returns a value as text for a table."""
        return str(value)

    def described(self, body: Mapping[str, Any]) -> str:
        """Returns a round's options in a few words. `body`: the result of RoundBody.of."""
        return self.name

    def reported_of(self, status: Mapping[str, Any]) -> str:
        """Returns in words which nonces are reported; empty if all. `status`: of GET /status."""
        return ""


def load_all(texts: Sequence[bytes]) -> list[Any]:
    """Returns the values of several JSON texts, parsed at once."""
    loaded: list[Any] = json.loads(b"[" + b",".join(texts) + b"]")
    return loaded
