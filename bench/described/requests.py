"""Generates right and wrong requests of every operation, and checks each answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import hypothesis
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Statuses that need a Retry-After header.
_COME_AGAIN = (429, 503)


class Target(Protocol):
    """A node that answers requests."""

    document: dict[str, Any]

    @property
    def situations(self) -> Sequence[str]: ...

    def enter(self, situation: str, operation: str) -> Mapping[str, Any]:
        """Puts the node into a situation; returns values of fields that the node accepts then."""

    def send(self, case: Any) -> Any:
        """Sends a case of schemathesis and returns the answer."""

    def share(self, operation: str) -> float:
        """Returns an operation's share of the cases, below 1 for slow operations."""


def ask_all(target: Target, cases_each: int, seed: int) -> dict[str, Counter[int]]:
    """Sends requests of every operation; counts the statuses of each.

    AssertionError or schemathesis' Failure: a request got a wrong answer.
    """
    seen: dict[str, Counter[int]] = {}
    for operation in operations(target.document):
        statuses = seen[operation.label] = Counter()
        n_cases = max(1, int(cases_each * target.share(operation.label)))
        _ask(target, operation, statuses, n_cases, seed)
    return seen


def operations(document: dict[str, Any]) -> Iterator[Any]:
    schema: Any = schemathesis.openapi.from_dict(document)
    for found in schema.get_all_operations():
        yield cast(Any, found).ok()


def _ask(target: Target, operation: Any, statuses: Counter[int], n_cases: int, seed: int) -> None:
    modes = [GenerationMode.POSITIVE]
    if operation.body or operation.path_parameters or operation.query:
        modes.append(GenerationMode.NEGATIVE)
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

    # Not derandomized, because each turn has its own seed. Without shrinking, which would send
    # hundreds of requests more.
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n_cases,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(
        case=cases, situation=st.sampled_from(target.situations), names_known=st.booleans()
    )
    def ask(case: Any, situation: str, names_known: bool) -> None:
        known = target.enter(situation, operation.label)
        if names_known:
            put_known(case, known)
        hypothesis.note(f"situation: {situation}")
        answer = target.send(case)
        statuses[answer.status_code] += 1
        said = (
            f"{situation}: {case.as_curl_command()} is answered {answer.status_code}"
            f" {answer.text[:500]}"
        )
        assert answer.status_code < 500 or answer.status_code == 503, said
        assert answer.status_code not in _COME_AGAIN or "retry-after" in answer.headers, said
        case.validate_response(answer, checks=CHECKS)

    ask()


def put_known(case: Any, known: Mapping[str, Any]) -> None:
    """Sets fields to values that the node accepts, because it would refuse most other names."""
    if isinstance(case.body, dict):
        _put(case.body, known)
    for name in case.path_parameters or {}:
        if name in known:
            case.path_parameters[name] = known[name]


def _put(body: dict[str, Any], known: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if isinstance(value, dict):
            _put(value, known)
        elif name in known:
            body[name] = known[name]
