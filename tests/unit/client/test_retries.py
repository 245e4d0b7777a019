"""When a request is sent again, and after how long."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from proofline.client.errors import ApiError
from proofline.client.retries import MAX_PAUSE_S, Patience, retry_after_s


def test_retry_after_is_a_number_of_seconds_or_a_date() -> None:
    assert retry_after_s("5") == 5
    assert retry_after_s(None) is None
    for nonsense in ("", "soon", "-3", "5.5", f"Wed, 21 Oct {10**20} 07:28:00 GMT"):
        assert retry_after_s(nonsense) is None
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert retry_after_s(in_a_minute) == pytest.approx(60, abs=30)
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 -0000") == 0


def test_pauses_double_up_to_a_limit() -> None:
    patience = Patience(1e6)
    error = ApiError("away")
    pauses = [
        patience.pause_s(error, is_repeatable=True, waits_for_start=False) for _ in range(2000)
    ]
    assert 0.125 <= pauses[0] <= 0.25
    assert 0.5 <= pauses[2] <= 1
    assert all(MAX_PAUSE_S / 2 <= pause <= MAX_PAUSE_S for pause in pauses[5:])


def test_what_would_take_longer_than_patience_is_not_waited_for() -> None:
    error = ApiError("full", 429, retry_after_s=60)
    with pytest.raises(ApiError, match="full"):
        Patience(30).pause_s(error, is_repeatable=True, waits_for_start=True)
    assert Patience(90).pause_s(error, is_repeatable=False, waits_for_start=False) == 60


def test_without_patience_nothing_is_tried_again() -> None:
    with pytest.raises(ApiError):
        Patience(0).pause_s(ApiError("away"), is_repeatable=True, waits_for_start=True)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 500])
def test_other_refusals_are_final(status: int) -> None:
    with pytest.raises(ApiError):
        Patience(60).pause_s(
            ApiError("no", status, retry_after_s=0), is_repeatable=True, waits_for_start=True
        )


@pytest.mark.parametrize("status", [429, 503])
def test_who_asks_for_no_pause_is_not_asked_without_one(status: int) -> None:
    """As proxies do, or by a date in the past: thousands of requests a second would follow."""
    error = ApiError("full", status, retry_after_s=0)
    patience = Patience(60)
    for _ in range(3):
        assert patience.pause_s(error, is_repeatable=False, waits_for_start=False) >= 0.1
