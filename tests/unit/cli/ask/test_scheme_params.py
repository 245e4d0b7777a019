"""`--scheme NAME --param KEY=VALUE` of any scheme, its errors in its own words."""

from typing import Any

import pytest

from cli.ask.scheme_params import OfScheme, job_of, round_of
from cli.terminal import UsageError
from poc_core.errors import SpecError
from poc_core.schemes.contract import contracts, recognised

PLACE = {
    "block_hash": "b",
    "block_height": 0,
    "public_key": "k",
    "node_id": 0,
    "node_count": 1,
}
JOB = {**PLACE, "nonces": [1, 2]}
MODEL = {"model": "m", "seq_len": 8}


def made_or_why_not(make: Any, name: str, place: dict[str, Any]) -> Any:
    try:
        return make(OfScheme(name), place, **MODEL)
    except UsageError as error:
        return str(error)


LACKS = {
    ("decode", job_of): "The decode scheme: params.max_tokens: Field required.",
    ("decode", round_of): "The decode scheme: params.max_tokens: Field required.",
    ("distance", job_of): "The distance scheme has no jobs; start a round of it.",
    ("distance", round_of): "The distance scheme: r_target: Field required.",
}


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.name)
@pytest.mark.parametrize("make", [job_of, round_of])
def test_each_scheme_is_asked_for_by_its_name_or_says_what_it_lacks(
    contract: Any, make: Any
) -> None:
    found = made_or_why_not(make, contract.name, JOB if make is job_of else PLACE)
    lacks = LACKS.get((contract.name, make))
    assert (found if isinstance(found, str) else None) == lacks
    if lacks is None:
        assert recognised(found, contracts()) is contract


def test_parameters_go_where_the_scheme_has_them() -> None:
    artifact = OfScheme("artifact", ["k_dim=8", "poc_stronger_rng=true"])
    body = job_of(artifact, JOB, **MODEL, batch_size=4)
    assert body["params"] == {"model": "m", "seq_len": 8, "k_dim": 8}
    assert (body["poc_stronger_rng"], body["batch_size"]) == (True, 4)
    chains = round_of(OfScheme("decode", ["max_tokens=4"]), PLACE, **MODEL, url="http://a")
    assert chains["params"] == {**MODEL, "scheme": "decode", "max_tokens": 4}
    distances = round_of(OfScheme("distance", ["r_target=1.4"]), PLACE, **MODEL, url="http://a")
    assert (distances["r_target"], distances["callback_url"]) == (1.4, "http://a")


@pytest.mark.parametrize(
    ("scheme", "params", "said"),
    [
        ("artifact", ["k_dim"], r"--param takes KEY=VALUE, not 'k_dim'"),
        ("artifact", ["kdim=8"], r"The artifact scheme has no parameter kdim; it has .*k_dim"),
        ("artifact", ["k_dim=0"], r"The artifact scheme: params\.k_dim: .*greater than or equal"),
        ("decode", [], r"The decode scheme: params\.max_tokens: Field required"),
        ("distance", [], r"The distance scheme has no jobs; start a round of it"),
    ],
)
def test_a_mistake_is_told_in_the_schemes_words(scheme: str, params: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        job_of(OfScheme(scheme, params), JOB, **MODEL)


def test_an_unknown_scheme_is_told_with_those_there_are() -> None:
    with pytest.raises(SpecError, match="no proof scheme 'unheard'; use one of artifact, "):
        job_of(OfScheme("unheard"), JOB, **MODEL)


def test_flags_of_other_schemes_stand_beside_no_name() -> None:
    with pytest.raises(UsageError, match="--k-dim cannot be combined with --scheme"):
        OfScheme("decode").refuse_flags({"--k-dim": 8, "--max-tokens": None})
    with pytest.raises(UsageError, match="name the scheme too"):
        OfScheme(None, ["a=1"]).refuse_flags({})
