"""What the API's address means for callbacks."""

import pytest

from cli.addresses import receiver_settings


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1"])
def test_on_loopback_only_the_port_is_told(host: str) -> None:
    assert receiver_settings(host, 8123, {}) == {"POC_API_PORT": "8123"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "api.example"])
def test_beyond_loopback_strangers_do_not_reach_through_it(host: str) -> None:
    assert receiver_settings(host, 8000, {})["POC_CALLBACK_ALLOW"] == "public,private"


def test_what_the_operator_set_stays() -> None:
    assert receiver_settings("0.0.0.0", 8000, {"POC_CALLBACK_ALLOW": "loopback"}) == {
        "POC_API_PORT": "8000"
    }
