"""`proofline workers`: all the workers of one machine, each pinned to its GPUs or cores."""

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options
from cli.console import UsageError, note
from cli.engine_options import takes_engine_options

if TYPE_CHECKING:
    from cli.supervise.fleet import Fleet
    from poc_core.settings import Settings
    from workers.engines.options import EngineOptions

# More than `up` allows: nobody looks on, and a driver that hangs may take minutes to come back.
MAX_FAST_CRASHES = 8
READY_POLL_S = 1.0


@takes_engine_options()
def workers(
    engine_options: "EngineOptions",
    gpus: Annotated[
        str, typer.Option(help="GPUs to use: all, or their ids as CUDA_VISIBLE_DEVICES takes them, such as 0,1.")
    ] = "all",
    n_workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Workers where there is no GPU, each on its share of the cores. Default: 1.",
            show_default=False,
        ),
    ] = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Run the workers of this machine in the foreground: one for every tensor-parallel x pipeline-parallel GPUs.

    Each sees just its GPUs. One that dies is started again, after 1 s, then 2, 4, ... 30 s; after nine ends in a row
    it is given up, and with the last worker this command. SIGTERM or Ctrl-C lets them finish the batches in hand; what
    they had not begun goes to others. On further hosts: the same command with the same --redis-url.

    **Example:** proofline workers --model Qwen/Qwen3-8B --gpus 0,1,2,3 --tensor-parallel 2
    """
    from cli.machine import placement
    from cli.machine.gpus import chosen_gpus, groups_of_all
    from cli.supervise.fleet import Fleet, worker_command
    from cli.supervise.foreground import LabelledLog, hurry_on_signals, stopped_by_signals
    from cli.supervise.redis_server import wait_for_redis
    from poc_core.settings import load_settings

    settings = load_settings()
    found = chosen_gpus(gpus) if placement.wants_gpus(engine_options) or gpus != "all" else []
    if found and n_workers is not None:
        raise UsageError("--workers is for machines without a GPU; with GPUs, --gpus and the parallelism say how many.")
    groups = groups_of_all(found, engine_options.n_devices) if found else []
    count = len(groups) or n_workers or 1
    fleet = Fleet(
        lambda: worker_command(engine_options),
        placement.environments(engine_options, groups, count),
        MAX_FAST_CRASHES,
        on_line=LabelledLog(),
        announce=lambda message: note(f"workers: {message}"),
    )
    with stopped_by_signals("workers"), ExitStack() as exits:
        wait_for_redis(settings.redis_url)
        exits.callback(fleet.stop)
        where = "; ".join(f"worker-{i} on GPU {','.join(group)}" for i, group in enumerate(groups))
        note(f"workers: starting {count} worker(s) for {engine_options.name}{': ' if where else ''}{where}")
        fleet.start({"POC_REDIS_URL": settings.redis_url})
        exits.callback(hurry_on_signals, fleet.kill, "workers: finishing what is in hand")
        watch_workers(fleet, engine_options.name, settings)


def watch_workers(fleet: "Fleet", model: str, settings: "Settings") -> None:
    """Says once when all workers are ready. Returns never; WorkersError when none is left."""
    from redis.exceptions import RedisError

    from cli.supervise.fleet import WorkersError
    from poc_core.state.client import connect
    from poc_core.state.registry import WorkerRegistry

    registry = WorkerRegistry(connect(settings), settings)
    said = False
    while (why := fleet.failure()) is None:
        if not said:
            try:
                ready = {worker.pid for worker in registry.here() if worker.is_ready}
            except RedisError:
                ready = set()  # the workers say so in their logs
            said = len(fleet.pids) == len(fleet.children) and ready.issuperset(fleet.pids)
            if said:
                note(f"workers: all {len(fleet.pids)} ready for {model}")
        time.sleep(READY_POLL_S)
    raise WorkersError(why)
