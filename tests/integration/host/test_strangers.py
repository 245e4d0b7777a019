"""A stranger on the machine of a `proofline up` that wants keys. Of a node by compose:
test_compose_services.py.
"""

from collections.abc import Iterator

import pytest

from tests.integration.strangers import doors_of, knock_at
from tests.stacks.up import Up

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    up = Up(
        "--model",
        "tiny-qwen3",
        "--engine",
        "synthetic",
        "--port",
        "0",
        env={"POC_REQUIRE_KEYS": "always"},
    )
    yield up
    up.end()


def test_gets_nothing_from_any_port(up: Up) -> None:
    doors = doors_of(up.below)
    heard = knock_at(doors)
    assert [one for one in heard if not one.is_refusal] == []
    assert up.base_url in {
        f"http://{one.door.host}:{one.door.port}" for one in heard if one.is_http
    }
    assert any(one.answer.startswith(b"-NOAUTH") for one in heard)
    assert len(doors) == 2  # the API and Redis
