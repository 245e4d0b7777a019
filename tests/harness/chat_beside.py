"""Greedy answers of an engine in a test's own process, alone and beside its own proofs."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from poc_core.settings import parse_chat_policy
from tests.harness.chat_client import PROMPTS, Answer, ask_all
from workers.chat_gate import ChatGate
from workers.engines.base import Engine


def answers_alone_and_beside(
    engine: Engine, prove: Callable[[], int]
) -> tuple[list[Answer], list[Answer], int]:
    """(answers to PROMPTS alone, those while `prove` runs on and on, nonces that it counted).

    PROOFLINE_TEST_PROMPTS says how many prompts.
    """
    gate = ChatGate(parse_chat_policy("share:0.5"), engine.unfinished_chat)
    # vLLM's server sets it in this process, where later tests read warnings.
    level = logging.root.level
    done = threading.Event()

    def prove_on() -> int:
        n = 0
        while not done.is_set():
            n += prove()
        return n

    try:
        port, name = engine.serve_chat(gate, "127.0.0.1"), engine.info.name
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
    finally:
        logging.root.setLevel(level)
