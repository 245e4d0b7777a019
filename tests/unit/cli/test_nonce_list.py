"""Lists of nonces as people type them."""

import pytest

from cli.nonce_list import MAX_NONCE, NonceListError, parse_nonces


@pytest.mark.parametrize(
    ("text", "nonces"),
    [
        ("7", [7]),
        ("0,1,2", [0, 1, 2]),
        ("0-3", [0, 1, 2, 3]),
        ("5,10-12, 3", [5, 10, 11, 12, 3]),
        (" 4 - 5 ", [4, 5]),
        ("9-9", [9]),
        (str(MAX_NONCE), [MAX_NONCE]),
        (f"{MAX_NONCE - 1}-{MAX_NONCE}", [MAX_NONCE - 1, MAX_NONCE]),
        ("007", [7]),
        pytest.param("0" * 5000, [0], id="5,000 zeros"),
    ],
)
def test_reads_numbers_and_ranges_in_their_order(text: str, nonces: list[int]) -> None:
    assert parse_nonces(text) == nonces


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "No nonces given"),
        ("  ", "No nonces given"),
        ("1,,2", "There is an empty place between two commas"),
        ("1,", "empty place"),
        ("one", '"one" is no nonce'),
        ("1.5", '"1.5" is no nonce'),
        ("1-2-3", '"1-2-3" is no nonce'),
        ("9-3", "runs backwards; write 3-9"),
        ("-1", '"-1" is negative'),
        ("-5-3", '"-5-3" is negative'),
        ("3--5", '"3--5" is negative'),
        ("-0", '"-0" is negative'),
        (str(MAX_NONCE + 1), f"beyond the largest nonce, {MAX_NONCE}"),
        ("1" * 5000, "beyond the largest nonce"),
        (f"0-{MAX_NONCE}", "more than 1,000,000 nonces"),
        ("0-9,0-999999", "more than 1,000,000 nonces"),
        ("1,2,1", "Nonce 1 is given twice"),
        ("0-5,3", "Nonce 3 is given twice"),
    ],
)
def test_refuses_what_is_no_list_of_nonces_and_says_why(text: str, message: str) -> None:
    with pytest.raises(NonceListError, match=message.replace("(", r"\(")):
        parse_nonces(text)


def test_the_limit_can_be_set() -> None:
    with pytest.raises(NonceListError, match="more than 10 nonces"):
        parse_nonces("0-10", max_count=10)
    assert len(parse_nonces("0-9", max_count=10)) == 10
