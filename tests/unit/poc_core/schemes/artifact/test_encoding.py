import base64
from typing import Any

import numpy as np
import pytest

from poc_core.errors import VectorError
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.contract import CONTRACT
from poc_core.schemes.artifact.encoding import decode_vector, encode_vectors


def b64(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers, dtype="<f2").tobytes()).decode()


def test_encodes_float16_little_endian_base64() -> None:
    assert encode_vectors(np.array([[1.0, -2.0], [0.5, 0.0]], dtype=np.float32)) == [
        "ADwAwA==",
        "ADgAAA==",
    ]


def test_decoding_undoes_encoding() -> None:
    vectors = (
        np.linspace(-1, 1, 24, dtype=np.float32)
        .reshape(2, 12)
        .astype(np.float16)
        .astype(np.float32)
    )
    decoded = [decode_vector(text, 12) for text in encode_vectors(vectors)]
    np.testing.assert_array_equal(decoded, vectors)


def test_no_vectors_encode_to_nothing() -> None:
    assert encode_vectors(np.empty((0, 12), dtype=np.float32)) == []


@pytest.mark.parametrize("text", ["not base64!", "ADw", "ADwAwA==\n", "ADwA wA==", "ÄDwA", "-_-_"])
def test_refuses_what_is_no_base64(text: str) -> None:
    with pytest.raises(VectorError, match="not base64"):
        decode_vector(text, 2)


@pytest.mark.parametrize("text", ["", b64(1), b64(1, 2, 3), base64.b64encode(b"abc").decode()])
def test_refuses_a_wrong_length_and_says_the_right_one(text: Any) -> None:
    with pytest.raises(VectorError, match="2 float16 numbers take 4"):
        decode_vector(text, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_refuses_what_is_not_finite(bad: Any) -> None:
    with pytest.raises(VectorError, match="finite"):
        decode_vector(b64(0.5, bad), 2)


def test_invented_vectors_are_units_too() -> None:
    spec = ProofSpec(scheme="artifact", block_hash="b", public_key="k", seq_len=8)
    texts: list[Any] = CONTRACT.synthetic_values(spec, range(20), 64)
    norms = [np.linalg.norm(decode_vector(text, 12)) for text in texts]
    assert norms == pytest.approx([1.0] * 20, abs=2e-3)
