"""What vLLM loads from Proofline into each of its processes."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from cli.shipped import shipped_models
from tests.harness.marks import needs_vllm
from workers.vllm.start import lifeline

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),  # whose process has loaded vLLM
    needs_vllm,
]


@pytest.fixture
def shm_broadcast(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module that waits for messages, as vLLM has it: an engine in this process may have
    changed it before.
    """
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast, "sched_yield", utils.sched_yield)
    return shm_broadcast


@pytest.fixture
def register() -> Any:
    """As vLLM finds it."""
    (entry,) = (
        entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "proofline"
    )
    return entry.load()


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each call of sched_yield."""
    seen: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: seen.append(None))
    return seen


def test_somebody_elses_vllm_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, shm_broadcast: Any, register: Any, yields: list[None]
) -> None:
    monkeypatch.delenv(lifeline.VARIABLE, raising=False)
    register()
    shm_broadcast.sched_yield()
    assert len(yields) == 1


def test_a_workers_readers_sleep_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, shm_broadcast: Any, register: Any, yields: list[None]
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setenv(lifeline.VARIABLE, str(os.getpid()))
    register()
    shm_broadcast.sched_yield()
    assert len(yields) == (0 if current_platform.is_cpu() else 1)


def test_a_cores_grammars_give_way_to_its_steps(
    monkeypatch: pytest.MonkeyPatch, register: Any
) -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    def priority(*_: Any) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", priority)
    monkeypatch.setenv(lifeline.VARIABLE, str(os.getpid()))
    register()
    manager = object.__new__(StructuredOutputManager)
    own = priority()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(manager._create_grammar, None).result() == min(19, own + 10)
    assert manager._create_grammar(None) == own  # as it is, where a core compiles by itself


@pytest.mark.parametrize(
    ("text", "ends"), [('root ::= "a" | root root', True), ('root ::= "a"+', False)]
)
def test_an_ambiguous_grammar_ends_its_own_answer_before_it_delays_others_for_long(
    monkeypatch: pytest.MonkeyPatch, register: Any, text: str, ends: bool
) -> None:
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    for name in ("accept_tokens", "fill_bitmask"):
        monkeypatch.setattr(XgrammarGrammar, name, getattr(XgrammarGrammar, name))
    monkeypatch.setenv(lifeline.VARIABLE, str(os.getpid()))
    register()
    vocabulary = xgrammar.TokenizerInfo([bytes([n]) for n in range(256)], stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(vocabulary).compile_grammar(text)
    grammar = XgrammarGrammar(256, xgrammar.GrammarMatcher(compiled), compiled)
    mask = xgrammar.allocate_token_bitmask(1, 256)
    steps: list[float] = []
    began = time.thread_time()
    while len(steps) < 400 and grammar.accept_tokens("a", [ord("a")]):
        grammar.fill_bitmask(mask, 0)
        steps.append(time.thread_time() - began)
    assert (len(steps) < 400) is ends
    assert steps[-1] < 5.0


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (16, 4), (64, 8)])
def test_one_grammar_takes_a_quarter_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, register: Any, cores: int, threads: int
) -> None:
    import xgrammar
    from transformers import AutoTokenizer
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    seen = []
    compiler = xgrammar.GrammarCompiler

    def told(*args: Any, max_threads: int, **options: Any) -> Any:
        seen.append(max_threads)
        return compiler(*args, max_threads=max_threads, **options)

    monkeypatch.setattr(xgrammar, "GrammarCompiler", told)
    monkeypatch.setattr(XgrammarBackend, "__post_init__", XgrammarBackend.__post_init__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv(lifeline.VARIABLE, str(os.getpid()))
    register()
    tokenizer = AutoTokenizer.from_pretrained(shipped_models()["tiny-qwen3"])
    XgrammarBackend(
        SimpleNamespace(
            speculative_config=None,
            structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3")),
        ),
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
    )
    assert seen == [threads]
