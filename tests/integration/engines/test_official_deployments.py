"""The network's own deployments, and mutants of them, as the installed vLLM reads their words; its
families' tiny models started with these words, as far as a CPU goes.
"""

import json
import random
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.families.make import given, make
from cli.supervise.fleet import worker_command
from cli.supervise.follower import deployed_options
from poc_core.errors import ArgumentsError, ProoflineError
from poc_core.serving.trusted_models import SHIPPED
from poc_core.serving.vllm_arguments import harmless, read_deployment, without
from tests.harness.marks import needs_vllm
from tests.harness.official import Official, official
from tests.harness.waiting import wait_until
from tests.integration.node import Node, run_node
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.vllm.start.launch import serve_words
from workers.vllm.start.log_patterns import LEFT_OUT

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("engines"), needs_vllm]

HOST = EngineOptions(model="")  # that was told nothing
UNPINNED = "moonshotai/Kimi-K2.6"
# Where a picture of a chat request may be said to be.
INTERNAL = (
    "http://127.0.0.1:8000/health",
    "http://localhost/",
    "http://[::1]:6379/",
    "http://169.254.169.254/latest/meta-data/",
    "https://10.0.0.1/",
    "HTTP://example.com@127.0.0.1/",
    "https://example.com/picture.png",
    "file:///etc/passwd",
    "ftp://127.0.0.1/",
)
# What a deployment leaves as it is, whatever words it brings.
NOT_ITS_OWN = """
    api_key chat_template code_revision config_format download_dir enable_lora hf_config_path
    hf_token host io_processor_plugin kv_events_config kv_transfer_config logits_processors
    lora_modules middleware model model_loader_extra_config model_class_overrides port
    reasoning_parser_plugin root_path scheduler_cls ssl_certfile ssl_keyfile
    structured_outputs_config
    tool_parser_plugin tool_server uds worker_cls worker_extension_cls
"""


class Parser:
    """Of `vllm serve`."""

    def __call__(self, words: list[str]) -> Namespace:
        """SystemExit: vLLM does not take them."""
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from workers.vllm.release import api_server

        found: Namespace = api_server.serve_parser(FlexibleArgumentParser()).parse_args(words)
        return found


@pytest.fixture(scope="module")
def parse(forked_engines: None) -> Parser:
    return Parser()


def options_of(deployment: Official, words: list[str]) -> EngineOptions:
    """What a host starts a worker's process with."""
    wanted = read_deployment(deployment.model, "auto", words, SHIPPED)
    *_, argument = worker_command(deployed_options(wanted, HOST))
    return EngineOptions.model_validate_json(argument)


def all_words(options: EngineOptions) -> list[str]:
    return [*serve_words(options, on_cpu=False), *options.vllm_args]


@pytest.mark.promise("a client that may deploy", "can run no code, read no file and open no port")
@pytest.mark.parametrize("deployment", official(), ids=str)
def test_the_engine_gets_what_vllm_serve_would_get(parse: Parser, deployment: Official) -> None:
    own = ["--model", deployment.model, "--served-model-name", deployment.name]
    theirs = vars(parse([*own, *deployment.words]))
    ours = vars(parse(all_words(options_of(deployment, deployment.words))))
    changed = {name for name, value in theirs.items() if value != ours[name]}
    defaults = ("max_num_batched_tokens", "logprobs_mode")  # ours, unless the operator names them
    allowed = {name for name in defaults if f"--{name.replace('_', '-')}" not in deployment.words}
    allowed.add("allowed_media_domains")
    if deployment.model == UNPINNED:  # whose code is not trusted
        allowed.add("trust_remote_code")
    assert changed == allowed


