from itertools import islice
from typing import Any

import pytest

from poc_core.arithmetic.nonces import MAX_NONCE, NonceSequence


def test_follows_the_formula_of_the_protocol() -> None:
    sequence = NonceSequence(node_id=2, node_count=7, group_id=1, n_groups=3)
    assert (sequence.offset, sequence.step) == (9, 21)
    assert list(sequence.take(0, 4)) == [9, 30, 51, 72]


def test_groups_of_a_node_yield_each_of_its_nonces_once() -> None:
    groups = [NonceSequence(1, 4, group, 3) for group in range(3)]
    together = sorted(nonce for group in groups for nonce in group.take(0, 100))
    assert together == list(NonceSequence(1, 4).take(0, 300))


def test_take_continues_where_the_last_ended() -> None:
    sequence = NonceSequence(3, 10)
    assert [*sequence.take(0, 4), *sequence.take(4, 3)] == list(sequence.take(0, 7))


def test_contains_what_it_yields_and_nothing_else() -> None:
    sequence = NonceSequence(2, 5, 1, 3)
    assert [nonce for nonce in range(60) if nonce in sequence] == [7, 22, 37, 52]
    assert 7 - 15 not in sequence


def test_ends_at_the_largest_nonce() -> None:
    sequence = NonceSequence(0, 1)
    assert sequence.count == 2**63
    assert list(sequence.take(MAX_NONCE - 1, 100)) == [MAX_NONCE - 1, MAX_NONCE]
    assert list(sequence.take(MAX_NONCE + 1, 100)) == []
    assert MAX_NONCE + 1 not in sequence


def test_the_last_nonce_fits_however_large_the_step() -> None:
    sequence = NonceSequence(6, 7, 2, 3)
    (last,) = sequence.take(sequence.count - 1, 1)
    assert MAX_NONCE - sequence.step < last <= MAX_NONCE
    assert list(sequence.take(sequence.count - 2, 10)) == [last - sequence.step, last]


def test_a_node_beyond_the_largest_nonce_has_none() -> None:
    sequence = NonceSequence(MAX_NONCE, MAX_NONCE + 1, 1, 2)
    assert sequence.count == 0
    assert list(sequence.take(0, 5)) == []


def test_takes_are_lazy() -> None:
    assert next(islice(NonceSequence(0, 2).take(0, 10**15), 3, None)) == 6


@pytest.mark.parametrize(
    "args", [(0, 0), (-1, 2), (2, 2), (0, 1, 1, 1), (0, 1, -1, 1), (0, 1, 0, 0)]
)
def test_refuses_an_id_that_its_count_does_not_have(args: Any) -> None:
    with pytest.raises(ValueError, match="must be from 0"):
        NonceSequence(*args)


@pytest.mark.parametrize("args", [(-1, 2), (1, -2)])
def test_refuses_negative_places(args: Any) -> None:
    with pytest.raises(IndexError, match="negative"):
        NonceSequence(0, 1).take(*args)
