"""A stand-in for the network node's container `api`: registers nodes, drives one, takes callbacks.

Its requests are as the network node's: bodies are JSON without a Content-Type, no key, and paths
behind a version. `serve` runs it (callbacks on 9100, admin on 9200); everything else is one step of
a node's life, done in the same container: `docker compose exec api python /network_node.py ...`.
"""

import http.client
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NODE, VERSION, MODEL = "inference", "/v3.0.8", "tiny-qwen3"
PROOF = {"block_height": 1, "public_key": "node1", "node_id": 0, "node_count": 1}
PARAMS = {"model": MODEL, "seq_len": 256}
SETTLE_S = 60.0

nodes: dict[str, Any] = {}
received: dict[str, dict[int, list[str]]] = {}  # block hash -> nonce -> its vectors, as they came
verdicts: list[dict[str, Any]] = []
lock = threading.Lock()


class Callbacks(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            if self.path.endswith("/validated"):
                verdicts.append(body)
            for artifact in body.get("artifacts", []):
                of_block = received.setdefault(body["block_hash"], {})
                of_block.setdefault(artifact["nonce"], []).append(artifact["vector_b64"])
        self.answer({"status": "OK"})

    def answer(self, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


class Admin(Callbacks):
    def do_GET(self) -> None:
        with lock:
            if self.path == "/admin/v1/nodes":
                return self.answer(list(nodes.values()))
            return self.answer({"received": received, "verdicts": verdicts})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            nodes[body["id"]] = body
        self.answer(body)


def call(
    method: str,
    path: str,
    body: Any = None,
    port: int = 8080,
    host: str = NODE,
    headers: dict[str, str] | None = None,
) -> Any:
    """As Go's http.NewRequest sends it: a body, and no word of what it is."""
    connection = http.client.HTTPConnection(host, port, timeout=900)
    connection.request(method, path, None if body is None else json.dumps(body), headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, f"{method} {path}: {answer.status} {text[:500]}"
    return json.loads(text or "null")


def seen() -> dict[str, Any]:
    found: dict[str, Any] = call("GET", "/seen", port=9200, host="127.0.0.1")
    return found


def register() -> Any:
    while True:
        try:
            seen()
            break
        except OSError:
            time.sleep(0.2)
    node = {"id": "node1", "host": NODE, "inference_port": 5000, "poc_port": 8080}
    node |= {"max_concurrent": 500, "models": {MODEL: {"args": []}}}
    call("POST", "/admin/v1/nodes", node, 9200, "127.0.0.1")
    return call("GET", "/admin/v1/nodes", port=9200, host="127.0.0.1")


def state() -> Any:
    return call("GET", f"{VERSION}/api/v1/state")


def wait_health(seconds: str = "60") -> Any:
    """The seconds until /health is 200."""
    began = time.monotonic()
    while True:
        try:
            call("GET", f"{VERSION}/health")
            return round(time.monotonic() - began, 1)
        except (AssertionError, OSError):
            if time.monotonic() - began > float(seconds):
                raise
            time.sleep(0.1)


def deploy() -> Any:
    up = {"model": MODEL, "dtype": "auto", "additional_args": ["--max-model-len", "512"]}
    call("POST", f"{VERSION}/api/v1/inference/up", up)
    listed = call("GET", f"{VERSION}/v1/models", port=5000)["data"]
    assert MODEL in [model["id"] for model in listed], listed
    return state()


def start(block: str) -> Any:
    body = {**PROOF, "block_hash": block, "params": PARAMS, "url": "http://api:9100/v2/poc"}
    return call("POST", f"{VERSION}/api/v1/inference/pow/init/generate", body)


def wait_nonces(block: str, n: str = "1") -> Any:
    """Waits until `n` more nonces have come than at the call."""
    began, before = time.monotonic(), len(seen()["received"].get(block, {}))
    while (now := len(seen()["received"].get(block, {}))) < before + int(n):
        assert time.monotonic() - began < 240, f"{now} nonces, {before} before"
        time.sleep(0.2)
    return now


def stop(block: str) -> Any:
    """Stops the round; how many nonces have come once all has: every one, and once."""
    call("POST", f"{VERSION}/api/v1/inference/pow/stop", {})
    end = time.monotonic() + SETTLE_S
    while True:
        nonces = sorted(int(nonce) for nonce in seen()["received"].get(block, {}))
        if nonces == list(range(len(nonces))):
            time.sleep(3)  # nothing more comes
            if len(seen()["received"][block]) == len(nonces):
                break
        assert time.monotonic() < end, f"missing: {set(range(nonces[-1] + 1)) - set(nonces)}"
        time.sleep(0.5)
    vectors = seen()["received"][block]
    changed = [nonce for nonce, of in vectors.items() if len(set(of)) > 1]
    assert not changed, f"came with two values: {changed}"
    return {"nonces": len(vectors), "missing": 0}


def validate(block: str) -> Any:
    """Has the node judge artifacts that it has sent itself."""
    before = len(seen()["verdicts"])
    claimed = sorted(seen()["received"][block].items(), key=lambda one: int(one[0]))[:50]
    artifacts = [{"nonce": int(nonce), "vector_b64": of[0]} for nonce, of in claimed]
    body = {
        **PROOF,
        "block_hash": block,
        "params": PARAMS,
        "nonces": [one["nonce"] for one in artifacts],
        "url": "http://api:9100/v2/poc",
        "validation": {"artifacts": artifacts},
        "stat_test": {"dist_threshold": 0.4, "p_mismatch": 0.1, "p_value_threshold": 0.05},
    }
    call("POST", f"{VERSION}/api/v1/inference/pow/generate", body)
    end = time.monotonic() + 120
    while len(verdicts := seen()["verdicts"]) == before:
        assert time.monotonic() < end, "no verdict"
        time.sleep(0.2)
    verdict = verdicts[-1]
    assert (verdict["n_total"], verdict["fraud_detected"]) == (len(artifacts), False), verdict
    return {name: verdict[name] for name in ("n_total", "n_mismatch", "fraud_detected")}


def chat() -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    headers = {"Content-Type": "application/json"}  # chat alone has one
    answer = call("POST", f"{VERSION}/v1/chat/completions", body, 5000, headers=headers)
    return answer["usage"]


def serve() -> None:
    servers = [
        ThreadingHTTPServer(("", 9100), Callbacks),
        ThreadingHTTPServer(("", 9200), Admin),
    ]
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()


if __name__ == "__main__":
    done = globals()[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(done))
