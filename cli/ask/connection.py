"""Connects a command to a running API."""

from cli.terminal import UsageError, note
from proofline.client import ApiError, Client, UrlError

# Seconds for which a command obeys Retry-After. Ctrl-C ends the command earlier.
PATIENCE_S = 15.0


def connect(url: str) -> Client:
    try:
        return Client(url, patience_s=PATIENCE_S, on_wait=_say)
    except UrlError as error:
        raise UsageError(f"--url: {error}") from error


def only_model(client: Client) -> str:
    """Returns the only served model's name. ApiError if none is served, UsageError if several."""
    models = sorted({worker.model for worker in client.status().workers})
    if not models:
        raise ApiError(
            "No worker serves a model yet; start one, wait for it, or name its model with --model."
        )
    if len(models) > 1:
        raise UsageError(
            f"Several models are served; choose one with --model: {', '.join(models)}."
        )
    return models[0]


def _say(error: ApiError, pause_s: float) -> None:
    if error.retry_after_s is not None:
        note(f"{error}. Trying again in {pause_s:.0f} s, as the API asks.")
