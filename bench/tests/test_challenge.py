"""Segments of a PoC challenge one after the other, as `bench.challenge` runs hundreds of them."""

import pytest

from bench import challenge
from bench.challenge import Chat, Engine, Found

SEGMENTS = 8

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("challenge"), pytest.mark.slow]


def test_no_nonce_of_any_segment_is_lost_and_no_key_of_an_earlier_one_is_left() -> None:
    found = Found()
    with challenge.node(Engine.SYNTHETIC, Chat.NONE) as node:
        node.run(SEGMENTS, 1.0, found)
    assert found.problems == []
    assert (len(found.paces), found.n_nonces > SEGMENTS) == (SEGMENTS, True)
