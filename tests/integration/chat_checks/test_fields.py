"""The network's fields over HTTP, and requests that name tokens that the model does not have: what
is answered, and that the engine lives on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.harness.chat_client import CHAT
from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import DATA, Server, content, ids_of, known
from workers.vllm.release.extra_args import NAMES

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.parametrize("server", [64], indirect=True, scope="session"),
]

COMPLETIONS = "/v1/completions"
ERRORS: dict[str, Any] = json.loads((DATA / "errors.json").read_text())
BASE: dict[str, Any] = ERRORS["base"]
_N_IDS, _CONTEXT = 512, 2048
FOREIGN = [_N_IDS, -1, 2**31, 2**40]


def judged(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


@pytest.fixture
def unable(server: Server) -> Iterator[None]:
    """Within: the trial at start-up has failed."""
    validations = server.engine.validations
    assert validations is not None
    way, validations.way = validations.way, "none"
    yield
    validations.way = way


@pytest.mark.parametrize(
    "case", ERRORS["cases"], ids=[json.dumps(case["body"])[:70] for case in ERRORS["cases"]]
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_each_golden_case_is_judged_as_the_network_judges(
    server: Server, case: dict[str, Any], streams: bool
) -> None:
    answer = server.post(BASE | case["body"] | {"stream": streams})
    if case["status"] != 200:
        assert judged(answer) == (case["status"], case["param"])
        return
    assert answer.status_code == 200
    if not streams and case["body"].get("enforced_tokens"):
        assert ids_of(answer.json()) == [7]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_what_does_not_fit_beside_the_prompt_judges_nobody(server: Server, streams: bool) -> None:
    """Where neither is too long alone."""
    asked = {name: one for name, one in BASE.items() if name != "max_tokens"}
    n_prompt = server.post(BASE).json()["usage"]["prompt_tokens"]
    fits = known(asked | {"ignore_eos": True}, [7] * (_CONTEXT - n_prompt))
    answer = server.post(fits).json()
    assert len(ids_of(answer)) == _CONTEXT - n_prompt
    too_many = known(asked, [7] * (_CONTEXT - n_prompt + 1)) | {"stream": streams}
    assert judged(server.post(too_many)) == (400, None)


@pytest.mark.usefixtures("unable")
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_engine_that_cannot_judges_nobody(server: Server, streams: bool, path: str) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "logprobs": 5} if path == COMPLETIONS else BASE
    answer = server.post(known(body, [40, 41]) | {"stream": streams}, path)
    assert judged(answer) == (503, None)
    assert "cannot be scored here" in answer.json()["error"]["message"]
    assert server.post(body, path).status_code == 200


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "more", [{"use_beam_search": True, "n": 2}, {"prompt_logprobs": 1}], ids=str
)
def test_what_cannot_be_forced_judges_nobody(
    server: Server, more: dict[str, Any], streams: bool
) -> None:
    answer = server.post(known(BASE, [40, 41]) | more | {"stream": streams})
    # vLLM itself has no prompt's logprobs in a stream.
    expected = 400 if streams and "prompt_logprobs" in more else 503
    assert answer.status_code == expected


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_that_the_model_does_not_have_are_refused(
    server: Server, path: str, field: str, streams: bool
) -> None:
    body = {"prompt": "Hi", "max_tokens": 5} if path == COMPLETIONS else BASE
    # Stop ids are masked before min_tokens: on some releases that was the engine's end.
    body = body | {"min_tokens": 3, "stream": streams}
    for one in FOREIGN:
        given = {str(one): 1.0} if field == "logit_bias" else [7, one]
        answer = server.post(body | {field: given}, path)
        assert judged(answer) == (400, field), one
    server.engine.check()
    allowed = {"7": 1.0} if field == "logit_bias" else [7, _N_IDS - 1]
    assert server.post(body | {field: allowed}, path).status_code == 200


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stream": True}], ids=str)
@pytest.mark.parametrize("one", FOREIGN)
def test_so_are_prompts_of_such_ids(server: Server, one: int, more: dict[str, Any]) -> None:
    for prompt in ([one], [5, one, 6], [[5, 6], [7, one]]):
        answer = server.post({"prompt": prompt, "max_tokens": 2, **more}, COMPLETIONS)
        assert answer.status_code in (400, 422), prompt
    server.engine.check()
    answer = server.post({"prompt": [[5, 6], [_N_IDS - 1]], "max_tokens": 2}, COMPLETIONS)
    assert answer.status_code == 200


def test_a_clients_own_words_to_the_engine_have_no_effect(server: Server) -> None:
    asked = BASE | {"temperature": 0}
    expected = server.post(asked).json()
    for value in ([40, 41], "raw_logprobs", 1):
        forged = asked | {"vllm_xargs": dict.fromkeys(NAMES, value)}
        answer = server.post(forged)
        assert content(answer.json()) == content(expected)
    forged = {"prompt": "Hi", "max_tokens": 5, "temperature": 0}
    plain = server.post(forged, COMPLETIONS).json()["choices"][0]["text"]
    forged |= {"vllm_xargs": {NAMES[0]: [40, 99999]}}
    assert server.post(forged, COMPLETIONS).json()["choices"][0]["text"] == plain


@pytest.mark.parametrize("name", ["enforced_tokens", "enforced_tok\\u0065ns"])
def test_a_body_is_parsed_once(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """However JSON writes its names."""
    body = json.dumps({"model": server.model, **known(BASE, [7])}).replace("enforced_tokens", name)
    parsed: list[Any] = []
    loads = json.loads

    def noted(text: Any, **options: Any) -> Any:
        parsed.extend([text] if text in (body, body.encode()) else [])
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", noted)
    headers = {"Content-Type": "application/json"}
    answer = server.http.post(CHAT, content=body, headers=headers)
    assert ids_of(answer.json()) == [7]
    assert parsed == [body.encode()]


def test_a_text_token_counts_as_its_first_one(server: Server) -> None:
    words = {"tokens": [{"token": "token_id:40"}, {"token": "the sea"}]}
    tokenized = server.http.post(
        "/tokenize", json={"prompt": "the sea", "add_special_tokens": False}
    )
    answer = server.post(BASE | {"enforced_tokens": words})
    assert ids_of(answer.json()) == [40, tokenized.json()["tokens"][0]]


def test_a_beam_search_is_answered_with_ids_too(server: Server) -> None:
    asked = BASE | {"use_beam_search": True, "n": 2, "logprobs_mode": "raw"}
    answer = server.ask(asked)
    assert all(len(ids_of(answer, n)) == BASE["max_tokens"] for n in range(2))


def test_every_answer_calls_tokens_by_their_ids(server: Server) -> None:
    """Also bare of the network's fields, as the fleet does."""
    answer = server.post(BASE | {"return_token_ids": True}).json()
    assert ids_of(answer) == answer["choices"][0]["token_ids"]
    for one in content(answer):
        assert bytes(one["bytes"]).decode() == one["token"]
        assert len(one["top_logprobs"]) == 5
        assert all(entry["token"].isdecimal() for entry in one["top_logprobs"])
    asked = {"prompt": "The sea", "max_tokens": 5, "logprobs": 3, "return_token_ids": True}
    (choice,) = server.post(asked, COMPLETIONS).json()["choices"]
    assert [int(token) for token in choice["logprobs"]["tokens"]] == choice["token_ids"]
    choices = [chunk["choices"][0] for chunk in server.stream(BASE)]
    streamed = [
        one for choice in choices if choice.get("logprobs") for one in choice["logprobs"]["content"]
    ]
    assert len(streamed) == BASE["max_tokens"]
    assert all(one["token"].isdecimal() for one in streamed)


