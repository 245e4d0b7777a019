"""How vLLM's engine and its OpenAI server are started and ended, on the loop that runs them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from poc_core.errors import ProoflineError, SettingsError
from poc_core.serving.openai_paths import passed_on
from poc_core.serving.vllm_arguments import harmless, without
from workers.chat_gate import ChatGate
from workers.engines import stages
from workers.engines.options import EngineOptions
from workers.vllm.chat.chat_requests import ChatRequests
from workers.vllm.chat.gated_chat import GatedChat
from workers.vllm.chat.network_fields import NetworkFields
from workers.vllm.start import cpu_threads
from workers.vllm.start.spawned import main_of_children

logger = logging.getLogger(__name__)

# Tokens of one forward. Large enough to fill a GPU, small enough that its activations fit beside
# the weights and chat's KV cache; on a CPU larger batches gain nothing.
_GPU_BATCH_TOKENS = 32_768
_CPU_BATCH_TOKENS = 8_192
# Of pictures in chat: a name that no host has (RFC 2606), so that no request makes the engine fetch
# what its machine reaches. vLLM takes an empty list for all hosts. Pictures come in the body.
_NO_DOMAIN = "none.invalid"
# The class that vLLM mixes into its workers, by name: they import it in processes of their own.
EXTENSION = "workers.vllm.extension.ProofExtension"


@contextmanager
def garbage_may_wait() -> Iterator[None]:
    """Within: nobody looks for garbage, of which imports make none: that takes a fifth of the
    time of vLLM's.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


async def start(
    options: EngineOptions, on_step: Callable[[], None], of_hosts: Sequence[str] = ()
) -> tuple[Any, Any, Any]:
    """The AsyncLLM, its configuration and the arguments of its server, made on the loop that
    will run it. `on_step` is called there for each step of the engine.

    `of_hosts`: the arguments for this host's part of an engine over several (host_link.py).
    """
    args, engine_args, config = _configured(options, of_hosts, headless=False)
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from workers.vllm import compat

    with lone_rank_in_core(engine_args, config), main_of_children():
        llm = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[compat.step_logger(on_step)],
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )
    return llm, config, args


def follow(options: EngineOptions, of_hosts: Sequence[str]) -> None:
    """Runs the ranks of a host that is not the head, until one of them ends.

    ProoflineError: they cannot be started.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with garbage_may_wait():
        _, _, config = _configured(options, of_hosts, headless=True)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        with main_of_children():
            ranks = MultiprocExecutor(config, monitor_workers=False)
    ranks.start_worker_monitor(inline=True)


def _configured(
    options: EngineOptions, of_hosts: Sequence[str], headless: bool
) -> tuple[Any, Any, Any]:
    """The arguments of vLLM's server, of its engine, and the engine's configuration."""
    try:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from workers.vllm import compat
        from workers.vllm.start import known_faults, random_weights
    except ImportError as error:
        raise ProoflineError(
            f"vLLM cannot be imported ({error}); install it with `make setup` (CPU) or `make"
            " setup-gpu`, or use --engine transformers."
        ) from error
    stages.begin("loading the model")
    words = serve_words(options, current_platform.is_cpu())
    if current_platform.is_cpu():
        # It would still compile some helpers when first used: a chat request for logprobs would
        # wait for half a minute.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        compat.look_at_models_here()
        cpu_threads.divide(options.n_devices_here)
        # Left alone, glibc gives large activations back to the kernel after every use and gets them
        # again page by page: a third of the time of a batch of 8,192 tokens. Read by the processes
        # that vLLM starts from here.
        for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            os.environ.setdefault(variable, str(2**32))
    parser = compat.serve_parser(FlexibleArgumentParser())
    compat.hold_tools_to_schemas(parser)
    unknown = harmless(options.vllm_args) - compat.known_arguments(parser)
    for name in sorted(unknown):
        logger.warning("left out --%s: vLLM %s does not know it", name, vllm.__version__)
    args = parsed(parser, [*words, *without(options.vllm_args, unknown), *of_hosts])
    send_no_comments(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.worker_extension_cls = EXTENSION
    if why_not := known_faults.why_not_on_cpus(engine_args):
        raise _not_startable(options, why_not)
    known_faults.avoid(engine_args)
    random_weights.ask_for(str(engine_args.load_format))
    if not current_platform.is_cpu():
        compat.enable_custom_ops(engine_args)
        if options.decode_memory_gb and not any(
            "gpu-memory-util" in word for word in options.vllm_args
        ):
            compat.leave_memory(engine_args, options.decode_memory_gb)
    # The defaults of `vllm serve`; those of a bare engine hold fewer sequences.
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=headless)
    if not names_grammars(options.vllm_args):
        # Left to itself, vLLM keeps for its life the compiler that the first grammar asks for, and
        # refuses what another would be needed for. Only this one is tried beforehand.
        config.structured_outputs_config.backend = "xgrammar"
    if why_not := known_faults.why_not_startable(config):
        raise _not_startable(options, why_not)
    return args, engine_args, config


def parsed(parser: Any, words: Sequence[str]) -> Any:
    """Parses the words with vLLM's parser. SettingsError: it refuses them.

    Left alone, it would show a usage of some hundred lines, and end this loop but not the process.
    """

    def refuse(why: str) -> NoReturn:
        raise SettingsError(
            f"vLLM does not take its arguments: {why} (`vllm serve --help=all` shows all)."
        )

    parser.error = refuse
    try:
        return parser.parse_args(words)
    except SystemExit:  # it has shown its help
        raise SettingsError("vLLM shows its help and does not start: leave out --help.") from None


def send_no_comments(args: Any) -> None:
    """The network node drops an answer whose stream has a comment; the API keeps streams open."""
    if getattr(args, "sse_keep_alive_interval", 0):
        logger.warning("left out --sse-keep-alive-interval: a node settles that by itself")
        args.sse_keep_alive_interval = 0


def names_grammars(words: Sequence[str]) -> bool:
    """True if an operator's arguments say which compiler of grammars is used."""
    return bool(re.search(r"--structured.outputs.config\b.*?\bbackend\b", " ".join(words)))


