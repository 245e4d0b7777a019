"""Callback urls: what is shown of one, and where one may lead."""

import ipaddress
from pathlib import Path

import pytest

from poc_core.callback_tls import CallbackTls
from poc_core.callbacks import (
    CallbackPolicy,
    is_of_this_machine,
    literal_address,
    receiver_of,
    redacted,
    without_secret,
)
from poc_core.errors import ForbiddenReceiverError, SettingsError
from poc_core.settings import Settings, load_settings
from poc_core.settings.callbacks import TlsNames

DEFAULT = Settings().callbacks
OWN_PORTS = frozenset({8000, 6379})


def allows(
    policy: CallbackPolicy,
    address: str,
    port: int = 9000,
    host: str = "receiver",
    is_own: bool = False,
) -> bool:
    try:
        policy.check(host, ipaddress.ip_address(address), port, OWN_PORTS, lambda _: is_own)
    except ForbiddenReceiverError:
        return False
    return True


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@host:9000/a%252Fb", "http://***@host:9000/a%252Fb"),
        ("https://token@host/", "https://***@host/"),
        ("http://us@er:sec@ret@host/", "http://***@host/"),
        ("http://user:secret@[::1]:9000/", "http://***@[::1]:9000/"),
        ("http://host/path/with@sign", "http://host/path/with@sign"),
        ("http://host:9000", "http://host:9000"),
        (None, None),
    ],
)
def test_a_url_is_shown_without_its_user_and_password(url: str | None, shown: str | None) -> None:
    assert redacted(url) == shown


def test_what_an_error_says_of_a_url_is_shown_without_its_user_and_password() -> None:
    assert without_secret("bad: user:secret@host", "http://user:secret@host/x") == "bad: ***@host"
    assert without_secret("bad: host", "http://host/x@y") == "bad: host"


@pytest.mark.parametrize(
    ("url", "receiver"),
    [
        ("http://HOST/x/generated", "host:80"),
        ("https://host/x", "host:443"),
        ("http://user:secret@host:9000/x", "host:9000"),
        ("http://[::1]:9000/x", "[::1]:9000"),
        ("http://host:bad/", ""),
        ("", ""),
    ],
)
def test_a_receiver_is_a_host_and_a_port(url: str, receiver: str) -> None:
    assert receiver_of(url) == receiver


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "10.1.2.3", "192.168.0.9", "172.17.0.1", "127.0.0.1", "::1", "fd12::9"]
)
def test_public_private_and_loopback_addresses_are_allowed_by_default(address: str) -> None:
    assert allows(DEFAULT, address)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "169.254.169.254",
            "169.254.1.1",
            "fe80::1",
            "fd00:ec2::254",
            "100.100.100.200",
            "168.63.129.16",
        ),
        # The same address as IPv6.
        *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"),
        *("0.0.0.0", "::", "224.0.0.1", "ff02::1"),
    ],
)
def test_link_local_and_metadata_addresses_are_not(address: str) -> None:
    assert not allows(DEFAULT, address)


def test_an_operator_may_name_a_link_local_address() -> None:
    assert allows(CallbackPolicy.of("169.254.7.0/24"), "169.254.7.1")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::ffff:127.0.0.1"]
)
@pytest.mark.parametrize("policy", ["public,private,loopback", "receiver,127.0.0.0/8,::/0"])
def test_the_nodes_own_ports_are_never_allowed_on_loopback(policy: str, address: str) -> None:
    assert not allows(CallbackPolicy.of(policy), address, port=8000)


def test_the_nodes_own_ports_are_not_allowed_on_this_machines_other_addresses() -> None:
    assert not allows(DEFAULT, "10.0.0.1", port=8000, is_own=True)
    assert allows(DEFAULT, "10.0.0.1", port=8000)  # another machine's
    assert allows(DEFAULT, "10.0.0.1", port=9000, is_own=True)


def test_only_what_is_named_is_allowed() -> None:
    policy = CallbackPolicy.of("Aggregator.example, 10.0.0.0/8")
    assert allows(policy, "8.8.8.8", host="aggregator.EXAMPLE")
    assert allows(policy, "10.9.9.9")
    assert not allows(policy, "8.8.8.8")
    assert not allows(policy, "127.0.0.1")


def test_without_loopback_it_is_refused() -> None:
    assert not allows(CallbackPolicy.of("public,private"), "127.0.0.1")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://169.254.169.254/latest",
            "http://[::ffff:169.254.169.254]/",
            "http://2852039166/",
            "http://0xa9.0xfe.0xa9fe/",
        ),
        *(
            "http://127.0.0.1:8000/api/v1/pow/stop",
            "http://localhost:8000",
            "http://127.1:8000",
            "http://a.localhost:6379",
        ),
    ],
)
def test_a_url_with_an_address_is_refused_before_anything_is_tried(url: str) -> None:
    with pytest.raises(ForbiddenReceiverError):
        DEFAULT.check_url(url, OWN_PORTS)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9100", "http://receiver:9000/poc", "http://[::1]:9100/"]
)
def test_a_url_is_admitted(url: str) -> None:
    DEFAULT.check_url(url, OWN_PORTS)


