"""`proofline bench`: measures how fast this machine computes a model's proofs, shows where the time
goes, and recommends settings.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli import options
from cli.engine_options import takes_engine_options
from cli.terminal import UsageError, note, progress_bar, write_json
from lab.local_engine import clean_stdout, local_engine, progress_title
from lab.measure import moe_backends, speed_picture
from lab.measure.dimensions import takes_dimensions
from lab.measure.published import beside_published
from lab.measure.speed import SeqLenSpeeds, Speeds, measure, n_steps, sizes, spec_of
from lab.measure.speed_advice import Division, advise, division_from
from lab.measure.speed_tables import document, print_backends, print_speeds
from lab.picture import check_picture
from lab.tables import print_json
from poc_core.settings import load_settings
from workers.engines.base import Engine
from workers.engines.options import EngineOptions

# The seq_len of the network's rounds.
ROUND_SEQ_LEN = 1024
LIMITS_MS = (25.0, 50.0, 100.0)


@takes_dimensions
@takes_engine_options(for_proofs=True)
def bench(
    *,
    seq_len: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"{options.SEQ_LEN_HELP} Repeatable. Default: {ROUND_SEQ_LEN}."),
    ] = None,
    engine_options: EngineOptions,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Number of nonces in a micro-batch; repeatable. Default: as many as "
            "--max-batch-tokens allows, half, a quarter, and so on.",
        ),
    ] = None,
    max_step_ms: Annotated[
        list[float] | None,
        typer.Option(
            min=1, help="Value of POC_MAX_STEP_MS to measure; repeatable. Default: 25, 50 and 100."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Shortest time of each measurement.")] = 2.0,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="JSON of an earlier run with other parallel sizes; repeatable."),
    ] = None,
    try_moe_backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also measure this value of vLLM's --moe-backend, such as deep_gemm, and print "
            "whether it is faster and how far its artifacts lie from the default's; "
            "repeatable.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the time of each part of the computation to this .png or .svg file. Needs "
            "matplotlib."
        ),
    ] = None,
    json_only: options.JsonOnly = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure how fast a model's proofs are on this machine, and recommend settings for a round.

    Loads the model in this process, which must have the GPUs for itself, and computes artifacts
    without a queue. Reports the nonces/s for each size of a micro-batch, complete and cut into
    slices between which chat can run; where the time of a micro-batch goes; how much of the
    device's measured matrix peak is used; and which settings to use, and why. For models of the
    network, compares the nonces a minute of eight such GPUs with published rates. The engine's log
    goes to a file, whose path is printed.

    **Example:** proofline bench --dimensions qwen3-8b --seq-len 1024 --picture time.png

    **Example:** proofline bench --dimensions minimax-m2.7 --layers 16 -- --max-model-len 2048

    **Example:** proofline bench --model Qwen/Qwen3-30B-A3B-FP8 --try-moe-backend deep_gemm
    """
    check_picture(picture, speed_picture.OPTION)
    backends = list(dict.fromkeys(try_moe_backend or ()))
    moe_backends.check_backends(engine_options, backends)
    others = [earlier(path, engine_options.name) for path in compare or ()]
    limits_ms = sorted(set(max_step_ms or LIMITS_MS))
    usual_ms = load_settings().max_step_ms
    with clean_stdout(verbose) as stdout, local_engine(engine_options) as loaded:
        found = measure_all(
            loaded,
            sorted(set(seq_len or [ROUND_SEQ_LEN])),
            batch_size,
            usual_ms,
            limits_ms,
            seconds,
        )
        speeds = Speeds(
            model=engine_options.name,
            engine=engine_options.engine,
            dtype=loaded.info.dtype,
            dummy_weights="--load-format=dummy" in engine_options.vllm_args,
            tensor_parallel=engine_options.tensor_parallel,
            pipeline_parallel=engine_options.pipeline_parallel,
            max_batch_tokens=loaded.info.max_batch_tokens,
            max_step_ms=usual_ms,
            seconds=seconds,
            seq_lens=found,
        )
        advice = advise(speeds, others)
        beside = beside_published(speeds, loaded.stages[-1].stop)
        parts = next((one.parts for one in found if one.parts), None)
        title = (
            f"Proofs of {speeds.model} ({speeds.engine},"
            f" {speeds.dtype}{', dummy weights' if speeds.dummy_weights else ''}), tensor parallel"
            f" {speeds.tensor_parallel}, pipeline parallel"
            f" {speeds.pipeline_parallel}{f', on {parts.device}' if parts else ''}"
        )
        if not json_only:
            print_speeds(stdout, title, speeds, advice, beside)
        elif not backends:
            print_json(stdout, document(speeds, advice, beside))
        if parts is None:
            note(
                f"The {speeds.engine} engine cannot tell where the time goes: no parts, no share of"
                " the peak."
            )
        default = moe_backends.default_of(loaded, found[-1]) if backends else None
    if default is not None:  # the default's engine has ended, so that another has memory
        experts = moe_backends.compare(
            engine_options, backends, default, speeds.dummy_weights, seconds, verbose
        )
        if json_only:
            write_json(document(speeds, advice, beside, experts), None)
        else:
            print_backends(sys.stdout, experts)
    if parts is not None and picture is not None:  # last: a full disk must not lose the numbers
        speed_picture.draw(picture, title, found)


def measure_all(
    engine: Engine,
    seq_lens: Sequence[int],
    counts: Sequence[int] | None,
    usual_ms: float,
    limits_ms: Sequence[float],
    seconds: float,
) -> list[SeqLenSpeeds]:
    """Measures the engine's speed at each seq_len, and shows a progress bar.

    `counts`: micro-batch sizes in nonces; None means a default size. `usual_ms`: time limit of a
    slice. `limits_ms`: further limits whose cost is measured. Raises SpecError if the model does
    not support a seq_len.
    """
    specs = [spec_of(seq_len) for seq_len in seq_lens]
    for spec in specs:
        engine.check_spec(spec)
    chosen = {}
    for seq_len in seq_lens:
        most = engine.info.max_batch(seq_len)
        chosen[seq_len] = sorted({min(count, most) for count in counts or sizes(most)})
    with progress_bar("measurements") as bar:
        total = sum(n_steps(len(one), len(limits_ms)) for one in chosen.values())
        task = bar.add_task(progress_title(engine), total=total)
        return [
            measure(
                engine,
                spec,
                chosen[spec.seq_len],
                usual_ms,
                limits_ms,
                seconds,
                lambda: bar.advance(task),
            )
            for spec in specs
        ]


def earlier(path: Path, model: str) -> Division:
    """Reads the parallelism and speed from an earlier result of `bench --json`.

    Raises UsageError if the file has no such result, or if it is about another model.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        division, measured = division_from(document), document["model"]
    except OSError as error:
        raise UsageError(
            f"Cannot read {path} ({error.strerror}); give --compare a file that --json wrote."
        ) from None
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{path} holds no result of `proofline bench --json`; give --compare one."
        ) from None
    if measured != model:
        raise UsageError(
            f"{path} is about {measured}, not {model}; give --compare a result of this model."
        )
    return division