def _not_startable(options: EngineOptions, why_not: str) -> ProoflineError:
    return ProoflineError(f"vLLM cannot start with the model {options.model}: {why_not}.")


def serve_words(options: EngineOptions, on_cpu: bool) -> list[str]:
    """The arguments of `vllm serve` that come before `options.vllm_args`, which win."""
    # Proofs take as many tokens at a time as vLLM's memory profile and its kernels' buffers are
    # made for.
    tokens = options.max_batch_tokens or (_CPU_BATCH_TOKENS if on_cpu else _GPU_BATCH_TOKENS)
    said = {
        "--model": options.model,
        "--served-model-name": options.name,
        "--dtype": options.dtype,
        "--tensor-parallel-size": options.tensor_parallel,
        "--pipeline-parallel-size": options.pipeline_parallel,
        "--max-num-batched-tokens": tokens,
        "--logprobs-mode": "processed_logprobs",  # by which the network judges chats
        "--allowed-media-domains": _NO_DOMAIN,
    }
    words = [str(word) for pair in said.items() for word in pair]
    # A graph compiler costs minutes at start and gains little on a CPU.
    return [*words, "--enforce-eager"] if on_cpu else words


@contextmanager
def lone_rank_in_core(engine_args: Any, config: Any) -> Iterator[None]:
    """Within: the engine core that is started computes itself where there is but one rank, as it
    does on a GPU.

    On CPUs vLLM gives that rank a process of its own, because OpenMP reads when a process starts
    where its threads are to run. Here the core starts with that. It saves a third of a start's CPU
    time, and of its memory.
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
    except ImportError:  # a release that cannot tell the places beforehand
        yield
        return
    parallel.distributed_executor_backend = "uni"
    with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
        yield


async def serve(
    llm: Any,
    args: Any,
    gate: ChatGate,
    listener: socket.socket,
    secret: str | None,
    ids_for_all: bool,
    fair: Any,
) -> list[str]:
    """Starts vLLM's OpenAI server on the running loop; returns once it listens: what of it the
    API passes on. `ids_for_all`: see ChatRequests. `fair`: the engine's FairChat.
    """
    import uvicorn

    from workers.vllm import compat
    from workers.vllm.chat import compat as chat_compat
    from workers.vllm.chat.strangers import guarded

    app = await compat.openai_app(llm, args)
    fair.format_in_turns(app)
    compat.check_bodies(app, chat_compat.limits().check)
    paths = passed_on(compat.routes(app))
    model = llm.model_config
    fields = NetworkFields(
        model.get_vocab_size(),
        model.max_model_len,
        llm.output_processor.tokenizer,
        model.logprobs_mode,
    )

    def is_lost() -> bool:
        return bool(llm.errored)

    chat = ChatRequests(app, fields, ids_for_all, is_lost)
    gated = GatedChat(chat, gate, is_lost, secret=secret, paths=paths)
    # Its lifespan is vLLM's; signals are Celery's.
    config = uvicorn.Config(
        gated,
        http=guarded(secret),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        lifespan="on",
    )
    server = app.state.server = uvicorn.Server(config)  # vLLM ends it when the engine died
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            raise ProoflineError(f"vLLM's OpenAI server did not start: {task.exception()}")
        await asyncio.sleep(0.01)
    return paths


async def shut_down(llm: Any) -> None:
    """Ends the engine and its processes."""
    llm.shutdown()
    # Its finalizer shuts down once more, maybe at the interpreter's exit, when what that calls is
    # gone.
    llm.shutdown = lambda timeout=None: None
    await asyncio.sleep(0)  # lets the cancelled output task end before the loop stops
