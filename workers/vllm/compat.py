"""Everything that depends on vLLM's version, but for its caches, in one place: 0.25.1 to 0.33.

vLLM's worker internals are no public interface and move between releases. Each function below, and
those for caches in cache_compat.py, hides one difference; nothing else asks which release runs.
Import it only inside a process that has vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors
from vllm.v1.metrics.loggers import StatLoggerBase

# Implementations of vLLM's operations as eager deployments have them, the first ones first.
_EAGER = ("vllm_c", "triton", "native")
# Seconds between two looks for a message; the kernel adds some 50 microseconds.
_LOOK_AGAIN_S = 1e-5
# Steps down from the priority of an engine core for what its steps need not wait for.
_NICE = 10


def forward_context(
    metadata: dict[str, Any],
    vllm_config: VllmConfig,
    n_tokens: int,
    slot_mapping: dict[str, torch.Tensor],
) -> AbstractContextManager[Any]:
    """The context a model forward runs in. Compiled code is skipped: it would not call the
    layers' hooks.
    """
    context: AbstractContextManager[Any] = set_forward_context(
        metadata, vllm_config, num_tokens=n_tokens, slot_mapping=slot_mapping, skip_compiled=True
    )
    return context


@contextmanager
def fused_kernels() -> Iterator[None]:
    """vLLM's own kernels for norms, as in an eager deployment: a compiled one leaves them to
    the compiler, whose code a proof's forward bypasses, and would run them operation by
    operation.
    """
    if not torch.cuda.is_available():
        yield
        return
    try:
        from vllm.ir.op import enable_torch_wrap
    except ImportError:  # releases whose norms are custom operations (see `enable_custom_ops`)
        yield
        return
    with _eager_priority().set_priority(), enable_torch_wrap(False):
        yield


@functools.cache
def _eager_priority() -> Any:
    """Which of its implementations vLLM asks first for each operation that has several."""
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.ir.op import IrOp
    from vllm.platforms import current_platform

    current_platform.import_ir_kernels()  # which says what there is
    return IrOpPriorityConfig(
        **{
            field.name: [one for one in _EAGER if one in IrOp.registry[field.name].impls]
            for field in dataclasses.fields(IrOpPriorityConfig)
        }
    )


def operation(name: str) -> Any | None:
    """One of vLLM's operations, as in _C::rms_norm; None: this release or device has none of that
    name.
    """
    import vllm._custom_ops  # noqa: F401  # which loads the compiled ones

    namespace, _, own = name.partition("::")
    return getattr(getattr(torch.ops, namespace), own, None)


def argument_names(operation: Any) -> list[str]:
    """Returns the names of an operation's arguments, in their order."""
    return [one.name for one in operation.default._schema.arguments]


