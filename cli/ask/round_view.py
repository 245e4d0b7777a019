"""Formats the status of rounds (as tables or as log lines) and of deployments."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from poc_core.errors import ProoflineError
from poc_core.schemes.contract import contracts, recognised
from poc_core.serving.places import name_of

ALARM = "bold red"

T = TypeVar("T")


def line(status: dict[str, Any]) -> str:
    """Returns a round's status as one line of text, with the round's problems at the end."""
    stats = status["stats"]
    ready = sum(worker["state"] == "ready" for worker in status["workers"])
    n_ready = (status.get("health") or {"workers_ready": ready})["workers_ready"]
    parts = [
        f"{_duration(stats.get('elapsed_seconds'))} {status['state']}",
        f"{stats['nonces_per_second']:.1f} nonces/s now",
        f"{stats.get('nonces_per_second_of_round') or 0.0:.1f} over the round",
        f"{stats['total_processed']:,} computed",
        f"{n_ready} worker" + ("" if n_ready == 1 else "s"),
        f"{stats.get('artifacts_delivered') or 0:,} delivered",
        f"{stats.get('artifacts_waiting') or 0:,} waiting",
        f"{status['queued_nonces']:,} nonces of jobs queued",
    ]
    return ", ".join(parts + troubles(stats) + _health(status))


def shown(view: Callable[..., T], *arguments: Any) -> T:
    """Calls `line` or `picture`. Raises ProoflineError if a node of another version has a status
    with other fields.
    """
    try:
        return view(*arguments)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ProoflineError(
            f"The node's status has other fields than expected ({error!r}); is it of another"
            " version? `proofline round status --json` prints the status unchanged."
        ) from error


def picture(status: dict[str, Any], now: float) -> RenderableType:
    """Returns a round's status as tables. `now`: the current time, in seconds since the epoch."""
    if not status:
        return Text("")
    parts: list[RenderableType] = [_head(status)]
    if status.get("config") is not None:
        parts.append(_outbox(status, now))
    return Group(
        *parts, "", _workers(status)
    )  # workers come last, because a low terminal cuts off the end


def _head(status: dict[str, Any]) -> Table:
    stats, config = status["stats"], status.get("config")
    table = grid()
    running = status["state"] in ("GENERATING", "VALIDATING")
    table.add_row("state", Text(status["state"], style="bold green" if running else "bold"))
    for trouble in _health(status):
        table.add_row("health", Text(trouble, style=ALARM))
    if config is None:
        table.add_row("round", "none yet")
        table.add_row("computed", f"{stats['total_processed']:,} nonces of jobs")
    else:
        table.add_row("model", Text(_described(config)))
        table.add_row("block", Text(f"{config['block_hash']} at height {config['block_height']}"))
        table.add_row("nonces", _share(config))
        table.add_row("elapsed", _duration(stats["elapsed_seconds"]))
        now, mean = stats["nonces_per_second"], stats["nonces_per_second_of_round"]
        table.add_row("rate", f"{now:.1f} nonces/s now, {mean:.1f} over the round")
        table.add_row("computed", _computed(status))
    table.add_row("jobs", f"{status['queued_nonces']:,} nonces queued")
    if stats.get("error"):
        table.add_row("error", Text(stats["error"], style=ALARM))
    return table


def _workers(status: dict[str, Any]) -> RenderableType:
    """Returns a table with a row for each live worker and each worker that has left the round."""
    seats = status.get("seats") or []
    states = {seat["name"]: seat["state"] for seat in seats} or {
        worker["id"]: worker["state"] for worker in status["workers"]
    }
    names = {worker["id"]: worker.get("name") or worker["id"] for worker in status["workers"]}
    counts: dict[str, dict[str, float]] = {}
    for worker_id, count in (status["stats"].get("workers") or {}).items():
        name = names.get(worker_id) or (name_of(worker_id) if seats else worker_id)
        before = counts.get(name, {})
        counts[name] = {key: n + before.get(key, 0) for key, n in count.items()}
    if not states and not counts:
        return Text("no workers", style=ALARM)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("worker")
    table.add_column("state")
    table.add_column("computed", justify="right")
    table.add_column("nonces/s", justify="right")
    for worker in sorted(states | counts):
        state = states.get(worker)
        count = counts.get(worker, {"total_processed": 0, "nonces_per_second": 0.0})
        table.add_row(
            Text(worker),
            Text(state or "gone", style="" if state else "red"),
            f"{count['total_processed']:,}",
            f"{count['nonces_per_second']:.1f}",
        )
    return table


