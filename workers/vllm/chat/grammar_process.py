"""A process that checks grammars (see grammars.py). For each grammar it forks a child, which has
the vocabulary and the imports, and compiles the grammar. Input lines: the vocabulary, then
grammars; `null` kills the current child. Output lines: each grammar's error, or "", or the seconds
of CPU time that a killed child had.
"""

import json
import os
import re
import resource
import select
import signal
from collections.abc import Iterator
from typing import Any

# Bytes of memory that a grammar may take.
_MEMORY = 1 << 30
_NICE = 15
WRONG = "is wrong"
_TOO_MUCH = "takes too much memory to compile; use a simpler one"
_DEAD_END = (
    "allows no first token of an answer; a schema that refers to itself without an end allows no"
    " token"
)
_INPUT, _OUTPUT = 0, 1
# Fields of a structural tag that are not schemas, and the kind of each.
_TEXTS = {"pattern": "regex", "grammar": "grammar"}
# Where xgrammar raised an error, before its words.
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")


def main() -> None:
    import xgrammar

    lines = _lines()
    tokenizer = xgrammar.TokenizerInfo.deserialize_json(next(lines).decode())
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=8, cache_enabled=False)
    # If no core is idle, the engine's steps go first, because all answers wait for them.
    os.nice(_NICE)
    os.write(_OUTPUT, b"ready\n")
    for line in lines:
        if (asked := json.loads(line)) is not None:
            child, told = _begin(compiler, *asked)
            # Until the child has ended, the input can only be `null`, or end.
            if is_killed := _INPUT in select.select([_INPUT, told], [], [])[0]:
                os.kill(child, signal.SIGKILL)
            with open(told) as answer:
                wrong = answer.read()
            _, status, used = os.wait4(child, 0)
            if status:
                wrong = _TOO_MUCH
            said = used.ru_utime + used.ru_stime if is_killed else wrong
            os.write(_OUTPUT, json.dumps(said).encode() + b"\n")


def _begin(compiler: Any, kind: str, text: str) -> tuple[int, int]:
    """Forks a child that tries a grammar. Returns its process id, and the pipe with its answer."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, _try(compiler, kind, text).encode())
        os._exit(0)
    os.close(tell)
    return child, told


def _try(compiler: Any, kind: str, text: str) -> str:
    """Tries to compile a grammar with limited memory. Returns the error, or ""."""
    with open("/proc/self/statm") as found:
        own = int(found.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + _MEMORY, own + _MEMORY))
    try:
        compile_grammar(compiler, kind, text)
    except MemoryError:
        return _TOO_MUCH
    except Exception as error:
        if "bad_alloc" in str(error):
            return _TOO_MUCH
        # vLLM rewrites choices and some grammars, and reports their errors itself.
        is_final = kind in ("json", "regex", "structural_tag")
        said = " ".join(_PLACE.sub("", str(error)).split())
        return f"{WRONG}: {said[:500].rstrip('.')}" if is_final else ""
    return _DEAD_END if any(_is_dead_end(*part) for part in parts(kind, text)) else ""


def parts(kind: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) of a JSON schema, or of each grammar in a structural tag."""
    level = [json.loads(text)] if kind == "structural_tag" else []
    if kind == "json":
        yield kind, text
    while level:
        one = level.pop()
        if isinstance(one, list):
            level += one
        elif isinstance(one, dict):
            for name, value in one.items():
                if name in ("json_schema", "schema"):
                    yield "json", json.dumps(value)
                elif name in _TEXTS and isinstance(value, str):
                    yield _TEXTS[name], value
                else:
                    level.append(value)


def _is_dead_end(kind: str, text: str) -> bool:
    """Returns True if a grammar allows no first token with any vocabulary."""
    import xgrammar

    signs = xgrammar.TokenizerInfo([bytes([n]) for n in range(256)], stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(signs, max_threads=1, cache_enabled=False)
    try:
        matcher = xgrammar.GrammarMatcher(compile_grammar(compiler, kind, text))
    except RuntimeError:  # the part cannot be compiled alone; the complete tag was compiled
        return False
    allowed = xgrammar.allocate_token_bitmask(1, signs.vocab_size)
    matcher.fill_next_token_bitmask(allowed)
    return not allowed.any()


def compile_grammar(compiler: Any, kind: str, text: str) -> Any:
    """Compiles a grammar as vLLM does."""
    if kind == "json":
        return compiler.compile_json_schema(text)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "choice":
        choices = " | ".join(json.dumps(str(one)) for one in json.loads(text))
        return compiler.compile_grammar(f"root ::= {choices}")
    if kind == "structural_tag":
        return _compile_tag(compiler, text)
    if "::=" not in text and hasattr(compiler, "compile_lark"):
        return compiler.compile_lark(text)
    return compiler.compile_grammar(text)


def _compile_tag(compiler: Any, text: str) -> Any:
    from xgrammar import StructuralTagItem

    tag = json.loads(text)
    if "structures" not in tag:
        return compiler.compile_structural_tag(text)
    items = [
        StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
        for one in tag["structures"]
    ]
    return compiler.compile_structural_tag(items, tag["triggers"])


def _lines() -> Iterator[bytes]:
    """Yields the input's lines. Does not read ahead, because `select` must see the rest."""
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
