"""A host's token, what is derived from it, and offers sealed with it."""

import pytest

from poc_core.joining.offers import SHARED, Offer, OfferError, SealedOffer
from poc_core.joining.tokens import Token, TokenError, hashed, new_salt
from poc_core.settings import Settings

OFFER = Offer(name="gpu2", user="host-gpu2", salt="5a17", redis_url="rediss://10.0.0.1:6379/0")


def test_tokens_are_long_random_and_found_by_scanners() -> None:
    tokens = {Token.new().text for _ in range(100)}
    assert len(tokens) == 100
    assert {(len(text), text.startswith("proofline_")) for text in tokens} == {(53, True)}


@pytest.mark.promise(
    "a host's token",
    "appears in no log, environment or process argument; "
    "Redis and the API never receive the token's secrets",
)
def test_nothing_shown_of_a_token_gives_it_or_the_password_away() -> None:
    token = Token.new()
    salt = new_salt()
    shown = {token.id, hashed(token.id), token.seal("x"), repr(token), salt}
    assert token.password(salt) not in shown
    assert not any(token.text in one or token.password(salt) in one for one in shown)
    assert token.password(salt) != token.password(new_salt())
    assert token.password(salt) != Token.new().password(salt)
    assert token.id == Token.read(f" {token.text}\n").id


@pytest.mark.parametrize("text", ["", "x", "proofline_short", "proofline_" + "é" * 43, "a" * 53])
def test_what_is_no_token_is_told_without_being_quoted(text: str) -> None:
    with pytest.raises(TokenError) as refused:
        Token.read(text)
    assert len(text) < 5 or text not in str(refused.value)


def test_an_offer_gives_the_host_its_url() -> None:
    token = Token.new()
    opened = SealedOffer.of(OFFER, token).opened(token)
    password = token.password(OFFER.salt)
    assert opened.url_for(token) == f"rediss://host-gpu2:{password}@10.0.0.1:6379/0"
    assert password not in SealedOffer.of(OFFER, token).model_dump_json()


def test_a_changed_offer_or_anothers_is_not_opened() -> None:
    token = Token.new()
    sealed = SealedOffer.of(OFFER, token)
    tampered = sealed.model_copy(update={"offer": sealed.offer.replace("10.0.0.1", "10.6.6.6")})
    for changed in (
        tampered,
        sealed.model_copy(update={"seal": "é"}),
        SealedOffer.of(OFFER, Token.new()),
    ):
        with pytest.raises(OfferError, match="not written by who made the token"):
            changed.opened(token)


def test_an_offer_of_another_version_is_told() -> None:
    token = Token.new()
    text = '{"version": 2}'
    with pytest.raises(OfferError, match="another version"):
        SealedOffer(offer=text, seal=token.seal(text)).opened(token)


def test_what_hosts_are_told_are_settings_and_no_secret_or_place() -> None:
    assert set(SHARED) <= {f"POC_{name.upper()}" for name in Settings.model_fields}
    assert not [name for name in SHARED if name.endswith(("_URL", "_KEY", "_FILE", "_HOST"))]