@pytest.mark.parametrize(
    "poison",
    [
        {"top_k": 2**64},
        {"top_k": str(2**64)},
        {"logit_bias": {"5": "NaN"}},
        {"allowed_token_ids": [5] * 1025},
        {"bad_words": ["the sea is wide and deep"] * 129},
        {"bad_words": [f"{n} sea sea sea sea sea" for n in range(120)]},
        {"stop_token_ids": list(range(300)), "min_tokens": 2},
        {"vllm_xargs": {"a": [1e400]}},
    ],
    ids=lambda body: str(body)[:40],
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_the_engine_cannot_hold_is_refused(
    server: Server, path: str, streams: bool, poison: dict[str, Any]
) -> None:
    body = {"prompt": "Hi", "max_tokens": 5} if path == COMPLETIONS else BASE
    field, *_ = poison
    content = json.dumps({"model": server.model, **body, "stream": streams, **poison})
    answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert judged(answer) == (400, field), answer.text
    server.engine.check()
    assert server.engine.unfinished_chat() == 0


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        (
            {"type": "object", "propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
            "patternProperties, propertyNames",
        ),
    ],
    ids=["circle", "nowhere", "not supported"],
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_schema_that_cannot_be_compiled_is_the_clients_and_changes_nothing(
    server: Server, schema: dict[str, Any], says: str, streams: bool
) -> None:
    answer = server.post(BASE | {"structured_outputs": {"json": schema}, "stream": streams})
    assert judged(answer) == (400, "structured_outputs"), answer.text
    assert says in answer.json()["error"]["message"]
    for grammar in ({"choice": ["yes"]}, {"json": {"const": "yes"}}):
        found = server.ask(BASE | {"structured_outputs": grammar, "temperature": 0})
        assert "yes" in found["choices"][0]["message"]["content"]
