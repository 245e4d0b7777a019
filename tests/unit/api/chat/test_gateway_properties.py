"""What the gateway makes of any headers and queries."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from api.chat.gateway import _HOP_HEADERS, _end_to_end, _url
from tests.harness.fuzz import FUZZ
from tests.harness.samples import worker_record

pytestmark = FUZZ
CHAT = "/v1/chat/completions"
TOKEN = st.text("abcdefghijklmnopqrstuvwxyzABCDEFXYZ-_0123456789", min_size=1, max_size=12).map(
    str.encode
)
VALUE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.encode)


@given(headers=st.lists(st.tuples(TOKEN, VALUE), max_size=8), named=st.lists(TOKEN, max_size=4))
def test_whatever_headers_come_only_those_of_the_connection_go(
    headers: list[tuple[bytes, bytes]], named: list[bytes]
) -> None:
    passed = _end_to_end([*headers, (b"Connection", b" , ".join(named))])
    said = [value.split(b",") for name, value in headers if name.lower() == b"connection"]
    hop = (
        _HOP_HEADERS
        | {name.lower() for name in named}
        | {token.strip().lower() for part in said for token in part}
    )
    assert passed == [header for header in headers if header[0].lower() not in hop]


@given(st.binary(max_size=30).filter(lambda query: not set(query) & set(b" \r\n#")))
def test_whatever_the_query_the_path_and_the_worker_stay(query: bytes) -> None:
    record = replace(worker_record(), chat_host="10.0.0.7", port=81)
    url = _url(record, CHAT.encode() + b"?" + query)
    assert (url.host, url.port) == ("10.0.0.7", 81)
    assert url.raw_path.startswith(CHAT.encode() + b"?")