def _outbox(status: dict[str, Any], now: float) -> RenderableType:
    stats, config = status["stats"], status["config"]
    receiver = config.get("url") or config.get("callback_url")
    if receiver is None:
        return Text("no callback url: what is computed is sent to nobody", style="dim")
    outbox = stats["outbox"]
    table = grid()
    table.add_row("receiver", Text(receiver))
    table.add_row("delivered", f"{stats['artifacts_delivered']:,}")
    waiting = f"{stats['artifacts_waiting']:,}, {outbox['bytes']:,} of {outbox['limit_bytes']:,} B"
    table.add_row("waiting", Text(waiting, style=ALARM if outbox["full"] else ""))
    for trouble in troubles(stats, with_error=False):
        table.add_row("", Text(trouble, style=ALARM))
    if outbox["failures"] and outbox["next_try_at"] is not None:
        table.add_row("next try", f"in {max(0.0, outbox['next_try_at'] - now):.0f} s")
    return table


def _health(status: dict[str, Any]) -> list[str]:
    health = status.get("health") or {"reasons": []}  # earlier releases report none
    return [f"{reason['level']}: {reason['text']}" for reason in health["reasons"]]


def troubles(stats: dict[str, Any], with_error: bool = True) -> list[str]:
    """Returns one line for each problem of a round. `with_error`: includes the round's error."""
    outbox = stats.get("outbox") or {}
    troubles = []
    if outbox.get("full"):
        troubles.append("FULL: the round pauses until the receiver takes some")
    if outbox.get("failures"):
        troubles.append(
            f"FAILING (tries in a row: {outbox['failures']}): {outbox.get('last_error')}"
        )
    if outbox.get("dropped"):
        troubles.append(f"{outbox['dropped']:,} DROPPED after POC_CALLBACK_MAX_RETRIES")
    if with_error and stats.get("error"):
        troubles.append(f"ERROR: {stats['error']}")
    return troubles


def _computed(status: dict[str, Any]) -> str:
    stats = status["stats"]
    text = f"{stats['total_processed']:,} nonces"
    reported = recognised(status["config"], contracts()).reported_of(status)
    if reported:
        text += f", {reported}"
    if stats["n_excluded"]:
        text += f", {stats['n_excluded']:,} excluded (no finite state)"
    return text


def _described(config: dict[str, Any]) -> str:
    params = config.get("params") or config
    scheme = recognised(config, contracts())
    return (
        f"{params['model']}, seq_len {params['seq_len']}, {scheme.described(config)}, batches of"
        f" {config['batch_size']}"
    )


def _share(config: dict[str, Any]) -> str:
    text = f"node {config['node_id']} of {config['node_count']}"
    if config.get("n_groups", 1) > 1:
        text += f", group {config['group_id']} of {config['n_groups']}"
    return text


def grid() -> Table:
    """Returns an empty table without borders, with a column for names and a column for values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=9)
    table.add_column()
    return table


def _duration(seconds: float | None) -> str:
    return str(timedelta(seconds=int(seconds or 0)))


def in_words(status: str, elapsed_s: float | None) -> str:
    """Returns a deployment's status with its duration, such as "starting for 12 s"."""
    if elapsed_s is None:
        return status
    return f"{status} {'for' if status == 'starting' else 'after'} {elapsed_s:.0f} s"
