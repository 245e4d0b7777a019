from unittest import mock

import pytest
import torch

from poc_core.arithmetic import fused
from poc_core.arithmetic.reflections import (
    householder_vectors,
    layer_vectors,
    reflect,
    reflect_terms,
)
from tests.harness.golden import PRIMITIVES
from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")

CPU = torch.device("cpu")


def reference_vector() -> torch.Tensor:
    case = PRIMITIVES["householder_vector"]
    return householder_vectors([case["seed_string"]], case["dim"], CPU)[0]


def test_vector_is_the_references() -> None:
    torch.testing.assert_close(
        reference_vector(),
        torch.tensor(PRIMITIVES["householder_vector"]["values"]),
        rtol=0,
        atol=1e-6,
    )


def test_reflection_is_the_references() -> None:
    case = PRIMITIVES["householder_apply"]
    y = reflect(torch.tensor(case["x"]), reference_vector())
    torch.testing.assert_close(y, torch.tensor(case["y"]), rtol=0, atol=1e-6)


def test_reflecting_twice_changes_nothing() -> None:
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(reflect(reflect(x, reference_vector()), reference_vector()), x)


def test_reflecting_leaves_its_argument_alone() -> None:
    x = torch.ones(2, 16)
    reflect(x, reference_vector())
    assert torch.equal(x, torch.ones(2, 16))


def test_layer_vectors_are_unit_vectors_named_by_layer() -> None:
    vectors = layer_vectors("TEST_BLOCK", 3, 16, CPU, torch.float32)
    assert torch.equal(vectors[0], reference_vector())
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))


def test_layer_vectors_are_cast_after_they_are_normalised() -> None:
    exact = layer_vectors("block", 2, 128, CPU, torch.float32)
    assert torch.equal(
        layer_vectors("block", 2, 128, CPU, torch.bfloat16), exact.to(torch.bfloat16)
    )


def test_the_kernel_takes_each_stream_of_hyper_connections_as_a_row() -> None:
    run_interpreted(__name__, "check_streams()")


def check_streams() -> None:
    """Hidden states (20, 512) and a residual of four streams: by the kernel, in place."""
    generator = torch.Generator().manual_seed(2)
    x, residual = (
        torch.randn(20, *streams, 512, generator=generator).bfloat16() for streams in ((), (4,))
    )
    v = layer_vectors("block", 1, 512, CPU, torch.bfloat16)[0]
    plain = reflect_terms([x, residual], v)
    terms = [x.clone(), residual.clone()]
    with mock.patch.object(fused, "is_on", return_value=True):
        done = reflect_terms(terms, v)
        (rows,) = reflect_terms([residual.view(80, 512).clone()], v)
    assert [one.data_ptr() for one in done] == [one.data_ptr() for one in terms]
    assert torch.equal(done[1].view(80, 512), rows)
    # A processor adds in another order than the kernel.
    for one, other in zip(done, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)
