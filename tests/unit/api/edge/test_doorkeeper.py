"""Keys at the door: who is let in, to what, from where, and how often."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.app import create_app
from api.edge import doorkeeper, private_peers
from api.edge.doorkeeper import OPEN, ROLES, Rates, keys_wanted, role_of, salts_wanted
from api.edge.keys import OF_NETWORK_NODE, KeyFile, Role
from poc_core.settings import Settings
from proofline.client import exchange
from tests.harness.samples import Clock, body

STATUS = "/api/v1/pow/status"
STOP = "/api/v1/pow/stop"
CHAT = "/v1/chat/completions"
Opened = Callable[..., TestClient]


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


@pytest.fixture
def opened(client: TestClient, keys: KeyFile) -> Opened:
    """The API beyond loopback: opened(peer="10.0.0.9", trusted_networks=...)."""

    def open_to(
        peer: str = "192.0.2.1", listens_on: str = "0.0.0.0", **settings: Any
    ) -> TestClient:
        services = client.app.state.services  # type: ignore[attr-defined]
        app = create_app(Settings(api_keys_file=keys.path, **settings), services, listens_on)
        return TestClient(app, client=(peer, 1234), raise_server_exceptions=False)

    return open_to


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def paths(app: Any) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        for method in sorted(route.methods or ()):
            yield method, route.path


@pytest.mark.promise("a client without a key", "gets 401 for every path except the public ones")
def test_every_path_but_livez_wants_a_key(opened: Opened) -> None:
    stranger = opened()
    asked = {*paths(stranger.app), ("GET", "/nowhere"), ("POST", "/v9/api/v1/stop")}
    answers = {(method, path): stranger.request(method, path).status_code for method, path in asked}
    assert {path for (_, path), status in answers.items() if status != 401} == OPEN
    assert len(answers) > 20


def test_a_refusal_says_what_to_do(opened: Opened) -> None:
    answer = opened().get(STATUS)
    assert "proofline key new" in answer.json()["detail"]
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert "error" in opened().post(CHAT, json={"model": "x"}).json()


@pytest.mark.promise(
    "a client with a key", "may do what its role allows, and gets 403 for the rest"
)
@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.READ, {STATUS}),
        (Role.CHAT, {CHAT, "/score", "/v2/rerank"}),
        (Role.PROOFS, {STATUS, STOP}),
        (Role.DEPLOY, {STATUS, "/api/v1/stop"}),
    ],
)
def test_a_key_opens_what_its_role_is_for(
    opened: Opened, keys: KeyFile, role: Role, allowed: set[str]
) -> None:
    headers = bearer(keys.add("a", [role]))
    client = opened()
    answers = {STATUS: client.get(STATUS, headers=headers).status_code}
    for path in (STOP, "/api/v1/stop"):
        answers[path] = client.post(path, headers=headers).status_code
    for path in (CHAT, "/score", "/v2/rerank"):
        answers[path] = client.post(path, json={"model": "x"}, headers=headers).status_code
    assert {path for path, status in answers.items() if status not in (401, 403)} == allowed
    assert {status for path, status in answers.items() if path not in allowed} == {403}


@pytest.mark.parametrize("version", ["", "/v3.0.8", "/mlnode-308"])
def test_the_network_node_does_all_that_it_does_with_one_key(
    opened: Opened, keys: KeyFile, version: str, serve: Callable[..., Any]
) -> None:
    """As a node that it knows by base_url and auth_token."""
    serve("w1")
    headers = bearer(keys.add("network-node", OF_NETWORK_NODE))
    client, stranger = opened(), opened()
    asked = [
        *(("GET", path) for path in ("/health", "/readyz", "/v1/models", "/api/v1/metrics")),
        *(("GET", f"/api/v1/{path}") for path in ("state", "versions", "gpu/devices")),
        *(("GET", f"/api/v1/{path}") for path in ("gpu/driver", "models/list", "models/space")),
        *(("GET", f"/api/v1/inference/{path}") for path in ("up/status", "pow/status")),
        *(("POST", f"/api/v1/{path}") for path in ("stop", "models/status", "models/download")),
        *(("POST", f"/api/v1/inference/{path}") for path in ("up", "up/async", "down")),
        *(("POST", f"/api/v1/inference/pow/{path}") for path in ("init/generate", "stop")),
        ("POST", "/api/v1/inference/pow/generate"),
        ("GET", f"/api/v1/inference/pow/generate/{'0' * 32}"),
        ("DELETE", "/api/v1/models"),
        ("POST", CHAT),
    ]
    for method, path in asked:
        answer = client.request(method, version + path, headers=headers)
        assert answer.status_code not in (401, 403), (method, path)
        assert answer.status_code != 404 or path.endswith("0" * 32), (method, path)
        assert stranger.request(method, version + path).status_code == 401, (method, path)
    for probe in ("/health", "/readyz"):
        serve("w1")
        assert client.get(version + probe, headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
def test_a_key_may_come_as_anthropics_and_azures_clients_send_it(
    opened: Opened, keys: KeyFile, name: str
) -> None:
    key, other = keys.add("a", [Role.CHAT]), keys.add("b", [Role.CHAT])
    client = opened()

    def status(headers: dict[str, str]) -> int:
        return client.post(CHAT, json={"model": "x"}, headers=headers).status_code

    assert status({name: key}) == status({name: key} | bearer(key)) == 503
    assert status({name: "wrong"}) == status({name: other} | bearer(key)) == 401
    assert status({name: key, "Authorization": "Basic YTpi"}) == 401


@pytest.mark.parametrize("peer", ["192.0.2.1", "10.0.0.9"])
@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
def test_no_key_gets_to_a_worker(keys: KeyFile, peer: str, name: str) -> None:
    """Also none of a client in a trusted network, such as the network node with its auth_token."""
    key, seen = keys.add("a", list(Role)), set[str]()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(header.decode() for header, _ in scope["headers"])
        await Response()(scope, receive, send)

    settings = Settings(api_keys_file=keys.path, trusted_networks="10.0.0.0/8")
    client = TestClient(doorkeeper.Doorkeeper(inner, settings, True, []), client=(peer, 1234))
    value = f"Bearer {key}" if name == "authorization" else key
    assert client.post(CHAT, headers={name: value, "x-other": "1"}).status_code == 200
    assert seen & {name, "x-other"} == {"x-other"}


@pytest.mark.promise("a revoked key", "is refused from the next request on")
def test_a_revoked_key_opens_nothing_from_the_next_request_on(
    opened: Opened, keys: KeyFile
) -> None:
    headers, client = bearer(keys.add("a", [Role.READ])), opened()
    assert client.get(STATUS, headers=headers).status_code == 200
    keys.revoke("a")
    assert client.get(STATUS, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "given", ["", "Basic YTpi", "Bearer", "Bearer ", "Bearer proofline_x", "\xff"]
)
def test_what_is_no_key_opens_nothing(opened: Opened, keys: KeyFile, given: str) -> None:
    keys.add("a", list(Role))
    headers = {b"Authorization": given.encode("latin-1")}
    assert opened().get(STATUS, headers=headers).status_code == 401


@pytest.mark.promise("a client in POC_TRUSTED_NETWORKS", "needs no key; other clients need a key")
@pytest.mark.parametrize(
    ("peer", "status"),
    [("10.1.2.3", 200), ("::ffff:10.1.2.3", 200), ("11.0.0.1", 401), ("fd00::1", 200), ("x", 401)],
)
def test_trusted_networks_need_no_key(opened: Opened, peer: str, status: int) -> None:
    assert opened(peer, trusted_networks="10.0.0.0/8, fd00::/8").get(STATUS).status_code == status


@pytest.mark.promise("a client with a forged forwarding header", "is not trusted")
def test_a_header_makes_nobody_trusted(opened: Opened) -> None:
    headers = {"X-Forwarded-For": "10.1.2.3", "Forwarded": "for=10.1.2.3"}
    assert opened(trusted_networks="10.0.0.0/8").get(STATUS, headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("require_keys", "listens_on", "wanted"),
    [
        *[("auto", host, False) for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2")],
        *[("auto", host, True) for host in ("0.0.0.0", "10.0.0.7", "::", "node.example.org", "")],
        ("always", "127.0.0.1", True),
        ("never", "0.0.0.0", False),
    ],
)
def test_keys_are_wanted_beyond_loopback(require_keys: Any, listens_on: str, wanted: bool) -> None:
    assert keys_wanted(Settings(require_keys=require_keys), listens_on) is wanted
    # and so caches of clients' own
    assert salts_wanted(Settings(require_keys=require_keys), listens_on) is wanted


@pytest.mark.parametrize(("cache_salt", "wanted"), [("always", True), ("never", False)])
def test_caches_are_clients_own_as_the_operator_says(cache_salt: Any, wanted: bool) -> None:
    for listens_on in ("127.0.0.1", "0.0.0.0"):
        assert salts_wanted(Settings(cache_salt=cache_salt), listens_on) is wanted


def test_loopback_asks_for_none(opened: Opened) -> None:
    assert opened(listens_on="127.0.0.1").get(STATUS).status_code == 200


@pytest.mark.parametrize("key", ["a key of 16 characters or more", "ein Schlüssel mit 28 Zeichen"])
def test_the_key_of_the_environment_opens_everything(opened: Opened, key: str) -> None:
    client = opened(api_key=key)
    assert client.post(STOP, headers=dict(exchange.headers(key).raw)).status_code == 200


def test_every_path_of_the_table_exists(client: TestClient) -> None:
    assert set(ROLES) <= {path for _, path in paths(client.app)}


@pytest.mark.promise(
    "a client with a key", "may do what its role allows, and gets 403 for the rest"
)
def test_what_is_not_in_the_table_may_only_be_looked_at_without_the_role_deploy() -> None:
    assert role_of("/api/v1/new", "GET") is Role.READ
    assert role_of("/api/v1/new", "POST") is role_of(None, "DELETE") is Role.DEPLOY


class TestRates:
    def test_a_client_has_its_burst_and_then_its_rate(self) -> None:
        clock = Clock()
        rates = Rates(2, clock)
        assert [rates.take("a") for _ in range(20)] == [0.0] * 20
        assert rates.take("a") == pytest.approx(0.5)
        assert rates.take("b") == 0
        clock.now += 0.5
        assert rates.take("a") == 0

    def test_a_rate_below_one_in_ten_seconds_lets_one_pass(self) -> None:
        clock = Clock()
        rates = Rates(0.01, clock)
        assert rates.take("a") == 0
        assert rates.take("a") == pytest.approx(100)

    def test_beyond_it_the_api_answers_429(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        still = Clock()
        monkeypatch.setattr(doorkeeper, "Rates", lambda per_second, _: Rates(per_second, still))
        client = opened(listens_on="127.0.0.1", max_requests_per_s=0.5)
        answers = [client.post("/api/v1/pow/generate", json=body()) for _ in range(6)]
        assert [answer.status_code == 429 for answer in answers] == [False] * 5 + [True]
        assert int(answers[-1].headers["Retry-After"]) > 0
        assert client.get("/livez").status_code == 200

    def test_another_address_of_a_customers_network_is_no_other_client(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        still = Rates(0.1, Clock())
        monkeypatch.setattr(doorkeeper, "Rates", lambda *_: still)

        def status(peer: str) -> int:
            client = opened(peer, require_keys="never", max_requests_per_s=0.1)
            return client.get(STATUS).status_code

        assert [status("2001:db8::1"), status("2001:db8::2"), status("2001:db8:0:1::1")] == [
            *(200, 429, 200),
        ]


def test_a_wrong_key_is_told_apart_from_none(opened: Opened, keys: KeyFile) -> None:
    stranger = opened()
    assert stranger.get("/readyz").json()["detail"].startswith("This needs a key: send the header")
    wrong = stranger.get("/readyz", headers=bearer("proofline_wrong"))
    assert (wrong.status_code, wrong.json()["detail"].partition(":")[0]) == (
        401,
        "The key is wrong",
    )


class TestPrivatePeers:
    """POC_TRUSTED_NETWORKS=private, as in the image proofline-node behind nginx."""

    @pytest.fixture(autouse=True)
    def in_a_compose_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "route").write_text(
            "Iface Destination Gateway Flags RefCnt Use Metric Mask\n"
            "eth0 00000000 010012AC 0003 0 0 0 00000000\n"
            "eth0 000012AC 00000000 0001 0 0 0 0000FFFF\n"
            "eth1 000013AC 00000000 0001 0 0 0 0000FFFF\n"
            "eth1 090013AC 00000000 0005 0 0 0 FFFFFFFF\n"
            "eth1 FFFFFFFF 00000000 0005 0 0 0 FFFFFFFF\n"
        )
        nothing = 32 * "0"
        (tmp_path / "ipv6_route").write_text(
            f"fd{30 * '0'} 40 {nothing} 00 {nothing} 0 0 0 1 eth0\n"
            f"{nothing} 00 {nothing} 00 fdff{27 * '0'}9 0 0 0 3 eth0\n"
            f"fd{29 * '0'}2 80 {nothing} 00 {nothing} 0 0 0 1 lo\n"
        )
        found = private_peers.gateways(tmp_path)
        monkeypatch.setattr(private_peers, "_recent_gateways", lambda: found)

    @pytest.mark.parametrize(
        ("peer", "status"),
        [
            *[(peer, 200) for peer in ("172.18.0.5", "10.1.2.3", "192.168.7.7", "127.0.0.1")],
            *[(peer, 200) for peer in ("::ffff:172.18.0.5", "fd00::5", "::1")],
            *[(peer, 200) for peer in ("172.19.0.10", "fd00::3")],  # beside a route to one host
            # Docker shows these for clients that it forwards by itself, as from IPv6.
            *[(peer, 401) for peer in ("172.18.0.1", "172.19.0.1", "fd00::1", "fdff::9")],
            *[(peer, 401) for peer in ("203.0.113.7", "100.64.0.1", "2001:db8::1", "169.254.1.1")],
        ],
    )
    def test_private_networks_need_no_key_and_gateways_do(
        self, opened: Opened, peer: str, status: int
    ) -> None:
        assert opened(peer, trusted_networks="private").get(STATUS).status_code == status

    @pytest.mark.promise(
        "a client with a public address behind nginx or Docker",
        "needs a key even with POC_TRUSTED_NETWORKS=private",
    )
    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"X-Real-IP": "172.18.0.5", "X-Forwarded-For": "172.18.0.5"}, 200),
            ({"X-Forwarded-For": "10.0.0.9, 172.18.0.5"}, 200),
            ({"X-Forwarded-For": "203.0.113.7"}, 401),
            ({"X-Forwarded-For": "10.0.0.9, 203.0.113.7"}, 401),  # said by the client
            ({"X-Forwarded-For": "203.0.113.7, 10.0.0.9"}, 401),  # behind another proxy
            ({"X-Forwarded-For": "172.18.0.1"}, 401),  # forwarded by Docker itself
            ({"X-Real-IP": "203.0.113.7"}, 401),
            ({"X-Forwarded-For": "unknown"}, 401),
            ({"X-Forwarded-For": ""}, 401),
            ({"Forwarded": "for=10.0.0.9"}, 401),
            ({"X-Forwarded-For": ",".join(16 * ["10.0.0.9"])}, 200),
            ({"X-Forwarded-For": ",".join(17 * ["10.0.0.9"])}, 401),
        ],
    )
    def test_a_proxys_request_is_its_clients(
        self, opened: Opened, headers: dict[str, str], status: int
    ) -> None:
        client = opened("172.18.0.3", trusted_networks="private")
        assert client.get(STATUS, headers=headers).status_code == status

    def test_a_forwarded_address_makes_nobody_trusted(self, opened: Opened) -> None:
        client = opened("203.0.113.7", trusted_networks="private")
        assert client.get(STATUS, headers={"X-Forwarded-For": "10.0.0.9"}).status_code == 401

    def test_others_may_be_listed_beside(self, opened: Opened) -> None:
        settings = {"trusted_networks": "private, 100.64.0.0/10, 172.18.0.1"}
        for peer in ("100.64.0.1", "172.18.0.1", "10.0.0.1"):
            assert opened(peer, **settings).get(STATUS).status_code == 200
        headers = {"X-Forwarded-For": "100.64.0.1"}
        assert opened("172.18.0.3", **settings).get(STATUS, headers=headers).status_code == 200
