"""Chat clients that take a byte a second of long answers."""

import json
import socket
import threading
from urllib.parse import urlsplit

import httpx

from bench.harness.chat_load import PATH

READERS = 4
# With the likeliest tokens of each place an answer is a few megabytes: more than sockets and
# servers keep for a client.
N_TOKENS, TOP_LOGPROBS = 1000, 20
_RECEIVE_BYTES = 4096


class SlowReaders:
    """Context manager: clients that ask at once and read on until its end."""

    def __init__(self, base_url: str, model: str) -> None:
        parts = urlsplit(base_url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._body = {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me all."}],
            "max_tokens": N_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "stream": True,
        }
        self._stop = threading.Event()
        self._open = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "SlowReaders":
        self._threads = [threading.Thread(target=self._read) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_until_generated(self, http: httpx.Client) -> None:
        """Returns when a client that reads at once has the answer: the engine has given all."""
        with http.stream("POST", PATH, json=self._body, timeout=300) as answer:
            for _ in answer.iter_raw():
                pass

    def still_reading(self) -> int:
        """Clients whose answer has not ended."""
        with self._lock:
            return self._open

    def _read(self) -> None:
        body = json.dumps(self._body).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type:"
            " application/json\r\n"
        )
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            client.connect(self._address)
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            with self._lock:
                self._open += 1
            while not self._stop.wait(1.0):
                if not client.recv(1):
                    break
            else:
                return
            with self._lock:
                self._open -= 1
