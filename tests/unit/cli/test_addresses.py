"""What the API's address means for callbacks, and which address a head may have."""

import pytest

from cli.addresses import head_of, receiver_settings
from cli.terminal import UsageError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1"])
def test_on_loopback_only_the_port_is_told(host: str) -> None:
    assert receiver_settings(host, [8123], {}) == {"POC_API_PORT": "8123"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "api.example"])
def test_beyond_loopback_strangers_do_not_reach_through_it(host: str) -> None:
    assert receiver_settings(host, [8000], {})["POC_CALLBACK_ALLOW"] == "public,private"


def test_what_the_operator_set_stays() -> None:
    assert receiver_settings("0.0.0.0", [8080, 5000], {"POC_CALLBACK_ALLOW": "loopback"}) == {
        "POC_API_PORT": "8080 5000"
    }


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("10.0.0.1:7070", ("10.0.0.1", 7070)),
        ("[fd00::1]:7070", ("fd00::1", 7070)),
        ("worker-a-0.worker-a.proofline:7070", ("worker-a-0.worker-a.proofline", 7070)),
    ],
)
def test_a_head_has_a_host_and_a_port(text: str, head: tuple[str, int]) -> None:
    assert head_of(text) == head


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", ":7070", "a:b", "a:0", "a:70700", "u@a:1", "a:1/x", "http://a:1"]
)
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--head is HOST:PORT, as in"):
        head_of(text)


@pytest.mark.parametrize("text", ["0.0.0.0:7070", "[::]:7070"])
def test_a_head_listens_on_one_address(text: str) -> None:
    with pytest.raises(UsageError, match="names one address of the host with --rank 0"):
        head_of(text)
