"""The interface of a scheme for code without torch: its requests, answers, payloads and verdicts.

The API, the stores, the courier, the synthetic engine and the commands call a scheme's contract
where schemes differ. They therefore contain no scheme's name.
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

# A nonce and the value that the scheme computed for it.
Pair = tuple[int, Any]


@dataclass(frozen=True)
class Reported:
    """Some of the nonces that a round has reported to its receiver, with their values, in the order
    of computation.
    """

    first: int  # index of the first of `pairs` among all reported nonces of the round
    pairs: Sequence[Pair]


class Options(BaseModel):
    """The inputs of a scheme besides block_hash, public_key and seq_len. This is the typed form of
    ProofSpec.options.

    The description of a field names its valid values. Errors quote the description, and replace
    {hidden_size} in it by the model's hidden size.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def of(cls, spec: ProofSpec) -> Self:
        """Returns the options of a spec that `checked` has accepted before."""
        return cls.model_validate(spec.options)

    @classmethod
    def checked(cls, spec: ProofSpec, hidden_size: int) -> Self:
        """Returns the options of a spec for a model of this hidden size. SpecError if an option is
        unknown or its value is invalid.
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
    """The criteria for verdicts on claims, and for the nonces that a round reports. This is the
    typed form of JobRequest.terms and RoundConfig.terms.

    Unlike Options, criteria do not change the computed values.
    """

    model_config = ConfigDict(frozen=True)


class Contract(ABC):
    """The interface of a scheme for all code except engines. A scheme's `contract.py` has an
    instance with the name `CONTRACT`.
    """

    name: ClassVar[str]  # the name of the scheme's folder
    options: ClassVar[type[Options]] = Options
    terms: ClassVar[type[Terms]] = Terms

    # Request bodies. None if the scheme lacks the endpoint.

    job_body: ClassVar[type[JobBody] | None] = None
    round_body: ClassVar[type[RoundBody] | None] = None
    batch_body: ClassVar[type[BatchBody] | None] = None  # if set, the scheme's rounds have phases
    # Names of fields that identify this scheme's bodies. If empty, the scheme gets the bodies that
    # no other scheme recognises.
    marks: ClassVar[tuple[str, ...]] = ()

    def recognises(self, marks: Mapping[str, Any]) -> bool:
        """Returns True if a request body belongs to this scheme.

        `marks`: the fields of the unchecked body that are `marks` of this or another scheme.
        """
        return any(name in marks for name in self.marks)

    def limits(self, spec: ProofSpec, info: ModelInfo) -> dict[str, tuple[int, int]]:
        """Returns the limited fields of a request: the field's name -> (requested value, the
        model's limit).
        """
        return {"seq_len": (spec.seq_len, min(info.max_seq_len, info.max_batch_tokens))}

    def why_not(self, spec: ProofSpec, info: ModelInfo) -> str:
        """Returns a sentence that says why this model cannot compute the spec, apart from `limits`.
        The sentence is empty if the model can.
        """
        return ""

    def common(self, infos: Sequence[ModelInfo]) -> dict[str, JsonValue]:
        """Combines the scheme-specific limits of several models (ModelInfo.schemes). Returns limits
        that hold for all of the models.
        """
        return {}

    def max_batch(self, spec: ProofSpec, info: ModelInfo) -> int:
        """Returns the largest number of nonces that fit into one micro-batch; at least 1."""
        return info.max_batch(self.passes(spec).rows)

    def halved(self, spec: ProofSpec, n: int, part: int, info: ModelInfo) -> ModelInfo:
        """Returns `info` with smaller limits, after a micro-batch ran out of memory. The new limits
        allow at most half of that micro-batch.

        `n`: the number of nonces in the micro-batch. `part`: the largest number of nonces in one of
        its forward passes.
        """
        tokens = max(1, part * self.passes(spec).rows // 2)
        return replace(info, max_batch_tokens=min(info.max_batch_tokens, tokens))

    def passes(self, spec: ProofSpec) -> Passes:
        """Returns the forward passes that the model runs for each nonce. SpecError if the options
        are invalid.
        """
        return Passes(spec.seq_len)

    # Rounds.

    # True if /status lists the reported nonces.
    lists_reported: ClassVar[bool] = False
    # The optional fields that /status has only for this scheme's rounds.
    status_fields: ClassVar[type[BaseModel] | None] = None

    # The values of these fields before the first round.
    status_without_round: ClassVar[Mapping[str, JsonValue]] = {}

    def is_reported(self, value: JsonValue, terms: Mapping[str, JsonValue]) -> bool:
        """Returns True if a round sends a nonce with this value to the round's receiver. `terms`:
        the criteria of the round.
        """
        return True

    def status(
        self, record: RoundRecord, reported: Reported, elapsed_s: float, rate: float
    ) -> dict[str, Any]:
        """Returns the `status_fields` of a round, with their values.

        `reported`: the reported nonces to list. `elapsed_s`: seconds since the round began. `rate`:
        computed nonces per second.
        """
        return {}

    # Answers and callbacks (protocol.md, sections 5 and 6).

    # The answers to jobs, for OpenAPI.
    result_models: ClassVar[tuple[type[BaseModel], ...]] = ()
    result_examples: ClassVar[Examples] = {}

    def about(self, spec: ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Returns the fields of answers and callbacks that describe the values as a whole, such as
        their encoding.
        """
        return {}

    @abstractmethod
    def bytes_per_artifact(self, spec: ProofSpec) -> int:
        """Returns the largest number of bytes that a nonce and its value take in a job's answer."""

    @abstractmethod
    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        """Returns a nonce and its value as a JSON object for clients."""

    def values(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Returns the fields of a callback that contain the nonces and their values."""
        return {"artifacts": [self.artifact(nonce, value) for nonce, value in pairs]}

    def artifacts_json(self, nonces: Sequence[bytes], values: Sequence[bytes]) -> bytes:
        """Returns the artifacts of a job's answer as a JSON list.

        `nonces`, `values`: JSON texts of the nonces, and of their values in the same order.
        """
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
        """Compares claimed values with this node's values. Returns the fields of the validation's
        answer.

        `request`: has the criteria. `values`: this node's value of each nonce; None for an excluded
        nonce. `claims`: the claimed value of each nonce.
        """

    # For engines without a model, and for the display of values.

    @abstractmethod
    def synthetic_values(
        self, spec: ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        """Returns a value for each nonce without computing a model, for load tests. The values are
        derived only from spec and nonces.

        SpecError if the options are invalid.
        """

    # The heading of the column of values in a table.
    column: ClassVar[str] = "value"

    def cell(self, value: Any) -> str:
        """Returns a value as text for a cell of a table."""
        return str(value)

    def described(self, body: Mapping[str, Any]) -> str:
        """Returns a few words that describe a round's options. `body`: the round's configuration,
        as returned by RoundBody.of.
        """
        return self.name

    def reported_of(self, status: Mapping[str, Any]) -> str:
        """Returns a text that says how many nonces of a round were reported, and by which
        criterion. The text is empty if the scheme reports all nonces. `status`: the answer of GET
        /status.
        """
        return ""


def load_all(texts: Sequence[bytes]) -> list[Any]:
    """Parses several JSON texts at once. Returns one value per text."""
    loaded: list[Any] = json.loads(b"[" + b",".join(texts) + b"]")
    return loaded
