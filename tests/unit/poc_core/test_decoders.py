"""What reads others' bytes understands them or says what is wrong, whatever they are."""

import base64
import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cli.nonce_list import NonceListError, parse_nonces
from poc_core.errors import BodyError, ClaimsError, VectorError
from poc_core.fields import MAX_NONCE
from poc_core.schemes.artifact.encoding import decode_vector, encode_vectors
from poc_core.schemes.artifact.requests import GenerateBody
from poc_core.schemes.distance.requests import ProofBatchBody
from poc_core.state import entries
from tests.harness.fuzz import FUZZ
from tests.harness.samples import body

pytestmark = FUZZ

NONCES = st.integers(0, MAX_NONCE)
FLOAT16 = st.floats(width=16, allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.lists(FLOAT16, min_size=1, max_size=64))
def test_a_vector_is_read_as_it_was_written(numbers: list[float]) -> None:
    (text,) = encode_vectors(np.array([numbers], dtype=np.float32))
    assert decode_vector(text, len(numbers)).tolist() == numbers


@given(
    st.text() | st.binary(max_size=64).map(lambda raw: base64.b64encode(raw).decode()),
    st.integers(1, 32),
)
def test_what_is_read_of_any_text_are_k_dim_finite_numbers(text: str, k_dim: int) -> None:
    try:
        vector = decode_vector(text, k_dim)
    except VectorError:
        return
    assert vector.shape == (k_dim,)
    assert np.isfinite(vector).all()


@given(st.text(alphabet="0123456789-, \t\nx²٣") | st.text())
def test_a_list_of_nonces_is_read_or_refused_with_a_reason(text: str) -> None:
    try:
        nonces = parse_nonces(text, max_count=1000)
    except NonceListError:
        return
    assert 0 < len(nonces) <= 1000
    assert len(set(nonces)) == len(nonces)
    assert all(0 <= nonce <= MAX_NONCE for nonce in nonces)


@given(st.lists(NONCES, min_size=1, max_size=50, unique=True))
def test_a_list_of_nonces_is_read_as_it_was_written(nonces: list[int]) -> None:
    assert parse_nonces(",".join(map(str, nonces))) == nonces


@given(
    st.lists(
        st.lists(
            st.tuples(NONCES, st.floats(allow_nan=False, allow_infinity=False) | st.text()),
            min_size=1,
        )
    )
)
def test_entries_are_read_as_they_were_written(pairs: list[list[tuple[int, Any]]]) -> None:
    packed = [entries.pack(one).encode() for one in pairs]
    assert entries.unpack(packed) == [pair for one in pairs for pair in one]


ARTIFACTS = st.lists(
    st.fixed_dictionaries({"nonce": NONCES | JSON, "vector_b64": st.text() | JSON}) | JSON
)
BODIES = st.builds(
    lambda changes: body() | changes,
    st.dictionaries(
        st.sampled_from(sorted([*body(), "url", "batch_size", "stat_test"])), JSON, max_size=3
    ),
)


@given(BODIES | JSON)
def test_a_job_is_understood_or_refused_whatever_its_fields_hold(sent: Any) -> None:
    try:
        job = GenerateBody.model_validate_json(json.dumps(sent))
    except ValidationError:
        return
    assert all(0 <= nonce <= MAX_NONCE for nonce in job.nonces)
    assert job.spec().model_validate_json(job.spec().model_dump_json()) == job.spec()


@given(st.lists(NONCES, max_size=5, unique=True), ARTIFACTS)
def test_claims_are_those_of_the_nonces_or_refused(nonces: list[int], artifacts: list[Any]) -> None:
    sent = body(nonces=nonces, validation={"artifacts": artifacts})
    try:
        claims = GenerateBody.model_validate_json(json.dumps(sent)).claims()
    except (ValidationError, ClaimsError, BodyError):
        return
    assert claims is not None
    assert sorted(claims) == sorted(nonces)


@given(st.dictionaries(st.sampled_from(sorted(ProofBatchBody.model_fields)), JSON))
def test_a_batch_of_distances_is_understood_or_refused(sent: Any) -> None:
    try:
        batch = ProofBatchBody.model_validate_json(json.dumps(sent))
    except ValidationError:
        return
    assert len(batch.nonces) == len(batch.dist)
