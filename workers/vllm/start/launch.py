"""Starts and ends vLLM's engine and OpenAI server. Coroutines run on the engine's event loop."""

import asyncio
import gc
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import psutil

from poc_core import errors
from poc_core.serving import vllm_arguments
from poc_core.serving.openai_paths import passed_on
from workers.chat_gate import ChatGate
from workers.engines import stages
from workers.engines.options import EngineOptions
from workers.vllm.chat.gated_chat import GatedChat
from workers.vllm.start import cpu_threads, lifeline
from workers.vllm.start.spawned import main_of_children

logger = logging.getLogger(__name__)

# Tokens of one forward: enough to fill a GPU, and few enough that the activations fit in memory
# with the weights and the KV cache. On a CPU larger batches gain nothing.
_GPU_BATCH_TOKENS = 32_768
_CPU_BATCH_TOKENS = 8_192
# The only allowed host for pictures in chat does not exist (RFC 2606), so that no request makes the
# engine fetch urls. (For vLLM an empty list allows all hosts.) Requests contain the pictures.
_NO_DOMAIN = "none.invalid"
# The name of the class that vLLM's worker processes import and mix into their worker.
EXTENSION = "workers.vllm.extension.ProofExtension"


@contextmanager
def garbage_may_wait() -> Iterator[None]:
    """Disables garbage collection inside the context: it takes a fifth of vLLM's import time."""
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
    """Creates an AsyncLLM on the running event loop. Returns the AsyncLLM, its configuration, and
    the arguments of vLLM's server. `on_step`: called on the loop for each step of the engine core.
    `of_hosts`: vLLM's arguments for an engine over several hosts (host_link.py).
    """
    args, engine_args, config = _configured(options, of_hosts, headless=False)
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from workers.vllm.release import engine_core

    with engine_core.lone_rank_in_core(engine_args, config), main_of_children():
        llm = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[engine_core.step_logger(on_step)],
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )
    return llm, config, args


def follow(options: EngineOptions, of_hosts: Sequence[str]) -> None:
    """Runs a follower's ranks until one of them ends. ProoflineError if they cannot start."""
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
    """Returns the arguments of vLLM's server, the arguments of the engine, and the engine's
    configuration. ProoflineError if vLLM is not installed, or is known to fail with this model.
    """
    try:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from workers.vllm.release import api_server, custom_ops, engine_core, faults, model_parts
        from workers.vllm.start import log_patterns, random_weights
    except ImportError as error:
        raise errors.ProoflineError(
            f"vLLM cannot be imported ({error}); install it with `make setup` (CPU) or `make"
            " setup-gpu`, or use --engine transformers."
        ) from error
    stages.begin("loading the model")
    words = serve_words(options, current_platform.is_cpu())
    if current_platform.is_cpu():
        # Otherwise the first chat request for logprobs waits half a minute for compilation.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        model_parts.look_at_models_here()
        cpu_threads.divide(options.n_devices_here)
        # By default glibc returns large activations to the kernel after each use, and gets the
        # memory again page by page, a third of the time of a batch of 8,192 tokens. The lifeline
        # returns it once a minute instead. The processes that vLLM starts read these variables.
        for variable in (lifeline.MMAP_THRESHOLD, "MALLOC_TRIM_THRESHOLD_"):
            os.environ.setdefault(variable, str(2**32))
        # vLLM caches code for the last 32 shapes of each matrix product, 0.3 MB each. In addition
        # vLLM's oneDNN and torch's oneDNN would each cache 1,024 shapes.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    parser = api_server.serve_parser(FlexibleArgumentParser())
    api_server.hold_tools_to_schemas(parser)
    unknown = vllm_arguments.harmless(options.vllm_args) - api_server.known_arguments(parser)
    for name in sorted(unknown):
        logger.warning(log_patterns.LEAVES_OUT, name, vllm.__version__)
    args = parsed(parser, [*words, *vllm_arguments.without(options.vllm_args, unknown), *of_hosts])
    send_no_comments(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.worker_extension_cls = EXTENSION
    if why_not := faults.why_not_on_cpus(engine_args):
        raise _not_startable(options, why_not)
    faults.avoid(engine_args)
    random_weights.ask_for(str(engine_args.load_format))
    if not current_platform.is_cpu():
        custom_ops.enable_custom_ops(engine_args)
        speed_up_sums(engine_args.tensor_parallel_size, current_platform.is_device_capability(90))
        if options.decode_memory_gb and not any(
            "gpu-memory-util" in word for word in options.vllm_args
        ):
            engine_core.leave_memory(engine_args, options.decode_memory_gb)
    # With the defaults of `vllm serve`; the defaults of a bare engine allow fewer sequences.
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=headless)
    if not names_grammars(options.vllm_args):
        # By default vLLM keeps the backend that the first grammar needs, and refuses grammars for
        # other backends. Only xgrammar is checked before a request reaches the engine.
        config.structured_outputs_config.backend = "xgrammar"
    if why_not := faults.why_not_startable(config):
        raise _not_startable(options, why_not)
    return args, engine_args, config