@pytest.mark.promise("a chat user who sends pictures", "cannot make an engine fetch or read a file")
@pytest.mark.parametrize("url", INTERNAL, ids=str)
def test_no_picture_makes_the_engine_fetch_anything(parse: Parser, url: str) -> None:
    from vllm.multimodal.media import ImageMediaIO, MediaConnector

    args = parse(serve_words(EngineOptions(model="any"), on_cpu=False))
    assert args.allowed_local_media_path == ""
    connector = MediaConnector(allowed_media_domains=args.allowed_media_domains)
    with pytest.raises((ValueError, RuntimeError), match=r"allowed|local files|must be"):
        connector.load_from_url(url, ImageMediaIO())


def test_an_operator_may_allow_hosts_of_pictures(parse: Parser) -> None:
    options = EngineOptions(model="any", vllm_args=("--allowed-media-domains", "pictures.example"))
    assert parse(all_words(options)).allowed_media_domains == ["pictures.example"]


_EVENTS = ("open", "import", "exec", "subprocess.Popen", "os.system")


class Watched:
    """A file and a module that nobody may open or import, and whoever did."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "evil_file_of_a_test.py"
        self.path.write_text("raise SystemError('run')")
        self.touched: list[str] = []
        self._on = True
        self._thread = threading.get_ident()  # engines of this process have others
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on or threading.get_ident() != self._thread:
            return
        if event == "socket.bind" or (event in _EVENTS and "evil" in str(args)):
            self.touched.append(f"{event} {args}"[:200])

    def stop(self) -> None:
        self._on = False


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.syspath_prepend(tmp_path)
    watched = Watched(tmp_path)
    yield watched
    watched.stop()


def mutant(dice: random.Random, options: list[str], path: str) -> tuple[Official, list[str]]:
    """Words of the network, in which somebody has put what would run, read or open something."""
    deployment = dice.choice(official())
    words = list(deployment.words)
    values = [
        path,
        "evil_file_of_a_test.Evil",
        "../evil",
        "http://evil",
        "evil/repo",
        "7999",
        "{}",
        "64",
        "auto",
    ]
    values += [
        json.dumps({dice.choice(KEYS.split()): dice.choice(values)}),
        "true",
        "",
        "\0",
        "-1",
        "@evil",
    ]
    for _ in range(dice.randint(1, 2)):
        own = [word for word in deployment.words if word.startswith("--")]
        option, value = dice.choice(dice.choice((own, options))), dice.choice(values)
        begins = [at for at, word in enumerate(words) if word.startswith("-")]
        at = dice.choice([*begins, len(words), dice.randint(0, len(words))])
        match dice.randrange(6):
            case 0:
                words[at:at] = [option, value]
            case 1:
                words.insert(at, f"{option}={value}")
            case 2:
                words.insert(at, f"--{option.strip('-').replace('-', '_')}={value}")
            case 3:
                words.insert(at, f"{option}.{dice.choice(KEYS.split())}={value}")
            case 4:
                words[at : at + 1] = [value]
            case _:
                words.insert(at, option[: dice.randint(3, len(option))])
    return deployment, words


KEYS = """
    auto_map backend cache_dir chat_template debug_dump_path inductor_passes method model mode
    pass_config splitting_ops trust_remote_code code_revision hisparse_config
    max_cudagraph_capture_size
"""


def test_no_mutant_reads_opens_or_runs_anything(parse: Parser, watched: Watched) -> None:
    options = [name for name in _all_options(parse) if name not in ("-h", "--help")]
    dice = random.Random(7)
    refused = taken = 0
    for _ in range(400):
        deployment, words = mutant(dice, options, str(watched.path))
        try:
            told = options_of(deployment, words)
        except ArgumentsError:
            refused += 1
            continue
        known = without(all_words(told), harmless(told.vllm_args))
        try:
            found = vars(parse(known))
        except SystemExit:  # vLLM refuses the value
            taken += 1
            continue
        taken += 1
        untouched = vars(parse(["--model", deployment.model]))
        for name in NOT_ITS_OWN.split():
            assert found[name] == untouched[name], (name, words)
        assert not found["trust_remote_code"] or f"{told.model}@{found['revision']}" in SHIPPED
        names = {"revision", "served_model_name", "tokenizer", "tokenizer_revision"}
        others = {name: value for name, value in found.items() if name not in names}
        assert "evil" not in str(others), words
    assert watched.touched == []
    assert (refused + taken, taken > 5) == (400, True)


def _all_options(parse: Parser) -> list[str]:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from workers.vllm.release import api_server

    parser = api_server.serve_parser(FlexibleArgumentParser())
    return [f"--{name}" for name in sorted(api_server.known_arguments(parser)) if len(name) > 3]


# What a CPU cannot do of these words, or a tiny model: kernels of GPUs, their cache in 8 bits,
# several of them, lengths, tokenizers and parsers of the real models.
_OF_A_GPU = """
    attention-backend attention-config block-size disable-custom-all-reduce gpu-memory-utilization
    kv-cache-dtype max-model-len mm-encoder-tp-mode moe-backend max-num-batched-tokens revision
    tokenizer-mode trust-remote-code
