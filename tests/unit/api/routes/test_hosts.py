"""/api/v1/hosts: joining with a token."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.app import create_app
from poc_core.joining.invitations import HostUser, Invitation, Invitations
from poc_core.joining.offers import Offer, SealedOffer
from poc_core.joining.tokens import Token, hashed
from poc_core.settings import Settings
from poc_core.state.events import Events
from tests.harness.samples import Clock

JOIN, STANDING = "/api/v1/hosts/join", "/api/v1/hosts/standing"
Invited = Callable[..., Token]


@pytest.fixture
def invited(redis: Redis, clock: Clock) -> Invited:
    """A token whose host may join: invited(name)."""
    invitations = Invitations(redis, clock)

    def invite(name: str = "gpu2") -> Token:
        token = Token.new()
        offer = Offer(name=name, user=f"host-{name}", salt="5a17", redis_url="redis://10.0.0.1/0")
        host = HostUser(
            user=offer.user,
            password_sha256=hashed(token.password(offer.salt)),
            token_sha256=hashed(token.id),
            invited_at=clock(),
        )
        invitation = Invitation(name=name, expires_at=clock() + 60, redis="10.0.0.1:6379")
        invitations.add(host, invitation, SealedOffer.of(offer, token))
        return token

    return invite


def shown(token: Token) -> dict[str, str]:
    return {"Authorization": f"Bearer {token.id}"}


def test_a_token_is_worth_one_offer(client: TestClient, invited: Invited, redis: Redis) -> None:
    token = invited()
    before = client.get(STANDING, headers=shown(token))
    assert before.json() == {"name": "gpu2", "state": "invited", "redis": "10.0.0.1:6379"}
    answer = client.post(JOIN, headers=shown(token))
    assert SealedOffer.model_validate(answer.json()).opened(token).name == "gpu2"
    again = client.post(JOIN, headers=shown(token))
    assert (again.status_code, "was used" in again.json()["detail"]) == (403, True)
    assert client.get(STANDING, headers=shown(token)).json()["state"] == "joined"
    assert [event.text for event in Events(redis).read() if event.kind == "node"] == [
        "Host gpu2 joined, from testclient."
    ]


def test_an_expired_token_is_worth_nothing(
    client: TestClient, invited: Invited, clock: Clock
) -> None:
    token = invited()
    clock.now += 61
    answer = client.post(JOIN, headers=shown(token))
    assert (answer.status_code, "has expired" in answer.json()["detail"]) == (403, True)
    assert client.get(STANDING, headers=shown(token)).json()["state"] == "expired"


@pytest.mark.promise("a client that guesses hosts' tokens", "gets status 401, and soon 429")
@pytest.mark.parametrize("given", [None, "", "Bearer ", "Basic x", "Bearer proofline_x", "\xff"])
def test_what_is_no_tokens_id_opens_nothing(
    client: TestClient, invited: Invited, given: str | None
) -> None:
    invited()
    headers: Any = {} if given is None else {b"Authorization": given.encode("latin-1")}
    for answer in (client.post(JOIN, headers=headers), client.get(STANDING, headers=headers)):
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "hosts invite" in answer.json()["detail"]


def test_the_token_itself_is_not_what_the_api_knows(client: TestClient, invited: Invited) -> None:
    headers = {"Authorization": f"Bearer {invited().text}"}
    assert client.post(JOIN, headers=headers).status_code == 401


@pytest.mark.promise("a client that guesses hosts' tokens", "gets status 401, and soon 429")
def test_tokens_cannot_be_tried_in_number(
    client: TestClient, invited: Invited, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    monkeypatch.setattr(services.token_rates, "_clock", clock)
    token = invited()
    tried = [client.post(JOIN, headers=shown(Token.new())) for _ in range(30)]
    assert {answer.status_code for answer in tried[:10]} == {401}
    assert tried[-1].status_code == 429
    assert int(tried[-1].headers["Retry-After"]) > 0
    # not even a right one, from there; from elsewhere it is
    assert client.post(JOIN, headers=shown(token)).status_code == 429
    elsewhere = TestClient(client.app, client=("192.0.2.7", 1))
    assert elsewhere.post(JOIN, headers=shown(token)).status_code == 200


def test_a_host_needs_its_token_and_no_key(client: TestClient, invited: Invited) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    app = create_app(Settings(), services, listens_on="0.0.0.0")
    stranger, token = TestClient(app, client=("192.0.2.1", 1)), invited()
    assert stranger.get("/api/v1/state", headers=shown(token)).status_code == 401
    assert stranger.get("/api/v1/hosts/other", headers=shown(token)).status_code == 401
    assert stranger.post(JOIN, headers=shown(token)).status_code == 200
