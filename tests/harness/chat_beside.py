"""Chat of an engine in a test's own process: its server; greedy answers alone and beside proofs."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from poc_core.settings import parse_chat_policy
from tests.harness.chat_client import PROMPTS, Answer, ask_all
from workers.chat_gate import ChatGate
from workers.engines.base import Engine


def serve_chat(engine: Engine, gate: ChatGate, secret: str | None = None) -> int:
    """The port at which the engine serves chat in this process.

    vLLM's server sets the levels of the root logger and its handlers; they are put back, as later
    tests read warnings.
    """
    level, handlers = logging.root.level, [(one, one.level) for one in logging.root.handlers]
    port = engine.serve_chat(gate, "127.0.0.1", secret)
    logging.root.setLevel(level)
    for handler, own in handlers:
        handler.setLevel(own)
    assert port is not None
    return port


def answers_alone_and_beside(
    engine: Engine, prove: Callable[[], int]
) -> tuple[list[Answer], list[Answer], int]:
    """(answers to PROMPTS alone, those while `prove` runs on and on, nonces that it counted).

    PROOFLINE_TEST_PROMPTS says how many prompts.
    """
    gate = ChatGate(parse_chat_policy("share:0.5"), engine.unfinished_chat)
    done = threading.Event()

    def prove_on() -> int:
        n = 0
        while not done.is_set():
            n += prove()
        return n

    port, name = serve_chat(engine, gate), engine.info.name
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        alone = ask_all(http, PROMPTS, 1, model=name)
        proving = pool.submit(prove_on)
        try:
            beside = ask_all(http, PROMPTS, 1, model=name)
        finally:
            done.set()
        return alone, beside, proving.result()