@contextmanager
def in_place_of_operations(others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within: what vLLM's Python calls under these names. Recorded and compiled code calls its
    own all the same.
    """
    own = {name: operation(name) for name in others}
    _put(others)
    try:
        yield
    finally:
        _put(own)


def _put(operations: Mapping[str, Any]) -> None:
    for name, one in operations.items():
        namespace, _, own = name.partition("::")
        found = vars(getattr(torch.ops, namespace))
        found[own] = one
        if one is None:  # there is none
            del found[own]


def query_and_key_norms() -> Any | None:
    """The class whose `forward_qk` computes MiniMax's norms of queries and keys where a rank has
    all heads; None: this release has none.
    """
    try:
        from vllm.model_executor.layers.minimax_rms_norm import rms_norm_tp
    except ImportError:
        return None
    found = getattr(rms_norm_tp, "MiniMaxText01RMSNormTP", None)
    return found if hasattr(found, "forward_qk") else None


def triton_experts() -> Any | None:
    """The module whose TritonExperts multiply by Triton's kernel; None: it is elsewhere here."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import triton_moe
    except ImportError:
        return None
    names = ("TritonExperts", "invoke_fused_moe_triton_kernel")
    return triton_moe if all(hasattr(triton_moe, name) for name in names) else None


def marlin_experts() -> Any | None:
    """The class of experts whose weights are in Marlin's layout; None: it is elsewhere here."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    except ImportError:
        return None
    return getattr(marlin_moe, "MarlinExperts", None)


def sum_of_experts(
    experts: Any, rows: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Adds a token's rows (tokens, experts a token, columns) to `out` (tokens, columns), as
    MarlinExperts do; `chosen`: its experts."""
    more = (chosen, None) if len(inspect.signature(experts.moe_sum).parameters) > 2 else ()
    experts.moe_sum(rows, out, *more)


def limit_of_gates(experts: Any) -> float | None:
    """What bounds the gates of a TritonExperts and what they open, as each release says it; None:
    nothing."""
    said = (("quant_config", "gemm1_clamp_limit"), ("activation_config", "clamp_limit"))
    limits = (getattr(getattr(experts, of, None), name, None) for of, name in said)
    return next((float(one) for one in limits if one is not None), None)


def scales_are_powers() -> bool:
    """True if TritonExperts' activation and quantisation are two steps, its scales powers of two.
    So it is on Hopper where DeepGEMM can be imported and VLLM_USE_DEEP_GEMM_E8M0 is not 0."""
    return bool(getattr(triton_experts(), "is_deep_gemm_e8m0_used", lambda: False)())


def rows_of_experts(
    chosen: torch.Tensor, block: int, n_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows by expert in whole blocks, of chosen experts (tokens, experts a token): places in it,
    the blocks' experts, and how many places count (1,); int32."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    rows = moe_align_block_size(chosen, block, n_experts, None)
    return rows


def tensor_ranks() -> tuple[int, int]:
    """This process's tensor-parallel rank, and how many there are."""
    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def of_all_tensor_ranks(part: torch.Tensor) -> torch.Tensor:
    """The rows of all tensor-parallel ranks, as many of each, in order. All ranks must ask."""
    group = get_tp_group()
    rows = part.new_empty(group.world_size * len(part), *part.shape[1:])
    torch.distributed.all_gather_into_tensor(rows, part, group=group.device_group)
    return rows


def do_all_tensor_ranks(say_so: bool) -> bool:
    """True if every tensor-parallel rank says so. All ranks must ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return say_so
    said = torch.tensor([say_so], dtype=torch.int32)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(said.item())


def enable_custom_ops(engine_args: Any) -> None:
    """The same for all other fused operations, which are chosen when the model loads. An
    operator's choice stands.
    """
    config = engine_args.compilation_config
    if not any(word in ("all", "none") for word in config.custom_ops):
        config.custom_ops.append("all")


def leave_memory(engine_args: Any, gb: float) -> None:
    """Leaves so much of a GPU to others than vLLM itself."""
    from vllm.platforms import current_platform

    share = gb * 2**30 / current_platform.get_device_total_memory()
    engine_args.gpu_memory_utilization = max(0.05, engine_args.gpu_memory_utilization - share)


def layer_owner(model: nn.Module, layers: nn.ModuleList, text_config: Any) -> nn.Module | None:
    """The module whose forward runs `layers` from its `start_layer` to its `end_layer`; None:
    it cannot be asked to run part of them, or chat in between would overwrite what one layer
    leaves for the next.
    """
    shared = (
        getattr(text_config, "index_topk_freq", 1) > 1
        or "S" in (getattr(text_config, "index_topk_pattern", None) or "")
        or "shared" in (getattr(text_config, "indexer_types", None) or ())
    )
    if shared:  # sparse attention whose layers attend to the tokens that an earlier one chose
        return None
    for module in model.modules():
        if any(child is layers for child in module._modules.values()):
            return (
                module if hasattr(module, "start_layer") and hasattr(module, "end_layer") else None
            )
    return None


def own_layers(layers: nn.ModuleList) -> range:
    """Which decoder layers this pipeline stage has: the others are placeholders."""
    present = [index for index, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)]
    return range(present[0], present[-1] + 1) if present else range(0)


class _StageView:
    """The pipeline group as one slice of the model is to see it; all else is the real group's."""

    def __init__(self, group: Any, is_first: bool, is_last: bool) -> None:
        self._group = group
        self.is_first_rank = is_first
        self.is_last_rank = is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def virtual_stage(owner: nn.Module | None, layers: range, n_layers: int) -> Iterator[None]:
    """Within: the model's forward runs just `layers`, as a pipeline stage that has no others
    would.
    """
    if owner is None:  # whole stages only: what the model does anyway
        yield
        return
    real, bounds = parallel_state._PP, (owner.start_layer, owner.end_layer)
    active: Any = getattr(owner, "_active_layers", None)
    parallel_state._PP = _StageView(real, layers.start == 0, layers.stop == n_layers)
    owner.start_layer, owner.end_layer = layers.start, layers.stop  # type: ignore[assignment]
    if active is not None:  # GLM-5.3-Flash's model chose them once and for all
        owner._active_layers = owner.layers[layers.start : layers.stop]  # type: ignore[index]
    try:
        yield
    finally:
        owner.start_layer, owner.end_layer = bounds
        if active is not None:
            owner._active_layers = active
        parallel_state._PP = real


def stage_index() -> int:
    """Which pipeline stage this process computes."""
    return int(get_pp_group().rank_in_group)


def is_replicated(x: torch.Tensor) -> bool:
    """True if this tensor-parallel rank's tensor is the first one's. All ranks must ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return True
    first = x.contiguous().clone()
    torch.distributed.broadcast(first, group.ranks[0], group=group.device_group)
    return torch.equal(first, x)


def is_first_tensor_rank() -> bool:
    """The one rank of a pipeline stage that holds and reports results, which all of them have."""
    return bool(get_tp_group().rank_in_group == 0)


def as_first_tensor_rank_has_it(x: torch.Tensor) -> None:
    """Fills the tensor of each tensor-parallel rank with the first one's, so that all go on
    from the same. All ranks must ask.
    """
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(x, group.ranks[0], group=group.device_group)


def n_stages() -> int:
    """How many pipeline stages compute the model."""
    return int(get_pp_group().world_size)


@contextmanager
def recorded_sums() -> Iterator[torch.cuda.Stream | None]:
    """Within, a CUDA graph may hold sums over the tensor-parallel ranks. All ranks must enter and
    leave it. Gives the stream to record in; None: there is one rank, and any stream will do.

    Where one rank fails within, all fail. RuntimeError: another rank did.
    """
    group = get_tp_group()
    if group.world_size == 1:
        yield None
        return
    communicator = getattr(group.device_communicator, "ca_comm", None)
    with ExitStack() as after, group.graph_capture(_sums_capture()) as one:
        failure: Exception | None = None
        try:
            yield one.stream
        except Exception as error:
            failure = error
        if do_all_tensor_ranks(failure is None):
            return
        # On its way out vLLM's own sum tells ranks what they recorded: all must have recorded as
        # many buffers, or their processes end.
        if communicator is not None:
            after.callback(setattr, communicator, "disabled", communicator.disabled)
            communicator.disabled = True
        raise failure or RuntimeError("another rank could not record its part")


@functools.cache
def _sums_capture() -> Any:
    """The stream in which all is recorded: graphs of several streams would share no memory."""
    return parallel_state.GraphCaptureContext(torch.cuda.Stream())


def between_stages(
    model: nn.Module, n_tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Empty tensors of the shapes that a stage takes from the one before it."""
    empty: IntermediateTensors = model.make_empty_intermediate_tensors(  # type: ignore[operator]
        batch_size=n_tokens, dtype=dtype, device=device
    )
    tensors: dict[str, torch.Tensor] = empty.tensors
    return tensors


def send_to_next_stage(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Begins to send; the handles must be kept, with the tensors, until each says
    `is_completed`.
    """
    group = get_pp_group()
    to = group.ranks[group.rank_in_group + 1]
    return [
        torch.distributed.isend(tensors[name], to, group=group.device_group)
        for name in sorted(tensors)
    ]


def receive_from_previous_stage(tensors: dict[str, torch.Tensor]) -> None:
    """Fills the tensors. On a GPU this only queues it."""
    group = get_pp_group()
    source = group.ranks[group.rank_in_group - 1]
    for name in sorted(tensors):
        torch.distributed.recv(tensors[name], source, group=group.device_group)


def send_to_first_stage(tensor: torch.Tensor) -> Any:
    """Sends to the first stage; returns one handle, like send_to_next_stage."""
    group = get_pp_group()
    return torch.distributed.isend(tensor, group.ranks[0], group=group.device_group)


def receive_from_last_stage(tensor: torch.Tensor) -> None:
    """Fills the tensor. On a GPU this only queues it."""
    group = get_pp_group()
    torch.distributed.recv(tensor, group.ranks[-1], group=group.device_group)


def intermediate(tensors: dict[str, torch.Tensor]) -> IntermediateTensors:
    """Makes a stage's input from the previous stage's output."""
    return IntermediateTensors(tensors)


def wait_for_pending_sends(worker: Any) -> None:
    """Let an earlier chat step's asynchronous sends to the next stage end before this rank
    sends again.
    """
    for handle in getattr(worker, "_pp_send_work", None) or ():
        handle.wait()
    if hasattr(worker, "_pp_send_work"):
        worker._pp_send_work = []


def forget_unfinished_forward(model: nn.Module) -> None:
    """After a forward that an exception ended: shared experts keep what they had computed until
    a mixture of experts asks for it, and refuse to compute again, for chat too.
    """
    for module in model.modules():
        if type(module).__name__ == "SharedExperts":
            module._output = [None] * len(module._output)  # type: ignore[arg-type, assignment]


def norm_left_to_logits(model: nn.Module) -> nn.Module | None:
    """The final norm of a model whose forward ends before it, as Kimi-Linear's does since 0.28."""
    for module in model.modules():
        norm = getattr(getattr(module, "model", None), "norm", None)
        if isinstance(norm, nn.Module) and norms_in_logits(type(module)):
            return norm
    return None


def norms_in_logits(model: type) -> bool:
    """True if a class' logits begin with the final norm, by the names in their code."""
    compute = getattr(model, "compute_logits", None)
    return compute is not None and "norm" in inspect.unwrap(compute).__code__.co_names


def final_hidden_states(output: Any) -> torch.Tensor:
    """The hidden states that a model's forward gives; some give auxiliary ones beside them."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def let_readers_sleep() -> None:
    """On CPUs, vLLM's processes sleep from now on between two looks for a message, where they would
    call sched_yield.

    That call costs nothing where each process has a core of its own. On machines with fewer, Linux
    6.18 was seen to leave everything else on such a core waiting for many seconds: the API, other
    engines, chat's clients.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    shm_broadcast.sched_yield = lambda: time.sleep(_LOOK_AGAIN_S)


def compile_grammars_after_steps() -> None:
    """An engine core's steps come, from now on, before the grammars that its other threads compile,
    where they share cores.

    xgrammar would take eight threads for one, which weigh as much as a step's even so.
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


def let_core_count() -> None:
    """An engine core tells from now on, asked by name, how many requests it has not finished."""
    from vllm.v1.engine.core import EngineCore

    def proof_unfinished(core: Any) -> int:
        found: int = core.scheduler.get_num_unfinished_requests()
        return found

    EngineCore.proof_unfinished = proof_unfinished


async def unfinished_in_core(llm: Any) -> int:
    """How many requests the engine cores have not finished, as they say between two steps."""
    core = llm.engine_core
    asked = [core._call_utility_async("proof_unfinished", engine=one) for one in core.core_engines]
    return sum(await asyncio.gather(*asked))


def make_up_weights(draw: Callable[[nn.Module], None]) -> None:
    """--load-format dummy has, in this process from now on, the weights that `draw` puts in."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class MadeUp(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw(model)

    register_model_loader("dummy")(MadeUp)


def step_logger(count: Callable[[], None]) -> Any:
    """A stat logger for AsyncLLM that calls `count` once for everything that the engine core
    says: with stats on, which such a logger switches on, that is every step, also one that
    gives no request a token.
    """

    class StepLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, *_stats: Any, **_named: Any) -> None:
            count()

        def log_engine_initialized(self) -> None:
            pass

    return StepLogger


def serve_parser(parser: Any) -> Any:
    """Adds the arguments of `vllm serve` to a FlexibleArgumentParser."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # up to 0.32
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:  # up to 0.31
            from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(parser)


def known_arguments(parser: Any) -> set[str]:
    """The names of all that such a parser takes, without dashes before them."""
    return {name.lstrip("-") for name in parser._option_string_actions}


def hold_tools_to_schemas(parser: Any) -> None:
    """A required or named tool's arguments follow its schema by default, as up to release 0.28.
    0.32 leaves them to the model where a tool is not `strict`: they were [] or "en"."""
    if "tool-strict-level" in known_arguments(parser):
        parser.set_defaults(tool_strict_level="parameter")


def look_at_models_here() -> None:
    """Has vLLM look at a model's class in this process. Left alone, it imports all of itself in
    another one for each class that it meets for the first time: for CUDA, which must not begin in
    this one.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        vars(registry)["_run_in_subprocess"] = lambda look: look()


async def openai_app(llm: Any, args: Any) -> Any:
    """vLLM's own OpenAI application (ASGI) around a running engine."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # up to 0.31
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


# A route's path, its request, and what its function gets: None, or an error.
Check = Callable[[str, Any, Iterable[Any]], Awaitable[None]]


def check_bodies(app: Any, check: Check) -> None:
    """Each body that an application's route has read is checked before the route's function has it.
    What `check` raises is the route's."""
    for route in app.routes:
        dependant = getattr(route, "dependant", None)
        if dependant is not None and inspect.iscoroutinefunction(inspect.unwrap(dependant.call)):
            dependant.call = _after_check(route.path, dependant, check)


def _after_check(path: str, dependant: Any, check: Check) -> Any:
    call = dependant.call

    @functools.wraps(call)
    async def checked(**values: Any) -> Any:
        await check(path, values.get(dependant.request_param_name), values.values())
        return await call(**values)

    return checked


def routes(app: Any) -> list[tuple[str, str]]:
    """(method, path) of all that an application answers by itself, not by another that is
    mounted in it.
    """
    return [
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
    ]
