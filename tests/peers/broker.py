"""The network's client, as it drives a node: any answer but 200 marks the node FAILED."""

import json
import time
from typing import Any

import httpx

from tests.harness.waiting import wait_until

# The path as the network writes it: with the model's id, escaped twice.
CALLBACK_PATH = "/v3/poc/tiny%252Fmodel"
SETTLE_S = 120.0


class Broker:
    """Calls of the network's client to one node. `version`: a segment before every path, or ''."""

    def __init__(self, http: httpx.Client, version: str = "") -> None:
        self.http = http
        self.version = version

    def call(self, method: str, path: str, body: Any = None, expect: int = 200) -> dict[str, Any]:
        # Without a Content-Type, but for chat.
        headers = {"Content-Type": "application/json"} if path.startswith("/v1/") else {}
        content = None if body is None else json.dumps(body).encode()
        answer = self.http.request(method, self.version + path, content=content, headers=headers)
        assert answer.status_code == expect, (
            f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        )
        found: dict[str, Any] = answer.json()
        return found

    def state(self) -> tuple[str, str]:
        """(state, loaded_model) of the node."""
        answer = self.call("GET", "/api/v1/state")
        return answer["state"], answer["loaded_model"]

    def stop(self) -> None:
        assert self.call("POST", "/api/v1/stop") == {"status": "OK"}

    def up(self, model: str, *args: str, expect: int = 200, dtype: str = "auto") -> dict[str, Any]:
        body = {"model": model, "dtype": dtype, "additional_args": list(args)}
        return self.call("POST", "/api/v1/inference/up", body, expect)

    def up_status(self) -> dict[str, Any]:
        return self.call("GET", "/api/v1/inference/up/status")

    def hosts(self) -> list[str]:
        return [host["state"] for host in self.up_status()["hosts"]]

    def wait_hosts(self, *states: str) -> None:
        wait_until(lambda: self.hosts() == list(states), f"hosts {states}", SETTLE_S, 0.1)

    def start_round(self, model: str, url: str, block_hash: str = "block") -> None:
        """Starts a round as the chain does: without a batch_size and a k_dim."""
        body = {
            **_NODE,
            "block_hash": block_hash,
            "params": {"model": model, "seq_len": 64},
            "url": url,
        }
        self.call("POST", "/api/v1/inference/pow/init/generate", body)

    def round_status(self) -> str:
        return str(self.call("GET", "/api/v1/inference/pow/status")["status"])

    def stop_round(self) -> None:
        self.call("POST", "/api/v1/inference/pow/stop", {})

    def validate(
        self, model: str, url: str, artifacts: list[dict[str, Any]], block_hash: str = "block"
    ) -> str:
        """Asks for a verdict by callback; returns the request_id."""
        body = {
            **_NODE,
            "block_hash": block_hash,
            "params": {"model": model, "seq_len": 64},
            "nonces": [artifact["nonce"] for artifact in artifacts],
            "validation": {"artifacts": artifacts},
            "stat_test": {"dist_threshold": 0.4, "p_mismatch": 0.1, "p_value_threshold": 0.05},
            "url": url,
        }
        return str(self.call("POST", "/api/v1/inference/pow/generate", body)["request_id"])


_NODE = {"block_height": 7, "public_key": "key", "node_id": 0, "node_count": 1}


def wait_state(broker: Broker, state: str, model: str, timeout_s: float = SETTLE_S) -> float:
    """Seconds until the node was in that state. The API may be away meanwhile."""
    began = time.monotonic()
    last: object = None
    while time.monotonic() - began < timeout_s:
        try:
            last = broker.state()
        except httpx.TransportError as error:
            last = error
        if last == (state, model):
            return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"not {state} {model} within {timeout_s:g} s, but {last}")
