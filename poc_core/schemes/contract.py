"""The half of a scheme that needs no torch: its requests, answers, payloads and verdicts.

The API, the stores, the courier, the synthetic engine and the command ask a scheme's contract
wherever two schemes differ, so that none of them knows any scheme by name.
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

# A nonce and its value, as a scheme's `finish` gave it.
Pair = tuple[int, Any]


@dataclass(frozen=True)
class Reported:
    """Some of a round's reported nonces, in the order in which they were computed."""

    first: int  # place of the first one among all that the round reported, counted from 0
    pairs: Sequence[Pair]


class Options(BaseModel):
    """A scheme's inputs besides hash, key and seq_len: ProofSpec.options, typed.

    Each field's description says what it must be, as errors put it; it may name {hidden_size}.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def of(cls, spec: ProofSpec) -> Self:
        """The options of a spec that was admitted."""
        return cls.model_validate(spec.options)

    @classmethod
    def checked(cls, spec: ProofSpec, hidden_size: int) -> Self:
        """The options for a model of that hidden size. SpecError: unknown ones or bad values."""
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
    """By what values are judged or reported: JobRequest.terms and RoundConfig.terms, typed.

    Unlike Options, terms change no value.
    """

    model_config = ConfigDict(frozen=True)


class Contract(ABC):
    """One scheme as all but the engines see it: the `CONTRACT` of its folder's `contract.py`."""

    name: ClassVar[str]  # of its folder
    options: ClassVar[type[Options]] = Options
    terms: ClassVar[type[Terms]] = Terms

    # Requests. None: the scheme has no such call.

    job_body: ClassVar[type[JobBody] | None] = None
    round_body: ClassVar[type[RoundBody] | None] = None
    batch_body: ClassVar[type[BatchBody] | None] = None  # with it the scheme's rounds have phases
    # Fields by which a body names this scheme. Empty: bodies that no other scheme recognises.
    marks: ClassVar[tuple[str, ...]] = ()

    def recognises(self, marks: Mapping[str, Any]) -> bool:
        """True if a body is this scheme's. `marks`: its fields of all schemes' marks, unchecked."""
        return any(name in marks for name in self.marks)

    def limits(self, spec: ProofSpec, info: ModelInfo) -> dict[str, tuple[int, int]]:
        """By field of a request: what it asks for, and the most that the model can do."""
        return {"seq_len": (spec.seq_len, min(info.max_seq_len, info.max_batch_tokens))}

    def why_not(self, spec: ProofSpec, info: ModelInfo) -> str:
        """Why this model cannot compute the spec, beside `limits`, in words; empty: it can."""
        return ""

    def common(self, infos: Sequence[ModelInfo]) -> dict[str, JsonValue]:
        """The scheme's own limits that all these models keep; each has its in ModelInfo.schemes."""
        return {}

    def max_batch(self, spec: ProofSpec, info: ModelInfo) -> int:
        """Nonces that one micro-batch holds; at least one."""
        return info.max_batch(self.passes(spec).rows)

    def halved(self, spec: ProofSpec, n: int, part: int, info: ModelInfo) -> ModelInfo:
        """Limits, halved at least, after a micro-batch of `n` nonces found too little memory.

        `part`: how many of these one forward of all rows held.
        """
        tokens = max(1, part * self.passes(spec).rows // 2)
        return replace(info, max_batch_tokens=min(info.max_batch_tokens, tokens))

    def passes(self, spec: ProofSpec) -> Passes:
        """Returns the forward passes that an engine runs of each nonce. SpecError: impossible
        options.
        """
        return Passes(spec.seq_len)

    # Rounds.

    # Whether /status lists the reported nonces.
    lists_reported: ClassVar[bool] = False
    # The fields that /status has of this scheme's rounds only, all optional.
    status_fields: ClassVar[type[BaseModel] | None] = None

    # The values of these fields before there is any round.
    status_without_round: ClassVar[Mapping[str, JsonValue]] = {}

    def is_reported(self, value: JsonValue, terms: Mapping[str, JsonValue]) -> bool:
        """True if a round's receiver gets a nonce with this value."""
        return True

    def status(
        self, record: RoundRecord, reported: Reported, elapsed_s: float, rate: float
    ) -> dict[str, Any]:
        """`status_fields` of a round. `reported`: see lists_reported; `rate`: nonces a second."""
        return {}

    # Answers and callbacks (protocol.md, sections 5 and 6).

    # The answers to jobs, as OpenAPI shows them.
    result_models: ClassVar[tuple[type[BaseModel], ...]] = ()
    result_examples: ClassVar[Examples] = {}

    def about(self, spec: ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        """The fields beside values, in answers and callbacks."""
        return {}

    @abstractmethod
    def bytes_per_artifact(self, spec: ProofSpec) -> int:
        """Bytes that a nonce takes at most in the answer of a job."""

    @abstractmethod
    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        """A nonce and its value as clients get them."""

    def values(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """The fields of a callback that hold its values."""
        return {"artifacts": [self.artifact(nonce, value) for nonce, value in pairs]}

    def artifacts_json(self, nonces: Sequence[bytes], values: Sequence[bytes]) -> bytes:
        """The list of artifacts in an answer, from the JSON of each nonce and value."""
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
        """The fields of an answer that judges claims. A value None could not be computed here."""

    # Engines without a model, and people.

    @abstractmethod
    def synthetic_values(
        self, spec: ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        """Invented values for load tests, from spec and nonce alone. SpecError: Options.checked."""

    # The heading of values in a table.
    column: ClassVar[str] = "value"

    def cell(self, value: Any) -> str:
        """A value as a table shows it."""
        return str(value)

    def described(self, body: Mapping[str, Any]) -> str:
        """Describes a round's special options in a few words. `body`: RoundBody.of its
        configuration.
        """
        return self.name

    def reported_of(self, status: Mapping[str, Any]) -> str:
        """Which nonces are reported, where not all are. `status`: the answer of /status."""
        return ""


def load_all(texts: Sequence[bytes]) -> list[Any]:
    """The values of JSON texts, parsed in one go."""
    loaded: list[Any] = json.loads(b"[" + b",".join(texts) + b"]")
    return loaded
