"""vLLM's engine core and its processes, adapted to each release of vLLM."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

# Seconds between two polls for a message; the kernel adds about 50 microseconds.
_LOOK_AGAIN_S = 1e-5

# Added to the niceness of threads for which an engine core's steps need not wait.
_NICE = 10

# CPU seconds that an answer's grammar may take in the engine core: in total, and more for each
# token. An unambiguous grammar takes less than a millisecond a token.
_GRAMMAR_S, _GRAMMAR_TOKEN_S = 1.0, 0.005


def let_readers_sleep() -> None:
    """Makes vLLM's processes on CPUs sleep between two polls for a message, instead of calling
    sched_yield. If there are fewer cores than such processes, Linux 6.18 let all other processes on
    a core wait for many seconds: the API, other engines, chat's clients.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    shm_broadcast.sched_yield = lambda: time.sleep(_LOOK_AGAIN_S)


def compile_grammars_after_steps() -> None:
    """Makes the engine core's steps precede grammars: lowers the priority of the threads that
    compile grammars, and reduces the number of these threads to a quarter of the CPUs.
    """
    from vllm.v1.structured_output import StructuredOutputManager, backend_xgrammar

    create = StructuredOutputManager._create_grammar
    begin = backend_xgrammar.XgrammarBackend.__post_init__

    def create_later(manager: Any, request: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            priority = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)
        return create(manager, request)

    def begin_with_few_threads(backend: Any) -> None:
        xgrammar: Any = import_module("xgrammar")
        compiler, most = xgrammar.GrammarCompiler, max(1, len(os.sched_getaffinity(0)) // 4)

        def of_few(*args: Any, max_threads: int, **options: Any) -> Any:
            return compiler(*args, max_threads=min(most, max_threads), **options)

        xgrammar.GrammarCompiler = of_few
        try:
            begin(backend)
        finally:
            xgrammar.GrammarCompiler = compiler

    StructuredOutputManager._create_grammar = create_later
    backend_xgrammar.XgrammarBackend.__post_init__ = begin_with_few_threads


def end_slow_grammars() -> None:
    """Ends an answer, as if its grammar refused the next token, if its grammar has taken too much
    CPU time. All answers and proofs wait for each grammar. With an ambiguous grammar, such as
    `root ::= "a" | root root`, xgrammar takes longer for each token: 0.8 s for the 400th.
    """
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    accept, fill = XgrammarGrammar.accept_tokens, XgrammarGrammar.fill_bitmask

    def count(grammar: Any, began: float) -> None:
        grammar.proof_spent_s = getattr(grammar, "proof_spent_s", 0.0) + time.thread_time() - began

    def accept_in_time(grammar: Any, request_id: str, tokens: list[int]) -> bool:
        most = _GRAMMAR_S + _GRAMMAR_TOKEN_S * grammar.num_processed_tokens
        if getattr(grammar, "proof_spent_s", 0.0) > most:
            return False
        began = time.thread_time()
        accepted = accept(grammar, request_id, tokens)
        count(grammar, began)
        return bool(accepted)

    def fill_and_count(grammar: Any, *args: Any) -> None:
        began = time.thread_time()
        fill(grammar, *args)
        count(grammar, began)

    XgrammarGrammar.accept_tokens = accept_in_time
    XgrammarGrammar.fill_bitmask = fill_and_count


def let_core_count() -> None:
    """Adds `proof_unfinished` to vLLM's engine core: a method that counts unfinished requests."""
    from vllm.v1.engine.core import EngineCore

    def proof_unfinished(core: Any) -> int:
        found: int = core.scheduler.get_num_unfinished_requests()
        return found

    EngineCore.proof_unfinished = proof_unfinished


async def unfinished_in_core(llm: Any) -> int:
    """Returns the number of unfinished requests in the engine cores, which answer between steps."""
    core = llm.engine_core
    asked = [core._call_utility_async("proof_unfinished", engine=one) for one in core.core_engines]
    return sum(await asyncio.gather(*asked))


def step_logger(count: Callable[[], None]) -> Any:
    """Returns a stat logger class whose instances call `count` for each report of the core."""

    class StepLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, *_stats: Any, **_named: Any) -> None:
            count()

        def log_engine_initialized(self) -> None:
            pass

    return StepLogger


def leave_memory(engine_args: Any, gb: float) -> None:
    """Leaves `gb` GiB of the GPU's memory to other uses: lowers vLLM's gpu_memory_utilization."""
    from vllm.platforms import current_platform

    share = gb * 2**30 / current_platform.get_device_total_memory()
    engine_args.gpu_memory_utilization = max(0.05, engine_args.gpu_memory_utilization - share)


@contextmanager
def lone_rank_in_core(engine_args: Any, config: Any) -> Iterator[None]:
    """An engine core that starts inside the context runs a single rank in its own process, as on a
    GPU. On CPUs, vLLM would start another process for the rank.
    The context saves a third of the start's CPU time and memory.
    """
    parallel = config.parallel_config
    lone = parallel.world_size == parallel.data_parallel_size == 1
    if (
        not lone
        or engine_args.distributed_executor_backend
        or parallel.distributed_executor_backend != "mp"
    ):
        yield
        return
    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager
    except ImportError:  # a release without this manager
        yield
        return
    parallel.distributed_executor_backend = "uni"
    with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
        yield
