"""Whether an API can listen where it is told to."""

import socket

import pytest

from cli.supervise.ports import AddressError, reserve_port


def test_a_host_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(AddressError, match=r"Cannot listen on 192\.0\.2\.1"):
        reserve_port("192.0.2.1", 8000)


@pytest.mark.parametrize("host", ["../..", "x" * 64])
def test_what_is_no_host_is_an_error(host: str) -> None:
    with pytest.raises(AddressError, match="is no address or host name"):
        reserve_port(host, 8000)


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            AddressError, match=rf"port {port} .*stop what uses it, or choose another --port"
        ):
            reserve_port("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_an_error(port: int) -> None:
    with pytest.raises(AddressError, match=f"not {port}"):
        reserve_port("127.0.0.1", port)


def test_port_0_is_a_free_one() -> None:
    assert reserve_port("127.0.0.1", 0) > 0
