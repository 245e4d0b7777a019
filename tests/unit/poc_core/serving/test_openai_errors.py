"""Errors as clients of OpenAI's API read them."""

from typing import Any

import httpx
import pytest

from poc_core.serving.openai_errors import error_body


def test_openais_own_client_reads_every_part() -> None:
    import openai  # here: every process of a run imports this module, one runs its test

    body = error_body(404, "There is no such model", "NotFoundError", "model")
    transport = httpx.MockTransport(lambda request: httpx.Response(404, json=body))
    # Not every release of openai takes an httpx.Client by this name.
    http: Any = httpx.Client(transport=transport)
    client = openai.OpenAI(base_url="http://node", api_key="none", http_client=http)
    with client, pytest.raises(openai.NotFoundError, match="There is no such model") as caught:
        client.models.list()
    assert (caught.value.type, caught.value.param, caught.value.code) == (
        "NotFoundError",
        "model",
        "404",
    )