def test_a_name_is_refused_where_only_others_are_allowed() -> None:
    with pytest.raises(ForbiddenReceiverError, match="POC_CALLBACK_ALLOW"):
        CallbackPolicy.of("aggregator").check_url("http://elsewhere/", OWN_PORTS)


SAME_NAME = ["bücher.example", "BÜCHER.Example.", "xn--bcher-kva.example", "XN--BCHER-KVA.EXAMPLE."]


@pytest.mark.parametrize("named", SAME_NAME)
@pytest.mark.parametrize("called", SAME_NAME)
def test_a_name_is_compared_in_one_form_by_api_and_courier(named: str, called: str) -> None:
    policy = CallbackPolicy.of(named)
    policy.check_url(f"http://{called}:9000/", OWN_PORTS)
    assert allows(policy, "10.0.0.1", host=called)
    assert receiver_of(f"http://{called}/x") == "xn--bcher-kva.example:80"
    assert CallbackTls(TlsNames.of(named, "", Path("file"))).concerns(called)


@pytest.mark.parametrize("url", ["http://LOCALHOST.:8000", "http://a.localhost.:6379"])
def test_loopback_by_name_has_no_other_form(url: str) -> None:
    with pytest.raises(ForbiddenReceiverError, match="the node's own"):
        DEFAULT.check_url(url, OWN_PORTS)


@pytest.mark.parametrize(
    "host",
    [
        *("*.example", "a..b", "1.2.3.4.5", "-a.example", f"{'x' * 64}.example", "xn--é.example"),
        *("xn--a", "xn--zzzzzz99999.example"),
    ],
)
def test_a_url_whose_host_is_no_name_is_refused_at_once(host: str) -> None:
    with pytest.raises(ForbiddenReceiverError, match="host name"):
        DEFAULT.check_url(f"http://{host}/", OWN_PORTS)


@pytest.mark.parametrize("host", ["api", "my_service", "proofline-api-1", "1a.example", "[::1]"])
def test_a_url_of_any_name_is_admitted(host: str) -> None:
    DEFAULT.check_url(f"http://{host}:9000/", OWN_PORTS)


@pytest.mark.parametrize("policy", ["public,private,loopback", "receiver,172.18.0.0/16,fd00::/8"])
@pytest.mark.parametrize(
    ("address", "port", "is_allowed"),
    [
        ("172.18.0.3", 6379, False),
        ("::ffff:172.18.0.3", 6379, False),
        ("172.18.0.3", 9100, True),
        ("172.18.0.4", 6379, True),
        ("fd00::3", 8000, False),
    ],
)
def test_the_nodes_own_services_on_other_machines_are_not_allowed(
    policy: str, address: str, port: int, is_allowed: bool
) -> None:
    own = {
        (ipaddress.ip_address("172.18.0.3"), 6379),
        (ipaddress.ip_address("fd00::3"), 8000),
    }
    try:
        CallbackPolicy.of(policy).check("receiver", ipaddress.ip_address(address), port, own)
    except ForbiddenReceiverError:
        assert not is_allowed
    else:
        assert is_allowed


@pytest.mark.parametrize("setting", ["POC_CALLBACK_ALLOW", "POC_CALLBACK_TLS_HOSTS"])
@pytest.mark.parametrize(
    "text", ["*.x", "a..b", "300.1.1.1", "host:80", "aggregator.example,b c", "a/b", "%", "x" * 300]
)
def test_what_is_no_name_is_refused_at_the_start(
    setting: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, text)
    with pytest.raises(SettingsError, match=setting):
        load_settings()


@pytest.mark.parametrize("text", ["10.0.0.0/99", "http://host", "user@host"])
def test_a_setting_that_cannot_be_read_says_what_it_may_be(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POC_CALLBACK_ALLOW", text)
    with pytest.raises(
        SettingsError, match="POC_CALLBACK_ALLOW: must list public, private, loopback, host names"
    ):
        load_settings()


def test_own_ports_are_those_of_the_api_and_its_redis() -> None:
    assert Settings(api_port=9, redis_url="redis://h:7/0").node_ports == {9, 7}
    assert Settings(redis_url="redis://h/0").node_ports == {8000, 6379}
    assert Settings(api_port="8080 5000").node_ports == {8080, 5000, 6379}
    with pytest.raises(ValueError, match="must be a port from 1 to 65535, or several"):
        Settings(api_port="8080,5000")


def test_a_scope_does_not_make_an_address_another_one() -> None:
    assert literal_address("fd00:ec2::254%eth0") == ipaddress.ip_address("fd00:ec2::254")
    assert literal_address("name") is None


def test_an_address_of_this_machine_is_one_that_can_be_bound() -> None:
    assert is_of_this_machine(ipaddress.ip_address("127.0.0.1"))
    assert not is_of_this_machine(ipaddress.ip_address("192.0.2.77"))  # of documents, nobody's
    assert not is_of_this_machine(ipaddress.ip_address("2001:db8::77"))
