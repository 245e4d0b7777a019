"""A complete node: `proofline up` with synthetic engines and its own Redis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from api.edge.keys import KeyFile, Role
from bench.described.node import KNOWN
from tests.harness.samples import MODEL, body, distance_body, round_body
from tests.stacks.up import Up

POW = "/api/v1/pow"
# Nothing listens there. All callbacks use it, so that generated names are never resolved.
NOWHERE = "http://127.0.0.1:9"
# Seconds for one answer.
TIMEOUT_S = 60
# The key of a node that requires keys, with all roles.
OWN_KEY = "described-opens-everything"
# Operations that end or start processes, which takes a second or more.
_PROCESSES = {
    "POST /api/v1/stop",
    "POST /api/v1/inference/down",
    "POST /api/v1/inference/up",
    "POST /api/v1/inference/up/async",
    "POST /api/v1/models/download",
}


SITUATIONS = (
    "as the last request left it",
    "idle",
    "a job",
    "a round generates",
    "a distance round validates",
)


class RealNode:
    """A Target, as a context manager. Earlier requests may still be in progress."""

    def __init__(self, folder: Path, wants_keys: bool = False) -> None:
        """`folder`: for models and keys. `wants_keys`: the node requires keys.

        Requests without a key or with fewer roles meet the node as the last request left it.
        """
        self._keys: dict[str, str] = {}
        env = {
            "HF_HOME": str(folder / "hub"),
            "HF_ENDPOINT": NOWHERE,  # downloads fail at once
            "POC_GENERATE_CHUNK_TIMEOUT_SEC": "5",
            "POC_CALLBACK_MAX_RETRIES": "3",
            "POC_OUTBOX_MAX_BYTES": str(100_000 * 512 * 1024),
        }
        if wants_keys:
            path = folder / "keys"
            of_roles = {f"a key for {role}": KeyFile(path).add(role, [role]) for role in Role}
            self._keys = {"no key": "", "a key of nobody": "nobody's", **of_roles}
            always = {"POC_REQUIRE_KEYS": "always", "POC_API_KEY": OWN_KEY}
            env |= {"POC_API_KEYS_FILE": str(path), **always}
        self.situations = (*SITUATIONS, *self._keys)
        self._up = Up(
            "--model", MODEL, "--engine", "synthetic", "--workers", "2", "--port", "0", env=env
        )
        self._url = self._up.base_url
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Authorization"] = f"Bearer {OWN_KEY}"
        self._headers: dict[str, str] = {}
        self.document: dict[str, Any] = self._get("/openapi.json")

    def __enter__(self) -> RealNode:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._session.close()
        self._up.end()

    def enter(self, situation: str, operation: str) -> Mapping[str, Any]:
        known = {**KNOWN, "url": NOWHERE, "callback_url": NOWHERE}
        # A request may have stopped the model or deployed another one.
        if self._get("/api/v1/state")["loaded_model"] != MODEL:
            self._post("/api/v1/stop", None)
            self._post("/api/v1/inference/up", {"model": MODEL})
        self._headers = {}
        if situation in self._keys:
            self._headers = {"Authorization": f"Bearer {self._keys[situation]}"}
        elif situation != "as the last request left it":
            self._post(f"{POW}/stop", {})
        if situation == "a job":
            known["request_id"] = self._post(f"{POW}/generate", body())["request_id"]
        if situation == "a round generates":
            self._post(f"{POW}/init/generate", round_body(url=NOWHERE))
        if situation == "a distance round validates":
            self._post(f"{POW}/init/validate", distance_body(url=NOWHERE))
        return known

    def send(self, case: Any) -> Any:
        if isinstance(case.body, dict):
            self._tame(case.body)
        asked = {"base_url": self._url, "session": self._session, "timeout": TIMEOUT_S}
        return case.call(**asked, headers=self._headers)

    def share(self, operation: str) -> float:
        return 0.05 if operation in _PROCESSES else 1.0

    def _tame(self, sent: dict[str, Any]) -> None:
        for name in ("url", "callback_url"):
            if sent.get(name):
                sent[name] = NOWHERE
        # During a round such a request would wait for ever.
        if sent.get("wait") and self._get(f"{POW}/status")["state"] == "GENERATING":
            sent["wait"] = False

    def _get(self, path: str) -> Any:
        return self._answer(self._session.get(self._url + path, timeout=TIMEOUT_S))

    def _post(self, path: str, sent: Any) -> Any:
        return self._answer(self._session.post(self._url + path, json=sent, timeout=TIMEOUT_S))

    @staticmethod
    def _answer(answer: requests.Response) -> Any:
        assert answer.status_code == 200, (
            f"{answer.request.url}: {answer.status_code} {answer.text[:500]}"
        )
        return answer.json()
