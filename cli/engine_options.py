"""The command-line options of an engine, declared once for all commands that start engines."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from cli.grouped import with_parameters
from cli.model_choice import with_chosen_model
from cli.terminal import UsageError
from poc_core.schemes.decode.codebook_file import read_codebook_file
from poc_core.serving.model_options import Dtype
from poc_core.settings import load_settings
from workers.engines.options import EngineKind, EngineOptions

# For commands that compute proofs, which the synthetic engine cannot.
ProofEngine = Annotated[
    Literal["vllm", "transformers"],
    typer.Option(
        "--engine", help="The engine: vllm, or transformers, which is slower, for comparison."
    ),
]
_SHIPPED = (
    "tiny-qwen3, tiny-llama, tiny-qwen3-moe (for decode proofs tiny-qwen3-256, tiny-qwen3-moe-256);"
    " with the extra `demo`, the trained model smollm2-135m"
)
# For commands that can wait for a deployment.
FirstModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The first model to serve: a model's directory, a name on the Hugging Face hub, "
        f"or a shipped model: {_SHIPPED}. Default: serve the deployed model, or wait for "
        "a deployment.",
    ),
]
NOT_FOR_PROOFS = ("served_model_name", "synthetic_step_ms")


def from_command_line(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model's directory, a name on the Hugging Face hub, or a shipped model:"
            f" {_SHIPPED}."
        ),
    ],
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="The name clients use for the model. Default: the last part of the directory, "
            "or --model's name."
        ),
    ] = None,
    engine: Annotated[
        EngineKind,
        typer.Option(
            help="The engine: vllm; transformers, which is slower, for comparison; synthetic, "
            "which computes nothing and returns placeholder vectors, for load tests."
        ),
    ] = "vllm",
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Number format of the weights; auto: the format in which they are stored."
        ),
    ] = "auto",
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="GPUs (on a CPU: processes) that share each layer. vllm only."),
    ] = 1,
    pipeline_parallel: Annotated[
        int,
        typer.Option(min=1, help="GPUs (on a CPU: processes) that divide the layers. vllm only."),
    ] = 1,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of tokens in one forward pass, which limits its memory. "
            "Default: the engine's.",
        ),
    ] = None,
    decode_memory_gb: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="GB of each GPU for the KV cache of decode proofs. Default: half of the memory "
            "that is free after the engine's start. vllm only.",
        ),
    ] = None,
    synthetic_step_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds per batch of the synthetic engine.")
    ] = 50.0,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM_ARGS", help="After --: further arguments of `vllm serve`."),
    ] = None,
) -> EngineOptions:
    """Converts command-line options to EngineOptions. `model`: None to wait for a deployment."""
    said = dict(locals())  # names of EngineOptions' fields -> values

    settings = load_settings()
    read_codebook_file(settings.decode_codebook)  # fails before an engine is loaded
    if model is None and served_model_name is not None:
        raise UsageError("--served-model-name is for a --model; a deployment brings its own name.")
    # The parser has removed the `--`; an argument without an option was not meant for vLLM.
    if vllm_args and not vllm_args[0].startswith("-"):
        named = f"a model is named by --model {vllm_args[0]}, and " if model is None else ""
        raise UsageError(
            f"{vllm_args[0]!r} is not an option; {named}vLLM's own arguments go to the end, after"
            " --."
        )
    made = {
        "model": model or "",
        "vllm_args": tuple(vllm_args or ()),
        "codebook": settings.decode_codebook,
        "logprob_tokens": settings.logprob_tokens,
        "validation": settings.validation,
    }
    options = EngineOptions(**said | made)
    return options if model is None else with_chosen_model(options)


def takes_engine_options(
    *, for_proofs: bool = False, needs_model: bool = True, model: Any = FirstModel
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds the options of `from_command_line` to a command.

    The command receives all these options as one parameter, `engine_options`. --help lists --model
    first, and the other options at that parameter's position. `for_proofs`: True leaves out the
    options in NOT_FOR_PROOFS. `needs_model`: False makes --model optional, and `model` is then the
    type annotation of --model.
    """
    shared = dict(inspect.signature(from_command_line).parameters)
    if for_proofs:
        shared = {
            name: parameter for name, parameter in shared.items() if name not in NOT_FOR_PROOFS
        }
        shared["engine"] = shared["engine"].replace(annotation=ProofEngine)

    if not needs_model:
        shared["model"] = shared["model"].replace(annotation=model, default=None)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            engine_options = from_command_line(**{name: given.pop(name) for name in shared})
            command(engine_options=engine_options, **given)

        first, *others = shared.values()
        parameters = [first]
        for name, parameter in inspect.signature(command).parameters.items():
            parameters += others if name == "engine_options" else [parameter]
        return with_parameters(with_options, parameters)

    return decorate
