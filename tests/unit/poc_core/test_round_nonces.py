"""The nonces of a round are those of the protocol, up to the largest."""

from poc_core.fields import MAX_NONCE
from tests.harness.samples import round_config


def nonces(node_id: int, node_count: int, group_id: int = 0, n_groups: int = 1) -> range:
    return round_config(
        node_id=node_id, node_count=node_count, group_id=group_id, n_groups=n_groups
    ).nonces


def test_follows_the_formula_of_the_protocol() -> None:
    assert list(nonces(2, 7, 1, 3)[:4]) == [9, 30, 51, 72]


def test_groups_of_a_node_yield_each_of_its_nonces_once() -> None:
    groups = [nonces(1, 4, group, 3) for group in range(3)]
    together = sorted(nonce for group in groups for nonce in group[:100])
    assert together == list(nonces(1, 4)[:300])


def test_ends_at_the_largest_nonce() -> None:
    every = nonces(0, 1)
    assert list(every[MAX_NONCE - 1 : MAX_NONCE + 99]) == [MAX_NONCE - 1, MAX_NONCE]
    assert list(every[MAX_NONCE + 1 : MAX_NONCE + 101]) == []


def test_a_node_beyond_the_largest_nonce_has_none() -> None:
    assert list(nonces(MAX_NONCE, MAX_NONCE + 1, 1, 2)[:5]) == []
