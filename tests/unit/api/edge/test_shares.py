"""Who counts as one client, and who holds most."""

import random

import pytest

from api.edge.shares import CLIENT, Holdings, client_of, of_address


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2::3", "20010db800010002::/64"),
        ("2001:db8:1:2:ffff::", "20010db800010002::/64"),
        ("fe80::1%eth0", "fe80000000000000::/64"),
        ("testclient", "testclient"),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(host: str, client: str) -> None:
    assert of_address(host) == client


def test_a_key_says_more_than_an_address() -> None:
    scope = {"type": "http", "client": ("192.0.2.1", 1)}
    assert client_of(scope) == "192.0.2.1"
    assert client_of({**scope, CLIENT: "key users"}) == "key users"
    assert client_of({"type": "http"}) == ""


def test_the_largest_holder_is_known_after_any_changes() -> None:
    chance, held = random.Random(1), dict[str, list[int]]()
    holdings: Holdings[int] = Holdings()
    for thing in range(3000):
        client = f"client {chance.randrange(20)}"
        if held.get(client) and chance.random() < 0.49:
            gone = held[client].pop(chance.randrange(len(held[client])))
            holdings.remove(client, gone)
        else:
            held.setdefault(client, []).append(thing)
            holdings.add(client, thing)
        assert len(holdings) == sum(map(len, held.values()))
        most = max(map(len, held.values()))
        largest = [things for things in held.values() if len(things) == most]
        if most:
            assert holdings.oldest() in [things[0] for things in largest]
            assert holdings.youngest() in [things[-1] for things in largest]


def test_of_equal_holders_the_first_that_held_so_much_counts() -> None:
    holdings: Holdings[str] = Holdings()
    for thing in ("a1", "a2", "b1"):
        holdings.add(thing[0], thing)
    holdings.remove("a", "a2")  # holds one again, after b
    assert holdings.oldest() == "b1"
