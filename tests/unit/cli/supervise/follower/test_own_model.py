"""A host's own `--model`, and how a record becomes an engine's options."""

from typing import Any

import pytest

from cli.shipped import shipped_models
from cli.supervise.follower import deployed_options
from cli.terminal import UsageError
from poc_core.errors import ArgumentsError, OptionsError
from poc_core.serving.deployments import Deployment, DeploymentState, HostState
from tests.peers.hosts import LLAMA, OWN, SYNTHETIC, Node
from workers.engines.options import EngineOptions, HostSpan


def test_a_hosts_own_model_is_the_first_deployment(node: Node) -> None:
    h = node.host(OWN)
    h.look()
    h.serve()
    status = node.store.status()
    assert status.wanted is not None
    assert (status.state, status.wanted.label) == (DeploymentState.RUNNING, "tiny-qwen3")
    assert h.fleet.options == OWN


def test_hosts_each_serve_their_own_where_nobody_deployed_anything(node: Node) -> None:
    llama = OWN.model_copy(
        update={"model": str(shipped_models()["tiny-llama"]), "served_model_name": "tiny-llama"}
    )
    first, second, third = node.host(OWN), node.host(llama, "h2"), node.host(name="h3")
    for one in (first, second, third):
        one.look()
    assert [one.fleet.options.name for one in (first, second, third)] == [
        "tiny-qwen3",
        "tiny-llama",
        "tiny-qwen3",
    ]
    node.store.withdraw()
    for one in (first, second, third):
        assert one.look(2).state is HostState.IDLE


def test_what_a_request_deployed_goes_before_it_and_that_is_said(node: Node) -> None:
    first = node.host()
    first.look()
    node.store.deploy(LLAMA)
    first.follower.stop()
    h = node.host(OWN)
    h.look()
    assert h.fleet.options.name == "tiny-llama"
    assert h.said == [
        "tiny-llama is deployed, and that counts more than --model; `proofline deploy` changes it"
    ]


def test_its_failure_ends_the_command(node: Node) -> None:
    h = node.host(OWN)
    h.look()
    h.fleet.why = "gone"
    h.look(2)
    assert (h.follower.failure(), h.follower.waits) == ("gone", False)
    assert node.store.status().state is DeploymentState.FAILED


def test_having_no_place_for_it_ends_the_command(node: Node) -> None:
    h = node.host(OWN)
    h.no_place = "no GPU"
    with pytest.raises(UsageError, match="no GPU"):
        h.follower.begin()


# From the record to an engine's options.


@pytest.mark.parametrize(
    ("wanted", "defaults", "expected"),
    [
        (
            Deployment(model="Qwen/Qwen3-8B", tensor_parallel=4, vllm_args=("--seed", "1")),
            EngineOptions(
                model="", dtype="bfloat16", tensor_parallel=2, vllm_args=("--enforce-eager",)
            ),
            {
                "dtype": "bfloat16",
                "tensor_parallel": 4,
                "vllm_args": ("--enforce-eager", "--seed", "1"),
            },
        ),
        (
            Deployment(model="Qwen/Qwen3-8B", served_model_name="q"),
            EngineOptions(
                model="other", dtype="float32", tensor_parallel=2, vllm_args=("--enforce-eager",)
            ),
            {"served_model_name": "q"},
        ),
        (
            Deployment(
                model="Qwen/Qwen3-8B", tensor_parallel=4, dtype="float32", vllm_args=("--seed", "1")
            ),
            EngineOptions(model="other", engine="synthetic", synthetic_step_ms=7),
            {"engine": "synthetic", "synthetic_step_ms": 7, "dtype": "float32"},
        ),
    ],
    ids=[
        "defaults of a host without a model",
        "another model's options are not this one's",
        "no vLLM",
    ],
)
def test_what_workers_are_told(
    wanted: Deployment, defaults: EngineOptions, expected: dict[str, Any]
) -> None:
    name = {"model": "Qwen/Qwen3-8B", "served_model_name": "Qwen/Qwen3-8B"}
    assert deployed_options(wanted, defaults) == EngineOptions(**name | expected)


@pytest.mark.promise("a compromised host", "cannot run code on other hosts")
@pytest.mark.parametrize(
    "words",
    [
        ("--middleware", "os.system"),
        ("--tool-parser-plugin", "/tmp/x.py"),
        ("--chat-template", "/etc/passwd"),
    ],
)
def test_a_record_runs_no_code_on_a_host(words: tuple[str, ...]) -> None:
    """Also one that no API has checked: who may write it is not who may deploy."""
    with pytest.raises(ArgumentsError):
        deployed_options(Deployment(model="acme/m", vllm_args=words), EngineOptions(model=""))


@pytest.mark.promise("a compromised host", "cannot run code on other hosts")
def test_a_record_makes_no_host_trust_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = ("--trust-remote-code", "--revision", "a" * 40)
    wanted = Deployment(model="acme/m", vllm_args=pinned)
    here = EngineOptions(model="")
    assert deployed_options(wanted, here).vllm_args == pinned[1:]
    monkeypatch.setenv("POC_TRUSTED_MODELS", f"acme/m@{'a' * 40}")
    assert deployed_options(wanted, here).vllm_args == pinned


def test_a_directory_is_served_under_its_name() -> None:
    wanted = Deployment(model=str(shipped_models()["tiny-llama"]))
    assert deployed_options(wanted, SYNTHETIC).name == wanted.name == "tiny-llama"


def test_a_head_waits_no_more_for_a_follower_that_gave_up_what_was_deployed(node: Node) -> None:
    spans = [HostSpan(n_hosts=2, rank=n, head_host="10.0.0.1", head_port=7070) for n in (0, 1)]
    head, part = (node.host(EngineOptions(model="", span=span), f"h{span.rank}") for span in spans)
    for one in (head, part):
        one.look()
    node.store.deploy(Deployment(model="tiny-llama", tensor_parallel=2))
    for one in (head, part):
        assert one.look().state is HostState.STARTING
    part.fleet.why = "h1/cpu0 ended (exit code 1); not restarted: it has no such model."
    assert part.look().state is HostState.FAILED
    assert head.look(3).state is HostState.IDLE
    assert head.fleet.n_stops == 1
    record = node.record()
    assert record.error == part.fleet.why
    assert node.store.status().state is DeploymentState.FAILED


def test_a_deployment_is_divided_among_the_hosts_of_an_engine() -> None:
    span = HostSpan(n_hosts=2, rank=1, head_host="10.0.0.1", head_port=7070)
    waiting = EngineOptions(model="", span=span)
    wanted = Deployment(model="tiny-llama", tensor_parallel=2)
    assert deployed_options(wanted, waiting).span == span
    with pytest.raises(OptionsError, match="2 hosts cannot share 1 device"):
        deployed_options(LLAMA, waiting)
