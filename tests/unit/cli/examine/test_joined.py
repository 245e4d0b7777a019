"""`proofline doctor` on a host that joins, or has joined."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.examine import joined
from cli.examine.findings import Finding, Subject, findings_of
from cli.join.access import Access, write_access
from cli.join.asking import Api, ApiAwayError, CertificateError, RefusedError
from cli.join.options import Join
from cli.supervise.redis_server import free_port
from poc_core.answers import HostStanding
from poc_core.joining.tokens import Token

URL = "https://node.example.org:8443"


class World:
    """What the API answers, and where Redis is."""

    skew_s: float | Exception = 0.0
    standing: str | Exception = "invited"
    port: int = 0

    def ask_clock(self, _api: Api) -> float:
        if isinstance(self.skew_s, Exception):
            raise self.skew_s
        return self.skew_s

    def ask_standing(self, _api: Api, _token_id: str) -> HostStanding:
        if isinstance(self.standing, Exception):
            raise self.standing
        told = {"name": "gpu2", "state": self.standing, "redis": f"127.0.0.1:{self.port}"}
        return HostStanding.model_validate(told)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(Api, "skew_s", lambda api: world.ask_clock(api))
    monkeypatch.setattr(Api, "standing", lambda api, token_id: world.ask_standing(api, token_id))
    monkeypatch.setattr(
        joined, "server", lambda settings: iter([Subject("redis").ok(settings.redis_url)])
    )
    for name in ("POC_REDIS_URL", "POC_HOST_NAME", "POC_CHAT_HOST"):  # set_up writes them
        monkeypatch.setenv(name, "")
        del os.environ[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        world.port = listener.getsockname()[1]
        yield world


@pytest.fixture
def joining(tmp_path: Path) -> Join:
    return Join(join=URL, token=Token.new().text, join_file=tmp_path / "joined.json")


def look(options: Join) -> list[tuple[str, str, str]]:
    found: list[Finding] = list(findings_of(joined.checks(options)))
    assert all(one.remedy for one in found if one.level == "problem")
    return [(one.about, one.level, one.says) for one in found]


def test_a_host_that_may_join(world: World, joining: Join) -> None:
    found = [(about, level) for about, level, _ in look(joining)]
    assert found == [(about, "ok") for about in ("api", "clock", "token", "redis")]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("joined", "The token of gpu2 was used already."),
        ("expired", "The token of gpu2 has expired."),
        ("revoked", "The token of gpu2 is revoked."),
        (RefusedError("The token is wrong: ... (HTTP 401)", 401), "The token is wrong: ... "),
    ],
)
def test_a_token_that_is_worth_nothing(
    world: World, joining: Join, state: str | Exception, says: str
) -> None:
    world.standing = state
    about, level, said = look(joining)[-1]
    assert (about, level) == ("token", "problem")
    assert said.startswith(says)


@pytest.mark.parametrize(
    "error",
    [
        ApiAwayError("No answer from"),
        CertificateError("The certificate"),
        RefusedError("This node does not answer to the name 'x'", 421),
    ],
)
def test_an_api_that_is_away_or_another(world: World, joining: Join, error: Exception) -> None:
    world.skew_s = error
    ((about, level, said),) = look(joining)
    assert (about, level) == ("api", "problem")
    assert said.startswith(str(error))


def test_a_clock_that_is_wrong(world: World, joining: Join) -> None:
    world.skew_s = -9.0
    differs = "This host's clock and the API's differ by 9.00 s."
    assert ("clock", "problem", differs) in look(joining)


def test_an_address_of_redis_that_does_not_lead_there(world: World, joining: Join) -> None:
    world.port = free_port()
    about, level, says = look(joining)[-1]
    assert (about, level) == ("redis", "problem")
    assert says.startswith(f"127.0.0.1:{world.port}, which the operator gave")


def test_a_host_that_has_joined(world: World, joining: Join) -> None:
    url = f"redis://host-gpu2:pw@127.0.0.1:{world.port}/0"
    access = Access(api=URL, token_id="1d", name="gpu2", redis_url=url)
    write_access(joining.join_file, access)
    world.standing = "joined"
    here = joining._replace(join=None, token=None)
    assert look(here)[-1] == ("redis", "ok", url)
    assert os.environ["POC_HOST_NAME"] == "gpu2"
    del os.environ["POC_REDIS_URL"]
    world.standing = "revoked"
    assert ("token", "problem", "This host, gpu2, is revoked.") in look(here)


def test_a_host_of_no_other_node_is_not_looked_at(world: World, joining: Join) -> None:
    here = joining._replace(join=None, token=None)
    assert look(here) == []
    write_access(joining.join_file, Access(api=URL, token_id="1d", name="g", redis_url="redis://h"))
    os.environ["POC_REDIS_URL"] = "redis://h"
    assert look(here) == []


def test_what_does_not_go_together_is_told(world: World, joining: Join) -> None:
    for options, says in (
        (joining._replace(token=None), "has not joined yet"),
        (joining._replace(token="x"), "is none of `proofline hosts invite`"),
        (joining._replace(join="http://10.0.0.1"), "is not encrypted"),
    ):
        ((about, level, said),) = look(options)
        assert (about, level) == ("joining", "problem")
        assert says in said
    os.environ["POC_REDIS_URL"] = "redis://h"
    ((_, _, said),) = look(joining)
    assert "leave out POC_REDIS_URL" in said
