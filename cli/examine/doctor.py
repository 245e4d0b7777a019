"""`proofline doctor`: finds problems of this machine that would make a start fail."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from api.models.cache import ModelCache
from cli import options
from cli.examine import hardware, joined, machine, model, packages, receiver, redis
from cli.examine import model as models
from cli.examine.findings import Check, Finding, Subject, findings_of
from cli.grouped import grouped
from cli.join.options import Join
from cli.machine.cgroup import memory_left
from cli.machine.gpus import vllm_runs_on_cpu
from cli.terminal import EXIT_FAILURE, note
from poc_core.errors import SettingsError
from poc_core.gpus import Gpu, GpuWatch
from poc_core.serving.model_options import Dtype
from poc_core.settings import (
    Settings,
    load_settings,
    parse_ports,
    stranger_text,
    strangers,
)

_VLLM, _SETTINGS = map(Subject, ("vllm", "settings"))

# Exists in each of our images. The images of API, courier and Flower have no engine.
OUR_IMAGE = Path("/usr/share/proofline/sbom.cdx.json")
_ELSEWHERE = (
    "this image has no engine and needs none; for the workers: docker compose exec worker proofline"
    " doctor"
)
_SIGNS = {"ok": "ok", "warning": "look", "problem": "WRONG"}
_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "problem": typer.colors.RED}


@grouped
def doctor(
    join: Join,
    model: Annotated[
        str | None,
        typer.Option(help="Also check this model: its files, the memory it needs, its family."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Number format of the model's weights, as for a worker.")
    ] = "auto",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="As for a worker.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="As for a worker.")] = 1,
    redis_url: options.RedisUrl = None,
    host: Annotated[str, typer.Option(help="Address on which the API will listen.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="The API's port. Default: POC_API_PORT.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of Redis' data, as for `proofline up`.")
    ] = None,
    callback_url: Annotated[
        str | None,
        typer.Option(
            help="Check whether callbacks to this receiver are allowed, and whether it answers."
        ),
    ] = None,
    without_workers: Annotated[
        bool,
        typer.Option(
            "--without-workers",
            help="This host runs only the API and the courier: skip the checks of vLLM and GPUs.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: {ok, findings: [{about, level, says, remedy}]}."),
    ] = False,
) -> None:
    """Check Python, torch, vLLM, GPUs, Redis, ports, disks and settings, and print what to fix.

    Changes nothing and needs no running node. torch and vLLM are imported in a separate process,
    which takes seconds. Redis is checked if --redis-url or POC_REDIS_URL names one.

    On a host that joins or has joined a node (`proofline workers --join`), the API, its
    certificate, the token and the connection to Redis are checked; the token is not spent.

    **Exit code:** 0 if there are no problems (there may be warnings), 1 if there are.

    **Example:** proofline doctor --model Qwen/Qwen3-8B --callback-url http://aggregator:9100
    """
    of_joining = joined.checks(join)
    settings, wrong = _settings()
    checks: list[Check] = [("settings", lambda: wrong)]
    if not without_workers and not importlib.util.find_spec("vllm") and OUR_IMAGE.exists():
        without_workers = True
        checks.append(("vllm", lambda: [_VLLM.ok(_ELSEWHERE)]))
    if not without_workers:
        checks += _of_workers(settings, model, dtype, tensor_parallel, pipeline_parallel)
    checks += of_joining or _of_the_node(
        settings, host, [port] if port else parse_ports(settings.api_port), data_dir, callback_url
    )
    found = []
    for finding in findings_of(checks):
        found.append(finding)
        if not as_json:
            _show(finding)
    n_problems = sum(finding.level == "problem" for finding in found)
    if as_json:
        typer.echo(
            json.dumps({"ok": not n_problems, "findings": [asdict(finding) for finding in found]})
        )
    else:
        note(f"{n_problems} wrong." if n_problems else "Nothing is wrong.")
    if n_problems:
        raise typer.Exit(EXIT_FAILURE)


def _settings() -> tuple[Settings, Iterable[Finding]]:
    """Returns the settings (all defaults if a setting is invalid), and findings about settings."""
    found: list[Finding] = []
    try:
        settings = load_settings()
    except SettingsError as error:
        found.append(
            _SETTINGS.problem(
                str(error), "Correct the variable; docs/settings.md has the valid values."
            )
        )
        settings = Settings.model_construct()
    for name, meant in strangers(os.environ).items():
        found.append(
            _SETTINGS.warning(stranger_text(name, meant), "Correct the name, or unset it.")
        )
    return settings, found or [_SETTINGS.ok("all can be read; `proofline config` shows them")]


def _of_workers(
    settings: Settings,
    model: str | None,
    dtype: Dtype,
    tensor_parallel: int,
    pipeline_parallel: int,
) -> list[Check]:
    gpus = GpuWatch(settings.host).now()  # logs an error of the driver
    checks: list[Check] = [
        ("python", packages.python),
        ("vllm", packages.vllm),
        ("torch", lambda: packages.imports(gpus.devices)),
        ("gpu", lambda: hardware.gpus(gpus)),
        ("nvlink", lambda: hardware.nvlink(gpus, tensor_parallel)),
        ("memory", lambda: machine.memory(*memory_left())),
        ("nccl", lambda: hardware.multicast(gpus)),
        ("disk", lambda: machine.disk("models", ModelCache().path, 1, 20)),
        ("models", models.in_cache),
    ]
    if model is not None:
        size = tensor_parallel * pipeline_parallel
        checks.append(
            (
                "model",
                lambda: _of_the_model(settings, model, dtype, hardware.group_of(gpus, size), size),
            )
        )
    return checks


def _of_the_model(
    settings: Settings, name: str, dtype: Dtype, gpus: Sequence[Gpu], size: int
) -> Iterator[Finding]:
    """Yields findings about --model. `gpus`: a worker's GPUs. `size`: how many a worker needs."""
    found, findings = model.find(name)
    yield from findings
    if found is None:
        return
    uses_gpus = not vllm_runs_on_cpu()
    yield from model.room(found, dtype, gpus if uses_gpus else [], size, uses_gpus)
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    yield from model.family(found, not uses_gpus, has_torchvision)


def _of_the_node(
    settings: Settings,
    host: str,
    ports: Sequence[int],
    data_dir: Path | None,
    callback_url: str | None,
) -> list[Check]:
    # Without a named Redis, `up` starts its own.
    has_redis = any(name.upper() == "POC_REDIS_URL" for name in os.environ)
    place = data_dir or Path(tempfile.gettempdir())
    checks: list[Check] = [
        ("redis", lambda: redis.server(settings) if has_redis else redis.local_server()),
        ("port", lambda: chain.from_iterable(machine.port(host, port) for port in ports)),
    ]
    if not has_redis or data_dir is not None:
        checks.append(
            (
                "disk",
                lambda: machine.disk("Redis", place, machine.LEAST_DATA_GIB, machine.SOME_DATA_GIB),
            )
        )
    if callback_url is not None:
        checks.append(("receiver", lambda: [receiver.receiver(callback_url, settings)]))
    return checks


def _show(finding: Finding) -> None:
    sign = typer.style(
        f"{_SIGNS[finding.level]:<6}", fg=_COLOURS[finding.level], bold=finding.level != "ok"
    )
    typer.echo(f"{sign}{finding.about:<12}{finding.says}")
    if finding.remedy:
        typer.echo(f"{'':<18}Do: {finding.remedy}")
