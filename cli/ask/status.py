"""`proofline status`: shows a node's state on one screen."""

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from cli import options
from cli.ask.connection import connect
from cli.ask.round_view import grid, in_words, troubles
from cli.terminal import EXIT_FAILURE, write_json
from proofline.client import Document, calls

_GOOD, _BAD = "bold green", "bold red"
_COLOURS = {"ok": _GOOD, "degraded": "bold yellow", "down": _BAD}
_MOST_WORKERS = 8  # workers with a line each

Rows = Iterator[tuple[str, "Text | str"]]


def status(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one line of JSON: {node, deployment}, the API's answers."
        ),
    ] = False,
    url: options.Url = options.DEFAULT_URL,
) -> None:
    """Show a node on one screen: health, model, workers, round and jobs, deliveries, chat.

    **Exit code:** 0 if a worker is ready, 1 if none is or the node does not answer.
    """
    with connect(url) as client:
        node = client.call(calls.status(Document))
        deployment = client.deployment().model_dump(mode="json")
    if as_json:
        write_json({"node": node, "deployment": deployment}, None)
    else:
        show(node, deployment, time.time())
    if not any(worker["state"] == "ready" for worker in node["workers"]):
        raise typer.Exit(EXIT_FAILURE)


def show(node: dict[str, Any], deployment: dict[str, Any], now: float) -> None:
    table = grid()
    at_work = {worker["id"] for worker in node["workers"]}
    away = [seat for seat in node.get("seats", ()) if seat["worker_id"] not in at_work]
    for rows in (
        _health(node),
        _deployment(deployment),
        _workers(node["workers"], away, now),
        _work(node),
        _deliveries(node, now),
        _chat(node["workers"]),
    ):
        for name, said in rows:
            table.add_row(name, said)
    Console().print(table)


def _health(node: Mapping[str, Any]) -> Rows:
    health = node.get("health")
    if not health:
        n_ready = sum(worker["state"] == "ready" for worker in node["workers"])
        yield "health", Text("ok" if n_ready else "down", style=_GOOD if n_ready else _BAD)
        return
    yield "health", Text(health["level"], style=_COLOURS.get(health["level"], ""))
    for reason in health["reasons"]:
        yield "", Text(reason["text"], style=_COLOURS.get(reason["level"], ""))


def _deployment(found: Mapping[str, Any]) -> Rows:
    served = ", ".join(found["models"])
    model = found["model"] or served or "none"
    if served not in ("", model):
        model = f"{served} ({model})"
    yield "model", Text(f"{model}: {in_words(found['status'], found['elapsed_seconds'])}")
    if found["error"]:
        yield "", Text(found["error"], style=_BAD)
    for host in found["hosts"]:
        serves = f", {host['ready']} of {host['workers']} workers ready" if host["model"] else ""
        why = f": {host['error']}" if host["error"] else ""
        yield "", Text(f"{host['host']}: {host['state']}{serves}{why}")


def _workers(workers: list[dict[str, Any]], away: list[dict[str, Any]], now: float) -> Rows:
    """Yields table rows about workers. `away`: expected workers that send no heartbeats now."""
    n_ready = sum(worker["state"] == "ready" for worker in workers)
    n_all = len(workers) + len(away)
    yield "workers", Text(f"{n_ready} of {n_all} ready", style="" if n_ready else _BAD)
    # Workers that are not ready come first, because they matter most.
    for seat in away[:_MOST_WORKERS]:
        why = f", ended ({seat['last_exit']})" if seat["last_exit"] else ""
        yield "", Text(f"{seat['name']}: {seat['state']}, {seat['model']}{why}")
    if len(away) > _MOST_WORKERS:
        yield "", Text(f"and {len(away) - _MOST_WORKERS} more that are not ready")
    for worker in sorted(workers, key=lambda one: one["state"] == "ready")[:_MOST_WORKERS]:
        name = worker.get("name") or worker["id"]
        lives = f"{max(0.0, now - worker['started_at']) / 60:.0f} min"
        yield "", Text(f"{name}: {worker['state']}, {worker['model']}, started {lives} ago")
    if len(workers) > _MOST_WORKERS:
        yield "", Text(f"and {len(workers) - _MOST_WORKERS} more")


def _work(node: Mapping[str, Any]) -> Rows:
    stats = node["stats"]
    done = f"{stats['total_processed']:,} nonces, {stats['nonces_per_second']:.1f}/s now"
    has_round = node.get("config") is not None
    yield "round", Text(f"{node['state']}, {done}" if has_round else "none yet")
    if stats.get("error"):
        yield "", Text(stats["error"], style=_BAD)
    yield (
        "jobs",
        Text(f"{node['queued_nonces']:,} nonces queued" + ("" if has_round else f"; {done}")),
    )


def _deliveries(node: Mapping[str, Any], now: float) -> Rows:
    waiting = node["stats"].get("artifacts_waiting") or 0
    yield (
        "deliveries",
        Text(
            f"receivers that wait: {node['callbacks_waiting']:,}"
            + (f", {waiting:,} artifacts of the round" if waiting else "")
        ),
    )
    for trouble in troubles(node["stats"], with_error=False):
        yield "", Text(trouble, style=_BAD)
    for silent in node["silent_receivers"]:
        again_s = max(0.0, silent["next_try_at"] - now)
        said = f"{silent['receiver']} does not answer, {silent['failures']} tries;"
        yield "", Text(f"{said} the next in {again_s:.0f} s", style=_BAD)


def _chat(workers: list[dict[str, Any]]) -> Rows:

    def total(name: str) -> int:
        return sum(int(worker.get("stats", {}).get(name) or 0) for worker in workers)

    refused = f", {total('chat_refused'):,} refused" if total("chat_refused") else ""
    yield "chat", Text(f"{total('chat_active'):,} now, {total('chat_total'):,} answered{refused}")
