"""`proofline workers`: runs all workers of a machine, each on its own GPUs or CPU cores."""

import os
import time
from contextlib import ExitStack
from typing import Annotated

import typer

from cli import options
from cli.addresses import head_of
from cli.engine_options import takes_engine_options
from cli.grouped import grouped
from cli.join.admission import Admission, ShutOutError
from cli.join.joining import access_of, set_up
from cli.join.options import Join
from cli.machine import placement
from cli.machine.gpus import chosen_gpus, groups_of_all, groups_of_most
from cli.model_choice import check_is_there
from cli.supervise import foreground
from cli.supervise.fleet import Fleet, WorkersError, slots, worker_command
from cli.supervise.follower import Follower
from cli.supervise.redis_server import RedisServerError, wait_for_redis
from cli.terminal import UsageError, note
from poc_core.serving.places import HOST_ID_VARIABLE
from poc_core.settings import load_settings, stranger_text, strangers
from poc_core.state import scripts
from poc_core.state.client import connect
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from workers.engines.options import EngineOptions, HostSpan
from workers.vllm.start.log_patterns import HOPELESS

# More than for `up`, because nobody watches, and a hanging driver may need minutes to recover.
MAX_FAST_CRASHES = 8
WATCH_S = 0.5
# Seconds before this command ends in a container, which would restart it without end.
HOPELESS_S = 600.0
# Seconds to wait until a starting API has loaded its scripts into Redis.
SCRIPTS_WAIT_S = 60.0


@takes_engine_options(needs_model=False)
@grouped
def workers(
    engine_options: EngineOptions,
    join: Join,
    gpus: Annotated[
        str,
        typer.Option(help="GPUs to use: all, or ids as in CUDA_VISIBLE_DEVICES, such as 0,1."),
    ] = "all",
    n_workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Number of workers on a host without GPUs; they share the cores. Default: 1.",
        ),
    ] = None,
    hosts: Annotated[
        int,
        typer.Option(
            min=1, help="Number of hosts that share one engine, for a model too large for one host."
        ),
    ] = 1,
    rank: Annotated[
        int,
        typer.Option(
            min=0, help="Number of this host among --hosts; 0 is the head, which serves chat."
        ),
    ] = 0,
    head: Annotated[
        str | None,
        typer.Option(
            help="With --hosts: HOST:PORT on which the head listens for the other hosts, in a "
            "private network."
        ),
    ] = None,
    redis_url: options.RedisUrl = None,
    verbose: options.Verbose = False,
) -> None:
    """Run the workers of this machine in the foreground, one for each group of GPUs.

    Each worker sees only its own GPUs. A worker that dies is started again, after 1 s, then 2, 4,
    ... 30 s. A worker that has exited nine times in a row is not started again. When no worker is
    left, this command exits. SIGTERM or Ctrl-C lets the workers finish the running batches. All
    other work goes to the hosts on which this command still runs with the same --redis-url.

    The workers' logs go to files in ~/.local/state/proofline; the start prints the folder. Use
    --verbose in a container.

    Without --model the workers serve the deployed model (`proofline deploy`, POST
    /api/v1/inference/up), or wait for a deployment. A deployed model takes precedence over --model.

    With --hosts 2 two hosts run one engine together: one runs this command with --rank 0, the other
    with --rank 1. Give the parallel sizes of the complete engine. Each host waits for the other.

    With --join and a token of `proofline hosts invite` a new host gets its settings from the API,
    and stores them, so that later starts need neither --join nor a token. Give the token by
    --token-file or in the variable PROOFLINE_JOIN_TOKEN.

    **Example:** proofline workers --model Qwen/Qwen3-8B --gpus 0,1,2,3 --tensor-parallel 2
    """
    access = access_of(join, os.environ)
    if access is not None:
        set_up(access, join.join_file, os.environ)
    settings = load_settings()
    for name, meant in strangers(os.environ).items():
        note(f"workers: {stranger_text(name, meant)}")
    found = chosen_gpus(gpus) if placement.wants_gpus(engine_options) or gpus != "all" else []
    engine_options = with_span(engine_options, hosts, rank, head)
    own_places = places_of(engine_options, found, n_workers)

    def announce(message: str) -> None:
        note(f"workers: {message}")

    def start_fleet(options: EngineOptions, own: bool) -> Fleet:
        check_is_there(options)
        places = (
            own_places
            if own
            else placement.environments_of_most(
                options, found, 1 if options.span else None, n_workers or 1
            )
        )
        if (why := placement.short_of_memory(options, places)) is not None:
            announce(why)
        fleet = Fleet(
            settings.host,
            lambda: worker_command(options),
            places,
            MAX_FAST_CRASHES,
            on_line=log,
            announce=announce,
            own=own,
        )
        names = ", ".join(f"{settings.host}/{slot}" for slot in slots(places))
        what = str(options.span or f"{len(places)} worker(s)")
        announce(f"starting {what} for {options.name}: {names}")
        fleet.start({"POC_REDIS_URL": settings.redis_url, HOST_ID_VARIABLE: follower.id})
        return fleet

    with (
        foreground.stopped_by_signals("workers"),
        foreground.logs_of_children(verbose) as log,
        ExitStack() as exits,
    ):
        admission: Admission | None = None
        if access is not None:
            announce(f"this host is {access.name} of {access.api} ({join.join_file})")
            admission = Admission(access, settings.redis_url, announce)
            exits.callback(admission.stop)
            admission.begin()
        wait_for_redis(settings.redis_url)
        redis = connect(settings)
        try:
            scripts.wait_until_loaded(redis, SCRIPTS_WAIT_S)
        except scripts.ScriptsMissingError as error:
            raise RedisServerError(f"{error}; start one with the same Redis first") from error
        store, registry = DeploymentStore(redis, settings), WorkerRegistry(redis, settings)
        follower = Follower(store, registry, settings.host, engine_options, start_fleet, announce)
        exits.callback(follower.stop)
        follower.begin()
        if log.where:
            announce(log.where)
        exits.callback(
            foreground.hurry_on_signals, follower.kill, "workers: finishing the running batches"
        )
        if follower.waits:
            announce(
                "no model is deployed; `proofline deploy MODEL` or POST /api/v1/inference/up"
                " starts one"
            )
        try:
            watch_workers(follower, admission)
        except ShutOutError:
            follower.kill()  # results of running work can no longer be returned
            raise


