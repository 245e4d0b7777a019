"""`validate --explain` names the mistake that makes artifacts agree, on an invented node."""

from typing import Any

import pytest

from cli.ask.mistakes import fitting, mistakes
from poc_core.schemes.artifact.contract import CONTRACT
from poc_core.schemes.artifact.requests import GenerateBody
from poc_core.schemes.artifact.verdict import compare
from proofline.client import ApiError, JobFailedError

HIDDEN_SIZE = 64
BODY: dict[str, Any] = {
    "block_hash": "0xABC",
    "block_height": 1,
    "public_key": "node-1",
    "node_id": 0,
    "node_count": 1,
    "nonces": list(range(8)),
    "params": {"model": "m", "seq_len": 256, "k_dim": 12},
    "poc_stronger_rng": False,
    "stat_test": {"dist_threshold": 0.02},
}


def values(body: dict[str, Any]) -> dict[int, Any]:
    spec = GenerateBody.model_validate(body).spec()
    found = CONTRACT.synthetic_values(spec, body["nonces"], HIDDEN_SIZE)
    return dict(zip(body["nonces"], found, strict=True))


class Node:
    """Has a model of 1,024 positions, whose states are not finite after 64 of them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def run(self, body: dict[str, Any], _answer: object) -> dict[str, Any]:
        self.asked.append(body)
        if body["params"]["seq_len"] > 1024:
            raise ApiError("seq_len is too long", status=409)
        if body["params"]["seq_len"] == 64:
            raise JobFailedError("no finite state")
        claims = {one["nonce"]: one["vector_b64"] for one in body["validation"]["artifacts"]}
        return {"n_mismatch": compare(values(body), claims, 12).n_mismatch}


def explained(made_with: dict[str, Any], node: Node) -> list[str]:
    claims = [{"nonce": n, "vector_b64": v} for n, v in values(BODY | made_with).items()]
    body = BODY | {"validation": {"artifacts": claims}}
    return fitting(node, body, BODY["nonces"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made_with", "fits"),
    [
        ({"poc_stronger_rng": True}, "poc_stronger_rng true"),
        ({"params": BODY["params"] | {"seq_len": 1024}}, "seq_len 1024"),
        ({"block_hash": "ABC"}, "block_hash ABC"),
        ({"block_hash": "0xabc"}, "block_hash 0xabc"),
        (
            {"block_hash": "node-1", "public_key": "0xABC"},
            "block_hash and public_key exchanged",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_mistake_that_was_made_fits_alone(made_with: dict[str, Any], fits: str) -> None:
    assert explained(made_with, Node()) == [fits]


def test_another_key_is_no_mistake_that_anybody_could_guess() -> None:
    node = Node()
    assert explained({"public_key": "node-2"}, node) == []
    assert {len(body["nonces"]) for body in node.asked} == {4}


def test_no_mistake_is_the_body_itself_and_each_is_tried_once() -> None:
    bodies = [body for _, body in mistakes(BODY)]
    assert BODY not in bodies
    assert [body for i, body in enumerate(bodies) if body in bodies[:i]] == []
