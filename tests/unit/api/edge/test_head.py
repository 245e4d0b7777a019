"""HEAD is answered wherever GET is."""

import pytest
from fastapi.testclient import TestClient


@pytest.mark.parametrize("path", ["/livez", "/api/v1/pow/status", "/metrics", "/openapi.json"])
def test_head_has_the_headers_of_get_and_no_body(client: TestClient, path: str) -> None:
    answer, got = client.head(path), client.get(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert set(answer.headers) == set(got.headers)
    assert answer.headers["content-type"] == got.headers["content-type"]
    if path in ("/livez", "/openapi.json"):  # the others' figures may have grown
        assert answer.headers["content-length"] == str(len(got.content))


def test_where_there_is_no_get_there_is_no_head(client: TestClient) -> None:
    assert client.head("/api/v1/pow/stop").status_code == 405