def with_span(
    engine_options: EngineOptions, hosts: int, rank: int, head: str | None
) -> EngineOptions:
    """Returns the options, plus this host's rank if several hosts run one engine together."""
    if hosts == 1:
        if rank or head is not None:
            raise UsageError("--rank and --head are for an engine over several hosts: say --hosts.")
        return engine_options
    if head is None:
        raise UsageError("--hosts needs --head HOST:PORT: where the host with --rank 0 listens.")
    name, port = head_of(head)
    span = HostSpan(n_hosts=hosts, rank=rank, head_host=name, head_port=port)
    return EngineOptions(**engine_options.model_dump(exclude={"span"}), span=span)


def places_of(
    engine_options: EngineOptions, found: list[str], n_workers: int | None
) -> list[dict[str, str]]:
    """Returns each worker's environment variables for --model. `found`: ids of the GPUs to use."""
    if found and n_workers is not None:
        raise UsageError(
            "--workers is for machines without a GPU; with GPUs, --gpus and the parallelism say how"
            " many."
        )
    if engine_options.span and n_workers is not None:
        raise UsageError("--workers is for engines of one host; with --hosts each has one engine.")
    if not engine_options.model:
        return []
    groups: list[list[str]] = []
    if found and engine_options.span:
        groups = groups_of_most(found, engine_options.n_devices_here, 1)
    elif found:
        groups = groups_of_all(found, engine_options.n_devices)
    return placement.environments(engine_options, groups, len(groups) or n_workers or 1)


def watch_workers(follower: Follower, admission: Admission | None) -> None:
    """Raises ShutOutError once this host is revoked, WorkersError once all workers have failed."""
    while (why := follower.failure()) is None:
        if admission is not None:
            admission.check()
        time.sleep(WATCH_S)
    if os.getppid() <= 1 and any(text in why for text in HOPELESS.values()):
        note(f"workers: {why} Ends in {HOPELESS_S / 60:g} min, as it would be started again.")
        time.sleep(HOPELESS_S)
    raise WorkersError(why)
