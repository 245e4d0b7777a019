"""How a host comes to its access: by a token once, then from its file."""

from pathlib import Path

import pytest

from cli.join import joining
from cli.join.access import Access, AccessError, read_access, write_access
from cli.join.asking import Api
from cli.join.joining import access_of, address_towards, set_up, token_of
from cli.join.options import TOKEN_VARIABLE, Join
from cli.terminal import UsageError
from poc_core.joining.offers import Offer, OfferError, SealedOffer
from poc_core.joining.tokens import Token
from tests.harness.samples import known

URL = "https://node.example.org:8443"
OFFER = Offer(
    name="gpu2",
    user="host-gpu2",
    salt="5a17",
    redis_url="redis://127.0.0.1:6379/0",
    settings={"POC_WORKER_TTL_S": "20", "POC_CHAT_POLICY": "off", "LD_PRELOAD": "x"},
)


class Asked:
    """An API in the place of the network's: what it was asked with, and what it answers."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.answer: SealedOffer | None = None

    def join(self, _api: Api, token_id: str) -> SealedOffer:
        self.ids.append(token_id)
        assert self.answer is not None
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(Api, "join", lambda api, token_id: asked.join(api, token_id))
    return asked


@pytest.fixture
def token(asked: Asked) -> Token:
    token = Token.new()
    asked.answer = SealedOffer.of(OFFER, token)
    return token


def options(tmp_path: Path, **changes: object) -> Join:
    return Join(join=URL, join_file=tmp_path / "joined.json")._replace(**changes)  # type: ignore[arg-type]


def test_a_token_is_shown_once_and_later_starts_need_none(
    tmp_path: Path, asked: Asked, token: Token
) -> None:
    first = known(access_of(options(tmp_path, token=token.text), {}))
    assert first.redis_url == OFFER.url_for(token)
    assert token.text not in (tmp_path / "joined.json").read_text()
    again = options(tmp_path)
    assert access_of(again, {}) == first
    assert access_of(again._replace(token=token.text), {}) == first  # as a supervisor repeats it
    assert access_of(again._replace(join=None), {}) == first
    assert asked.ids == [token.id]


def test_a_new_token_joins_anew(tmp_path: Path, asked: Asked, token: Token) -> None:
    first = access_of(options(tmp_path, token=token.text), {})
    other = Token.new()
    asked.answer = SealedOffer.of(OFFER, other)
    second = access_of(options(tmp_path, token=other.text), {})
    assert first is not None
    assert second is not None
    assert first.redis_url != second.redis_url
    assert read_access(tmp_path / "joined.json") == second


@pytest.mark.promise(
    "an attacker between a host and the API", "learns nothing; hosts refuse changed answers"
)
def test_a_tampered_answer_is_not_used(tmp_path: Path, asked: Asked, token: Token) -> None:
    assert asked.answer is not None
    text = asked.answer.offer.replace("127.0.0.1", "10.6.6.6")
    asked.answer = asked.answer.model_copy(update={"offer": text})
    with pytest.raises(OfferError):
        access_of(options(tmp_path, token=token.text), {})
    assert not (tmp_path / "joined.json").exists()


def test_no_token_is_spent_where_the_answer_could_not_be_kept(
    tmp_path: Path, asked: Asked, token: Token
) -> None:
    (tmp_path / "joined.json.new").mkdir()  # where it is written first
    with pytest.raises(AccessError, match="--join-file"):
        access_of(options(tmp_path, token=token.text), {})
    assert asked.ids == []


def test_where_a_token_comes_from(tmp_path: Path, token: Token) -> None:
    file = tmp_path / "token"
    file.write_text(f"{token.text}\n")
    assert token_of(options(tmp_path, token_file=file), {}) == token
    env = {TOKEN_VARIABLE: token.text, "OTHER": "1"}
    assert token_of(options(tmp_path, token=token.text), env) == token
    assert env == {"OTHER": "1"}  # which children inherit
    with pytest.raises(UsageError, match="exclude each other"):
        token_of(options(tmp_path, token=token.text, token_file=file), {})
    with pytest.raises(UsageError, match="cannot be read"):
        token_of(options(tmp_path, token_file=tmp_path / "none"), {})


def test_what_does_not_go_together(tmp_path: Path, asked: Asked, token: Token) -> None:
    with pytest.raises(UsageError, match="leave out --redis-url"):
        access_of(options(tmp_path, token=token.text), {"POC_REDIS_URL": "redis://x"})
    with pytest.raises(UsageError, match="needs --join"):
        access_of(options(tmp_path, join=None, token=token.text), {})
    with pytest.raises(UsageError, match="needs a token"):
        access_of(options(tmp_path), {})
    with pytest.raises(UsageError, match="is not encrypted"):
        access_of(options(tmp_path, join="http://node", token=token.text), {})
    assert asked.ids == []


def test_without_any_of_it_nothing_changes(tmp_path: Path) -> None:
    assert access_of(options(tmp_path, join=None), {}) is None
    access = Access(api=URL, token_id="1d", name="gpu2", redis_url="redis://host-gpu2:pw@h/0")
    write_access(tmp_path / "joined.json", access)
    assert access_of(options(tmp_path, join=None), {"POC_REDIS_URL": "redis://x"}) is None


def test_a_host_is_set_up_as_the_operator_said_and_its_own_settings_win(
    tmp_path: Path, token: Token
) -> None:
    access = known(access_of(options(tmp_path, token=token.text), {}))
    env = {"POC_CHAT_POLICY": "yield"}
    set_up(access, tmp_path / "joined.json", env)
    assert env == {
        "POC_REDIS_URL": OFFER.url_for(token),
        "POC_HOST_NAME": "gpu2",
        "POC_CHAT_HOST": "127.0.0.1",  # on the way to Redis, which is here
        "POC_WORKER_TTL_S": "20",
        "POC_CHAT_POLICY": "yield",
    }


def test_no_way_is_no_address() -> None:
    assert address_towards("no-such-name.invalid", 6379) is None
    assert joining.address_towards("127.0.0.1", 6379) == "127.0.0.1"
