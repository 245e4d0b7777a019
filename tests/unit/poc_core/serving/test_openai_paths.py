"""Which paths of a worker's server the API passes on."""

import pytest

from poc_core.serving.openai_paths import USUAL, is_among, passed_on

# Paths of vLLM 0.32, started with all that adds any.
CLIENTS = [
    *(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/score",
    ),
    *(
        "/v1/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/messages/count_tokens",
    ),
    *(
        "/v1/responses/{response_id}/cancel",
        "/v1/chat/completions/batch",
        "/v2/embed",
        "/v2/rerank",
    ),
    *("/score", "/rerank", "/pooling", "/classify", "/cohere/v2/chat"),
    *(f"/v1/{path}/render" for path in ("chat/completions", "completions", "responses")),
]
OURS_ALONE = [
    *(
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/reset_prefix_cache",
    ),
    *(
        "/scale_elastic_ep",
        "/start_profile",
        "/update_weights",
        "/pause",
        "/resume",
        "/server_info",
        "/invocations",
    ),
    *(
        "/v1/sleep",
        "/v1/anything/{path:path}",
        "/metrics",
        "/abort_requests",
        "/inference/v1/generate",
    ),
    *(
        "/v2/sleep",
        "/cohere/v2/admin",
        "/cohere/sleep",
        "/score/weights",
        "/scores",
        "/load",
        "/shutdown",
    ),
    # What computes and is not bounded, and what a release may add.
    *("/generative_scoring", "/v1/systemone", "/v1/completions/derender", "/v1/score/new"),
]


def test_what_clients_ask_for_is_passed_on_and_nothing_else() -> None:
    routes = [("POST", path) for path in (*CLIENTS, *OURS_ALONE, "/tokenize", "/detokenize")]
    found = passed_on([*routes, ("HEAD", "/v1/score"), ("OPTIONS", "/v1/score")])
    assert found == sorted(f"POST {path}" for path in (*CLIENTS, "/tokenize", "/detokenize"))
    assert set(USUAL) <= set(found)


def test_what_a_server_does_not_have_is_not_promised() -> None:
    assert passed_on([("GET", "/v1/models")]) == ["GET /v1/models"]


@pytest.mark.parametrize(
    ("method", "path", "passes"),
    [
        ("POST", "/v1/score", True),
        ("GET", "/v1/score", False),
        ("POST", "/v1/score/", False),
        ("POST", "/v1/scores", False),
        ("GET", "/v1/responses/resp_1-a", True),
        ("GET", "/v1/responses/", False),
        ("GET", "/v1/responses/..", False),
        ("GET", "/v1/responses/a/b", False),
        ("GET", "/v1/responses/a\n", False),
        ("GET", "/v1/responses/\u00e9", False),
    ],
)
def test_a_request_is_one_of_them_as_a_whole(method: str, path: str, passes: bool) -> None:
    assert is_among(["POST /v1/score", "GET /v1/responses/{response_id}"], method, path) is passes