"""
_FAMILIES = {
    "qwen235B-B200-node1": ("qwen3-moe", None),
    "kimik26-B200-node1": ("deepseek-v3", None),  # MLA and experts, the core of it
    "minimaxm27-H200-node1": ("minimax-m2", "softmax"),
    "deepseekv4flash0731-H200-node1": ("deepseek-v4", "cannot compute deepseek_v4 on CPUs"),
    "glm53flash-H200-node1": ("glm-5.3-flash", "cannot compute glm5_next on CPUs"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "deployment", [one for one in official() if one.file in _FAMILIES], ids=str
)
def test_a_tiny_model_of_each_family_starts_with_these_words(
    tmp_path: Path, forked_engines: None, deployment: Official, caplog: pytest.LogCaptureFixture
) -> None:
    """Or fails for its kernels, as docs/models.md says of it, and not for a word: what vLLM does
    not know any more is left out.
    """
    family, refusal = _FAMILIES[deployment.file]
    told = options_of(deployment, deployment.words)
    options = told.model_copy(
        update={
            "model": str(make(family, tmp_path)),
            "tensor_parallel": 1,
            "dtype": "float32" if family in ("qwen3-moe", "deepseek-v3") else "bfloat16",
            "max_batch_tokens": 2048,
            "vllm_args": (
                *without(told.vllm_args, _OF_A_GPU.split()),
                "--max-model-len",
                "512",
                "--swap-space",
                "4",
            ),
        }
    )
    if refusal is None:
        engine = load_engine(options, 120)
        engine.close()
        assert engine.info.name == deployment.name
    else:
        with pytest.raises(ProoflineError) as error:
            load_engine(options, 120)
        assert "does not take its arguments" not in str(error.value)
        assert refusal in str(error.value)
    told_left_out = [LEFT_OUT.search(message) for message in caplog.messages]
    assert [found[1].partition(":")[0] for found in told_left_out if found] == ["--swap-space"]


REFUSED = {
    "deepseekv4flash0731-H200-node1": "it has no kernels for this family's numbers of 8 bits there",
    "glm53flash-H200-node1": "this family's kernels need Triton",
}


@pytest.mark.slow
def test_up_status_says_why_a_host_without_gpus_does_not_serve_a_family(tmp_path: Path) -> None:
    with ExitStack() as exits:
        node = run_node(exits, model="", engine="vllm")
        for deployment in [one for one in official() if one.file in REFUSED]:
            # Refused before weights are read: there are none.
            family = _FAMILIES[deployment.file][0]
            folder = tmp_path / deployment.file
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(given(family)))
            body = {"model": str(folder), "dtype": "auto", "additional_args": deployment.words}
            assert node.http.post(UP, json=body).status_code == 200
            wait_until(lambda: status_of(node)["status"] == "failed", "the refusal", 120)
            told = status_of(node)["error"]
            assert f"on CPUs, as {REFUSED[deployment.file]}; deploy it on a host with GPUs." in told
            node.http.post("/api/v1/inference/down").raise_for_status()


UP = "/api/v1/inference/up/async"


def status_of(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.http.get("/api/v1/inference/up/status").json()
    return found
