"""The process that tries grammars, see grammars.py.

Its first line is the vocabulary. Each further one is a grammar, compiled by a child that has both
already, or `null`, which ends that child. One line answers each grammar: what is too much of it, or
"". The process ends when its input does.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Bytes of memory that a grammar may take.
_MEMORY = 1 << 30
_TOO_MUCH_MEMORY = 3  # a child's exit status
_INPUT, _OUTPUT = 0, 1


def main() -> None:
    # Its children have what the engine leaves of the cores: all answers wait for that one's step.
    with suppress(OSError):  # not every sandbox has that policy
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    import xgrammar

    lines = _lines()
    tokenizer = xgrammar.TokenizerInfo.deserialize_json(next(lines).decode())
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=8, cache_enabled=False)
    os.write(_OUTPUT, b"ready\n")
    for line in lines:
        if (asked := json.loads(line)) is not None:
            child, ended = _begin(compiler, *asked)
            # What comes before it has ended can only be `null`, or the end.
            if _INPUT in select.select([_INPUT, ended], [], [])[0]:
                os.kill(child, signal.SIGKILL)
            os.close(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            wrong = "takes too much memory to compile" if status else ""
            os.write(_OUTPUT, json.dumps(wrong).encode() + b"\n")


def _begin(compiler: Any, kind: str, text: str) -> tuple[int, int]:
    """The child, and what can be read from when it has ended."""
    ended, open_while_it_lives = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_try(compiler, kind, text))
    os.close(open_while_it_lives)
    return child, ended


def _try(compiler: Any, kind: str, text: str) -> int:
    with open("/proc/self/statm") as found:
        own = int(found.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + _MEMORY, own + _MEMORY))
    try:
        compile_grammar(compiler, kind, text)
    except MemoryError:
        return _TOO_MUCH_MEMORY
    except Exception as error:  # what vLLM will say too, or answer by another compiler
        return _TOO_MUCH_MEMORY if "bad_alloc" in str(error) else 0
    return 0


def compile_grammar(compiler: Any, kind: str, text: str) -> None:
    """Compiles a grammar like vLLM."""
    if kind == "json":
        compiler.compile_json_schema(text)
    elif kind == "regex":
        compiler.compile_regex(text)
    elif kind == "choice":
        choices = " | ".join(json.dumps(str(one)) for one in json.loads(text))
        compiler.compile_grammar(f"root ::= {choices}")
    elif kind == "structural_tag":
        tag = json.loads(text)
        if "structures" in tag:
            for one in tag["structures"]:
                compiler.compile_json_schema(json.dumps(one["schema"]))
        else:
            compiler.compile_structural_tag(text)
    elif "::=" not in text and hasattr(compiler, "compile_lark"):
        compiler.compile_lark(text)
    else:
        compiler.compile_grammar(text)


def _lines() -> Iterator[bytes]:
    """Yields the input's lines and reads none ahead, because select must see what is left."""
    held = b""
    while True:
        while b"\n" not in held:
            read = os.read(_INPUT, 1 << 20)
            if not read:
                return
            held += read
        line, _, held = held.partition(b"\n")
        yield line


if __name__ == "__main__":
    main()
