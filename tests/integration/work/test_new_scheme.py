"""A scheme is one folder: tests/toy_scheme/toy, put into a copy of the product in which no other
file differs, through API, queue and synthetic engines.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import poc_core.schemes
from poc_core.records import ProofSpec
from poc_core.schemes.contract import contract_of, contracts
from tests.harness.waiting import wait_until
from tests.integration.node import PREFIX, Node, run_node, synthetic_artifacts
from tests.peers.receiver import Receiver
from tests.stacks.round_client import StackClient, given_back, leave_nothing
from tests.toy_scheme.page import examples, install

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
TOY = ROOT / "tests/toy_scheme"
PRODUCT = ("api", "cli", "lab", "poc_core", "proofline", "workers")
# A body may say in two forms that it means this scheme.
FORMS: list[dict[str, Any]] = [{"scheme": "toy"}, {"toy": True}]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product, and the scheme's folder in it."""
    tree = tmp_path_factory.mktemp("tree")
    for package in PRODUCT:
        shutil.copytree(
            ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(TOY / "toy", tree / "poc_core/schemes/toy")
    install(examples("poc_core/schemes/README.md", "A new scheme"), tree / "poc_core/schemes")
    (tree / "models").symlink_to(ROOT / "models")
    return tree


@pytest.fixture(scope="module")
def toy_node(tree: Path) -> Iterator[Node]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as exits:
        # All processes of the stack import the product from there; this one, which has imported it
        # already, knows the scheme as well.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tree), str(ROOT)]))
        patch.setattr(poc_core.schemes, "__path__", [*poc_core.schemes.__path__, str(TOY)])
        patch.setenv("POC_CALLBACK_INTERVAL_SEC", "0.2")
        yield run_node(exits, workers=2, synthetic_step_ms=20.0)


@pytest.fixture
def receiver(toy_node: Node) -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        leave_nothing(client_of(toy_node))


def client_of(node: Node) -> StackClient:
    return StackClient(node.stack, node.http, deque())


def toy_params(n_steps: int = 4, form: dict[str, Any] = FORMS[0]) -> dict[str, Any]:
    return {"model": "tiny-qwen3", "seq_len": 64, "n_steps": n_steps, **form}


def expected(nonces: range, n_steps: int = 4) -> list[dict[str, Any]]:
    """What the synthetic engine answers of these nonces."""
    spec = ProofSpec(
        scheme="toy", block_hash="block", public_key="key", seq_len=64, options={"n_steps": n_steps}
    )
    toy = contract_of("toy")
    values = toy.synthetic_values(spec, nonces, 4096)
    return [toy.artifact(nonce, value) for nonce, value in zip(nonces, values, strict=True)]


def ask(node: Node, nonces: range, **changes: Any) -> Any:
    sent = {
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 0,
        "node_count": 1,
        "wait": True,
    }
    return node.http.post(
        f"{PREFIX}/generate", json=sent | {"nonces": list(nonces), "params": toy_params()} | changes
    )


def files_of(tree: Path) -> dict[str, bytes]:
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for package in PRODUCT
        for path in (tree / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_no_other_file_differs(tree: Path) -> None:
    ours, with_toy = files_of(ROOT), files_of(tree)
    files = ("__init__.py", "contract.py", "proof.py")
    new = {f"poc_core/schemes/{scheme}/{file}" for scheme in ("peaks", "toy") for file in files}
    assert {name for name in with_toy if with_toy[name] != ours.get(name)} == new
    assert ours.keys() | new == with_toy.keys()


@pytest.mark.parametrize("form", FORMS)
def test_a_job(toy_node: Node, receiver: Receiver, form: dict[str, Any]) -> None:
    nonces = range(100)
    answer = ask(toy_node, nonces, params=toy_params(5, form), url=receiver.url)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["status"], found["artifacts"], found["n_steps"]) == (
        "completed",
        expected(nonces, 5),
        5,
    )
    wait_until(lambda: receiver.taken(), "the job's callback")
    assert receiver.taken()[0].body["artifacts"] == expected(nonces, 5)


def test_the_pages_example_answers_by_command(toy_node: Node, tree: Path) -> None:
    asked = ("--block-hash", "block", "--public-key", "key", "--nonces", "0-2", "--seq-len", "8")
    chosen = ("--scheme", "peaks", "--param", "n_peaks=4")
    url = ("--url", str(toy_node.http.base_url).rstrip("/"))
    done = in_tree(tree, "generate", *asked, *chosen, *url)
    assert done.returncode == 0, done.stderr
    artifacts = json.loads(done.stdout)["artifacts"]
    assert [artifact["nonce"] for artifact in artifacts] == [0, 1, 2]
    assert all(len(artifact["peaks"]) == 4 for artifact in artifacts)


@pytest.mark.parametrize(("tolerated", "fraud"), [(0, True), (1, False)])
def test_a_validation(toy_node: Node, receiver: Receiver, tolerated: int, fraud: bool) -> None:
    claims = expected(range(8))
    claims[5]["steps"][2] += 1
    answer = ask(
        toy_node, range(8), validation={"artifacts": claims}, tolerated=tolerated, url=receiver.url
    ).json()
    assert (answer["status"], answer["fraud_detected"]) == ("completed", fraud)
    assert answer["per_nonce"] == [
        {"nonce": nonce, "n_differing": int(nonce == 5)} for nonce in range(8)
    ]
    wait_until(lambda: receiver.taken("/validated"), "the verdict's callback")
    assert receiver.taken("/validated")[0].body["per_nonce"] == answer["per_nonce"]


def test_claims_may_come_in_another_form(toy_node: Node) -> None:
    claims = expected(range(3))
    enforced = {str(claims[1]["nonce"]): [99, 99, 99, 99]}
    answer = ask(
        toy_node, range(3), validation={"artifacts": claims}, enforced_steps=enforced
    ).json()
    assert [nonce["n_differing"] for nonce in answer["per_nonce"]] == [0, 4, 0]


def test_a_round(toy_node: Node, receiver: Receiver) -> None:
    body = {
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 0,
        "node_count": 1,
    }
    sent = body | {"params": toy_params(), "at_most": 9, "url": receiver.url}
    assert toy_node.http.post(f"{PREFIX}/init/generate", json=sent).status_code == 200
    wait_until(lambda: len(receiver.nonces()) >= 50, "50 nonces of the round")
    status = toy_node.status()
    assert status["config"] == {"block_hash": "block", "params": {"scheme": "toy", "n_steps": 4}}
    assert 50 <= status["toys_reported"] < status["stats"]["total_processed"]
    toy_node.stop()
    in_hand = given_back(client_of(toy_node))
    wait_until(lambda: toy_node.status()["callbacks_waiting"] == 0, "the last payload")
    leased = range(toy_node.status()["stats"]["total_processed"] + len(in_hand))
    items = [
        item for item in expected(leased) if item["steps"][0] <= 9 and item["nonce"] not in in_hand
    ]
    assert sorted(receiver.nonces()) == [item["nonce"] for item in items]
    first = receiver.round_payloads()[0].body
    assert (first["public_key"], first["node_id"], first["n_steps"]) == ("key", 0, 4)
    assert first["artifacts"][0] in items


def in_tree(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command `proofline` of the copy."""
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *words],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_proof_without_a_queue(tree: Path) -> None:
    asked = ("--block-hash", "block", "--public-key", "key", "--nonces", "0-2", "--seq-len", "8")
    chosen = (
        "--engine",
        "transformers",
        "--dtype",
        "float32",
        "--scheme",
        "toy",
        "--option",
        "n_steps=5",
        "--json",
    )
    done = in_tree(tree, "compute", "--model", "tiny-qwen3", *asked, *chosen)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [artifact["nonce"] for artifact in document["artifacts"]] == [0, 1, 2]
    assert all(len(artifact["steps"]) == 5 for artifact in document["artifacts"])
    assert document["n_steps"] == 5


def test_what_the_scheme_cannot_do_is_refused(toy_node: Node) -> None:
    unknown = ask(toy_node, range(3), params=toy_params() | {"k_dim": 12})
    too_long = ask(toy_node, range(3), params=toy_params(101))
    others = ask(toy_node, range(3), validation={"artifacts": expected(range(2))})
    assert (unknown.status_code, too_long.status_code, others.status_code) == (422, 409, 400)
    assert unknown.json()["detail"][0]["loc"] == ["body", "params", "k_dim"]
    assert too_long.json()["detail"]["fields"] == ["n_steps"]
    assert others.json() == {"detail": "The nonces differ."}


def test_the_other_schemes_are_as_before(toy_node: Node) -> None:
    answer = toy_node.generate(range(10), wait=True).json()
    assert answer["artifacts"] == synthetic_artifacts(range(10))
    sent = {
        "block_hash": "b",
        "block_height": 7,
        "public_key": "key",
        "r_target": 1.4,
        "seq_len": 64,
    }
    assert toy_node.http.post(f"{PREFIX}/init/validate", json=sent).status_code == 200
    batch = {
        "block_hash": "b",
        "block_height": 7,
        "public_key": "key",
        "nonces": [1, 2],
        "dist": [1.9, 1.9],
    }
    assert toy_node.http.post(f"{PREFIX}/validate", json=batch).json()["n_invalid"] == 2
    assert toy_node.stop().status_code == 200


def test_openapi_shows_it(toy_node: Node) -> None:
    document = toy_node.http.get("/openapi.json").json()
    generate = document["paths"][f"{PREFIX}/generate"]["post"]["requestBody"]["content"][
        "application/json"
    ]
    refs = [schema["$ref"].rpartition("/")[2] for schema in generate["schema"]["anyOf"]]
    ours = [contract.job_body.__name__ for contract in contracts() if contract.job_body]
    assert sorted(refs) == sorted([*ours, "PeakBody"])
    assert "toys_reported" in document["components"]["schemas"]["Status"]["properties"]
