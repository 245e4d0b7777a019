"""protocol.md, sections 2 and 3, against the reference's numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import poc_core.schemes
from poc_core.arithmetic.reflections import reflect
from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes import scheme_names
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.schemes.base import load_scheme
from poc_core.schemes.distance import proof as distance
from tests.harness.golden import PRIMITIVES

CPU = torch.device("cpu")


def make(
    scheme: str,
    *,
    hidden: int = 128,
    block: Any = "BH",
    key: Any = "PK",
    dtype: Any = torch.float32,
    seq_len: Any = 4,
    **options: Any,
) -> Any:
    spec = ProofSpec(
        scheme=scheme, block_hash=block, public_key=key, seq_len=seq_len, options=options
    )
    return load_scheme(spec, hidden_size=hidden, n_layers=3, device=CPU, dtype=dtype)


def states(n: int, hidden: int = 128) -> torch.Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("case", PRIMITIVES["pick_indices"], ids=lambda c: f"{c['k']}of{c['dim']}")
def test_picks_are_the_references_in_its_order(case: Any) -> None:
    about = {"block": case["block_hash"], "key": case["public_key"]}
    scheme = make("artifact", hidden=case["dim"], k_dim=case["k"], **about)
    assert scheme.pick(case["nonces"]).tolist() == case["indices"]


def test_picking_one_dimension_picks_the_smallest_score() -> None:
    many, one = make("artifact", k_dim=128), make("artifact", k_dim=1)
    assert one.pick([5]).shape == (1, 1)
    assert sorted(many.pick([5])[0].tolist()) == list(range(128))


def test_rotation_is_the_references() -> None:
    case = PRIMITIVES["haar_rotation"]
    x = torch.tensor(case["x"])
    scheme = make("artifact", block=case["block_hash"], key=case["public_key"], k_dim=x.shape[1])
    torch.testing.assert_close(
        scheme.rotate(case["nonces"], x), torch.tensor(case["y"]), rtol=0, atol=1e-6
    )


def test_rotation_in_parts_is_the_rotation_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, x = make("artifact"), states(3, 12)
    at_once = scheme.rotate([1, 2, 3], x)
    monkeypatch.setattr("poc_core.schemes.artifact.proof._ROTATION_ELEMENTS", 3 * 12 * 4)
    assert torch.equal(scheme.rotate([1, 2, 3], x), at_once)


@pytest.mark.parametrize("name", ["artifact", "distance"])
def test_a_value_does_not_depend_on_its_batch(name: str) -> None:
    scheme, x = make(name), states(5)
    together = scheme.finish([9, 1, 4, 0, 7], x)
    alone = [scheme.finish([nonce], x[i : i + 1])[0] for i, nonce in enumerate([9, 1, 4, 0, 7])]
    if name == "artifact":
        together, alone = (
            [decode_vector(v, 12).tolist() for v in values] for values in (together, alone)
        )
    assert together == [pytest.approx(value, abs=1e-3) for value in alone]


@pytest.mark.parametrize("k_dim", [1, 12, 128])
def test_artifacts_are_unit_vectors_of_k_dim_numbers(k_dim: int) -> None:
    for value in make("artifact", k_dim=k_dim).finish([0, 1], states(2)):
        assert (decode_vector(value, k_dim) ** 2).sum() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("name", ["artifact", "distance"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_excluded(
    name: str, bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x = states(3)
    clean = make(name).finish([10, 11, 12], x)
    x[1, 5] = bad
    assert make(name).finish([10, 11, 12], x) == [clean[0], None, clean[2]]
    assert "nonce 11 excluded" in caplog.text


@pytest.mark.parametrize("name", ["artifact", "distance"])
def test_no_nonces_have_no_values(name: str) -> None:
    scheme = make(name)
    assert scheme.finish([], torch.empty(0, 128)) == []
    assert scheme.inputs([]).shape == (0, 4, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_artifact_layers_are_reflected_in_the_models_dtype(dtype: Any) -> None:
    scheme = make("artifact", dtype=dtype)
    x = states(6).view(2, 3, 128).to(dtype)
    (y,) = scheme.transform_terms(1, [x])
    assert y.dtype == dtype
    assert torch.equal(y, reflect(x, scheme.layer_vectors[1]))
    assert not torch.equal(y, scheme.transform_terms(2, [x])[0])


def test_layer_hooks_normalise_and_then_reflect() -> None:
    scheme = make("distance", randomization="layer_hooks")
    (y,) = scheme.transform_terms(0, [7 * states(2)])
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(2))
    torch.testing.assert_close(
        y, reflect(states(2) / states(2).norm(dim=-1, keepdim=True), scheme.layer_vectors[0])
    )


def test_who_transforms_layers_and_who_may_transform_a_sum() -> None:
    by_flips, by_hooks = make("distance"), make("distance", randomization="layer_hooks")
    artifact = make("artifact")
    assert (artifact.transforms_layers, artifact.transform_is_linear) == (True, True)
    assert (by_flips.transforms_layers, by_hooks.transforms_layers) == (False, True)
    assert not by_hooks.transform_is_linear


def test_stronger_rng_changes_the_inputs() -> None:
    stronger = make("artifact", stronger_rng=True)
    assert not torch.equal(make("artifact").inputs([1]), stronger.inputs([1]))


def test_sign_flips_are_the_references() -> None:
    case = PRIMITIVES["sign_flips"]
    scheme = make("distance", hidden=case["dim"], block=case["block_hash"], key=case["public_key"])
    assert scheme.signs(case["nonces"]).tolist() == case["values"]


def test_nonce_reflections_are_the_references() -> None:
    case = PRIMITIVES["nonce_reflection"]
    scheme = make("distance", hidden=case["dim"], block=case["block_hash"], key=case["public_key"])
    vector = scheme.nonce_vectors([case["nonce"]])[0, case["r"]]
    torch.testing.assert_close(vector, torch.tensor(case["values"]), rtol=0, atol=1e-6)


def test_target_is_the_references() -> None:
    case = PRIMITIVES["distance_target"]
    target = distance.target(case["block_hash"], CPU)
    assert target.shape == (case["dim"],)
    torch.testing.assert_close(target[:8], torch.tensor(case["first"]), rtol=0, atol=1e-6)


def test_projection_is_the_references() -> None:
    case = PRIMITIVES["distance_projection"]
    projection = distance.projection(case["block_hash"], case["hidden_size"], CPU)
    assert projection.shape == (case["output_dim"], case["hidden_size"])
    torch.testing.assert_close(
        projection[0, :8], torch.tensor(case["first_row_first"]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("randomization", ["sign_flips", "layer_hooks"])
def test_a_distance_takes_the_steps_of_the_protocol(randomization: str) -> None:
    scheme, given = make("distance", randomization=randomization), states(1)
    x = given * scheme.signs([7]) if randomization == "sign_flips" else given
    x = x / x.norm()
    vectors = scheme.nonce_vectors([7])[0]
    assert len(vectors) == 8
    for vector in vectors:
        x = reflect(x, vector)
    projected = x @ scheme.projection.T
    expected = (projected / projected.norm() - scheme.target).norm().item()
    assert scheme.finish([7], given) == [pytest.approx(expected, abs=1e-5)]


def test_distances_are_near_the_square_root_of_two() -> None:
    assert make("distance").finish([0, 1], states(2)) == [pytest.approx(2**0.5, abs=0.1)] * 2


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("artifact", {"k_dim": 0}, "k_dim must be an integer from 1 to 128"),
        ("artifact", {"k_dim": 129}, "k_dim"),
        ("artifact", {"k_dim": 2.0}, "k_dim"),
        ("artifact", {"k_dim": True}, "k_dim"),
        ("artifact", {"stronger_rng": "yes"}, "stronger_rng must be true or false"),
        (
            "artifact",
            {"randomization": "sign_flips"},
            "no option randomization; it knows k_dim, stronger_rng",
        ),
        ("distance", {"stronger_rng": True}, "no option stronger_rng"),
        ("distance", {"randomization": "none"}, "sign_flips or layer_hooks"),
        ("distance", {"randomization": ["layer_hooks"]}, "sign_flips or layer_hooks"),
        ("artifact", {"seq_len": 0}, "seq_len must be at least 1"),
    ],
)
def test_refuses_options_that_it_cannot_follow(scheme: str, options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(scheme, **options)


@pytest.mark.parametrize("name", ["base", "unknown", "", "../rng", "artifact.x", "__init__"])
def test_an_unknown_scheme_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(SpecError, match=f"use one of {', '.join(scheme_names())}"):
        make(name)


def test_a_scheme_is_found_by_its_folder() -> None:
    folders = Path(poc_core.schemes.__file__).parent.glob("*/contract.py")
    assert scheme_names() == sorted(contract.parent.name for contract in folders)