def speed_up_sums(n_ranks: int, on_hopper: bool) -> None:
    """Sets NCCL's blocks and buffer size for sums over two tensor-parallel ranks: 342 GB/s instead
    of 299 on two H200s, for 0.4 GB of each GPU's memory. An operator's own number of blocks is
    kept. Sums over more ranks are left alone, because their bits would differ.
    """
    if n_ranks == 2 and on_hopper and "NCCL_MIN_CTAS" not in os.environ:
        os.environ["NCCL_MIN_CTAS"] = "64"
        os.environ.setdefault("NCCL_BUFFSIZE", "524288")


def parsed(parser: Any, words: Sequence[str]) -> Any:
    """Parses arguments with vLLM's parser. SettingsError if the parser refuses them. vLLM itself
    would print hundreds of lines of usage, and end only the event loop's thread.
    """

    def refuse(why: str) -> NoReturn:
        raise errors.SettingsError(
            f"vLLM does not take its arguments: {why} (`vllm serve --help=all` shows all)."
        )

    parser.error = refuse
    try:
        return parser.parse_args(words)
    except SystemExit:  # the parser has printed its help
        raise errors.SettingsError(
            "vLLM shows its help and does not start: leave out --help."
        ) from None


def send_no_comments(args: Any) -> None:
    """Turns off keep-alive comments in vLLM's streams, because the network node drops comments."""
    if getattr(args, "sse_keep_alive_interval", 0):
        logger.warning("left out --sse-keep-alive-interval: a node settles that by itself")
        args.sse_keep_alive_interval = 0


def names_grammars(words: Sequence[str]) -> bool:
    """Returns True if an operator's arguments choose the grammar backend."""
    return bool(re.search(r"--structured.outputs.config\b.*?\bbackend\b", " ".join(words)))


def _not_startable(options: EngineOptions, why_not: str) -> errors.ProoflineError:
    return errors.ProoflineError(f"vLLM cannot start with the model {options.model}: {why_not}.")


def serve_words(options: EngineOptions, on_cpu: bool) -> list[str]:
    """Returns our arguments of `vllm serve`. The operator's `options.vllm_args` override them."""
    # Proofs compute as many tokens at a time as vLLM's memory profile and buffers allow.
    tokens = options.max_batch_tokens or (_CPU_BATCH_TOKENS if on_cpu else _GPU_BATCH_TOKENS)
    said = {
        "--model": options.model,
        "--served-model-name": options.name,
        "--dtype": options.dtype,
        "--tensor-parallel-size": options.tensor_parallel,
        "--pipeline-parallel-size": options.pipeline_parallel,
        "--max-num-batched-tokens": tokens,
        "--logprobs-mode": "processed_logprobs",  # the mode that the network validates
        "--allowed-media-domains": _NO_DOMAIN,
    }
    words = [str(word) for pair in said.items() for word in pair]
    # A graph compiler costs minutes at start and gains little on a CPU.
    return [*words, "--enforce-eager"] if on_cpu else words


async def serve(
    llm: Any,
    args: Any,
    gate: ChatGate,
    listener: socket.socket,
    secret: str | None,
    ids_for_all: bool,
    pipeline: Any,
) -> list[str]:
    """Starts vLLM's OpenAI server on the running event loop. Returns the paths that the API
    forwards. ProoflineError if it does not start. `secret`: see Engine.serve_chat. `ids_for_all`:
    see GatedChat. `pipeline`: the engine's ChatPipeline.
    """
    import uvicorn

    from workers.vllm.chat.gated_chat import guarded
    from workers.vllm.release import api_server

    app = await api_server.openai_app(llm, args)
    pipeline.fair.format_in_turns(app)
    api_server.check_bodies(app, pipeline.read)
    paths = passed_on(api_server.routes(app))
    gated = GatedChat(app, gate, lambda: bool(llm.errored), secret, paths, ids_for_all)
    # vLLM's app manages the lifespan; Celery handles signals.
    config = uvicorn.Config(
        gated,
        http=guarded(secret),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        lifespan="on",
    )
    server = app.state.server = uvicorn.Server(config)  # vLLM ends the server when the engine dies
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            raise errors.ProoflineError(f"vLLM's OpenAI server did not start: {task.exception()}")
        await asyncio.sleep(0.01)
    return paths


async def shut_down(llm: Any) -> None:
    try:
        llm.shutdown()
    except psutil.NoSuchProcess:
        # vLLM kills an engine process 5 s after SIGTERM, and this one ended just then. Do the rest.
        llm.engine_core.resources()
        llm.shutdown()
    # The finalizer would shut down again, perhaps when modules are gone at exit.
    llm.shutdown = lambda timeout=None: None
    await asyncio.sleep(0)  # lets the cancelled output task end before the loop stops
